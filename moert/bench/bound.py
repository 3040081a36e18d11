"""How fast a run could have been at most, and what a policy that knows the future would have hit. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moert.experts.policy import Demand
from moert.experts.replay import reads_of_belady
from moert.pack.model_spec import ExpertKey


@dataclass(frozen=True)
class FurthestFirst:
    """What Belady's rule reads in a trace: always evicting what is needed again last."""

    demands: int
    misses: int
    bytes_read: int

    @property
    def hit_rate(self) -> float:
        return 1 - self.misses / self.demands if self.demands else 0.0


def furthest_first(
    trace: Sequence[Demand], nbytes: Mapping[ExpertKey, int], cache_bytes: int, held: Sequence[ExpertKey] = ()
) -> FurthestFirst:
    """Replays the trace, with `held` in memory before it.

    The best that eviction can do where all experts have the same size. With mixed sizes another choice may read a
    little less, so that this is a figure to compare with and no bound: moert.bench.pfoo has that. Raises ValueError if
    an expert alone is larger than the cache.
    """
    before = [Demand(key.at, (key.expert,)) for key in held]  # as if each had been read before
    read = reads_of_belady([*before, *trace], nbytes, cache_bytes)[len(before) :]
    return FurthestFirst(len(read), int((read > 0).sum()), int(read.sum()))


def bound_s(compute_s: float, least_bytes: int, bytes_per_s: float | None) -> float:
    """The least time: reading and computing can at best overlap entirely. None: reading costs no time."""
    return max(compute_s, least_bytes / bytes_per_s if bytes_per_s else 0.0)
