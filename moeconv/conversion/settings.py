"""The settings of a conversion, from options or by name, checked before anything long starts."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, TypedDict, get_type_hints

from moeconv.artifacts import FISHER, PURPOSES, SIGNALS, Target
from moeconv.dense import SOURCE, DenseBits, dense_bits_text
from moeconv.errors import SettingsError
from moeconv.measure.metrics import find_metric, is_module
from moeconv.plan import ALLOCATORS
from moeconv.quantizers import GROUP_SIZES, QUANTIZERS, WHOLE_CHANNELS, codes_of
from moeconv.tuned import said
from moeconv.writer import Files
from moert.pack.codec import WIDTHS, Width
from moert.pack.layout import MOST_PIECE_BYTES, SECTOR, Neurons
from moert.pack.manifest import WIDTHS_BY_TEXT, WIDTHS_OF
from moert.pack.messages import NO_MEMORY, NotASize, fits, parse_size, unknown, wanted
from moert.pack.model_spec import ModelSpec
from moert.pack.parts import ROLES

# How experts lie in a pack: the layouts of --layout.

BY_NEURONS: Mapping[str, bool] = {"neuron": True, "columns": False}
"""Layout → whether columns lie beside the rows of their neurons."""
PIECE_BYTES = 4096
"""Most bytes of a block's columns: drives read pages of this size."""
_TOGETHER = 2
"""Neurons of a block at 4 bits: with more neurons, nearly every block has one that fires."""
LAYOUTS = ("expert", "layer", *BY_NEURONS, "auto")
PAYS_BYTES = 128 << 10
"""Least bytes of an expert at 4 bits for which `auto` takes blocks of neurons: a smaller expert is read whole as soon
as its few firing neurons. Experts that a router chooses stay whole at any size: those in frequent demand stay in the
expert cache, and that saves more than reading only firing neurons (recipes/LOG.md)."""


def files_of(layout: str) -> Files:
    """Returns the unit that has a file of its own in this layout: a layer or an expert."""
    return "layer" if layout == "layer" else "expert"


def check_piece_bytes(layout: str, piece_bytes: int | None) -> None:
    """Raises SettingsError for piece_bytes without neurons in blocks, or of a size that no block can have."""
    if piece_bytes is None:
        return
    if layout not in (*BY_NEURONS, "auto"):
        raise SettingsError(
            f"{said('piece_bytes')} has no effect on --layout {layout}: leave it out, or take --layout columns"
        )
    if piece_bytes % SECTOR or not SECTOR <= piece_bytes <= MOST_PIECE_BYTES:
        raise SettingsError(
            f"{said('piece_bytes', piece_bytes)}: expected a multiple of {SECTOR}, {SECTOR} to {MOST_PIECE_BYTES}"
        )


def neurons_of(layout: str, spec: ModelSpec, mxfp4: bool, piece_bytes: int | None = None) -> Neurons | None:
    """Returns how neurons lie in blocks with columns of at most `piece_bytes` (None: the usual number); None for a
    layout without blocks. Raises SettingsError for a model that can't have this layout."""
    act = spec.moe.ffn.act
    if layout == "auto":
        large = spec.weights_per_expert() // 2 >= PAYS_BYTES
        pays = large and act.exact_zeros and not mxfp4 and not spec.moe.chooses
        return blocks_of(spec, False, piece_bytes) if pays else None
    if layout not in BY_NEURONS:
        return None
    if not act.exact_zeros:
        raise SettingsError(
            f"--layout {layout} is for experts whose neurons are often exactly zero (relu, relu2), and this model's "
            f"activation is {act.name}: leave it out"
        )
    if mxfp4:
        raise SettingsError(f"--layout {layout} does not go with a source in MXFP4: leave it out")
    return blocks_of(spec, BY_NEURONS[layout], piece_bytes)


def blocks_of(spec: ModelSpec, bundled: bool, piece_bytes: int | None = None) -> Neurons:
    """Returns blocks with columns of at most `piece_bytes`; by default blocks of a few neurons, but no smaller than the
    sector that a drive reads."""
    if piece_bytes is not None:
        return Neurons(piece_bytes, bundled, together=not bundled)
    few = _TOGETHER * spec.expert_width // 2
    nbytes = SECTOR
    while nbytes < min(few, PIECE_BYTES):
        nbytes *= 2
    return Neurons(nbytes, bundled, together=not bundled)


