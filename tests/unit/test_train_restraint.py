"""Trainings that leave few neurons firing: the penalty beside its formula, its weight, what starts from what."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("transformers")

from recipes.train import grouped, loop, opt, switch, train, vocabulary
from recipes.train.decoder import Text
from recipes.train.restraint import WEIGHT, Moments, Restraint, Spread, Watch, WatchedReLU


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is expected."""
    return float((found - expected).detach().norm() / expected.detach().norm())


def plain_spread(hidden: torch.Tensor) -> torch.Tensor:
    return hidden.mean() / hidden.square().mean().sqrt()


def test_spread_and_its_gradient() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(7, 33).relu().requires_grad_()
    found, expected = 3 * Spread.apply(hidden), 3 * plain_spread(hidden)
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    gradients = [torch.autograd.grad(value, hidden)[0] for value in (found, expected)]
    assert torch.allclose(*gradients, rtol=1e-4, atol=1e-8)
    assert float(Spread.apply(hidden * 1000).detach()) == pytest.approx(float(found.detach()) / 3, rel=1e-5)


@pytest.mark.parametrize("share", [0.04, 0.25, 1.0])
def test_spread_of_equal_activations_is_the_root_of_their_share(share: float) -> None:
    hidden = (torch.arange(100) < share * 100).float() * 7
    assert Moments.of(hidden, 100).spread == pytest.approx(share**0.5, rel=1e-5)
    assert Moments.of(torch.cat([hidden, torch.zeros(50)]), 100).spread == pytest.approx(share**0.5, rel=1e-5)


def test_nothing_that_fires_has_no_spread() -> None:
    hidden = torch.zeros(4, 5, requires_grad=True)
    (gradient,) = torch.autograd.grad(Spread.apply(hidden), hidden)
    assert torch.isfinite(gradient).all()


def test_restrained_experts_are_the_experts_and_the_spread_of_those_chosen() -> None:
    torch.manual_seed(0)
    x, scores = torch.randn(37, 24, requires_grad=True), torch.rand(37, 1, requires_grad=True)
    up, down = torch.randn(5, 16, 24, requires_grad=True), torch.randn(5, 24, 16, requires_grad=True)
    index, inputs = torch.randint(4, (37, 1)), (x, scores, up, down)
    out, spread, firing = grouped.RestrainedExperts.apply(x, scores, index, up, down)
    assert torch.equal(out, grouped.GroupedExperts.apply(x, scores, index, up, down, False))
    hidden = F.relu(torch.einsum("td,tud->tu", x, up[index[:, 0]]))
    assert float(spread.detach()) == pytest.approx(float(plain_spread(hidden).detach()), rel=0.01)
    assert float(firing) == pytest.approx(float((hidden > 0).float().mean()), abs=0.01)
    plain = torch.einsum("tu,tdu->td", hidden, down[index[:, 0]]) * scores
    weight = torch.randn(37, 24)
    pairs = zip(
        torch.autograd.grad((out * weight).sum() + 500 * spread, inputs),
        torch.autograd.grad((plain * weight).sum() + 500 * plain_spread(hidden), inputs),
        strict=True,
    )
    assert all(relative(one, other) < 0.02 for one, other in pairs)


def test_the_weight_rises_while_too_many_fire_and_falls_while_too_few_do() -> None:
    restraint = Restraint(share=0.1, pace=0.01)
    assert restraint.moved(2.0, 0.1) == 2.0
    assert restraint.moved(2.0, 0.4) == pytest.approx(2.0 * 2.718281828**0.01)
    assert restraint.moved(2.0, 0.11) == pytest.approx(2.0 * 2.718281828**0.001)
    assert restraint.moved(2.0, 0.0) == pytest.approx(2.0 * 2.718281828**-0.01)


def test_a_watch_adds_nothing_before_its_first_step() -> None:
    layer, kept, x = WatchedReLU(), dict[str, float](), torch.randn(16, 10)
    watch = Watch(Restraint(share=0.1, since=5, first=0.2), [layer], kept)
    assert watch.end() == (torch.zeros(()), {})
    for step, adds in ((4, False), (5, True), (6, True)):
        watch.begin(step)
        assert torch.equal(layer(x), x.relu())
        before = kept.get(WEIGHT, 0.2)
        extra, figures = watch.end()
        assert figures["firing"] == pytest.approx(float((x[::8] > 0).float().mean()))
        assert float(extra) == pytest.approx(before * float(plain_spread(x.relu())) if adds else 0.0, rel=1e-5)
        assert (kept.get(WEIGHT, 0.0) > before) == adds
    layer.eval()
    seen = layer.firing
    layer(x * 0)
    assert layer.firing is seen


