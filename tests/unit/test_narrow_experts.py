"""Experts that are narrower or wider than the stream, beside their formula in double precision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from moert.kernels.backend import I64, ROWS, Floats
from moert.kernels.reference import ReferenceBackend
from moert.models.model import Builder
from moert.pack.codec import F32
from moert.pack.model_spec import Join, Layer, LayerKey
from moert.pack.parts import Act, Experts, Ffn, Narrow, Norm, Router
from tests.pairs import thinned

D_MODEL, D_FF, TOKENS = 6, 7, ROWS + 3
AT = LayerKey("decoder", 0)
_ACT = Act("relu2")


class PlainExperts:
    """Runs experts with weights of their own [n, out, in], and sees what they and the next router are asked."""

    def __init__(self, chance: np.random.Generator, n: int, width: int) -> None:
        self.up, self.down = chance.normal(size=(n, D_FF, width)), chance.normal(size=(n, width, D_FF))
        self.stream: F32 | None = None

    def __call__(self, expert: int, x: Any) -> Any:
        """x [width]"""
        return self.down[expert] @ np.square(np.maximum(self.up[expert] @ x, 0))

    def run(self, at: LayerKey, hidden: F32, experts: I64, weights: F32, out: F32, x: F32) -> None:
        self.stream = x.copy()
        for token, (chosen, share) in enumerate(zip(experts, weights, strict=True)):
            for expert, weight in zip(chosen, share, strict=True):
                out[token] += (weight * self(expert, hidden[token])).astype(np.float32)


@thinned("features, bias, add, weigh, top_k", [4, 9], [False, True], [1.0, 0.5], [("output", 2), ("input", 1)])
def test_a_layer_is_its_formula(
    features: int, bias: bool, add: float, weigh: Literal["output", "input"], top_k: int
) -> None:
    chance = np.random.default_rng(0)
    part = Experts(
        3, Ffn(D_FF, _ACT, False), Router(top_k, False, None, weigh=weigh), Ffn(5, _ACT, False),
        narrow=Narrow(features, bias),
    )  # fmt: skip
    layer = Layer(Norm(1e-5), None, None, part, ffn_join=Join(None, add))
    named = {
        each.name: chance.normal(size=each.shape).astype(np.float32) for each in layer.tensors("decoder.0", D_MODEL)
    }
    builder = Builder({name: Floats("F32", data.copy()) for name, data in named.items()}, (), ReferenceBackend())
    runner, x = PlainExperts(chance, 3, features), chance.normal(size=(TOKENS, D_MODEL)).astype(np.float32)
    ffn, found = builder.ffn(layer, AT, runner, {}), x.copy()
    assert ffn is not None
    ffn(found, [TOKENS], [])
    weights = {name.removeprefix("decoder.0."): data.astype(np.float64) for name, data in named.items()}
    expected = np.stack([x[token] + add * _made(weights, runner, part, x[token]) for token in range(TOKENS)])
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)
    assert runner.stream is not None
    assert runner.stream.shape == x.shape


def _made(weights: Mapping[str, Any], runner: PlainExperts, part: Experts, x: Any) -> Any:
    """What joins the stream of one token x [d_model]."""
    x = x / np.sqrt(np.mean(x.astype(np.float64) ** 2) + 1e-5) * weights["ffn_norm.weight"]
    scores = np.exp(weights["router.weight"] @ x)
    scores /= scores.sum()
    narrow = weights["narrow.weight"] @ x + weights.get("narrow.bias", 0)
    total = np.zeros_like(narrow)
    for expert in np.argsort(-scores)[: part.router.top_k]:
        share = scores[expert]
        total += runner(expert, share * narrow) if part.router.weigh == "input" else share * runner(expert, narrow)
    shared = weights["shared.down.weight"] @ np.square(np.maximum(weights["shared.up.weight"] @ x, 0))
    return weights["widen.weight"] @ total + weights.get("widen.bias", 0) + shared