# The settings and their checks.

DEFAULT_CONTEXT = 256
DEFAULT_MEMORY = 2 << 30
DEFAULT_TARGET = Target("loss", 0.05)
"""The target where the user gives none: compared by identity, since a given target may be equal to it."""
DEFAULT_QUANTIZER, PLAIN_QUANTIZER, TEXTLESS_QUANTIZER = "trellis", "gptq", "group"
"""The quantizer where the user gives none; those that give plain codes, with text and without."""
DEFAULT_ALLOCATION = "knapsack"
EVERY_WIDTH = tuple(WIDTHS_BY_TEXT.values())
"""The widths where the user gives none, of which a quantizer has those of its codes: compared by identity."""
_TARGET_OPTIONS = {"loss": "--loss", "size": "--size", "bits": "--bits-per-weight"}
ROUTES = ("router", "hash")
NEURONS = ("exact", "predicted")
SCALES = ("trained", "fitted")
DEFAULT_LAYOUT, PREDICTED_LAYOUT = "expert", "neuron"
LEAST_MEMORY = 10**6  # bytes; a smaller number is a share of the experts
_OF_TEXT = (
    "margin", "confidence", "heldout", "fields", "metric", "signal", "per_projection", "samples", "sweep_samples",
    "heldout_samples", "max_new_tokens", "memory_bytes", "cluster", "strict", "resident", "route", "neurons", "scales",
    "purpose",
)  # fmt: skip
"""Settings that have no effect without calibration text. The seed and the context are kept in the pack all the same."""
_CALLED = {"memory_bytes": "memory", "purpose": "for"}
"""Settings with another name on the command line."""


