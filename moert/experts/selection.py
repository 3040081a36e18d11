"""Which eviction policy? The one that would have hit most often on the pack's recorded trace at this budget. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from moert.experts.eviction import EVICTION, EvictionPolicy
from moert.experts.replay import Step, replay
from moert.experts.succession import Succession
from moert.pack.model_spec import ExpertKey, ModelSpec, Stack
from moert.pack.trace import DROPPED, Trace

AUTO_EVICTION = "auto"
DEFAULT = "expected"
"""Without a trace to judge by."""
CONTESTANTS = ("expected", "paper", "lfu", "lru")
"""Of equally good ones the first is taken. The others of EVICTION are baselines that these have always beaten."""
MOST_STEPS = 6000
MOST_DEMANDS = 16_000
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
    steps = [] if trace is None else _beginning(trace, spec, half)
    if trace is None or not steps or capacity_bytes < max(nbytes.values()):
        return Choice(DEFAULT, EVICTION[DEFAULT](order, known), {})
    succession = Succession.of(trace, spec, half)
    rates = {
        name: replay(steps, nbytes, capacity_bytes, EVICTION[name](order, succession)).hit_rate for name in CONTESTANTS
    }
    name = max(CONTESTANTS, key=lambda name: rates[name])
    return Choice(name, EVICTION[name](order, known), rates)


def steps_of(trace: Trace, spec: ModelSpec, decoder_tokens: int | None = None) -> Iterator[Step]:
    """What a cache is asked for: for each sample its encoder in one pass, then its decoder token by token.

    Ends before the decoder has read more than `decoder_tokens`. The trace must be one of this model (Trace.check).
    """
    left = trace.decoder_tokens if decoder_tokens is None else decoder_tokens
    for index in range(trace.n_samples):
        for name, experts in trace.sample(index).items():
            tower = spec.stack(name)
            layers = () if tower is None else tower.moe_layers
            if name == "encoder":
                yield from _one_pass(name, layers, experts)
                continue
            for token in experts[:left]:
                yield from _one_pass(name, layers, token[None])
            left -= len(experts)
        if left <= 0 and decoder_tokens is not None:
            return


def _beginning(trace: Trace, spec: ModelSpec, decoder_tokens: int) -> list[Step]:
    steps: list[Step] = []
    demands = 0
    for step in islice(steps_of(trace, spec, decoder_tokens), MOST_STEPS):
        steps.append(step)
        demands += len(step.experts)
        if demands >= MOST_DEMANDS:
            break
    return steps


def _one_pass(stack: Stack, layers: Sequence[int], tokens: npt.NDArray[np.uint16]) -> Iterator[Step]:
    """tokens [tokens, layers, top_k] that go through the stack at once."""
    for place, layer in enumerate(layers):
        needed = sorted({*tokens[:, place].ravel().tolist()} - {DROPPED})
        if needed:
            yield Step(stack, layer, tuple(needed))
