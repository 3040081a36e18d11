"""The eviction policy that a pack records for a share of its experts in memory: the one that hits most often on the
pack's trace. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from moert.experts.policy import EVICTION, Demand, EvictionPolicy, Residency, Succession
from moert.experts.replay import DEFAULT, Replay, demands_of
from moert.pack.model_spec import ExpertKey, ModelSpec
from moert.pack.paths import Trace

CONTESTANTS = ("expected", "paper", "lfu", "lru")
"""The policies that are compared; of equally good ones the first is taken. The others of EVICTION are baselines that
these have always beaten."""
MOST_LAYERS = 6000
MOST_EXPERTS = 16_000
"""The replay of each contestant ends at this number or at MOST_LAYERS, which bounds the time to about a second in
all."""
EVICTION_SHARES = (12, 25, 50, 75)
"""Shares of the experts' bytes, in percent, that eviction policies are chosen for."""
Observer = Callable[[Demand, Sequence[ExpertKey], Sequence[ExpertKey], Residency], None]
"""Called with the demand, experts that were brought in at once, those evicted for them, and the residency."""


def replay(
    trace: Iterable[Demand],
    nbytes: Mapping[ExpertKey, int],
    budget_bytes: int,
    policy: EvictionPolicy,
    observer: Observer | None = None,
) -> Replay:
    """Replays a trace under a policy: a layer's experts are brought in at once if they fit together, as for one token,
    else one by one.

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
            residency.used(group)
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


def hit_rates(
    trace: Trace, spec: ModelSpec, nbytes: Mapping[ExpertKey, int], capacity_bytes: int
) -> Mapping[str, float]:
    """Returns the hit rate of each contestant on the first half of the trace; policies that learn from a trace get the
    second half. Empty where the first half demands nothing or the largest expert does not fit.

    `nbytes` has every expert of the model.
    """
    half = (trace.decoder_tokens + 1) // 2
    demands = _beginning(trace, spec, half)
    if not demands or capacity_bytes < max(nbytes.values()):
        return {}
    succession = Succession.of(trace, spec, half)
    return {
        name: replay(demands, nbytes, capacity_bytes, EVICTION[name](spec.moe_layers(), succession)).hit_rate
        for name in CONTESTANTS
    }


def best_eviction(trace: Trace, spec: ModelSpec, nbytes: Mapping[ExpertKey, int], capacity_bytes: int) -> str:
    """Returns the name of the contestant that hits most often, or the default where none can be judged."""
    rates = hit_rates(trace, spec, nbytes, capacity_bytes)
    return max(CONTESTANTS, key=lambda name: rates[name]) if rates else DEFAULT


def with_eviction(trace: Trace, spec: ModelSpec, nbytes: Mapping[ExpertKey, int]) -> Trace:
    """Returns the trace with the policy that hits most often at each of EVICTION_SHARES."""
    total = sum(nbytes.values())
    chosen = {
        percent: best_eviction(trace, spec, nbytes, percent * total // 100) for percent in EVICTION_SHARES
    }  # fmt: skip
    return replace(trace, eviction=chosen)


def _beginning(trace: Trace, spec: ModelSpec, decoder_tokens: int) -> list[Demand]:
    found: list[Demand] = []
    experts = 0
    for demand in islice(demands_of(trace, spec, decoder_tokens), MOST_LAYERS):
        found.append(demand)
        experts += len(demand.experts)
        if experts >= MOST_EXPERTS:
            break
    return found
