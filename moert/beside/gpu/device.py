"""A device with memory of its own: its interface, and the costs of computing, copying and reading."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NewType, Protocol

import numpy as np

from moert.errors import RunError
from moert.kernels import library
from moert.kernels.backend import I32, Backend, ExpertView, ProjectionView
from moert.kernels.speed import WIDTHS, kernel_speeds
from moert.machine import DAMAGED, cache_file, entries, remember
from moert.pack.codec import F32, QuantizedMatrix, n_groups, row_bytes
from moert.pack.parts import Ffn


@dataclass(frozen=True)
class Roofline:
    """The time of a matrix product over the number of its rows: whatever takes longer, reading the weights once or
    multiplying each row with them. Both are seconds for each weight; `row_s` for each row as well."""

    weight_s: float
    row_s: float

    def seconds(self, weights: int, rows: int) -> float:
        """Of an expert with so many weights that so many tokens go to."""
        return weights * max(self.weight_s, rows * self.row_s)


Widths = Mapping[int, Roofline]
"""By bits of a weight: 2, 3, 4, 8, 16; MXFP4 counts as 4."""


@dataclass(frozen=True)
class DeviceCosts:
    """Of a device. `pass_s`: for each mixture, to hand x over and fetch what was made, beside their bytes; `launch_s`:
    for each expert in it. Copies take `copy_s` and their bytes by `copy_bytes_per_s`; x and what is made go over at
    the same speed."""

    widths: Widths
    launch_s: float
    pass_s: float
    copy_s: float
    copy_bytes_per_s: float


@dataclass(frozen=True)
class HostCosts:
    """Of the processor and the drive: an expert takes `call_s` and its products, a read `read_s` and its bytes by
    `read_bytes_per_s`."""

    widths: Widths
    call_s: float
    read_s: float
    read_bytes_per_s: float


class Clock(Protocol):
    """Time as a device tells it. On a simulated one it goes on only by what is told to it."""

    def now(self) -> float:
        """Seconds since some moment."""
        ...

    def host(self, seconds: float) -> None:
        """The processor has done something that takes so long on the machine whose time this is."""
        ...


class WallClock:
    """The time of this machine, which goes on by itself."""

    def now(self) -> float:
        return time.perf_counter()

    def host(self, seconds: float) -> None:
        """It has passed already."""


STAGING_BUFFERS = 4
"""Pinned pieces of memory that copies go through, shared by all layers (Mixtral-offloading, Eliseev & Mazur 2023)."""

Held = NewType("Held", object)
"""An expert in a device's memory, or on its way there: only the device that holds it looks inside."""
Running = NewType("Running", object)
"""What a device was asked to compute: alike."""


class DeviceFull(Exception):
    """The device has no memory left for what is asked: give experts back and ask again."""


class DeviceMissing(RunError):
    """A device that is not there, or can't be used here."""


class Device(Protocol):
    """Used by one thread, the model's. What is asked is done in the order asked, copies and computing side by side.

    All but `finish`, `wait` and `wait_left` come back at once; a copy may wait for one of the STAGING_BUFFERS."""

    name: str
    """As `open_device` takes it: "cuda:0"."""
    title: str
    """For people: the name of the card; of a simulated one it says that it is simulated."""
    simulated: bool
    """Whether its times are those of another machine: then they are taken from `clock`."""
    capacity_bytes: int
    """The most that it holds: experts, and what it computes with."""

    @property
    def clock(self) -> Clock:
        """What its times are of."""
        ...

    @property
    def used_bytes(self) -> int:
        """Memory that it holds now, everything included."""
        ...

    def weigh(self, nbytes: int, projections: Mapping[str, ProjectionView]) -> int:
        """Bytes that an expert takes there, of which `nbytes` lie in a buffer of the host."""
        ...

    def scratch_bytes(self, rows: int, d_model: int, d_ff: int) -> int:
        """What a mixture of so many rows takes there beside the experts, at most."""
        ...

    def copy(self, view: ExpertView) -> Held:
        """Begins to copy an expert there, packed as it is, out of a staging buffer, on the stream of copies. The
        buffer of the view is not changed or freed before `wait_left`. Raises DeviceFull."""
        ...

    def wait_left(self, held: Held) -> None:
        """Waits until the buffer that it was copied from is not needed any more: it lies in a staging buffer."""
        ...

    def has(self, held: Held) -> bool:
        """Whether its copy has come."""
        ...

    def wait(self, held: Held) -> None:
        """Waits until it has come."""
        ...

    def free(self, held: Held) -> None:
        """Gives its memory back, once all that was begun with it has ended."""
        ...

    def begin(
        self, experts: Sequence[Held], counts: Sequence[int], tokens: I32, x: F32, spec: Ffn
    ) -> Running:  # fmt: skip
        """Begins to compute expert after expert, each with the next `counts` of the tokens [rows]; those that are still
        on their way are waited for by the device, not by the caller. x [tokens of the pass, d_model] may be changed
        once this returns. Raises DeviceFull, and then has begun nothing."""
        ...

    def finish(self, running: Running, parts: F32) -> None:
        """Waits for it: parts [rows, d_model] = expert(x[token]) for each row, in the order given, not weighted.
        Whoever asks adds them up, so that the order of additions is the same wherever experts are computed."""
        ...

    def costs(self) -> DeviceCosts:
        """What things take there: measured in under a second, or remembered from the last time."""
        ...

    def backend(self, host: Backend) -> Backend | None:
        """One that has everything but the experts there, keys and values included, and hands to `host` what it can't
        do; None: all of that stays on the host."""
        ...

    def full(self, give_back: Callable[[], bool]) -> None:
        """From now on this is asked where that backend finds no room: whether experts gave some of theirs back."""
        ...

    def close(self) -> None:
        """Ends its streams and gives all of its memory back."""
        ...