@dataclass(frozen=True)
class Settings:
    """The settings of one conversion. `margin` is the share of a loss target that the calibration text must leave free;
    `confidence` is the probability with which the held-out loss stays under the target (None: only the measured loss
    must). `sweep_samples` bounds the text that ranks the experts, `samples` the text that judges plans,
    `heldout_samples` the text that the result is measured on (None: all of it): samples of input and target, or windows
    of `context` tokens of running text. `memory_bytes` bounds the whole process (None: all free memory, and
    DEFAULT_MEMORY for the sweep beside a model that fits). `dense_bits` is the width of all matrices outside the
    experts, or of those with the named roles, and the others are stored as they are; or SOURCE; None: they get widths
    with the experts, or where no loss decides, the usual ones. `purpose`: the bytes that plans save, one of PURPOSES.
    `strict` refuses, before the sweep, text that does not carry the confidence. `resident`: the memory that routing is
    fitted to, as shares of the experts or, from LEAST_MEMORY on, as bytes for moert; the widths are fitted to the first
    entry. `quantizer`: None for DEFAULT_QUANTIZER, or where its codes do not go with the other settings a plain one.
    `layout`: how experts lie in the pack, one of LAYOUTS; `piece_bytes`: in a layout by neurons, the most bytes of a
    block's columns (None, for both: the usual choice). `route`: one of ROUTES, the router or a hash function.
    `neurons`: the neurons of an expert that are computed, one of NEURONS. `scales`: of codes, one of SCALES.
    `overwrite`: any pack that stands at `out` may be replaced."""

    model: str
    out: Path
    work: Path
    target: Target = DEFAULT_TARGET
    margin: float = 0.0
    confidence: float | None = 0.95
    calib: str | None = None
    heldout: str | None = None
    fields: Mapping[str, str] | None = None
    metric: str | None = None
    quantizer: str | None = None
    group_size: int | None = None
    allocation: str = DEFAULT_ALLOCATION
    signal: str = "kl"
    per_projection: bool = False
    bits: tuple[Width, ...] = EVERY_WIDTH
    seed: int = 0
    samples: int | None = None
    sweep_samples: int | None = None
    heldout_samples: int | None = None
    context: int = DEFAULT_CONTEXT
    max_new_tokens: int | None = None
    memory_bytes: int | None = None
    cluster: str | None = None
    dense_bits: int | str | Mapping[str, int] | None = None
    purpose: str = PURPOSES[0]
    strict: bool = False
    resident: tuple[float, ...] = ()
    layout: str | None = None
    route: str = "router"
    piece_bytes: int | None = None
    neurons: str = "exact"
    scales: str = SCALES[0]
    overwrite: bool = False

    def __post_init__(self) -> None:
        if self.quantizer is not None:
            check_choice("quantizer", self.quantizer, QUANTIZERS)
        if self.layout is not None:
            check_choice("layout", self.layout, LAYOUTS)
        check_choice("for", self.purpose, PURPOSES)
        check_choice("route", self.route, ROUTES)
        check_choice("neurons", self.neurons, NEURONS)
        check_choice("scales", self.scales, SCALES)
        self._check_taught()
        check_piece_bytes(self.laid_out, self.piece_bytes)
        check_ranking(self.allocation, self.signal)
        if self.metric is not None and not is_module(self.metric):
            find_metric(self.metric)
        if self.group_size is not None and self.coded_by in WHOLE_CHANNELS:
            raise SettingsError(
                f"{said('group_size')} has no effect on the {self.coded_by} quantizer: leave it out, or use group"
            )
        if self.group_size is not None and self.group_size not in GROUP_SIZES:
            raise SettingsError(
                f"{said('group_size', self.group_size)}: expected one of {', '.join(map(str, GROUP_SIZES))}"
            )
        self._check_widths()
        check_dense_bits(self.dense_bits)
        self._check_text()
        self._check_numbers()
        if not self.out.name or not self.work.name:
            raise SettingsError(f"--out {self.out} and --work {self.work}: expected new directories with names")

    def _check_widths(self) -> None:
        """Takes the quantizer's own widths where none are given. Raises SettingsError for others, and for a layout
        that its codes do not have."""
        codes = codes_of(self.coded_by)
        if self.bits is EVERY_WIDTH:
            object.__setattr__(self, "bits", WIDTHS_OF[codes])
        if not self.bits or not set(self.bits) <= set(WIDTHS_OF[codes]):
            given, known = ",".join(map(str, self.bits)), ", ".join(map(str, WIDTHS_OF[codes]))
            trellis = "" if codes == "trellis" else f" with --quantizer {self.coded_by}"
            raise SettingsError(f"--bits {given}: expected widths among {known}{trellis}")
        if codes == "trellis" and self.laid_out in BY_NEURONS:
            given = said("neurons", "predicted") if self.predicts else f"--layout {self.laid_out}"
            raise SettingsError(
                f"{given} is for blocks of neurons, which have plain codes: leave it out, or take --quantizer "
                f"{PLAIN_QUANTIZER}"
            )

    def _check_taught(self) -> None:
        """Raises SettingsError for settings that a hash function or a predictor of neurons does not go with."""
        by_hash, predicted, leave = said("route", "hash"), said("neurons", "predicted"), "leave it out, or"
        for wrong, message in (
            (self.predicts and self.laid_out not in BY_NEURONS,
             f"--layout {self.layout} does not go with {predicted}, which reads parts of experts: take --layout "
             f"{PREDICTED_LAYOUT}"),
            (self.predicts and self.by_hash, f"{predicted} goes with routers: {leave} {by_hash}"),
            (self.predicts and self.resident, f"--resident is measured with all neurons: {leave} {predicted}"),
            (self.by_hash and self.resident, f"--resident goes with routers: {leave} {by_hash}"),
            (self.by_hash and self.signal == FISHER,
             f"{said('signal', FISHER)} does not go with {by_hash}: take {said('signal', 'kl')}"),
        ):  # fmt: skip
            if wrong:
                raise SettingsError(message)

    def _check_text(self) -> None:
        if self.calib is not None:
            return
        if self.quantizer == PLAIN_QUANTIZER:
            raise SettingsError(
                f"--quantizer {PLAIN_QUANTIZER} looks at text: give --calib, or take --quantizer {DEFAULT_QUANTIZER}"
            )
        if self.target.kind == "loss" and self.target is not DEFAULT_TARGET:
            raise SettingsError("--loss is measured on text: give --calib, or say --bits 4 or --bits-per-weight 3.2")
        if self.target.kind == "loss" and len(set(self.bits)) > 1:
            raise SettingsError(
                "--calib is missing: name a set in calib_data/ or a file; or go without text, where no loss is "
                "measured, by one width for all experts (--bits 4) or a size for all of them (--bits-per-weight 3.2)"
            )
        if self.target.kind != "loss" and len(set(self.bits)) == 1:
            raise SettingsError(
                f"{_TARGET_OPTIONS[self.target.kind]} has no effect on --bits {self.bits[0]}: leave one of them out"
            )
        if self.target.kind == "loss" and self.allocation != DEFAULT_ALLOCATION:
            raise SettingsError(f"{said('allocation')} has no effect on one width for all experts: leave it out")
        if self.bits == (16,) and (self.quantizer, self.group_size) != (None, None):
            option = said("group_size" if self.quantizer is None else "quantizer")
            raise SettingsError(f"{option} has no effect on --bits 16: leave it out")
        for field in fields(self):
            if field.name in _OF_TEXT and getattr(self, field.name) != field.default:
                option = said(_CALLED.get(field.name, field.name))
                raise SettingsError(f"{option} has no effect without --calib: leave it out")

    def _check_numbers(self) -> None:
        counts = {name: getattr(self, name) for name in ("samples", "sweep_samples", "heldout_samples")}
        check_counts(**counts, max_new_tokens=self.max_new_tokens, context=self.context, seed=self.seed)
        check_target(self.target)
        if self.memory_bytes is not None and self.memory_bytes < 1:
            raise SettingsError(f"--memory {self.memory_bytes}: expected more than 0 bytes")
        if not 0 <= self.margin < 1:
            raise SettingsError(f"{said('margin', f'{self.margin:g}')}: expected a share from 0 to less than 1")
        if self.confidence is not None and not 0.5 <= self.confidence < 1:
            raise SettingsError(f"--confidence {self.confidence:g}: expected 50% to less than 100%, or none")
        if self.strict and self.calib is not None and self.confidence is None:
            raise SettingsError(f"{said('strict')} has no effect with --confidence none: leave one of them out")
        if self.purpose != PURPOSES[0] and not self.chooses_dense:
            other = f"{said('allocation')}" if self.dense_bits is None else "--dense-bits"
            without = "without --loss" if self.target.kind != "loss" else f"with {other}"
            raise SettingsError(f"--for {self.purpose} has no effect {without}: leave it out")
        if self.target.kind != "loss" and self.margin:
            raise SettingsError(f"{said('margin')} has no effect without --loss: leave it out")
        if self.target.kind != "loss" and self.resident:
            raise SettingsError("--resident divides a loss between widths and routing: give --loss")
        known = all(0 < one < 1 or one >= LEAST_MEMORY for one in self.resident)
        if not known or len(set(self.resident)) < len(self.resident):
            raise SettingsError(
                f"--resident {resident_text(self.resident)}: expected different shares of the experts below 100%, or "
                "sizes of memory such as 2GB"
            )

    @property
    def by_hash(self) -> bool:
        """Whether a hash function takes the routers' place."""
        return self.route == "hash"

    @property
    def predicts(self) -> bool:
        """Whether only neurons are computed that a predictor names."""
        return self.neurons == "predicted"

    @property
    def learns(self) -> bool:
        """Whether something is trained on a part of the calibration text."""
        return self.by_hash or self.predicts

    @property
    def laid_out(self) -> str:
        """The layout of experts in the pack."""
        if self.predicts and self.layout in (None, "auto"):
            return PREDICTED_LAYOUT
        return DEFAULT_LAYOUT if self.layout is None else self.layout

    @property
    def coded_by(self) -> str:
        """The quantizer that is used."""
        if self.quantizer is not None:
            return self.quantizer
        if self.plain_for is None and min(self.bits, default=8) < 8:
            return DEFAULT_QUANTIZER
        return TEXTLESS_QUANTIZER if self.calib is None else PLAIN_QUANTIZER

    @property
    def plain_for(self) -> str | None:
        """The option that needs plain codes; None without one."""
        if self.predicts:
            return said("neurons", "predicted")
        if self.laid_out in (*BY_NEURONS, "auto"):
            return f"--layout {self.laid_out}"
        return None if self.group_size is None else said("group_size", self.group_size)

    @property
    def chooses_dense(self) -> bool:
        """Whether matrices outside the experts get widths by their measured losses, as experts do."""
        measured = self.calib is not None and self.target.kind == "loss"
        return measured and self.dense_bits is None and self.allocation == DEFAULT_ALLOCATION

    @property
    def usual_dense(self) -> bool:
        """Whether these matrices get the usual widths: nobody gave others, and no loss decides."""
        return self.dense_bits is None and not self.chooses_dense and self.bits != (16,)

    @property
    def planned_loss(self) -> float:
        """The largest loss on the calibration text that a plan may have. Only for a loss target."""
        return self.target.value * (1 - self.margin)


