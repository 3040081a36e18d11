"""Experts whose output takes a shortcut, and choices that stand for no expert, beside their formulas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import save
from tiny_packs import DECODER_SHAPE, PROMPTS, backbone, record_routes, run_greedy, with_shortcut, write_pack

from moeconv.routes import build
from moeconv.writer import add_to_pack
from moert.engine.engine import Engine
from moert.kernels import REFERENCE, library, open_backend
from moert.kernels.backend import NO_NORM, Backend, Floats, RouterWeights
from moert.kernels.reference import ReferenceBackend
from moert.models.ffn import LearnedRouter, PreferringRouter
from moert.models.kv import Recent
from moert.models.model import Builder
from moert.pack.model_spec import Layer, LayerKey
from moert.pack.parts import Act, Experts, Ffn, Norm, Router
from moert.pack.paths import PATHS
from moert.pack.reader import Pack
from tests.unit.test_narrow_experts import D_FF, D_MODEL, TOKENS, PlainExperts

AT, N, IDENTITIES = LayerKey("decoder", 0), 3, 2
_ACT = Act("relu2")
SHORTCUT = with_shortcut(DECODER_SHAPE.spec, 1, 5)


def test_a_layer_is_its_formula() -> None:
    chance = np.random.default_rng(0)
    router = Router(2, False, None, choice_bias=True, factor=1.5, identities=IDENTITIES)
    part = Experts(N, Ffn(D_FF, _ACT, False), router, Ffn(5, _ACT, False), shortcut=True)
    layer = Layer(Norm(1e-5), None, None, part)
    named = {
        each.name: chance.normal(size=each.shape).astype(np.float32) for each in layer.tensors("decoder.0", D_MODEL)
    }
    builder = Builder({name: Floats("F32", data.copy()) for name, data in named.items()}, (), ReferenceBackend())
    runner, x = _Real(chance, N, D_MODEL), chance.normal(size=(TOKENS, D_MODEL)).astype(np.float32)
    ffn, found = builder.ffn(layer, AT, runner, {}), x.copy()
    assert ffn is not None
    late = ffn(found, [TOKENS], [])
    weights = {name.removeprefix("decoder.0."): data.astype(np.float64) for name, data in named.items()}
    assert late is not None
    for token in range(TOKENS):
        hidden = x[token] / np.sqrt(np.mean(x[token].astype(np.float64) ** 2) + 1e-5) * weights["ffn_norm.weight"]
        shared = weights["shared.down.weight"] @ np.square(np.maximum(weights["shared.up.weight"] @ hidden, 0))
        np.testing.assert_allclose(found[token], x[token] + shared, rtol=1e-4, atol=1e-3)
        scores = np.exp(weights["router.weight"] @ hidden)
        scores /= scores.sum()
        chosen = np.argsort(-(scores + weights["router.choice_bias"]))[:2]
        made = sum(1.5 * scores[one] * (runner(one, hidden) if one < N else hidden) for one in chosen)
        np.testing.assert_allclose(late[token], made, rtol=1e-4, atol=1e-3)
    assert runner.none  # some choices stand for no expert


class _Real(PlainExperts):
    """Runs experts, and counts the choices that are none."""

    none = 0

    def run(self, at: LayerKey, hidden: Any, experts: Any, weights: Any, out: Any, x: Any) -> None:
        self.none += int((experts < 0).sum())
        super().run(at, hidden, experts, np.where(experts < 0, 0, weights), out, x)


def backends() -> list[Backend]:
    return [open_backend(REFERENCE), *([open_backend()] if library.load() is not None else [])]


@pytest.mark.parametrize("backend", backends(), ids=lambda backend: str(backend.name))
@pytest.mark.parametrize("sure", [0, 1])
def test_what_is_no_expert_is_neither_preferred_nor_remembered(backend: Backend, sure: int) -> None:
    chance = np.random.default_rng(1)
    n, part = 6, Router(3, False, None, identities=4)
    matrix = chance.normal(size=(n + 4, D_MODEL)).astype(np.float32)
    exact = LearnedRouter(
        RouterWeights(part, 1.0, NO_NORM, None, backend.matrix(Floats("F32", matrix)), None, None), backend
    )
    router, recent = PreferringRouter(exact, backend, 0.3, sure), Recent(4, 3)
    recent.exact = 5
    x, latest = chance.normal(size=(40, D_MODEL)).astype(np.float32), list[int]()
    for start, stop in ((0, 9), *((at, at + 1) for at in range(9, 40))):
        _, experts, weights = router.route(x[start:stop], [stop - start], [recent])
        for place, token in enumerate(range(start, stop)):
            scores = np.exp(matrix @ x[token])
            scores /= scores.sum()
            chosen = _plainly(scores, latest if token >= 5 else [], sure, 3)
            real = sorted(one for one in chosen if one < n)
            assert experts[place].tolist() == real + [-1] * (3 - len(real))
            np.testing.assert_allclose(weights[place], scores[sorted(chosen)], rtol=1e-5)
            latest = [*real, *(one for one in latest if one not in real)][:4]
        assert [one for one in recent.experts.tolist() if one >= 0] == latest
    assert len(router.guess(x[:1])) == n


def _plainly(scores: Any, recent: Sequence[int], sure: int, top_k: int) -> list[int]:
    first = np.argsort(-scores)[:sure].tolist()
    raised = scores.copy()
    raised[list(recent)] += np.float32(0.3)
    return first + [one for one in np.argsort(-raised).tolist() if one not in first][: top_k - sure]


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pack(tmp_path_factory.mktemp("shortcut") / "s.pack", SHORTCUT)


def test_policies_change_no_answer(pack: Path) -> None:
    with Engine.open(pack, predict="none") as engine:
        expected = run_greedy(engine, engine.encode(PROMPTS[0]), 20)
        together = [answer.result.tokens for answer in engine.generate_many(PROMPTS, max_new_tokens=9)]
        alone = [engine.generate(prompt, max_new_tokens=9).result.tokens for prompt in PROMPTS]
    assert together == alone
    for predict, cache in (("transitions", "25%"), ("gate", "40%"), ("gate", "100%")):
        with Engine.open(pack, predict=predict, cache=cache) as engine:
            found = run_greedy(engine, engine.encode(PROMPTS[0]), 20)
        assert found[0] == expected[0]
        assert np.array_equal(found[1], expected[1])


@pytest.mark.parametrize("predict", ["gate", "transitions"])
def test_a_token_that_chooses_no_expert_demands_none(tmp_path: Path, predict: str) -> None:
    """A router's numbers for experts are so small that all choices of its layer stand for none."""
    kinds = [replace(kind, ffn=_biased(kind.ffn)) for kind in SHORTCUT.decoder.kinds]
    spec = replace(SHORTCUT, decoder=replace(SHORTCUT.decoder, kinds=tuple(kinds)))
    root, weights = write_pack(tmp_path / "none.pack", spec, paths=False), backbone(spec)
    weights[f"{MINE}.router.bias"][:-5], weights[f"{MINE}.router.bias"][-5:] = 0, 50
    add_to_pack(root, Pack.open(root).manifest, "backbone.safetensors", save(weights))
    add_to_pack(root, Pack.open(root).manifest, PATHS, build(spec.moe.n, record_routes(root)).to_bytes())
    with Engine.open(root, predict=predict, cache="50%") as engine:
        seen = list[Sequence[int]]()
        engine.runner.listeners.append(lambda demand: seen.append(demand.experts) if demand.at.layer == 1 else None)
        run_greedy(engine, engine.encode(PROMPTS[0]), 12)
    assert {*seen} == {()}


MINE = "decoder.1"


def _biased(ffn: Ffn | Experts | None) -> Ffn | Experts | None:
    if not isinstance(ffn, Experts) or not ffn.router.identities:
        return ffn
    return replace(ffn, router=replace(ffn.router, bias=True))
