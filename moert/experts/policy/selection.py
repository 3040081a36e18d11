"""Which eviction policy? The one that would have hit most often on the pack's recorded trace at this budget. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from moert.experts.demand import Demand
from moert.experts.policy.eviction import EVICTION, EvictionPolicy
from moert.experts.policy.replay import replay
from moert.experts.policy.succession import Succession
from moert.pack.model_spec import ExpertKey, LayerKey, ModelSpec
from moert.pack.trace import DROPPED, Trace

AUTO_EVICTION = "auto"
DEFAULT = "expected"
"""Without a trace to judge by."""
OF_PREFERENCES = "layer-lru"
"""Where routers prefer what was used lately, which no trace in a pack shows."""
CONTESTANTS = ("expected", "paper", "lfu", "lru")
"""Of equally good ones the first is taken. The others of EVICTION are baselines that these have always beaten."""
MOST_LAYERS = 6000
MOST_EXPERTS = 16_000
"""What is replayed for each of them ends where either is reached, which bounds the time to about a second in all."""


@dataclass(frozen=True)
class Choice:
    """`policy` is a new one of this name, which has learned from the whole trace. `hit_rates` of the contestants on the
    trace, empty without one."""

    name: str
    policy: EvictionPolicy
    hit_rates: Mapping[str, float]


def choose_eviction(
    trace: Trace | None, spec: ModelSpec, nbytes: Mapping[ExpertKey, int], capacity_bytes: int
) -> Choice:
    """Judges by the first half of the trace; what policies learn from a trace, they learn from the second half here.

    `nbytes` has every expert of the model. Without a trace, and where not even one expert fits, the default.
    """
    order = spec.moe_layers()
    known = None if trace is None else Succession.of(trace, spec)
    half = 0 if trace is None else (trace.decoder_tokens + 1) // 2
    demands = [] if trace is None else _beginning(trace, spec, half)
    if trace is None or not demands or capacity_bytes < max(nbytes.values()):
        return Choice(DEFAULT, EVICTION[DEFAULT](order, known), {})
    succession = Succession.of(trace, spec, half)
    rates = {
        name: replay(demands, nbytes, capacity_bytes, EVICTION[name](order, succession)).hit_rate
        for name in CONTESTANTS
    }
    name = max(CONTESTANTS, key=lambda name: rates[name])
    return Choice(name, EVICTION[name](order, known), rates)


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