def check_choice(name: str, value: str, known: Iterable[str]) -> None:
    """Raises SettingsError for a value of a setting that is not among the known ones."""
    if value not in known:
        raise SettingsError(f"{said(name, value)}: expected one of {', '.join(known)}")


def check_dense_bits(wanted: DenseBits | None) -> None:
    """Raises SettingsError for a width or a role that does not exist."""
    if wanted in (None, SOURCE):
        return
    assert wanted is not None
    given, widths = f"--dense-bits {dense_bits_text(wanted)}", ", ".join(map(str, WIDTHS))
    if not isinstance(wanted, Mapping):
        if wanted not in WIDTHS:
            raise SettingsError(f"{given}: expected a width among {widths}")
        return
    for role, width in wanted.items():
        if role not in ROLES:
            raise SettingsError(f"{given}: there is no role {role}: expected roles among {', '.join(ROLES)}")
        if width not in WIDTHS:
            raise SettingsError(f"{given}: {role} can't have {width} bits: expected a width among {widths}")


def check_ranking(allocation: str, signal: str) -> None:
    """Raises SettingsError for an allocation or a signal that does not exist."""
    check_choice("allocation", allocation, ALLOCATORS)
    check_choice("signal", signal, (*SIGNALS, FISHER))


def check_target(target: Target) -> None:
    """Raises SettingsError for a target that is out of range."""
    option = _TARGET_OPTIONS[target.kind]
    if target.kind == "loss" and not 0 <= target.value < 1:
        raise SettingsError(f"{option} {target.value:g}: expected a share from 0 to less than 1")
    if target.kind == "size" and not 0 < target.value < math.inf:
        raise SettingsError(f"{option} {target.value:g}: expected a number of bytes above 0")
    if target.kind == "bits" and not 0 < target.value <= max(WIDTHS):
        raise SettingsError(f"{option} {target.value:g}: expected more than 0, at most {max(WIDTHS)}")


