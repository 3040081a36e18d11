"""Predictors of neurons with random weights, for packs that tests make."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moeconv.writer import add_to_pack
from moert.pack.learnt import PREDICTOR, Kept, LayerPredictor, NeuronPredictor, PredictedLoss
from moert.pack.model_spec import ModelSpec
from moert.pack.reader import Pack

NAMES_ALL = -1e30
"""A threshold that every score reaches."""


def random_layer(
    features: int, experts: int, d_ff: int, rank: int = 3, threshold: float | None = None, seed: int = 0
) -> LayerPredictor:
    """`threshold`: of all experts; None: one for each, so that few neurons are named."""
    generator = np.random.default_rng(seed)
    thresholds = generator.uniform(2, 5, experts) if threshold is None else np.full(experts, threshold)
    return LayerPredictor(
        (generator.standard_normal((rank, features)) / np.sqrt(features)).astype(np.float16),
        generator.standard_normal((experts, d_ff, rank)).astype(np.float16),
        generator.standard_normal((experts, d_ff)).astype(np.float32),
        thresholds.astype(np.float32),
        Kept(0.75, 0.25, 0.5),
    )


def random_predictor(
    spec: ModelSpec, threshold: float | None = None, loss: PredictedLoss | None = None, seed: int = 0, rank: int = 3
) -> NeuronPredictor:
    """For a model of this shape. `threshold`: see random_layer."""
    shape = spec.expert_width, spec.moe.n, spec.moe.ffn.d_ff
    layers = {at: random_layer(*shape, rank, threshold, seed + place) for place, at in enumerate(spec.moe_layers())}
    return NeuronPredictor(layers, 0.05, 4, loss)


def add_predictor(path: Path, predictor: NeuronPredictor | None = None) -> Path:
    """To a pack, a random one by default."""
    manifest = Pack.open(path).manifest
    made = random_predictor(manifest.model) if predictor is None else predictor
    add_to_pack(path, manifest, PREDICTOR, made.to_bytes())
    return path
