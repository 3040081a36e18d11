"""How fast a run could have been at most: what no cache can avoid reading, and what must be computed. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moert.experts.belady import unavoidable
from moert.experts.replay import Step
from moert.pack.model_spec import ExpertKey


@dataclass(frozen=True)
class Unavoidable:
    """What the best choice of victims reads in one part of a trace."""

    demands: int
    misses: int
    bytes_read: int

    @property
    def hit_rate(self) -> float:
        return 1 - self.misses / self.demands if self.demands else 0.0


def belady(
    trace: Sequence[Step],
    nbytes: Mapping[ExpertKey, int],
    cache_bytes: int,
    resident: Sequence[ExpertKey] = (),
    starts: Sequence[int] = (0,),
) -> list[Unavoidable]:
    """Replays the trace, always evicting what is needed again last (Belady 1966).

    `resident` is in memory before it; `starts`, ascending, are the steps at which parts begin: one result for each.
    Exact where all experts have the same size; with mixed sizes a little less could do. Raises ValueError if an expert
    alone is larger than the cache.
    """
    held = [Step(key.stack, key.layer, (key.expert,)) for key in resident]  # as if each had been read before
    read = unavoidable([*held, *trace], nbytes, cache_bytes)[len(held) :]
    ends = [*starts[1:], len(trace)]
    parts = []
    for start, end in zip(starts, ends, strict=True):
        first, count = (sum(len(step.experts) for step in steps) for steps in (trace[:start], trace[start:end]))
        part = read[first : first + count]
        parts.append(Unavoidable(count, int((part > 0).sum()), int(part.sum())))
    return parts


def bound_s(compute_s: float, unavoidable_bytes: int, bytes_per_s: float | None) -> float:
    """The least time: reading and computing can at best overlap entirely. None: reading costs no time."""
    return max(compute_s, unavoidable_bytes / bytes_per_s if bytes_per_s else 0.0)