def check_counts(context: int | None = None, seed: int | None = None, **counts: int | None) -> None:
    """Raises SettingsError for a number that is out of range; None is not checked."""
    for name, value in counts.items():
        if value is not None and value < 1:
            raise SettingsError(f"{said(name, value)}: expected 1 or more")
    if context is not None and context < 2:
        raise SettingsError(f"--context {context}: expected at least 2 tokens")
    if seed is not None and not 0 <= seed < 1 << 32:
        raise SettingsError(f"--seed {seed}: expected a whole number from 0 to {(1 << 32) - 1}")


def parse_target(loss: str | None, size: str | None, bits_per_weight: float | None) -> Target:
    """Returns the target that these options of the command line give. Raises SettingsError."""
    return one_target(
        None if loss is None else parse_share(loss),
        None if size is None else parse_bytes(size, "--size"),
        bits_per_weight,
    )


def one_target(loss: float | None, size: float | None, bits_per_weight: float | None) -> Target:
    """Returns the target that is given; without any, a loss of 5%. Raises SettingsError for more than one."""
    found = {"loss": loss, "size": size, "bits": bits_per_weight}
    given = [Target(kind, float(value)) for kind, value in found.items() if value is not None]
    if len(given) > 1:
        names = " and ".join(_TARGET_OPTIONS[target.kind] for target in given)
        raise SettingsError(f"{names}: one target at a time, leave the others out")
    return given[0] if given else DEFAULT_TARGET


