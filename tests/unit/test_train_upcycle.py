"""Upcycling: a mixture made of a dense model, which begins as that model and is trained on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from transformers import MixtralForCausalLM

from calib_data import wheels
from moeconv.source.checkpoint import Checkpoint
from recipes import talk
from recipes.train import loop, report, train, upcycle
from recipes.train.precision import COMPUTE_DTYPE
from tests.tiny import tiny_of

SMALL = upcycle.Upcycling(
    context=16, batch=2, experts=4, top_k=2, states=160, every=1, written=0, evaluated=32, judged=4
)
TEMPLATE = "{% for m in messages %}{{ 'user ' + m['content'] + ' ' }}{% endfor %}"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> upcycle.Source:
    """A tiny dense model with a chat template; text and results lie in tmp_path."""
    for name in ("train", "heldout"):
        path = tmp_path / "data" / "wiki" / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        chance = np.random.default_rng(len(name))
        words = ["".join(chance.choice(list("abcdefgh"), 4)) for _ in range(200)]
        path.write_text("".join(json.dumps({"text": " ".join(words[at : at + 50])}) + "\n" for at in range(0, 200, 50)))
    monkeypatch.setattr(train, "DATA_DIR", tmp_path / "data")
    monkeypatch.setattr(loop, "TRAIN_DIR", tmp_path / "train")
    monkeypatch.setattr(loop, "ROOT", tmp_path)
    folder = tiny_of("llama")(tmp_path / "dense", tie_word_embeddings=True)
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": TEMPLATE}))
    return upcycle.Source.open(folder)


def began(source: upcycle.Source, folder: Path, seed: int = 0, **changes: object) -> upcycle.Beginning:
    return upcycle.Beginning.of(source, replace(SMALL, **changes), seed, folder)


def settings(folder: Path, steps: int) -> loop.Settings:
    return loop.Settings(
        minutes=1, threads=1, rate=1e-2, embedding_rate=1e-2, weight_decay=0.0, warmup_steps=1, thrifty=True,
        steps=steps, models=folder,
    )  # fmt: skip


def test_without_noise_a_mixture_computes_the_dense_models_logits(source: upcycle.Source, tmp_path: Path) -> None:
    model = upcycle.mixture(source.model, began(source, tmp_path).routers, replace(SMALL, noise=0.0), 0).eval()
    ids = torch.randint(4, 90, (3, 20))
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, source.model(ids).logits, atol=1e-5)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert trained == {name for name in dict(model.named_parameters()) if ".mlp." in name}


def test_experts_differ_by_noise_and_seeds_repeat(source: upcycle.Source, tmp_path: Path) -> None:
    one, same, other = (began(source, tmp_path / str(at), seed) for at, seed in enumerate((3, 3, 4)))
    assert torch.equal(one.routers, same.routers)
    assert not torch.equal(one.routers, other.routers)
    models = [upcycle.mixture(source.model, each.routers, SMALL, seed) for each, seed in ((one, 3), (same, 3))]
    assert all(torch.equal(a, b) for a, b in zip(*(m.state_dict().values() for m in models), strict=True))
    up = models[0].model.layers[0].mlp.experts.gate_up_proj.detach()
    assert float((up[0] - up[1]).std() / up[0].std()) == pytest.approx(SMALL.noise * 2**0.5, rel=0.1)


def test_clusters_are_even_and_routers_find_them() -> None:
    chance = torch.Generator().manual_seed(0)
    places = torch.arange(900) % 3
    x = torch.randn(900, 12, generator=chance) * 0.3 + 3 * torch.eye(12)[places] + 1
    labels = upcycle.clusters(x, 3, chance)
    assert len({*zip(labels.tolist(), places.tolist(), strict=True)}) == 3
    probabilities = (x @ upcycle.router(x, replace(SMALL, experts=3), chance).t()).softmax(-1)
    assert float(probabilities.amax(-1).mean()) == pytest.approx(SMALL.sure, abs=0.01)
    assert len({*zip(probabilities.argmax(-1).tolist(), places.tolist(), strict=True)}) == 3
    lopsided = torch.cat([torch.randn(600, 12, generator=chance), torch.randn(200, 12, generator=chance) + 1])
    sizes = upcycle.clusters(lopsided, 4, chance).bincount(minlength=4)
    assert sizes.min() > 150
    assert sizes.max() < 250


def test_a_stopped_run_goes_on_and_its_result_is_a_checkpoint(
    source: upcycle.Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, kept = tmp_path / "models" / "mixed", tmp_path / "train" / "mixed"
    small = replace(SMALL, written=10, length=33, repeats=1)
    begins = upcycle.Beginning.of(source, small, 0, kept)
    assert begins.written.shape == (10, 33)
    assert begins.held == 1
    loop.run(upcycle.UpcycleTask("mixed", source, begins, small, 0), settings(folder.parent, 2), ["gate.weight"])
    monkeypatch.setattr(upcycle, "conversations", lambda *_: pytest.fail("written again"))
    again = upcycle.Beginning.of(source, small, 0, kept)
    assert torch.equal(again.routers, begins.routers)
    task = upcycle.UpcycleTask("mixed", source, again, small, 0)
    loop.run(task, settings(folder.parent, 3), ["gate.weight"])
    steps = [json.loads(line)["step"] for line in (kept / "log.jsonl").read_text().splitlines()]
    assert max(steps) == 3
    assert steps.count(2) >= 1
    plain = MixtralForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    window = task.windows.at(0)
    with torch.no_grad():
        expected = float(upcycle.losses(plain, window).mean())
        assert float(task._cross(window)) == pytest.approx(expected, rel=0.01)
    assert Checkpoint.open(folder).spec.moe.n == SMALL.experts
    assert TEMPLATE in (folder / "tokenizer_config.json").read_text()
    upcycle.judge(source, folder, again, small, 0)
    found = json.loads((tmp_path / "build" / "report" / "upcycle_mixed.json").read_text())
    assert found["source"] == source.sha256
    assert [sum(shares) for shares in found["layers"]["shares"]] == pytest.approx([1, 1], abs=1e-3)
    rows = {row["name"]: row["value"] for row in found["rows"]}
    assert {*rows} >= {"wiki: relative rise", "own text: relative rise"}
    dense, mixed = (rows[f"wiki: perplexity, {name}"] for name in ("dense", "mixture"))
    spans = ", ".join(f"{min(shares):.1%} to {max(shares):.1%}" for shares in found["layers"]["shares"])
    *_, last = capsys.readouterr().out.splitlines()
    models = f"dense {dense:.2f}, mixture {mixed:.2f}"
    assert last == f"held-out perplexity: {models}; shares of the experts by layer: {spans}"


def test_an_interrupted_run_ends_as_an_unbroken_one(
    source: upcycle.Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begins, updated = began(source, tmp_path), loop.update
    how = replace(settings(tmp_path / "models", 4), snapshot_minutes=0.0)

    def trained(name: str) -> dict[str, torch.Tensor]:
        task = upcycle.UpcycleTask(name, source, begins, SMALL, 0)
        loop.run(task, how, ["gate.weight"])
        return task.model.state_dict()

    def interrupted(task: loop.Task, optimizers: loop.Optimizers, step: int, *rest: float) -> dict[str, float]:
        if step == 2:
            raise KeyboardInterrupt
        return updated(task, optimizers, step, *rest)

    whole = trained("whole")
    monkeypatch.setattr(loop, "update", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trained("broken")
    monkeypatch.setattr(loop, "update", updated)
    assert all(torch.equal(weight, whole[name]) for name, weight in trained("broken").items())
    logs = [(tmp_path / "train" / name / "log.jsonl").read_text().splitlines() for name in ("whole", "broken")]
    crosses = [{r["step"]: r["heldout_cross"] for r in map(json.loads, log) if "heldout_cross" in r} for log in logs]
    assert crosses[0] == crosses[1]
    assert [*crosses[0]] == [1, 2, 3, 4]


def test_one_expert_is_the_dense_model_trained_as_long(source: upcycle.Source, tmp_path: Path) -> None:
    alone = replace(SMALL, experts=1, top_k=1, noise=0.0)
    begins = upcycle.Beginning.of(source, alone, 0, tmp_path)
    task = upcycle.UpcycleTask("alone", source, begins, alone, 0)
    window = task.windows.at(0)
    loss, _ = task.loss(0)
    loss.backward()
    with torch.no_grad():
        assert float(task._cross(window)) == pytest.approx(float(upcycle.losses(source.model, window).mean()), rel=0.01)
    assert float(task.model.model.layers[0].mlp.experts.down_proj.grad.norm()) > 0
    assert task.model.model.layers[0].mlp.gate.weight.grad.abs().sum() == pytest.approx(0, abs=1e-2)


def test_the_mixture_is_found_where_it_was_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "TRAIN_DIR", tmp_path)
    with pytest.raises(SystemExit, match="train it with: make upcycle"):
        report.model_folder(report.UPCYCLED)
    left = tmp_path / "models" / report.UPCYCLED
    left.mkdir(parents=True)
    (left / "model.safetensors").touch()
    assert report.model_folder(report.UPCYCLED) == left


def test_figures_of_a_report() -> None:
    choices = np.array([[[0, 1]], [[1, 2]], [[3, 0]], [[0, 3]]])  # two windows of two tokens, one layer
    assert upcycle.kept(choices, 2) == [0.75]
    rows = upcycle.compared(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]), "text")
    assert [row["value"] for row in rows][3:] == [0, 0]
    assert upcycle.spread(torch.arange(100), 4, 10)[:, 0].tolist() == [0, 30, 60, 90]


def test_missing_text_and_other_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "DATA_DIR", tmp_path)
    with pytest.raises(SystemExit, match=r"train\.jsonl is missing; build it with: python calib_data/wiki\.py"):
        upcycle.main([])
    monkeypatch.setattr(loop, "ROOT", tmp_path)
    file = tmp_path / "other.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.setattr(talk, "model", lambda _: file)
    with pytest.raises(SystemExit, match=r"other\.gguf is not the file that is meant; remove it"):
        upcycle.found()

    def fails(_: Path) -> Path:
        raise wheels.DataError("no wheel")

    monkeypatch.setattr(talk, "model", fails)
    with pytest.raises(SystemExit, match="error: no wheel"):
        upcycle.found()


def test_products_are_in_a_type_that_the_processor_has() -> None:
    assert COMPUTE_DTYPE in (torch.bfloat16, torch.float32)


def test_ctrl_c_ends_with_one_line(
    source: upcycle.Source, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: Path) -> upcycle.Source:
        raise KeyboardInterrupt

    monkeypatch.setattr(upcycle, "found", lambda: source.folder)
    monkeypatch.setattr(upcycle.Source, "open", interrupted)
    monkeypatch.setattr(loop, "prepare", lambda *_: None)
    assert upcycle.main([]) == 130
    assert capsys.readouterr().err == "stopped; the same command goes on from the last checkpoint\n"
