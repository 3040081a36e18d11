"""A model whose layers have one expert each, from a checkpoint to answers: widths by layer, and everything that counts,
chooses or foresees experts says something true or one line why not."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conversions import Done, settings_for
from tiny import VOCAB, tiny_of, transformers_model

from moeconv.artifacts import Target
from moeconv.conversion.additions import HashAsked, profile_paths, train_hash
from moeconv.conversion.planning import plan
from moeconv.errors import SettingsError
from moeconv.packing.packed import PackedModel, verify
from moeconv.progress import unseen
from moeconv.report.writer import write_report
from moeconv.source.checkpoint import Checkpoint
from moert.command.description import description_lines
from moert.engine.engine import Engine
from moert.engine.generation import GenerationSettings
from moert.experts.names import EVICTIONS
from moert.kernels import REFERENCE
from moert.kernels.backend import opaque
from moert.pack.codec import WIDTHS
from moert.pack.paths import PATHS, TransitionTable
from moert.pack.reader import Pack
from tests.e2e.test_by_layers import tight
from tests.kept_keys import WideKeys
from tests.parity.packs import open_model, reference_greedy

LAYERS, LOSS = 5, 0.005
SETTINGS = GenerationSettings(max_new_tokens=10, ignore_eos=True)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_of("opt")(tmp_path_factory.mktemp("opt"), seed=7, num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def done(source: Path, sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Done:
    root = tmp_path_factory.mktemp("converted")
    return Done(settings_for({**sources, "opt": source}, "opt", root, loss=LOSS))


def prompts() -> list[list[int]]:
    chance = random.Random(3)
    return [[chance.randrange(2, VOCAB) for _ in range(length)] for length in (1, 7, 40)]


def test_each_layer_gets_a_width_and_the_loss_is_kept(done: Done, source: Path) -> None:
    pack = Pack.open(done.settings.out)
    assert [str(entry.key) for entry in pack.manifest.experts] == [f"D{at:02}/E000" for at in range(LAYERS)]
    assert done.report.calibration is not None
    assert done.report.calibration.loss <= LOSS
    assert done.swept() >= LAYERS
    assert all(entry.importance is not None for entry in pack.manifest.experts)
    sizes = {point.nbytes for point in plan(done.settings.work, Target("bits", 6.0), "knapsack", "kl", None).points}
    assert len(sizes) > len(WIDTHS), "no layer has its own width"
    assert verify(pack, Checkpoint.open(source)).worst is not None
    with torch.inference_mode():
        expected = PackedModel.open(pack).model(torch.tensor([prompts()[2]])).logits[0].numpy()
    found = open_model(pack, opaque(WideKeys()))[0].forward_all(prompts()[2])
    assert np.abs(found - expected).max() / np.abs(expected).max() < 1e-4


def test_another_plan_of_the_same_measurements(done: Done) -> None:
    found = plan(done.settings.work, Target("bits", 6.0), "knapsack", "kl", None)
    assert 0 < found.chosen.nbytes <= 6.0 * found.weights / 8


@pytest.mark.parametrize(
    "changes",
    [
        {"bits": (4,), "calib": None},
        {"bits": (2, 4), "signal": "fisher", "loss": 0.5},
        {"bits": (2, 4), "per_projection": True, "loss": 0.5},
        {"bits": (4, 8), "loss": 0.5, "dense_bits": 4},
        {"bits": (2, 4), "target": Target("bits", 5.0), "layout": "layer"},
    ],
    ids=["without text", "gradients", "projections", "other matrices at 4 bits", "a file for each layer"],
)
def test_other_ways_to_convert(source: Path, sources: dict[str, Path], changes: dict[str, Any], tmp_path: Path) -> None:
    out = Done(settings_for({**sources, "opt": source}, "opt", tmp_path, **changes)).settings.out
    pack = Pack.open(out)
    assert verify(pack, Checkpoint.open(source)).worst is not None
    with Engine.open(out) as engine:
        assert len(engine.generate(prompts()[1], SETTINGS).result.tokens) == 10


def test_it_is_converted_layer_by_layer(
    source: Path, sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, changes = {**sources, "opt": source}, {"loss": 0.3, "samples": 8, "sweep_samples": 4, "heldout_samples": 6}
    whole = Done(settings_for(both, "opt", tmp_path, **changes, bits=(3,), out=tmp_path / "a.pack"))
    layered = Done(
        settings_for(
            both, "opt", tmp_path, **changes, bits=(3,), memory_bytes=tight(monkeypatch), work=tmp_path / "other"
        )
    )
    assert any("coding at 3 bits" in line for line in layered.said)
    assert layered.report.calibration is not None
    assert whole.report.calibration is not None
    assert layered.report.calibration.value == pytest.approx(whole.report.calibration.value, rel=2e-3)


def test_paths_report_and_info(done: Done, tmp_path: Path) -> None:
    pack = Pack.open(done.settings.out)
    _, nbytes = profile_paths(pack, calib=None, heldout=None, seed=None, samples=None, context=None, say=lambda _: None)
    pack = Pack.open(done.settings.out)
    table = TransitionTable.from_bytes(pack.read_file(PATHS))
    assert nbytes > 0
    assert table.num_experts == 1
    for at, paths in table.layers.items():
        assert paths.frequency.tolist() == [table.layers[pack.manifest.model.moe_layers()[0]].frequency[0]], at
    assert write_report(pack, tmp_path / "report")
    said = description_lines(pack)
    assert any("1 a layer" in line for line in said)
    assert "hash function    no: every token passes all experts of a layer" in said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"resident": (0.5,)}, "--resident would have no choice"),
        ({"route": "hash"}, "--tune route=hash would have no choice"),
    ],
)
def test_what_would_choose_experts_is_refused(
    source: Path, sources: dict[str, Path], changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match=f"{said}, as every token passes all experts of a layer: leave it out"):
        Done(settings_for({**sources, "opt": source}, "opt", tmp_path, loss=0.5, **changes))
    assert not (tmp_path / "m.pack").exists()


def test_there_is_nothing_to_foresee(done: Done) -> None:
    with pytest.raises(SettingsError, match="has nothing to foresee: every token passes all experts of a layer"):
        train_hash(Pack.open(done.settings.out), HashAsked(), lambda _: None, unseen)


def test_no_policy_budget_or_batch_changes_an_answer(done: Done) -> None:
    with Engine.open(done.settings.out) as engine:
        expected = [engine.generate(ids, SETTINGS).result.tokens for ids in prompts()]
        assert [answer.result.tokens for answer in engine.generate_many(prompts(), SETTINGS)] == expected
        least = max(entry.file_bytes for entry in engine.pack.manifest.experts)
    for number, eviction in enumerate(EVICTIONS):
        changes = {"cache": least * (1 + number % 3), "eviction": eviction}
        with Engine.open(done.settings.out, predict=("gate", "none")[number % 2], **changes) as engine:
            assert [engine.generate(ids, SETTINGS).result.tokens for ids in prompts()] == expected, changes


def test_a_pack_of_16_bits_writes_what_transformers_writes(
    source: Path, sources: dict[str, Path], tmp_path: Path
) -> None:
    out = Done(settings_for({**sources, "opt": source}, "opt", tmp_path, calib=None, bits=(16,))).settings.out
    expected = reference_greedy(transformers_model(source), prompts(), 10)
    with Engine.open(out, kernels=REFERENCE) as engine:
        found = [answer.result.tokens for answer in engine.generate_many(prompts(), max_new_tokens=10)]
    assert found == expected
