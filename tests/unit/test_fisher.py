"""Costs by gradients: beside plain autograd through the whole model, and interrupted in the middle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_layered import layered_of, scorer_of
from torch import Tensor

from moeconv.measure.passes import LayeredModel
from moeconv.measure.workdir import Journal
from moeconv.source.experts import Call, expert_ffn
from moeconv.sweep.fisher import Gradients, LayerScales
from moert.pack.model_spec import LayerKey

TinyModel = Callable[[str, str], Path]
BAR = SimpleNamespace(update=lambda n: None)
FAMILIES = (
    "olmoe", "deepseek_v3", "qwen3_5_moe_text", "gpt_oss", "llama4_text", "gemma4_text", "nemotron_h", "glm5_next",
    "qwen4_exp_text", "longcat_flash", "deepseek_v4",
)  # fmt: skip
DRAWS = 3


def gradients_of(model: LayeredModel, **changes: Any) -> Gradients:
    widths = len(model.spec.moe.ffn.projections)
    patterns = [(4,) * widths, (2,) * widths, (8,) * widths]
    return Gradients(model, scorer_of(model).texts, patterns, **{"draws": DRAWS, "seed": 5, **changes})


def whole_model_effects(model: LayeredModel, of: Gradients) -> dict[LayerKey, Tensor]:
    """[patterns, experts, draws, windows]: what each expert's change does to the drawn texts' log-likelihood, to first
    order, by autograd through the model in memory."""
    from trials import trial_of

    trial = trial_of(model.checkpoint.path)
    calls: dict[LayerKey, tuple[Call, Tensor]] = {}
    n, spec = len(of.ids), model.spec
    found = {at: torch.zeros(len(of.patterns), spec.moe.n, DRAWS, n) for at in spec.moe_layers("decoder")}
    for row in range(n):
        calls.clear()

        def answer(at: LayerKey, call: Call) -> Tensor:
            given = trial.calls.given(at, call)
            given = given + torch.zeros_like(given).requires_grad_()
            calls[at] = call, given
            return given

        with torch.enable_grad(), trial.calls.during(answer=answer):
            embedding = trial.model.get_input_embeddings()
            hook = embedding.register_forward_hook(lambda _module, _inputs, made: made.detach().requires_grad_())
            logits = trial.model(of.ids[row : row + 1], use_cache=False).logits[0]
            hook.remove()
            log_p = torch.log_softmax(logits.float(), -1)[of.texts.scored[row]]
        chance = torch.Generator().manual_seed(of.seed * 1_000_003 + row)
        drawn = torch.multinomial(log_p.detach().exp(), DRAWS, replacement=True, generator=chance)
        for draw in range(DRAWS):
            total = log_p.gather(1, drawn[:, draw : draw + 1]).sum()
            ats = list(calls)
            for at, gradient in zip(
                ats, torch.autograd.grad(total, [calls[at][1] for at in ats], retain_graph=True), strict=True
            ):
                _add(model, of, at, calls[at][0], gradient, found[at][:, :, draw, row])
    return found


@torch.no_grad()
def _add(model: LayeredModel, of: Gradients, at: LayerKey, call: Call, gradient: Tensor, into: Tensor) -> None:
    for number in range(model.spec.moe.n):
        key = at.expert(number)
        token, place = (call.chosen == number).nonzero(as_tuple=True)
        x, share = call.x[token], call.weights[token, place][:, None]
        biases = model.shelf.biases(key)
        before = expert_ffn(x, model.shelf.weights(key), model.spec.moe.ffn, biases)
        for pattern, bits in enumerate(of.patterns):
            coded = model.coder.weights(key, bits)
            weights = tuple(torch.from_numpy(coded[name]) for name in model.spec.moe.ffn.projections)
            change = expert_ffn(x, weights, model.spec.moe.ffn, biases) - before
            into[pattern, number] = (share * gradient[token] * change).sum()


@pytest.mark.parametrize("family", FAMILIES)
def test_costs_are_those_of_the_whole_model(family: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    model = layered_of(tiny_model(family, "plain"), tmp_path)
    of = gradients_of(model)
    found = of.run(Journal(tmp_path / "journal", "s"), "text", BAR).layers
    model.original_experts()
    for at, effects in whole_model_effects(model, of).items():
        base = effects[0]
        expected = [
            0.5 * (one - base).square().sum(-1).mean(-1) if max(bits) <= 4
            else 0.5 * (one.square() - base.square()).sum(-1).mean(-1)
            for bits, one in zip(of.patterns, effects, strict=True)
        ]  # fmt: skip
        got = torch.tensor(found[at].costs)
        assert torch.allclose(got.float(), torch.stack(expected), rtol=2e-3, atol=1e-6 * float(got.abs().max()) + 1e-9)
        rows, router = model.spec.moe.router.top_k * of.ids.numel(), model.spec.moe.router
        assert sum(found[at].rows) == rows or (router.identities and 0 < sum(found[at].rows) < rows)


def test_a_killed_run_goes_on_at_its_layer(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_model("olmoe", "plain")
    expected = gradients_of(layered_of(path, tmp_path / "a")).run(Journal(tmp_path / "ja", "s"), "text", BAR)

    class Killed(Exception):
        pass

    ready, back = LayeredModel.ready, []

    def watched(self: LayeredModel, at: int) -> Any:
        if (tmp_path / "b" / "gradients").exists():
            back.append(at)
            if len(back) == 2:
                raise Killed
        return ready(self, at)

    monkeypatch.setattr(LayeredModel, "ready", watched)
    with pytest.raises(Killed):
        gradients_of(layered_of(path, tmp_path / "b")).run(Journal(tmp_path / "jb", "s"), "text", BAR)
    again = gradients_of(layered_of(path, tmp_path / "b")).run(Journal(tmp_path / "jb", "s"), "text", BAR)
    assert again.layers == expected.layers
    assert back[2] == back[1], "the last layer is not run again"


@pytest.mark.parametrize("family", ["olmoe", "longcat_flash"])
def test_layers_are_measured_with_all_of_their_experts(family: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    """Beside plans in which only one layer has widths."""
    from moeconv.artifacts import uniform
    from moeconv.quantizers.coder import ORIGINAL

    model = layered_of(tiny_model(family, "plain"), tmp_path)
    texts, bits = scorer_of(model).texts, (2,) * len(model.spec.moe.ffn.projections)
    model.original_experts()
    with torch.inference_mode():
        model.through(model.passage(texts.ids, keeps=True), texts.ids, texts.real, "states")
    scales = LayerScales(model, texts, [bits, (4, 4, 4)], windows=3)
    found = scales.run(Journal(tmp_path / "journal", "s"), "text", BAR).nats
    scorer = scorer_of(model)
    scorer.texts = texts.select(scales.places.tolist())
    model.restore()
    scorer.score(as_reference=True)
    for at in model.spec.moe_layers():
        one = {key: bits for key in model.spec.expert_keys() if key.at == at}
        model.assign(uniform(model.spec, ORIGINAL) | one)
        assert found[at][0] == pytest.approx(float(scorer.score().kls.sum()), rel=1e-3, abs=1e-5)
        assert found[at][0] > found[at][1] > 0