def parse_share(text: str, option: str = "--loss") -> float:
    """Returns a share: '5%' or '0.05' → 0.05. Raises SettingsError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(%?)\s*", text)
    if match is None:
        raise SettingsError(f"{option} {text!r}: expected a share such as 5% or 0.05")
    share = float(match[1]) / (100 if match[2] else 1)
    if share >= 1:
        hint = f"; did you mean {match[1]}%?" if not match[2] and share < 100 else ""
        raise SettingsError(f"{option} {text!r}: expected less than 100%{hint}")
    return share


def parse_resident(text: str | None) -> tuple[float, ...]:
    """Returns shares and bytes: '25%,2GB' → (0.25, 2e9). Raises SettingsError."""
    return () if text is None else tuple(map(_resident, text.split(",")))


def _resident(text: str) -> float:
    is_size = text.strip()[-1:].upper() in ("B", "K", "M", "G", "T")
    return float(parse_bytes(text, "--resident")) if is_size else parse_share(text, "--resident")


def resident_text(resident: Iterable[float]) -> str:
    """Returns shares and bytes as text of the command line."""
    return ",".join(f"{100 * one:g}%" if one < LEAST_MEMORY else f"{one / 1e6:g}MB" for one in resident)


def parse_confidence(text: str, option: str = "--confidence") -> float | None:
    """Returns a share, or None for 'none'. Raises SettingsError."""
    return None if text.strip().lower() == "none" else parse_share(text, option)


def parse_bytes(text: str, option: str) -> int:
    """Returns bytes from a size as moert takes it too: '120MB', '2G' or '1.5GiB'. Raises SettingsError."""
    try:
        return parse_size(text, NO_MEMORY) if "memory" in option else parse_size(text)
    except NotASize as error:
        raise SettingsError(f"{option} {error}") from None


def parse_bits(text: str) -> tuple[Width, ...]:
    """Returns widths: '2,1.5,4' → (1.5, 2, 4), sorted, each once. Raises SettingsError."""
    given = set(map(str.strip, text.split(",")))
    if not all(re.fullmatch(r"\d+|\d+\.\d*[1-9]", each) for each in given):
        raise SettingsError(f"--bits {text!r}: expected widths such as 2,4,8")
    if not given <= WIDTHS_BY_TEXT.keys():
        raise SettingsError(f"--bits {text!r}: expected widths among {', '.join(WIDTHS_BY_TEXT)}")
    return tuple(width for name, width in WIDTHS_BY_TEXT.items() if name in given)


def parse_dense_bits(text: str, option: str = "--dense-bits") -> int | str | dict[str, int]:
    """Returns one width for all roles ('8' → 8), a width for each role ('attention=4,head=8'), or 'source'. Raises
    SettingsError."""
    given, expected = f"{option} {text!r}", "expected a width such as 8, or attention=4,head=8"
    if text.strip() == SOURCE:
        return SOURCE
    if re.fullmatch(r"\s*\d{1,9}\s*", text):
        return int(text)
    if not set(text) & set("=,"):
        raise SettingsError(f"{given}: {expected}")
    bits: dict[str, int] = {}
    for part in map(str.strip, text.split(",")):
        role, width = map(str.strip, part.partition("=")[::2])
        if not role or not re.fullmatch(r"\d{1,9}", width):
            lacks = "role" if not role else "whole number as its width" if width else "width"
            raise SettingsError(f"{given}: {part!r} has no {lacks}: {expected}")
        if role in bits:
            raise SettingsError(f"{given}: {role} is there twice: expected each role once")
        bits[role] = int(width)
    return bits


def parse_fields(text: str | None) -> dict[str, str] | None:
    """Returns the names that a file has for our fields, from 'input=question,target=answer'. Raises SettingsError."""
    if text is None:
        return None
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(name.strip() and value.strip() for name, _, value in pairs):
        raise SettingsError(f"--fields {text!r}: expected pairs such as input=question,target=answer")
    return {name.strip(): value.strip() for name, _, value in pairs}


# Settings by name, in a recipe or in Python: text as on the command line, or numbers.


class Options(TypedDict, total=False):
    """Settings by name, without the model and the pack's place: the options of `moeconv quantize`, as text of the
    command line or as numbers."""

    loss: str | float
    size: str | float
    bits_per_weight: str | float
    margin: str | float
    confidence: str | float
    strict: bool
    resident: str | float | Sequence[str | float]
    calib: str | os.PathLike[str] | None
    heldout: str | os.PathLike[str] | None
    fields: str | Mapping[str, str] | None
    metric: str | os.PathLike[str] | None
    quantizer: str | None
    group_size: str | int | None
    allocation: str
    signal: str
    per_projection: bool
    bits: str | float | Sequence[str | float]
    dense_bits: str | int | Mapping[str, int] | None
    purpose: str
    samples: str | int | None
    sweep_samples: str | int | None
    heldout_samples: str | int | None
    context: str | int
    max_new_tokens: str | int | None
    memory: str | int
    cluster: str | None
    layout: str | None
    piece_bytes: str | int | None
    route: str
    neurons: str
    scales: str
    seed: str | int
    overwrite: bool


ENTRIES = sorted({"model", *Options.__annotations__})
"""The names of the settings: a recipe may give all but `overwrite`."""
Parse = Callable[[str, str], float | str | Mapping[str, int] | None]


def _plain_number(text: str, name: str) -> float:
    """Returns a number from text. Raises SettingsError."""
    try:
        return float(text)
    except ValueError:
        raise SettingsError(f"{name} {text!r}: expected a number") from None


def _bits(value: Any) -> tuple[Width, ...]:
    """Returns widths from one width, several, or text. Raises SettingsError."""
    return parse_bits(",".join(map(str, value if isinstance(value, (list, tuple)) else (value,))))


def _resident_shares(value: Any) -> tuple[float, ...]:
    """Returns shares and bytes from one number, several, or text. Raises SettingsError."""
    parts = value if isinstance(value, (list, tuple)) else (value,)
    return tuple(one for part in parts for one in (parse_resident(part) if isinstance(part, str) else (part,)))


_PARSERS: Mapping[str, Parse] = {
    "loss": parse_share, "size": parse_bytes, "bits_per_weight": _plain_number, "margin": parse_share,
    "confidence": parse_confidence, "memory": parse_bytes, "dense_bits": parse_dense_bits,
}  # fmt: skip
"""Entries that are numbers, or text as on the command line; (text, name of the entry) → value."""
_FORMS: Mapping[str, Callable[[Any], Any]] = {
    "bits": _bits, "resident": _resident_shares,
    "fields": lambda value: parse_fields(value) if isinstance(value, str) else value,
}  # fmt: skip
"""Entries that hold one value or several, or text as on the command line."""


def settings_of(entries: Mapping[str, Any], out: Path, work: Path) -> Settings:
    """Returns the settings that these entries give. Raises SettingsError, which still names options: see
    `as_entries`."""
    settings: Settings = table(_parsed(dict(entries)) | {"out": out, "work": work}, Settings, "")
    return settings


def _parsed(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the values that Settings hold, from entries written as on the command line. Raises SettingsError."""
    if "target" in values:
        raise SettingsError("target: a recipe has loss, size or bits_per_weight in its place")
    for name, parse in _PARSERS.items():
        if name in values:
            values[name] = _number(name, values[name], parse)
    for name, form in _FORMS.items():
        if name in values:
            values[name] = form(values[name])
    values["target"] = one_target(*(values.pop(name, None) for name in ("loss", "size", "bits_per_weight")))
    if "memory" in values:
        values["memory_bytes"] = int(values.pop("memory"))
    return values


