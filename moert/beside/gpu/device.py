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
from moert.pack.codec import F32, QuantizedMatrix, n_groups, row_bytes, stream_bytes
from moert.pack.parts import Act, Ffn
from moert.stats import size


@dataclass(frozen=True)
class Roofline:
    """The time of a matrix product by its number of rows: reading the weights once, or multiplying each row with them
    if that takes longer. `weight_s`: seconds for each weight; `row_s`: for each weight and row."""

    weight_s: float
    row_s: float

    def seconds(self, weights: int, rows: int) -> float:
        """Returns the time of an expert with that many weights and rows [s]."""
        return weights * max(self.weight_s, rows * self.row_s)


Widths = Mapping[int, Roofline]
"""By bits of a weight: 2, 3, 4, 8, 16, where MXFP4 counts as 4; and TRELLIS."""
TRELLIS = 0
"""Trellis codes, whose products take about the same time at all their widths: that of decoding."""
COSTED = (*WIDTHS, TRELLIS)


@dataclass(frozen=True)
class DeviceCosts:
    """The costs of a device. `pass_s`: for each mixture, to hand x over and fetch the result, beside their bytes;
    `launch_s`: for each expert in it; `step_s`: for attention in each layer, beside its weights, to launch its many
    small operations. Copies take `copy_s` and their bytes by `copy_bytes_per_s`; x and the result go over at the same
    speed. `by_caller`: launches and copies are the work of the thread that begins them, which computes nothing
    meanwhile."""

    widths: Widths
    launch_s: float
    pass_s: float
    copy_s: float
    copy_bytes_per_s: float
    step_s: float
    by_caller: bool = False


@dataclass(frozen=True)
class HostCosts:
    """The costs of the processor and the drive: an expert takes `call_s` and its products, a read `read_s` and its
    bytes by `read_bytes_per_s`."""

    widths: Widths
    call_s: float
    read_s: float
    read_bytes_per_s: float


class Clock(Protocol):
    """The time of a device. On a simulated one it goes on only by calls."""

    def now(self) -> float:
        """Returns the seconds since some moment."""
        ...

    def host(self, seconds: float) -> None:
        """Adds the time of work that the processor has done on the machine of this clock [s]."""
        ...


class WallClock:
    """The time of this machine, which goes on by itself."""

    def now(self) -> float:
        return time.perf_counter()

    def host(self, seconds: float) -> None:
        """Does nothing: that time has passed already."""


STAGING_BUFFERS = 4
"""Pinned pieces of memory that copies go through, shared by all layers (Mixtral-offloading, Eliseev & Mazur 2023)."""

Held = NewType("Held", object)
"""An expert in a device's memory, or on its way there: only the device that holds it looks inside."""
Running = NewType("Running", object)
"""A computation that a device has begun: only that device looks inside."""


class DeviceFull(Exception):
    """The device has no memory left for a call: give experts back and call again."""


class DeviceMissing(RunError):
    """A device that is not there, or can't be used here. Leave `--device` out to run on the processor."""


