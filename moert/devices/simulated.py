"""A card that is not there: what it would do the processor does, and what it would take a clock of its own tells.

The clock knows the device's streams (computing, copying), the drive and the processor. Nothing is timed, so that the
same run gives the same figures everywhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moert.devices.costs import DeviceCosts, HostCosts
from moert.devices.device import STAGING_BUFFERS, DeviceFull, Held, Running
from moert.devices.profiles import Profile
from moert.kernels.backend import I32, Backend, Expert, ExpertView, ProjectionView
from moert.pack.codec import F32, U8
from moert.pack.parts import Ffn


class VirtualClock:
    """Time goes on by what is told to it. `waited_s`: of the processor, for anything else."""

    def __init__(self) -> None:
        self.waited_s = 0.0
        self._now = self._read_at = 0.0

    def now(self) -> float:
        return self._now

    def host(self, seconds: float) -> None:
        self._now += seconds

    def wait(self, until: float) -> None:
        """The processor does nothing before that moment."""
        if until > self._now:
            self.waited_s += until - self._now
            self._now = until

    def read(self, seconds: float) -> float:
        """The drive reads for so long, after all that it was asked before: when it has."""
        self._read_at = max(self._read_at, self._now) + seconds
        return self._read_at


@dataclass(eq=False)
class _Held:
    """`came`: the moment at which its copy has."""

    expert: Expert | None
    nbytes: int
    projections: Mapping[str, ProjectionView]
    came: float


@dataclass(eq=False)
class _Running:
    """`parts`: what it makes, which is there when `ends` comes."""

    parts: F32
    ends: float


class SimulatedDevice:
    """A Device of a profile. What it computes is what `host` computes, bit for bit."""

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
        """Memory for anything. Raises DeviceFull."""
        if self.used_bytes + nbytes > self.capacity_bytes:
            raise DeviceFull(f"{nbytes} bytes more than {self.used_bytes} of {self.capacity_bytes}")
        self.used_bytes += nbytes

    def _made(self, view: ExpertView) -> Expert | None:
        """The expert out of a copy of its bytes."""
        copied: U8 = _aligned(view.buffer.nbytes)
        np.copyto(copied, view.buffer)
        return self._host.expert(ExpertView(copied, view.projections))

    def wait_left(self, held: Held) -> None:
        """It was copied at once."""

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
        """What goes over for each row, and comes back."""
        width: int = x.shape[1]
        return 4 * width

    def _parts(self, experts: Sequence[_Held], counts: Sequence[int], tokens: I32, x: F32, spec: Ffn) -> F32:
        parts, row = np.empty((sum(counts), x.shape[1]), np.float32), 0
        for held, count in zip(experts, counts, strict=True):
            assert held.expert is not None
            compute_parts(self._host, held.expert, x, tokens[row : row + count], parts[row : row + count], spec)
            row += count
        return parts

    def finish(self, running: Running, parts: F32) -> None:
        assert isinstance(running, _Running)
        self.clock.wait(running.ends)
        parts[:] = running.parts

    def costs(self) -> DeviceCosts:
        return self._costs

    def host_costs(self) -> HostCosts:
        """Of the processor and the drive of that machine."""
        return self._profile.host()

    def backend(self, host: Backend) -> Backend | None:
        """What is not experts is computed by `host`, and told to the clock by who runs the experts."""
        return None

    def full(self, give_back: Callable[[], bool]) -> None:
        """It has no backend that could ask."""

    def close(self) -> None:
        pass


def compute_parts(backend: Backend, expert: Expert, x: F32, tokens: I32, parts: F32, spec: Ffn) -> None:
    """parts [rows, d_model] = expert(x[tokens]), the same bits as in `backend.mixture`."""
    if len(tokens) == 1:
        backend.parts([expert], np.ascontiguousarray(x[tokens]), parts, spec)
        return
    parts[:] = 0
    rows = len(tokens)
    ones = np.ones(rows, np.float32)
    backend.mixture([expert], [rows], np.arange(rows, dtype=np.int32), ones, x[tokens], parts, spec)


def products_s(projections: Mapping[str, ProjectionView], costs: DeviceCosts | HostCosts, rows: int) -> float:
    """What the products of an expert take with so many rows."""
    parts = projections.values()
    return sum(costs.widths[bits_of(each)].seconds(each.shape[0] * each.shape[1], rows) for each in parts)


def bits_of(projection: ProjectionView) -> int:
    """As costs have it: MXFP4 counts as 4."""
    return 4 if projection.form == "MXFP4" else projection.bits


def _inside(held: Held) -> _Held:
    assert isinstance(held, _Held)
    return held


def _aligned(nbytes: int) -> U8:
    """uint8 [nbytes] that begins on a line of the processor's caches, as experts' files do."""
    room = np.empty(nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    return room[start : start + nbytes]