def text() -> Text:
    tokenizer = vocabulary.byte_pairs([], 258, eos=False)
    ids = torch.tensor(tokenizer.encode("the quick brown fox jumps over the lazy dog " * 20).ids, dtype=torch.int16)
    return Text(tokenizer, [(ids, 1)], "a lazy dog jumps over a quick fox " * 8)


def tiny_opt(restraint: Restraint | None) -> opt.OptTask:
    torch.manual_seed(0)
    settings = opt.OptSettings(d_model=24, d_ff=40, layers=2, heads=2, context=12, batch=4, restraint=restraint)
    return opt.OptTask("tiny", settings, text(), 0)


def trained(task: Any, folder: Path, steps: int, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Lines of the log after a training of so many steps, all of them logged."""
    monkeypatch.setattr(loop, "TRAIN_DIR", folder / "train")
    settings = loop.Settings(
        minutes=1, threads=1, rate=3e-3, embedding_rate=3e-3, muon=True, log_seconds=0, warmup_steps=5, steps=steps,
        models=folder / "models", decay_from=0.9,
    )  # fmt: skip
    loop.run(task, settings, ["embed_"])
    return [json.loads(line) for line in (folder / "train" / "tiny" / "log.jsonl").read_text().splitlines()]


def test_fewer_neurons_fire_with_a_restraint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    restraint = Restraint(share=0.1, since=10, first=0.3, pace=0.1)
    free = trained(tiny_opt(None), tmp_path / "free", 60, monkeypatch)
    few = trained(tiny_opt(restraint), tmp_path / "few", 60, monkeypatch)
    assert [line["step"] for line in few] == [*range(1, 61), 60]
    for step in range(10):  # until then it is the same training
        assert few[step]["cross"] == free[step]["cross"]
    assert "restraint" not in few[9]
    assert few[10]["restraint"] == pytest.approx(0.3)
    assert few[-2]["firing"] < 0.2 < free[-2]["firing"]


def test_a_stopped_training_keeps_its_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    restraint = Restraint(share=0.1, first=0.3, pace=0.1)
    first = trained(tiny_opt(restraint), tmp_path, 6, monkeypatch)
    task = tiny_opt(restraint)
    more = trained(task, tmp_path, 8, monkeypatch)[len(first) :]
    assert [line["step"] for line in more] == [7, 8, 8]
    assert more[0]["restraint"] > first[-2]["restraint"] > 0.3
    assert (tmp_path / "models" / "tiny" / "model.safetensors").is_file()


def tiny_switch(restraint: Restraint | None, seed: int) -> switch.SwitchTask:
    torch.manual_seed(seed)
    settings = switch.SwitchSettings(
        d_model=24, d_ff=16, d_kv=8, layers=4, heads=3, experts=6, batch=3, max_input=20, max_target=24,
        sparse_every=2, restraint=restraint,
    )  # fmt: skip
    rows = [{"input": "one two", "target": "One, two."}, {"input": "three", "target": "Three."}]
    return switch.SwitchTask("tiny", settings, vocabulary.byte_pairs([], 258, eos=True), rows, rows, 0)


def test_a_switch_goes_on_from_an_exported_one(tmp_path: Path) -> None:
    first, other = tiny_switch(None, 0), tiny_switch(Restraint(share=0.1, first=0.3), 1)
    first.export(tmp_path)
    other.begin_with(tmp_path)
    for name, value in first.model.state_dict().items():
        assert torch.equal(other.model.state_dict()[name], value.bfloat16().float()), name
    first.model.load_state_dict(other.model.state_dict())
    found, plain = other.loss(0), first.loss(0)
    assert "firing" not in plain[1]
    assert found[1]["cross"] == plain[1]["cross"]
    assert float(found[0].detach()) == pytest.approx(float(plain[0].detach()) + 0.3 * found[1]["spread"], rel=1e-4)
    assert other.kept[WEIGHT] > 0.3


def test_what_is_only_compared_with_is_not_among_the_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[loop.Settings] = []
    monkeypatch.setattr(loop, "TRAIN_DIR", tmp_path)
    monkeypatch.setattr(loop, "prepare", lambda threads, seed: None)
    monkeypatch.setattr(loop, "run", lambda task, settings, embeddings: seen.append(settings))
    for name in ("opt", "opt_free"):
        plan = replace(train.PLANS[name], task=lambda seed: None)
        monkeypatch.setitem(train.PLANS, name, plan)
        assert train.main([name, "--steps", "7", "--threads", "1"]) == 0
    assert [settings.steps for settings in seen] == [7, 7]
    assert [settings.models for settings in seen] == [None, tmp_path / "models"]