class Device(Protocol):
    """A device with memory of its own, used by one thread, the model's. Calls are carried out in their order, copies
    and computing side by side.

    All but `finish`, `wait` and `wait_left` return at once; a copy may wait for one of the STAGING_BUFFERS.
    """

    name: str
    """As `open_device` takes it: "cuda:0"."""
    title: str
    """For people: the name of the card; of a simulated one it says that it is simulated."""
    simulated: bool
    """Whether its times are those of another machine: then they are taken from `clock`."""
    capacity_bytes: int
    """The most bytes that it holds: experts, and all that it computes with."""

    @property
    def clock(self) -> Clock:
        """The clock that its times are taken from."""
        ...

    @property
    def used_bytes(self) -> int:
        """Memory that it holds now, everything included."""
        ...

    def weigh(self, nbytes: int, projections: Mapping[str, ProjectionView]) -> int:
        """Returns the bytes on the device of an expert that has `nbytes` in a buffer of the host."""
        ...

    def scratch_bytes(self, rows: int, d_model: int, d_ff: int) -> int:
        """Returns the most bytes that a mixture of `rows` rows takes on the device beside the experts."""
        ...

    def copy(self, view: ExpertView) -> Held:
        """Begins to copy an expert to the device, packed as it is, out of a staging buffer, on the stream of copies.
        The buffer of the view is not changed or freed before `wait_left`. Raises DeviceFull."""
        ...

    def wait_left(self, held: Held) -> None:
        """Waits until the buffer that an expert is copied from is not needed any more: its bytes lie in a staging
        buffer."""
        ...

    def has(self, held: Held) -> bool:
        """Returns whether an expert's copy has arrived."""
        ...

    def wait(self, held: Held) -> None:
        """Waits until an expert's copy has arrived."""
        ...

    def free(self, held: Held) -> None:
        """Frees an expert's memory, once all computations that use it have ended."""
        ...

    def begin(
        self, experts: Sequence[Held], counts: Sequence[int], tokens: I32, x: F32, spec: Ffn
    ) -> Running:  # fmt: skip
        """Begins to compute expert after expert, each with the next `counts` of the tokens [rows]; the device waits for
        experts that are still on their way, the caller does not. x [tokens of the pass, d_model] may be changed once
        this returns. Raises DeviceFull, and then has begun nothing."""
        ...

    def finish(self, running: Running, parts: F32) -> None:
        """Waits for a computation: parts [rows, d_model] = expert(x[token]) for each row, in the order given, not
        weighted. The caller adds them up, so that the order of additions is the same wherever experts are computed."""
        ...

    def costs(self) -> DeviceCosts:
        """Returns the device's costs: measured in under a second, or remembered from the last time."""
        ...

    def backend(self, host: Backend) -> Backend | None:
        """Returns a backend that has all but the experts on the device, keys and values included, and leaves to `host`
        the operations that it lacks; None: all of that stays on the host."""
        ...

    def full(self, give_back: Callable[[], bool]) -> None:
        """Sets the function that this backend calls where it finds no room: it returns whether experts gave some of
        theirs back."""
        ...

    def close(self) -> None:
        """Ends its streams and gives all of its memory back."""
        ...


_SECTION = "devices"
_MEASURED_BYTES = 48 << 20  # of weights, for their time where no cache holds them
_SIDE, _WIDE, _GROUP, _ROWS, _TURNS = 512, 2048, 64, 64, 3
_SCALES = 0.5  # bits of a weight for its scale and minimum
_DECODED = 2  # bits of the trellis code that is measured


def remembered_costs(key: str, measure: Callable[[], DeviceCosts], cache: Path | None = None) -> DeviceCosts:
    """Returns the costs of the device that `key` names: remembered, or measured now and remembered."""
    cache = cache or cache_file()
    known = entries(cache, _SECTION)
    with suppress(KeyError, *DAMAGED):
        return _parsed(known[key])
    found = measure()
    remember(cache, _SECTION, {**known, key: _body(found)})
    return found


def known_costs(cache: Path | None = None) -> dict[str, DeviceCosts]:
    """Returns the costs of all devices that were measured here, by key; without damaged entries."""
    found: dict[str, DeviceCosts] = {}
    for key, body in entries(cache or cache_file(), _SECTION).items():
        with suppress(*DAMAGED):
            found[key] = _parsed(body)
    return found


def host_costs(backend: Backend, drive_bytes_per_s: float) -> HostCosts:
    """Returns the costs of this processor, measured in half a second: the time of weights that no cache holds, and of
    each of many rows."""
    loaded = library.load()
    speeds = dict[float, float]()
    if loaded is not None and not backend.widens:
        speeds.update(kernel_speeds(loaded, backend.threads, _MEASURED_BYTES))
        speeds[TRELLIS] = kernel_speeds(loaded, backend.threads, _MEASURED_BYTES, trellis=True)[_DECODED]
    widths = {bits: _roofline(backend, bits, speeds.get(bits)) for bits in WIDTHS}
    widths[TRELLIS] = _trellis_roofline(backend, speeds.get(TRELLIS))
    return HostCosts(widths, 5e-6, 100e-6, drive_bytes_per_s)


def _roofline(backend: Backend, bits: int, bytes_per_s: float | None) -> Roofline:
    """Returns the costs of a width; `bytes_per_s`: of weights with one row, if that is known. Many rows are measured
    with a matrix that all cores have a share in."""
    side = _SIDE if bytes_per_s is None else _WIDE
    matrix = backend.matrix(_matrix(bits, side))
    many = least_s(lambda: backend.linear(np.ones((_ROWS, side), np.float32), matrix)) / (_ROWS * side**2)
    if bytes_per_s is not None:
        return Roofline((bits + (_SCALES if bits < 16 else 0)) / 8 / bytes_per_s, many)
    return Roofline(least_s(lambda: backend.linear(np.ones((1, side), np.float32), matrix)) / side**2, many)