def _number(name: str, value: Any, parse: Parse) -> float | str | Mapping[str, int] | None:
    """Returns a value from text, or the number itself. Raises SettingsError; true is not a number."""
    if isinstance(value, str):
        return parse(value, name)
    if name == "dense_bits" and isinstance(value, Mapping):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < sys.maxsize:
        raise SettingsError(f"{name} = {value!r}: expected a number or text")
    return value


def as_entries(message: str) -> str:
    """Returns a message with options by the names that they have in a recipe: --dense-bits is dense_bits there, --for
    purpose, and --tune group-size=64 group_size 64. Paths such as models--owner--name stay as they are."""
    plain = (
        re.sub(r"--tune ([a-z][a-z-]*)=", r"--\1 ", message).replace("--tune ", "--").replace("--for ", "--purpose ")
    )
    return re.sub(r"(?<![\w/.-])--([a-z][a-z-]*)", lambda option: option[1].replace("-", "_"), plain)


def table(values: Any, kind: Any, where: str) -> Any:
    """Returns a TOML table as a dataclass; whole numbers may be text. Raises SettingsError, with a message that begins
    with `where`, for unknown, missing and wrongly typed entries."""
    if not isinstance(values, dict):
        raise SettingsError(f"{where}should be a table, found {values!r}")
    known = {field.name: field for field in fields(kind)}
    types = get_type_hints(kind)
    for name, value in values.items():
        if name not in known:
            raise SettingsError(f"{where}{name} {unknown(name, sorted(known))}")
        if isinstance(value, str) and not fits(value, types[name]) and re.fullmatch(r"\s*\d{1,18}\s*", value):
            value = values[name] = int(value)
        if not fits(value, types[name]):
            raise SettingsError(f"{where}{name} = {value!r}: expected {wanted(types[name])}")
    missing = [name for name, field in known.items() if field.default is MISSING and name not in values]
    if missing:
        raise SettingsError(f"{where}{missing[0]} is missing")
    return kind(**values)
