"""A simulated GPU: the processor computes its results, and a clock of its own tells the time that they would take.

The clock knows the device's streams (computing, copying), the drive and the processor. Nothing is timed, so that the
same run gives the same figures everywhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moert.beside.gpu.device import (
    STAGING_BUFFERS,
    TRELLIS,
    DeviceCosts,
    DeviceFull,
    Held,
    HostCosts,
    Roofline,
    Running,
)
from moert.kernels.backend import I32, Backend, Expert, ExpertView, ProjectionView
from moert.pack.codec import F32, U8
from moert.pack.parts import Ffn

_WIDTHS = (2, 3, 4, 8, 16)
_SCALES = 0.5  # bits of a weight that scales and minima add: 32 for each group of 64
_MEMORY, _LINK, _TENSOR = 0.8, 0.76, 0.4
_LAUNCH_S = 10e-6  # a kernel for gate and up, one for down
_PASS_S = 30e-6  # two copies of a few kilobytes, and waiting for the last
_COPY_S = 15e-6
_STEP_S = 50e-6  # some ten kernels


@dataclass(frozen=True)
class Profile:
    """The figures of a machine: bytes, bytes a second, and operations a second, of which a weight takes two for each
    row. Those of the processor were measured on machines of that kind, not taken from data sheets."""

    title: str
    memory_bytes: int
    memory_bytes_per_s: float
    operations_per_s: float
    link_bytes_per_s: float
    host_bytes_per_s: float
    host_operations_per_s: float
    drive_bytes_per_s: float

    def device(self) -> DeviceCosts:
        widths = _rooflines(_MEMORY * self.memory_bytes_per_s, _TENSOR * self.operations_per_s)
        return DeviceCosts(widths, _LAUNCH_S, _PASS_S, _COPY_S, _LINK * self.link_bytes_per_s, _STEP_S)

    def host(self) -> HostCosts:
        widths = _rooflines(self.host_bytes_per_s, self.host_operations_per_s)
        return HostCosts(widths, 5e-6, 100e-6, self.drive_bytes_per_s)


def _rooflines(bytes_per_s: float, operations_per_s: float) -> dict[int, Roofline]:
    found = {
        bits: Roofline((bits + (_SCALES if bits < 16 else 0)) / 8 / bytes_per_s, 2 / operations_per_s)
        for bits in _WIDTHS
    }
    return {**found, TRELLIS: found[2]}


PROFILES: Mapping[str, Profile] = {
    # NVIDIA GA106: 12 GB of GDDR6 at 360 GB/s, 51 TFLOPS in FP16 on tensor cores (GA102 whitepaper, appendix C, by
    # clocks and cores), PCI Express 4.0 x16; with eight cores and two channels of DDR4-3200.
    "rtx3060": Profile("RTX 3060", 12 * 10**9, 360e9, 51e12, 31.5e9, 40e9, 0.5e12, 3e9),
    # NVIDIA T4 data sheet: 16 GB of GDDR6 at 320 GB/s, 65 TFLOPS in FP16, PCI Express 3.0 x16; with the four virtual
    # cores that clouds give to one.
    "t4": Profile("T4", 15 * 10**9, 320e9, 65e12, 15.75e9, 20e9, 0.15e12, 1e9),
    # NVIDIA GA104, laptop: 16 GB of GDDR6 at 448 GB/s, 76 TFLOPS in FP16, PCI Express 4.0 x8; eight mobile cores.
    "rtx3080-mobile": Profile("RTX 3080 Mobile", 16 * 10**9, 448e9, 76e12, 15.75e9, 35e9, 0.4e12, 3e9),
    # NVIDIA A100 data sheet, 40 GB, PCIe: 1,555 GB/s, 312 TFLOPS in FP16, PCI Express 4.0 x16; twelve virtual cores.
    "a100": Profile("A100 40GB", 40 * 10**9, 1555e9, 312e12, 31.5e9, 60e9, 0.6e12, 2e9),
}


class VirtualClock:
    """A clock that goes on only by calls. `waited_s`: seconds that the processor has waited for other parts."""

    def __init__(self) -> None:
        self.waited_s = 0.0
        self._now = self._read_at = 0.0

    def now(self) -> float:
        return self._now

    def host(self, seconds: float) -> None:
        self._now += seconds

    def wait(self, until: float) -> None:
        """Lets the processor wait until that moment."""
        if until > self._now:
            self.waited_s += until - self._now
            self._now = until

    def read(self, seconds: float) -> float:
        """Adds a read of that many seconds behind all earlier ones of the drive; returns the moment at which it
        ends."""
        self._read_at = max(self._read_at, self._now) + seconds
        return self._read_at


@dataclass(eq=False)
class _Held:
    """An expert on the device. `came`: the moment at which its copy arrives."""

    expert: Expert | None
    nbytes: int
    projections: Mapping[str, ProjectionView]
    came: float


@dataclass(eq=False)
class _Running:
    """A computation. `parts`: its result, which is there at the moment `ends`."""

    parts: F32
    ends: float


class SimulatedDevice:
    """A Device of a profile. Its results are those of `host`, bit for bit."""

    simulated = True

    def __init__(self, name: str, profile: Profile, capacity_bytes: int | None, host: Backend) -> None:
        self.name, self.title = name, f"{profile.title}, simulated"
        most = profile.memory_bytes
        self.capacity_bytes = most if capacity_bytes is None else min(capacity_bytes, most)
        self.clock = VirtualClock()
        self.used_bytes = 0
        self._profile, self._host = profile, host
        self._costs = profile.device()
        self._copy_at = self._compute_at = 0.0
        self._staged = deque([0.0] * STAGING_BUFFERS, STAGING_BUFFERS)

    def weigh(self, nbytes: int, projections: Mapping[str, ProjectionView]) -> int:
        return nbytes

    def scratch_bytes(self, rows: int, d_model: int, d_ff: int) -> int:
        return 4 * rows * (2 * d_model + 2 * d_ff)

    def copy(self, view: ExpertView) -> Held:
        nbytes = self.weigh(view.buffer.nbytes, view.projections)
        self.take(nbytes)
        self.clock.wait(self._staged[0])
        start = max(self._copy_at, self.clock.now())
        self._copy_at = start + self._costs.copy_s + nbytes / self._costs.copy_bytes_per_s
        self._staged.append(self._copy_at)
        return Held(_Held(self._made(view), nbytes, view.projections, self._copy_at))

    def take(self, nbytes: int) -> None:
        """Takes memory for any use. Raises DeviceFull."""
        if self.used_bytes + nbytes > self.capacity_bytes:
            raise DeviceFull(f"{nbytes} bytes more than {self.used_bytes} of {self.capacity_bytes}")
        self.used_bytes += nbytes

    def _made(self, view: ExpertView) -> Expert | None:
        """Returns the expert made of a copy of its bytes."""
        copied: U8 = _aligned(view.buffer.nbytes)
        np.copyto(copied, view.buffer)
        return self._host.expert(ExpertView(copied, view.projections))

    def wait_left(self, held: Held) -> None:
        """Does nothing: the expert was copied at once."""

    def has(self, held: Held) -> bool:
        return _inside(held).came <= self.clock.now()

    def wait(self, held: Held) -> None:
        self.clock.wait(_inside(held).came)

    def free(self, held: Held) -> None:
        inside = _inside(held)
        self.used_bytes -= inside.nbytes
        inside.nbytes = 0
        inside.expert = None

    def begin(self, experts: Sequence[Held], counts: Sequence[int], tokens: I32, x: F32, spec: Ffn) -> Running:
        inside = [_inside(held) for held in experts]
        rows, width = sum(counts), x.shape[1]
        scratch = self.scratch_bytes(rows, width, spec.d_ff)
        self.take(scratch)  # and given back at once: one mixture runs at a time
        self.used_bytes -= scratch
        costs, at = self._costs, max(self._compute_at, self.clock.now())
        over = self._row_bytes(x) / costs.copy_bytes_per_s
        at += costs.pass_s / 2 + min(rows, len(x)) * over
        for held, count in zip(inside, counts, strict=True):
            at = max(at, held.came) + costs.launch_s + products_s(held.projections, costs, count)
        self._compute_at = at
        parts = self._parts(inside, counts, tokens, x, spec)
        return Running(_Running(parts, at + costs.pass_s / 2 + rows * over))

    def _row_bytes(self, x: F32) -> int:
        """Returns the bytes that go over for each row, and come back."""
        width: int = x.shape[1]
        return 4 * width

    def _parts(self, experts: Sequence[_Held], counts: Sequence[int], tokens: I32, x: F32, spec: Ffn) -> F32:
        parts, row = np.empty((sum(counts), x.shape[1]), np.float32), 0
        for held, count in zip(experts, counts, strict=True):
            assert held.expert is not None
            rows = slice(row, row + count)
            compute_parts(self._host, [held.expert], [count], x, tokens[rows], parts[rows], spec)
            row += count
        return parts

    def finish(self, running: Running, parts: F32) -> None:
        assert isinstance(running, _Running)
        self.clock.wait(running.ends)
        parts[:] = running.parts

    def costs(self) -> DeviceCosts:
        return self._costs

    def host_costs(self) -> HostCosts:
        """Returns the costs of the processor and the drive of that machine."""
        return self._profile.host()

    def backend(self, host: Backend) -> Backend | None:
        """Returns None: `host` computes all but the experts, and TieredExperts adds its time to the clock."""
        return None

    def full(self, give_back: Callable[[], bool]) -> None:
        """Does nothing: no backend could call it."""

    def close(self) -> None:
        pass


def compute_parts(
    backend: Backend, experts: Sequence[Expert], counts: Sequence[int], x: F32, tokens: I32, parts: F32, spec: Ffn
) -> None:  # fmt: skip
    """Computes parts [rows, d_model] = expert(x[tokens]), each expert with the next `counts` of the rows, the same bits
    as in `backend.mixture`."""
    if len(tokens) == 1 or len(x) == 1:
        backend.parts(experts, np.ascontiguousarray(x[tokens[:1]]), parts, spec)
        return
    parts[:] = 0
    rows = len(tokens)
    ones = np.ones(rows, np.float32)
    backend.mixture(experts, counts, np.arange(rows, dtype=np.int32), ones, x[tokens], parts, spec)


def products_s(projections: Mapping[str, ProjectionView], costs: DeviceCosts | HostCosts, rows: int) -> float:
    """Returns the time of an expert's products with `rows` rows [s]."""
    parts = projections.values()
    return sum(costs.widths[bits_of(each)].seconds(each.shape[0] * each.shape[1], rows) for each in parts)


def bits_of(projection: ProjectionView) -> int:
    """Returns the bits of a projection as costs count them: 4 for MXFP4, TRELLIS for trellis codes."""
    if projection.code is not None:
        return TRELLIS
    return 4 if projection.form == "MXFP4" else int(projection.bits)


def _inside(held: Held) -> _Held:
    assert isinstance(held, _Held)
    return held


def _aligned(nbytes: int) -> U8:
    """Returns an array, uint8 [nbytes], that begins on a line of the processor's caches, as experts' files do."""
    room = np.empty(nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    return room[start : start + nbytes]
