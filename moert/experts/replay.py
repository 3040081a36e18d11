"""Replays a recorded routing trace through an eviction policy: what would this budget have cost? Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from moert.experts.eviction import Belady, EvictionPolicy
from moert.experts.residency import Residency
from moert.pack.model_spec import ExpertKey, Stack


@dataclass(frozen=True)
class Step:
    """One layer of one forward pass: the experts that its router selected, each once, ascending."""

    stack: Stack
    layer: int
    experts: tuple[int, ...]

    def expert_keys(self) -> list[ExpertKey]:
        return [ExpertKey(self.stack, self.layer, expert) for expert in self.experts]


@dataclass(frozen=True)
class Replay:
    """What a trace cost under a policy and a budget."""

    demands: int
    hits: int
    misses: int
    bytes_read: int
    evictions: int
    peak_bytes: int

    @property
    def hit_rate(self) -> float:
        return self.hits / self.demands if self.demands else 0.0


Observer = Callable[[Step, ExpertKey, Sequence[ExpertKey], Residency], None]
"""Called after each demand with the step, the demanded expert, who was evicted for it, and who is resident."""


def replay(
    trace: Iterable[Step],
    nbytes: Mapping[ExpertKey, int],
    budget_bytes: int,
    policy: EvictionPolicy,
    observer: Observer | None = None,
) -> Replay:
    """Raises ValueError if some demanded expert alone is larger than the budget."""
    residency = Residency(budget_bytes, policy)
    hits = misses = bytes_read = evictions = peak = 0
    for step in trace:
        residency.begin_layer(step.stack, step.layer, step.experts)
        for key in step.expert_keys():
            victims: list[ExpertKey] = []
            if key in residency:
                hits += 1
            else:
                victims = _make_room(residency, key, nbytes[key])
                residency.add(key, nbytes[key])
                misses += 1
                bytes_read += nbytes[key]
                evictions += len(victims)
            residency.demand(key)
            residency.done(key)
            peak = max(peak, residency.used_bytes)
            if observer is not None:
                observer(step, key, victims, residency)
    return Replay(hits + misses, hits, misses, bytes_read, evictions, peak)


def _make_room(residency: Residency, key: ExpertKey, nbytes: int) -> list[ExpertKey]:
    victims = residency.victims(nbytes, force=True)
    if victims is None:
        raise ValueError(f"expert {key} has {nbytes} bytes, more than the budget of {residency.capacity_bytes}")
    for victim in victims:
        residency.remove(victim)
    return victims


def replay_belady(trace: Sequence[Step], nbytes: Mapping[ExpertKey, int], budget_bytes: int) -> Replay:
    """The most hits that any policy could have had, exact where all experts have the same size."""
    return replay(trace, nbytes, budget_bytes, Belady([key for step in trace for key in step.expert_keys()]))
