"""Replays a recorded routing trace through an eviction policy: what would this budget have cost? Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from moert.experts.cache.residency import Residency
from moert.experts.demand import Demand
from moert.experts.policy.eviction import EvictionPolicy
from moert.pack.model_spec import ExpertKey


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


Observer = Callable[[Demand, Sequence[ExpertKey], Sequence[ExpertKey], Residency], None]
"""Called with the demand, experts that were brought in at once, who was evicted for them, and who is resident."""


def replay(
    trace: Iterable[Demand],
    nbytes: Mapping[ExpertKey, int],
    budget_bytes: int,
    policy: EvictionPolicy,
    observer: Observer | None = None,
) -> Replay:
    """What a layer needs is brought in at once if it fits together, as for one token, else expert by expert.

    Raises ValueError if some demanded expert alone is larger than the budget.
    """
    residency = Residency(budget_bytes, policy)
    demands = misses = bytes_read = evictions = peak = 0
    for demand in trace:
        residency.begin(demand)
        keys = demand.expert_keys()
        demands += len(keys)
        for group in _groups(residency, keys, nbytes):
            missing = [key for key in group if key not in residency]
            if missing:
                wanted = sum(nbytes[key] for key in missing)
                victims = _make_room(residency, missing, wanted)
                for key in missing:
                    residency.add(key, nbytes[key])
                misses += len(missing)
                bytes_read += wanted
                evictions += len(victims)
                peak = max(peak, residency.used_bytes)
                if observer is not None:
                    observer(demand, missing, victims, residency)
            for key in group:
                residency.demand(key)
                residency.done(key)
    return Replay(demands, demands - misses, misses, bytes_read, evictions, peak)


def _groups(
    residency: Residency, keys: list[ExpertKey], nbytes: Mapping[ExpertKey, int]
) -> Iterable[Sequence[ExpertKey]]:
    if sum(nbytes[key] for key in keys) <= residency.capacity_bytes:
        return (keys,)
    return ((key,) for key in keys)


def _make_room(residency: Residency, missing: Sequence[ExpertKey], wanted: int) -> list[ExpertKey]:
    victims = residency.victims(wanted, force=True)
    if victims is None:
        raise ValueError(f"expert {missing[0]} has {wanted} bytes, more than the budget of {residency.capacity_bytes}")
    for victim in victims:
        residency.remove(victim)
    return victims
