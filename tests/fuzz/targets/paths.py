"""paths.safetensors: read, held against the model, and asked for the experts that follow."""

from __future__ import annotations

import numpy as np

from moeconv.routes import at_least, build
from moert.pack.errors import PackError
from moert.pack.paths import TransitionTable
from tests.fuzz.described import described, file_of
from tests.fuzz.target import Target
from tests.random_packs import DECODER, ENCODER_DECODER

_BEFORE = range(-1, 3)


def read(body: bytes) -> None:
    table = TransitionTable.from_bytes(file_of(body))
    for at in table.layers:
        table.probabilities(at, _BEFORE, _BEFORE)
    at_least(table, 2)
    table.check(DECODER)


def seeds() -> list[bytes]:
    rng, found = np.random.default_rng(0), []
    for spec in (DECODER, ENCODER_DECODER):
        shape = (12, spec.moe.router.top_k)
        routes = {at: rng.integers(-1, spec.moe.n, shape) for at in spec.moe_layers()}
        file = build(spec.moe.n, routes).to_bytes()
        found += [described(file), file]
    return found


TARGET = Target(read, (PackError,), seeds)
