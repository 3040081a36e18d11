"""predictor.safetensors: read, held against the model, and asked which neurons fire."""

from __future__ import annotations

import numpy as np

from moert.beside.flash.runner import Scores
from moert.kernels import REFERENCE, open_backend
from moert.pack.errors import PackError
from moert.pack.learnt import NeuronPredictor, PredictedLoss
from tests.fuzz.described import described, file_of
from tests.fuzz.target import Target
from tests.random_packs import NEURON_SPECS
from tests.random_predictor import random_predictor

_SPEC, _BACKEND = NEURON_SPECS["late"], open_backend(REFERENCE, 1)


def read(body: bytes) -> None:
    predictor = NeuronPredictor.from_bytes(file_of(body))
    _ = predictor.kept, predictor.rank
    predictor.check(_SPEC)
    with np.errstate(all="ignore"):
        scores = Scores(predictor, _BACKEND)
        for at in _SPEC.moe_layers():
            compressed = scores.compressed(at, np.ones((2, _SPEC.expert_width), np.float32))
            scores.named(at.expert(0), compressed)


def seeds() -> list[bytes]:
    file = random_predictor(_SPEC, loss=PredictedLoss(0.01, 0.0, 0.02)).to_bytes()
    return [described(file), file]


TARGET = Target(read, (PackError,), seeds)
