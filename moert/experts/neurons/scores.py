"""The pack's predictor at work: says from what enters a layer's experts which of their neurons will fire."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from moert.errors import NotFinite
from moert.kernels.backend import Backend, Floats
from moert.pack.codec import F32
from moert.pack.model_spec import ExpertKey, LayerKey
from moert.pack.neurons import NeuronLayout
from moert.pack.predictor import PREDICTOR, NeuronPredictor

Bools = npt.NDArray[np.bool_]


class Scores:
    """In float32, token by token alike: see Backend.linear."""

    def __init__(self, predictor: NeuronPredictor, backend: Backend) -> None:
        self._backend = backend
        self._compress = {at: backend.matrix(Floats("F16", layer.compress)) for at, layer in predictor.layers.items()}
        self._heads = {
            at.expert(number): backend.matrix(Floats("F16", heads), bias)
            for at, layer in predictor.layers.items()
            for number, (heads, bias) in enumerate(zip(layer.heads, layer.bias.copy(), strict=True))
        }
        self._threshold: Mapping[ExpertKey, float] = {
            at.expert(number): least
            for at, layer in predictor.layers.items()
            for number, least in enumerate(layer.threshold.tolist())
        }

    def compressed(self, at: LayerKey, x: F32) -> F32:
        """x [tokens, features], what enters the experts of a layer → [tokens, rank]"""
        return self._backend.linear(x, self._compress[at])

    def named(self, key: ExpertKey, compressed: F32) -> Bools:
        """[tokens, rank] → which neurons of an expert are named, [tokens, d_ff]. Raises NotFinite."""
        scores = self._backend.linear(compressed, self._heads[key])
        if not np.isfinite(scores).all():
            raise NotFinite(
                f"{PREDICTOR} gives something else than numbers for expert {key}: run without it, or train it again "
                "(moeconv train-neurons)"
            )
        found: Bools = scores >= self._threshold[key]
        return found


def blocks_with(layout: NeuronLayout, neurons: Bools) -> Bools:
    """Which blocks have one of these neurons [tokens, d_ff]: [tokens, n_blocks]."""
    found = np.zeros((len(neurons), layout.n_blocks), np.bool_)
    if len(neurons) == 1:
        found[0, neurons[0].nonzero()[0] // layout.per_block] = True
        return found
    rows, places = neurons.nonzero()
    found[rows, places // layout.per_block] = True
    return found


def neurons_in(layout: NeuronLayout, blocks: Bools) -> Bools:
    """All neurons of these blocks [tokens, n_blocks]: [tokens, d_ff]."""
    return blocks.repeat(layout.per_block, axis=1)[:, : layout.d_ff]