def _trellis_roofline(backend: Backend, bytes_per_s: float | None) -> Roofline:
    at = stream_bytes(_DECODED, _SIDE, _SIDE)
    view = ProjectionView((_SIDE, _SIDE), _DECODED, _SIDE, "BF16", (0, at), trellis=True)
    body = np.full(at + 2 * _SIDE, 0x20, np.uint8)  # any codes, and small scales
    expert = backend.expert(ExpertView(body, {"up": view, "down": view}))

    def weight_s(rows: int) -> float:
        x, spec, ones = (
            np.ones((rows, _SIDE), np.float32),
            Ffn(_SIDE, Act("relu"), gated=False),
            np.ones(rows, np.float32),
        )
        tokens, out = np.arange(rows, dtype=np.int32), np.zeros((rows, _SIDE), np.float32)
        return least_s(lambda: backend.mixture([expert], [rows], tokens, ones, x, out, spec)) / (2 * _SIDE**2)

    one = weight_s(1) if bytes_per_s is None else _DECODED / 8 / bytes_per_s
    return Roofline(one, weight_s(_ROWS) / _ROWS)


def _matrix(bits: int, side: int) -> Any:
    """Returns a matrix [side, side] of `bits` a weight, to measure with."""
    from moert.kernels.backend import Floats

    if bits == 16:
        return Floats("BF16", np.full((side, side), 0x3C00, np.uint16))
    codes = np.full((side, row_bytes(side, bits)), 0x55, np.uint8)
    groups = n_groups(side, _GROUP)
    scale, minimum = (np.full((side, groups), value, np.float16) for value in (0.01, -0.01))
    return QuantizedMatrix(bits, side, _GROUP, codes, scale, minimum)


def least_s(call: Callable[[], object]) -> float:
    """Returns the least time of a few calls [s], after one that is not counted."""
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
        "step_s": costs.step_s,
        "by_caller": costs.by_caller,
    }


def _parsed(body: Mapping[str, Any]) -> DeviceCosts:
    widths = {int(bits): Roofline(float(each[0]), float(each[1])) for bits, each in body["widths"].items()}
    numbers = [float(body[name]) for name in ("launch_s", "pass_s", "copy_s", "step_s", "copy_bytes_per_s")]
    slopes = [each for width in widths.values() for each in (width.weight_s, width.row_s)]
    sound = all(0 <= each < math.inf for each in (*numbers, *slopes)) and min(numbers[-1], *slopes) > 0
    if set(widths) != set(COSTED) or not sound:
        raise ValueError
    launch, each_pass, copy, step, speed = numbers
    return DeviceCosts(widths, launch, each_pass, copy, speed, step, by_caller=body["by_caller"] is True)


@dataclass
class DeviceCounters:
    """Counts of the experts that were computed with a device, since the engine was opened. Of the `asked` experts, each
    counted once for all tokens of a layer, `held` were on the device, and `coming` of these still on their way;
    `copied` were copied to the device then and computed there, `on_host` were computed by the processor. All `copies`
    together brought `copied_bytes`; `ahead` of them were begun before their expert was demanded, and `ahead_used` of
    these experts were demanded next. `given_back`: experts that left because the device had less memory than it was to
    use. Layers were predicted to take `predicted_s` in all, and took `taken_s`."""

    asked: int = 0
    held: int = 0
    coming: int = 0
    copied: int = 0
    on_host: int = 0
    copies: int = 0
    copied_bytes: int = 0
    ahead: int = 0
    ahead_used: int = 0
    evictions: int = 0
    given_back: int = 0
    predicted_s: float = 0.0
    taken_s: float = 0.0


@dataclass(frozen=True)
class DeviceUse:
    """A device with its used memory and the counts of its work. `title` names the device, and says if it is
    simulated."""

    title: str
    used_bytes: int
    capacity_bytes: int
    counters: DeviceCounters

    def lines(self) -> list[str]:
        """Returns lines for people."""
        counters = self.counters
        asked = max(1, counters.asked)
        shares = [
            f"{100 * count / asked:.1f}% {what}"
            for count, what in (
                (counters.held, "of the experts asked for were there"), (counters.copied, "copied there"),
                (counters.on_host, "computed by the processor"),
            )
        ]  # fmt: skip
        ahead = f"; {counters.ahead} ahead, {counters.ahead_used} of them used" if counters.ahead else ""
        back = f"; {counters.given_back} given back for lack of memory" if counters.given_back else ""
        return [
            f"device           {self.title}: {size(self.used_bytes)} of {size(self.capacity_bytes)} used",
            f"on the device    {', '.join(shares)}",
            f"copies           {counters.copies}, {size(counters.copied_bytes)}{ahead}{back}",
        ]
