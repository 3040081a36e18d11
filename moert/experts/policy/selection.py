"""Chooses eviction policies by replaying a recorded trace: for `moeconv profile-paths` and benches. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
import numpy.typing as npt

from moert.experts.demand import Demand
from moert.experts.policy.eviction import EVICTION
from moert.experts.policy.replay import replay
from moert.experts.policy.succession import Succession
from moert.pack.model_spec import ExpertKey, LayerKey, ModelSpec
from moert.pack.paths import DROPPED, EVICTION_SHARES, Trace

AUTO_EVICTION = "auto"
DEFAULT = "expected"
"""Without a record of what does best. In the replays of recipes/LOG.md no other is as good on the whole: within a point
of the best at every room on g2p, the best by 6 to 7 points on wiki."""
OF_PREFERENCES = "layer-lru"
"""Where routers prefer what was used lately, which no trace in a pack shows."""
CONTESTANTS = ("expected", "paper", "lfu", "lru")
"""Of equally good ones the first is taken. The others of EVICTION are baselines that these have always beaten."""
MOST_LAYERS = 6000
MOST_EXPERTS = 16_000
"""What is replayed for each of them ends where either is reached, which bounds the time to about a second in all."""


def hit_rates(
    trace: Trace, spec: ModelSpec, nbytes: Mapping[ExpertKey, int], capacity_bytes: int
) -> Mapping[str, float]:
    """Returns the hit rate of each contestant on the first half of the trace; what policies learn from a trace, they
    learn from the second half. Empty where the first half demands nothing or not even one expert fits.

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


def demands_of(trace: Trace, spec: ModelSpec, decoder_tokens: int | None = None) -> Iterator[Demand]:
    """What a cache is asked for: for each sample its encoder in one pass, then its decoder token by token.

    Ends before the decoder has read more than `decoder_tokens`. The trace must be one of this model (Trace.check).
    """
    left = trace.decoder_tokens if decoder_tokens is None else decoder_tokens
    for index in range(trace.n_samples):
        for name, experts in trace.sample(index).items():
            layers = spec.moe_layers(name)
            if name == "encoder":
                yield from _one_pass(layers, experts)
                continue
            for token in experts[:left]:
                yield from _one_pass(layers, token[None])
            left -= len(experts)
        if left <= 0 and decoder_tokens is not None:
            return


def _beginning(trace: Trace, spec: ModelSpec, decoder_tokens: int) -> list[Demand]:
    found: list[Demand] = []
    experts = 0
    for demand in islice(demands_of(trace, spec, decoder_tokens), MOST_LAYERS):
        found.append(demand)
        experts += len(demand.experts)
        if experts >= MOST_EXPERTS:
            break
    return found


def _one_pass(layers: Sequence[LayerKey], tokens: npt.NDArray[np.uint16]) -> Iterator[Demand]:
    """tokens [tokens, layers, top_k] that go through the stack at once."""
    for place, at in enumerate(layers):
        needed = sorted({*tokens[:, place].ravel().tolist()} - {DROPPED})
        if needed:
            yield Demand(at, tuple(needed))
