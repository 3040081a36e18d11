"""The choice between converting a model in memory and layer by layer, and the division of the memory."""

from __future__ import annotations

import math
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from moeconv.artifacts import FISHER
from moeconv.conversion.material import Coding, Material
from moeconv.conversion.settings import DEFAULT_MEMORY, Settings
from moeconv.errors import ConversionError, SettingsError
from moeconv.measure.passes import LEAST_TOKENS, Room, token_bytes
from moeconv.plan.outlook import parameters, table_numbers
from moeconv.plan.search import uniform_bytes
from moeconv.quantizers.moments import beside_bytes
from moeconv.report.page import size
from moeconv.source.checkpoint import Checkpoint
from moeconv.source.skeleton import by_layers
from moeconv.sweep.fisher import DRAWS, WINDOWS, have_gradients
from moeconv.sweep.probes import blocks_for
from moeconv.tuned import said
from moert.machine import most_bytes
from moert.pack.model_spec import ModelSpec

PROCESS_BYTES = 1_100_000_000
"""Memory of Python, torch and transformers while they run: 0.7 to 1.0 GB were seen."""
_FLOAT = 4
_FACTORED = 12  # times the moments of a matrix, while they are factored: copies in float32 and float64
_EXPERTS = 4  # in memory at once, a quantizer's copies of one among them


