"""How good could eviction have been? Belady's rule, which knows the future, over the demands of a run. Pure.

Whoever is needed again last leaves first: no policy hits more often where all experts have the same size. With mixed
sizes some other choice may; what no choice at all could beat is in moert.bench.pfoo.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush

import numpy as np
import numpy.typing as npt

from moert.experts.demand import Demand
from moert.experts.policy.replay import Replay
from moert.experts.policy.usage import I64, place_of
from moert.pack.model_spec import ExpertKey

MOST_DEMANDS = 1 << 18
"""Demands that a recorder keeps: 1 MiB, and a fraction of a second to judge."""


class Recorder:
    """The first MOST_DEMANDS demands of a run, 4 bytes each. `demands` counts all."""

    def __init__(self, most: int = MOST_DEMANDS) -> None:
        self.demands = 0
        self._most = most
        self._codes = array("I")

    def add(self, demand: Demand) -> None:
        """Recorded whole or not at all."""
        self.demands += len(demand.experts)
        if self.demands <= self._most:
            place = place_of(demand.at) << 16
            self._codes.extend([place | expert for expert in demand.experts])

    def __len__(self) -> int:
        """Demands that were recorded."""
        return len(self._codes)

    def codes(self) -> npt.NDArray[np.uint32]:
        """[demands] `code_of` each expert, in order."""
        return np.array(self._codes, dtype=np.uint32)


def code_of(key: ExpertKey) -> int:
    """An expert as a recorder writes it."""
    return place_of(key.at) << 16 | key.expert


def headroom(recorded: Recorder, nbytes: Mapping[ExpertKey, int], capacity_bytes: int) -> Replay:
    """What Belady's rule (1966) would have hit in the recorded demands, starting with nothing in memory.

    Of those that are never needed again the largest leaves first. Raises ValueError if some demanded expert alone is
    larger than the capacity.
    """
    return _best(recorded.codes(), nbytes, capacity_bytes)[0]


def replay_belady(trace: Sequence[Demand], nbytes: Mapping[ExpertKey, int], budget_bytes: int) -> Replay:
    """The same for a whole trace."""
    return _best(_record(trace).codes(), nbytes, budget_bytes)[0]


def reads_of_belady(
    trace: Sequence[Demand], nbytes: Mapping[ExpertKey, int], budget_bytes: int
) -> npt.NDArray[np.int64]:
    """[demands]: the bytes that each demand of a trace, in order, reads under the same rule; 0 for a hit."""
    return _best(_record(trace).codes(), nbytes, budget_bytes)[1]


def _record(trace: Sequence[Demand]) -> Recorder:
    recorded = Recorder(sum(len(demand.experts) for demand in trace))
    for demand in trace:
        recorded.add(demand)
    return recorded


def _best(
    codes: npt.NDArray[np.uint32], nbytes: Mapping[ExpertKey, int], capacity_bytes: int
) -> tuple[Replay, npt.NDArray[np.int64]]:
    """What Belady's rule would have hit, and the bytes that each demand reads."""
    names, experts = np.unique(codes, return_inverse=True)
    size_of = {code_of(key): size for key, size in nbytes.items()}
    sizes = np.array([size_of[name] for name in names.tolist()], dtype=np.int64)
    if len(sizes) and sizes.max() > capacity_bytes:
        raise ValueError(f"an expert has {sizes.max()} bytes, more than the budget of {capacity_bytes}")
    missed, evictions, peak = _evict_the_furthest(experts, sizes, capacity_bytes)
    read = sizes[experts] * missed
    misses = int(missed.sum())
    return Replay(len(codes), len(codes) - misses, misses, int(read.sum()), evictions, peak), read


def _evict_the_furthest(demands: I64, sizes: I64, capacity_bytes: int) -> tuple[npt.NDArray[np.bool_], int, int]:
    """`demands` are indices into `sizes` → which of them miss, evictions, most bytes held at once."""
    size_of = sizes.tolist()
    needed_at = [0] * len(sizes)  # when each resident is needed again; 0 for what is not resident
    furthest: list[tuple[int, int]] = []  # a heap of (-when, expert), also of residents that were used since
    missed = bytearray(len(demands))
    used = evictions = peak = 0
    for at, (expert, when) in enumerate(zip(demands.data, _next_uses(demands, sizes).data, strict=True)):
        if not needed_at[expert]:
            missed[at] = 1
            used += size_of[expert]
            while used > capacity_bytes:
                soonest, leaving = heappop(furthest)
                if needed_at[leaving] == -soonest:
                    needed_at[leaving] = 0
                    used -= size_of[leaving]
                    evictions += 1
            peak = max(peak, used)
        needed_at[expert] = when
        heappush(furthest, (-when, expert))
        if len(furthest) > 4 * len(needed_at):
            furthest = [(-when, expert) for expert, when in enumerate(needed_at) if when]
            heapify(furthest)
    return np.frombuffer(missed, dtype=np.bool_), evictions, peak


def _next_uses(demands: I64, sizes: I64) -> I64:
    """For each demand when the same expert is demanded next; if never, after all demands, the largest last."""
    never = len(demands) + np.lexsort((np.arange(len(sizes)), sizes)).argsort()
    found = never[demands]
    order = demands.argsort(kind="stable")
    again = np.diff(demands[order]) == 0
    found[order[:-1][again]] = order[1:][again]
    return found
