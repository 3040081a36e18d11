"""A reference model with its text, and what becomes of it when all its experts are quantised in some way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moeconv.calibration import load_splits
from moeconv.command.recipe import Recipe
from moeconv.quantizers import Inputs
from moeconv.quantizers.moments import Moments, collect
from moeconv.source.checkpoint import Checkpoint
from moeconv.source.experts import ExpertCalls
from moert.pack.codec import F32
from moert.pack.model_spec import ExpertKey
from recipes.bench.likelihood import Batch, Likelihoods, Text, judge, pairs, run, windows
from recipes.bench.peers import BLOCK, Coded
from recipes.bench.sized import sized

SPLITS = ("calibration", "heldout")
SIZES = sized({"g2p": (1000, 800), "marks": (400, 200), "wiki": (64, 40), "wikids": (64, 40)}, {"wiki": (2, 2)})
"""Samples or windows whose inputs the quantisers see, and others, of each split, that the loss is measured on."""
DOCUMENTS = {"g2p": "words", "marks": "articles", "wiki": "articles", "wikids": "articles"}
"""What is resampled whole."""
FITTING = ", fitting rows"
"""Ends a subject's name where only the matrices are quantised whose rows are whole blocks of llama.cpp's formats."""

Matrices = tuple[str, int, str]  # stack, layer, projection: the matrices of all experts there
Method = Callable[[F32, Inputs], Coded]  # weights [n, out, in] and what is known of their inputs, with products


@dataclass(frozen=True)
class Quantized:
    """All experts' matrices in one way; `name` says which."""

    method: str
    name: str
    coded: Mapping[Matrices, Coded]
    bits: float  # effective bits a weight, scales counted


@dataclass(frozen=True)
class Result:
    """`error` is the share of the weights' norm that is lost."""

    model: str
    method: str
    name: str
    bits: float
    error: float
    judged: Mapping[str, Likelihoods]


class Subject:
    """One reference model; `unquantised` has what each split gives before anything was changed."""

    def __init__(self, name: str) -> None:
        self.name = name
        model, fitting = name.removesuffix(FITTING), name.endswith(FITTING)
        path = Path("recipes/models") / model
        checkpoint = Checkpoint.open(path)
        self.family, self.spec = checkpoint.family, checkpoint.spec
        self.model: Any = self.family.load(path, torch.float32)
        seen, texts = _texts(model, SIZES[model])
        calls = ExpertCalls(self.model, self.family, self.spec)
        self.moments: Moments = collect(calls, lambda: run(self.model, seen), "products")
        self.weights: dict[Matrices, F32] = {
            (stack, layer, projection): np.stack(
                [
                    self.family.expert_weight(self.model, ExpertKey(stack, layer, expert), projection).numpy().copy()
                    for expert in range(self.spec.moe.n)
                ]
            )
            for stack, layer in self.spec.moe_layers()
            for projection in self.spec.moe.ffn.projections
        }
        if fitting:
            self.weights = {at: w for at, w in self.weights.items() if w.shape[2] % BLOCK == 0}
        self.texts = texts
        self.unquantised = {split: judge(self.model, text) for split, text in texts.items()}
        self._kept: dict[str, Quantized] = {}

    @property
    def sizes(self) -> set[int]:
        """Weights of one matrix of each shape."""
        return {weights[0].size for weights in self.weights.values()}

    def quantize(self, method: str, name: str, function: Method) -> Quantized:
        """All experts; what was asked for before under the same name is remembered."""
        if name not in self._kept:
            coded = {}
            for (stack, layer, projection), weights in self.weights.items():
                keys = [ExpertKey(stack, layer, expert) for expert in range(len(weights))]  # type: ignore[arg-type]
                coded[stack, layer, projection] = function(weights, self.moments.inputs(keys, projection))
            self._kept[name] = Quantized(method, name, coded, self._bits({at: c.nbytes for at, c in coded.items()}))
        return self._kept[name]

    def mix(self, name: str, low: Quantized, high: Quantized, limit: float) -> Quantized:
        """Every so many-th expert of each layer as in `high`, the others as in `low`, to fill `limit` bits a weight.

        Which ones is not chosen by what they cost: that is the allocation's part.
        """
        share = (limit - low.bits) / (high.bits - low.bits)
        n = self.spec.moe.n
        coded, nbytes, start = {}, {}, 0.0
        for at, first in low.coded.items():
            steps = np.floor(start + share * np.arange(n + 1))
            taken = np.diff(steps).astype(bool)
            start = (start + share * n) % 1
            second = high.coded[at]
            mixed = np.where(taken[:, None, None], second.weights, first.weights)
            nbytes[at] = float(np.where(taken, second.nbytes, first.nbytes).mean())
            coded[at] = Coded(mixed, nbytes[at])
        return Quantized(low.method, name, coded, self._bits(nbytes))

    def measure(self, quantized: Quantized) -> Result:
        """Writes the weights into the model and judges both splits."""
        lost = whole = 0.0
        for at, coded in quantized.coded.items():
            weights = self.weights[at]
            lost += float(np.square(coded.weights - weights, dtype=np.float64).sum())
            whole += float(np.square(weights, dtype=np.float64).sum())
            stack, layer, projection = at
            for expert, weight in enumerate(coded.weights):
                key = ExpertKey(stack, layer, expert)  # type: ignore[arg-type]
                self.family.expert_weight(self.model, key, projection).copy_(torch.from_numpy(weight))
        judged = {split: judge(self.model, text) for split, text in self.texts.items()}
        return Result(self.name, quantized.method, quantized.name, quantized.bits, (lost / whole) ** 0.5, judged)

    def _bits(self, nbytes: Mapping[Matrices, float]) -> float:
        experts = self.spec.moe.n
        weights = sum(matrices.size for matrices in self.weights.values())
        return 8 * experts * sum(nbytes.values()) / weights


def _texts(name: str, sizes: tuple[int, int]) -> tuple[Sequence[Batch], dict[str, Text]]:
    """What the quantisers see, and what each split is judged on."""
    settings = Recipe.load(Path(f"recipes/{name}.toml"), Path("build")).settings
    path = Path(settings.model)
    assert settings.calib is not None
    splits = load_splits(settings.calib, None, seed=0)
    seen, judged = sizes
    if not splits.seq2seq:  # every other article to the quantisers
        first, _ = windows(splits.calibration[::2], path, seen)
        others = {"calibration": splits.calibration[1::2], "heldout": splits.heldout}
        return first, {split: Text(*windows(part, path, judged)) for split, part in others.items()}
    parts = {"calibration": splits.calibration[seen : seen + judged], "heldout": splits.heldout[:judged]}
    judging = {split: Text(*pairs(part, path)) for split, part in parts.items()}
    return pairs(splits.calibration[:seen], path)[0], judging
