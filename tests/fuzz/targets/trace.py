"""trace.safetensors: read, held against the model, and replayed under the policies that are chosen between."""

from __future__ import annotations

import numpy as np

from moeconv.eviction import best_eviction
from moeconv.routes import record
from moert.pack.errors import PackError
from moert.pack.paths import Trace
from tests.fuzz.described import described, file_of
from tests.fuzz.target import Target
from tests.random_packs import DECODER, ENCODER_DECODER

_SPECS = (DECODER, ENCODER_DECODER)


def read(body: bytes) -> None:
    """As a trace of whichever of the models it fits."""
    trace = Trace.from_bytes(file_of(body))
    spec = next((spec for spec in _SPECS if len(spec.stacks) == len(trace.stacks)), DECODER)
    trace.check(spec)
    best_eviction(trace, spec, dict.fromkeys(spec.expert_keys(), 10), 30)


def seeds() -> list[bytes]:
    rng, found = np.random.default_rng(0), []
    for spec in _SPECS:
        counts = {name: len(spec.moe_layers(name)) for name in spec.stacks if spec.moe_layers(name)}
        samples = [
            {name: rng.integers(-1, spec.moe.n, (5, count, spec.moe.router.top_k)) for name, count in counts.items()}
            for _ in range(3)
        ]
        file = record(spec.moe.n, samples).to_bytes()
        found += [described(file), file]
    return found


TARGET = Target(read, (PackError,), seeds)