@dataclass(frozen=True)
class Memory:
    """The division of the memory. `sweep_bytes`: the most that an exact sweep may keep beside a model in memory.
    `limit_bytes`: the most that the whole process may take where the model goes through memory layer by layer; None
    where the model is in memory. `weighing_bytes`: of these, what codes of matrices outside the experts take."""

    sweep_bytes: int = DEFAULT_MEMORY
    limit_bytes: int | None = None
    weighing_bytes: int = 0

    @property
    def layered(self) -> bool:
        return self.limit_bytes is not None

    def room(self, spec: ModelSpec, folder: Path) -> Room:
        """Returns the room for passes layer by layer, which gradients of a model in memory need too."""
        if self.limit_bytes is None:
            return Room(folder, self.sweep_bytes // 2, self.sweep_bytes // 4)
        return room_in(self.limit_bytes - self.weighing_bytes, spec, folder)


def memory_of(settings: Settings, coding: Coding, material: Material) -> Memory:
    """Returns the division of the memory for a conversion. Raises SettingsError where not even one layer at a time
    fits."""
    checkpoint, spec, asked = coding.checkpoint, coding.spec, settings.memory_bytes
    whole = whole_bytes(spec, checkpoint.description.computed)
    limit = within(asked)
    beside = DEFAULT_MEMORY if asked is None else asked - whole
    small = asked is None and whole <= PROCESS_BYTES + DEFAULT_MEMORY  # whatever is free just now
    if limit is None or small or (whole <= limit and beside > 0):
        try:
            blocks_for(spec, material.ranked, beside)
            return Memory(beside)
        except SettingsError:
            if asked is None:
                raise
    if not by_layers(checkpoint.family, checkpoint.spec):
        raise SettingsError(
            f"--memory {_megabytes(limit)}: a {spec.family} model is converted in memory, which takes at least "
            f"{_megabytes(whole + DEFAULT_MEMORY)}: give more, or convert without text (--bits 4)"
        )
    assert limit is not None
    weighing = max((_FACTORED * beside_bytes(spec, [name]) for name in coding.weighed), default=0)
    check_least(limit, spec, weighing)
    return Memory(limit_bytes=limit, weighing_bytes=weighing)


def within(asked: int | None) -> int | None:
    """Returns the bytes that the process may take: those that the user gives, or the free ones; None where the system
    does not report them."""
    return most_bytes() if asked is None else asked


def whole_bytes(spec: ModelSpec, computed: Collection[str] = ()) -> int:
    """Returns the bytes of a process with the whole model in memory, but for tables that stay on the drive."""
    return PROCESS_BYTES + _FLOAT * (parameters(spec, computed).total - table_numbers(spec))


def check_least(limit_bytes: int, spec: ModelSpec, weighing_bytes: int = 0) -> None:
    """Raises SettingsError where `limit_bytes` are too few to go layer by layer, and to weigh errors."""
    least = _fixed_bytes(spec) + 2 * LEAST_TOKENS * token_bytes(spec) + weighing_bytes
    if limit_bytes < least:
        raise SettingsError(
            f"--memory {_megabytes(limit_bytes)}: text takes at least {_megabytes(least)} to go through this model "
            "layer by layer"
        )


def room_in(limit_bytes: int, spec: ModelSpec, folder: Path) -> Room:
    """Returns the room for passes layer by layer in a process of `limit_bytes`."""
    left = limit_bytes - _fixed_bytes(spec)
    return Room(folder, max(0, left // 2), max(0, left // 4))


def check_room(place: Path, needed_bytes: int, option: str, left: Path) -> None:
    """Raises ConversionError where the disk that `place` is on has less room than `needed_bytes`; `option` chooses
    another place. Files that an interrupted run has left in the folder `left` count as room: they are used again, or
    removed."""
    there = next(path for path in place.absolute().parents if path.exists())
    files = (path for path in left.rglob("*") if path.is_file())
    free = shutil.disk_usage(there).free + sum(path.stat().st_size for path in files)
    if free < needed_bytes:
        raise ConversionError(
            f"{place} needs {size(needed_bytes)}, and its disk has {size(free)} free: free some space, or choose "
            f"another place with {option}"
        )


def work_bytes(material: Material, coding: Coding) -> int:
    """Returns the most bytes that passes layer by layer keep in the work directory: states between layers, gradients,
    codes."""
    spec, settings = coding.spec, material.settings
    a_token = spec.stream_width * _FLOAT
    widths = [bits for bits in settings.bits if bits < 16]
    kept = 2 * (len(spec.decoder) + 1) * material.ranked.decoder_tokens * a_token
    back = 2 * DRAWS * material.ranked.decoder_tokens * a_token
    variants = len(spec.moe_layers()) * (len(widths) + 1) * WINDOWS
    scales = 2 * variants * settings.context * a_token
    plans = 2 * (material.judged.decoder_tokens + material.heldout.decoder_tokens) * a_token
    codes = sum(uniform_bytes(spec, bits, coding.storage) for bits in widths)
    return kept + back + scales + plans + codes + beside_bytes(spec, coding.weighed)


def check_layered(settings: Settings, memory: Memory, checkpoint: Checkpoint) -> None:
    """Raises SettingsError for gradients of a model that has none by layers, and for settings that need a model in
    memory."""
    if settings.signal == FISHER and not have_gradients(checkpoint.family, checkpoint.spec):
        raise SettingsError(
            f"{said('signal', FISHER)}: gradients cannot go back through a {checkpoint.spec.family} model, which "
            f"can't be run layer by layer: take {said('signal', 'kl')}"
        )
    if not memory.layered:
        if settings.signal == FISHER and settings.cluster is not None:
            raise SettingsError(
                f"{said('cluster')} shares out the exact sweep, or coding layer by layer where a model does not fit "
                f"--memory: leave it out, or take {said('signal', 'kl')}"
            )
        return
    for option, asked in (
        ("--resident", bool(settings.resident)), (said("route", "hash"), settings.by_hash),
        (said("neurons", "predicted"), settings.predicts),
        (said("signal", settings.signal), settings.signal in ("metric", "nll")),
    ):  # fmt: skip
        if asked:
            raise SettingsError(
                f"{option} takes a model in memory, and this one does not fit: leave it out, or give more --memory"
            )


def _fixed_bytes(spec: ModelSpec) -> int:
    """Returns the bytes that one layer at a time takes, whatever the text: of the process, of the larger of a layer
    without its experts and the head, and of a few experts."""
    roles: dict[str, int] = {}
    for name, tensor in spec.tensors.items():
        part = ".".join(name.split(".")[:2]) if name.startswith("decoder.") else name
        roles[part] = roles.get(part, 0) + math.prod(tensor.shape)
    largest = max(roles.values())
    return PROCESS_BYTES + _FLOAT * (largest + _EXPERTS * spec.weights_per_expert())


def _megabytes(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{math.ceil(nbytes / 1e6):,}MB".replace(",", "")