_SECTION = "devices"
_MEASURED_BYTES = 48 << 20  # of weights, for what they take where no cache holds them
_SIDE, _GROUP, _ROWS, _TURNS = 512, 64, 64, 3
_SCALES = 0.5  # bits of a weight for its scale and minimum


def remembered_costs(key: str, measure: Callable[[], DeviceCosts], cache: Path | None = None) -> DeviceCosts:
    """Those of the device that `key` names: remembered, or measured now and remembered."""
    cache = cache or cache_file()
    known = entries(cache, _SECTION)
    with suppress(KeyError, *DAMAGED):
        return _parsed(known[key])
    found = measure()
    remember(cache, _SECTION, {**known, key: _body(found)})
    return found


def known_costs(cache: Path | None = None) -> dict[str, DeviceCosts]:
    """Of all devices that were measured here; without damaged entries."""
    found: dict[str, DeviceCosts] = {}
    for key, body in entries(cache or cache_file(), _SECTION).items():
        with suppress(*DAMAGED):
            found[key] = _parsed(body)
    return found


def host_costs(backend: Backend, drive_bytes_per_s: float) -> HostCosts:
    """Of this processor, measured in half a second: what weights take that no cache holds, and what each of many rows
    takes."""
    loaded = library.load()
    speeds = None if loaded is None or backend.widens else kernel_speeds(loaded, backend.threads, _MEASURED_BYTES)
    widths = {bits: _roofline(backend, bits, None if speeds is None else speeds[bits]) for bits in WIDTHS}
    return HostCosts(widths, 5e-6, 100e-6, drive_bytes_per_s)


def _roofline(backend: Backend, bits: int, bytes_per_s: float | None) -> Roofline:
    stored = _matrix(bits)
    matrix = backend.matrix(stored)
    many = _least_s(lambda: backend.linear(np.ones((_ROWS, _SIDE), np.float32), matrix)) / (_ROWS * _SIDE**2)
    if bytes_per_s is not None:
        return Roofline((bits + (_SCALES if bits < 16 else 0)) / 8 / bytes_per_s, many)
    return Roofline(_least_s(lambda: backend.linear(np.ones((1, _SIDE), np.float32), matrix)) / _SIDE**2, many)


def _matrix(bits: int) -> Any:
    """Of so many bits a weight."""
    from moert.kernels.backend import Floats

    if bits == 16:
        return Floats("BF16", np.full((_SIDE, _SIDE), 0x3C00, np.uint16))
    codes = np.full((_SIDE, row_bytes(_SIDE, bits)), 0x55, np.uint8)
    groups = n_groups(_SIDE, _GROUP)
    scale, minimum = (np.full((_SIDE, groups), value, np.float16) for value in (0.01, -0.01))
    return QuantizedMatrix(bits, _SIDE, _GROUP, codes, scale, minimum)


def _least_s(call: Callable[[], object]) -> float:
    """Of a few turns, after one that is not counted."""
    call()
    times = []
    for _ in range(_TURNS):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)


def _body(costs: DeviceCosts) -> dict[str, Any]:
    return {
        "widths": {str(bits): [each.weight_s, each.row_s] for bits, each in costs.widths.items()},
        "launch_s": costs.launch_s,
        "pass_s": costs.pass_s,
        "copy_s": costs.copy_s,
        "copy_bytes_per_s": costs.copy_bytes_per_s,
    }


def _parsed(body: Mapping[str, Any]) -> DeviceCosts:
    widths = {int(bits): Roofline(float(each[0]), float(each[1])) for bits, each in body["widths"].items()}
    numbers = [float(body[name]) for name in ("launch_s", "pass_s", "copy_s", "copy_bytes_per_s")]
    slopes = [each for width in widths.values() for each in (width.weight_s, width.row_s)]
    sound = all(0 <= each < math.inf for each in (*numbers, *slopes)) and min(numbers[-1], *slopes) > 0
    if set(widths) != set(WIDTHS) or not sound:
        raise ValueError
    return DeviceCosts(widths, *numbers)
