"""Conversions whose experts lie in blocks of neurons: the loss is that of what the pack gives back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conversions import Done, settings_for
from tiny import tiny_olmoe

import moeconv
from moeconv.artifacts import Target
from moeconv.command.cli import _exit_code
from moeconv.conversion import conversion, measuring, room
from moeconv.conversion.additions import profile_paths
from moeconv.conversion.planning import plan
from moeconv.conversion.taught import guessed_block
from moeconv.errors import ConversionError, SettingsError
from moeconv.measure.codes import CodingWorker
from moeconv.measure.scoring import build_scorer, load_tokenizer
from moeconv.order import load_order
from moeconv.packing.packed import PackedModel, verify
from moeconv.source.checkpoint import Checkpoint
from moeconv.sweep.cluster import runner_for
from moert.command.description import describe, description_lines
from moert.pack.layout import Neurons
from moert.pack.learnt import ORDER
from moert.pack.manifest import Manifest
from moert.pack.reader import Pack

SMALL: dict[str, Any] = {"samples": 8, "sweep_samples": 4, "heldout_samples": 6}


@pytest.fixture(scope="module")
def firing(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same families, with gated experts that have ReLU."""
    return {**sources, "olmoe": tiny_olmoe(tmp_path_factory.mktemp("relu") / "olmoe", hidden_act="relu")}


def widths_of(manifest: Manifest) -> list[Any]:
    return [(entry.key, dict(entry.bits), entry.tensor_bytes) for entry in manifest.experts]


@pytest.mark.parametrize("quantizer", ["gptq", "group", "channel"])
@pytest.mark.parametrize("family", ["switch", "olmoe"])
def test_the_pack_is_the_model_that_was_measured(
    firing: dict[str, Path], tmp_path: Path, family: str, quantizer: str
) -> None:
    settings = settings_for(firing, family, tmp_path, loss=0.3, quantizer=quantizer, layout="columns")
    done = Done(settings)
    pack, report = Pack.open(settings.out), done.report
    assert pack.manifest.quantization.neurons == Neurons(512, bundled=False, together=True)
    assert report.heldout is not None
    tokenizer, material = load_tokenizer(settings.out / "tokenizer.json"), done.bench.material
    packed = PackedModel.open(pack)
    scorer = build_scorer(packed, tokenizer, material.splits.heldout, material.metric, material.extent(None))
    assert material.metric.value(scorer.score().scores) == pytest.approx(report.heldout.value, rel=1e-5)
    found = verify(pack, Checkpoint.open(settings.model))
    assert found.worst is not None
    assert found.worst <= 1
    assert report.expert_bytes["pack"] == pack.manifest.expert_tensor_bytes()
    assert 8 * report.expert_bytes["pack"] == pytest.approx(
        report.effective_bits * len(pack.manifest.experts) * pack.manifest.model.weights_per_expert()
    )
    planned = plan(settings.work, Target("loss", 0.2), "knapsack", "kl", None)
    assert planned.chosen.nbytes <= report.expert_bytes["pack"]
    points = {point.nbytes for point in planned.points}
    assert report.expert_bytes["pack"] in points
    found_paths, _ = profile_paths(
        pack, calib=None, heldout=None, seed=None, samples=8, context=None, say=lambda line: None
    )
    assert found_paths.tokens > 0


def test_measurements_are_those_of_such_codes(
    firing: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another order of the same codes measures nothing; codes along the inputs are measured anew."""

    def convert(layout: str) -> Done:
        settings = settings_for(firing, "switch", tmp_path, loss=0.3, layout=layout, out=tmp_path / f"{layout}.pack")
        return Done(settings)

    columns = convert("columns")
    folders = set((tmp_path / "work").iterdir())
    with monkeypatch.context() as patched:
        patched.setattr(measuring, "LoadedModel", None)
        again = convert("neuron")
    assert set((tmp_path / "work").iterdir()) == folders
    assert again.report.heldout == columns.report.heldout
    assert widths_of(again.manifest) == widths_of(columns.manifest)
    assert again.manifest.quantization.neurons == Neurons(512, bundled=True)
    plain = convert("expert")
    assert len(set((tmp_path / "work").iterdir()) - folders) >= 1
    assert plain.manifest.quantization.neurons is None
    assert plain.manifest.effective_bits() != columns.manifest.effective_bits()
    assert convert("auto").manifest.experts == plain.manifest.experts, "these experts are small"


def tight(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(room, "LEAST_TOKENS", 32)
    return room.PROCESS_BYTES + (2 << 20)


@pytest.mark.parametrize("quantizer", ["group", "gptq"])
def test_layer_by_layer_it_is_the_same_pack(
    firing: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantizer: str
) -> None:
    """In memory, layer by layer, and coded by others."""
    changes: dict[str, Any] = {**SMALL, "loss": 0.3, "bits": (3,), "quantizer": quantizer, "layout": "neuron"}
    whole = Done(settings_for(firing, "olmoe", tmp_path, **changes, out=tmp_path / "a.pack"))
    changes["memory_bytes"] = tight(monkeypatch)
    layered = Done(settings_for(firing, "olmoe", tmp_path, **changes, out=tmp_path / "b.pack", work=tmp_path / "w2"))
    assert any("coding at 3 bits" in line for line in layered.said)
    for split in ("calibration", "heldout"):
        mine, theirs = getattr(layered.report, split), getattr(whole.report, split)
        assert mine.value == pytest.approx(theirs.value, rel=2e-3)
    worst = verify(Pack.open(layered.settings.out), Checkpoint.open(layered.settings.model)).worst
    assert worst is not None
    assert worst <= 1

    def local(cluster: str, make: Any, reads: list[Path]) -> Any:
        assert make is CodingWorker
        return runner_for(None, make, reads)

    monkeypatch.setattr(measuring, "runner_for", local)
    shared = Done(settings_for(firing, "olmoe", tmp_path, **changes, cluster="here:1", work=tmp_path / "w3"))
    assert shared.manifest.experts == layered.manifest.experts
    orders = [load_order(Pack.open(done.settings.out)) for done in (whole, layered, shared)]
    first, second, third = (np.stack([*order.layers.values()]) for order in orders if order is not None)
    assert np.array_equal(second, third)
    assert (first == second).mean() > 0.95, "where the order of sums makes none of them fire once more"
    assert "which neurons fire of 2" in layered.said


def test_gradients_rank_such_experts_too(firing: dict[str, Path], tmp_path: Path) -> None:
    changes: dict[str, Any] = {**SMALL, "loss": 0.03, "signal": "fisher", "layout": "columns"}
    done = Done(settings_for(firing, "switch", tmp_path, **changes))
    assert done.report.signal == "fisher"
    assert done.report.heldout is not None
    assert done.manifest.quantization.neurons is not None


def test_neurons_lie_by_how_they_fire(firing: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted once for a work directory, in the checkpoint's order, and not at all for packs by expert."""
    changes: dict[str, Any] = {**SMALL, "loss": 0.3, "bits": (4,), "quantizer": "group", "layout": "columns"}
    settings = settings_for(firing, "switch", tmp_path, **changes)

    def stops(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(conversion, "deliver", stops)
        with pytest.raises(KeyboardInterrupt):
            Done(settings)
    [file] = settings.work.glob("*/order-*.safetensors")
    with monkeypatch.context() as patched:
        patched.setattr(measuring, "counted", stops)
        done = Done(settings)
    pack, source = Pack.open(settings.out), Checkpoint.open(settings.model)
    order = load_order(pack)
    assert order is not None
    assert order.to_bytes() == file.read_bytes() == (settings.out / ORDER).read_bytes()
    block = guessed_block(source.spec, done.bench.coding.quantizer.group_size, Neurons(512, bundled=False))
    found = done.bench.ordered_neurons(block)
    assert block > 1
    assert found.order.to_bytes() == order.to_bytes()
    assert found.shares
    worst = verify(pack, source).worst
    assert worst is not None
    assert worst <= 1
    file.write_bytes(b"nonsense")
    with pytest.raises(ConversionError, match="was changed since it was made: delete it"):
        Done(settings)
    file.unlink()
    again = Done(settings)
    assert any(line.startswith("the most frequent 10% of an expert's neurons do") for line in again.said)
    assert any(f"blocks of {block} in " in line for line in again.said)
    assert again.manifest.experts == done.manifest.experts
    with monkeypatch.context() as patched:
        patched.setattr(measuring, "counted", stops)
        plain = Done(settings_for(firing, "switch", tmp_path, **{**changes, "layout": "expert"}))
    assert ORDER not in plain.manifest.files


@pytest.mark.parametrize("target", [Target("bits", 4.0), Target("loss", 0.05)])
def test_without_text(firing: dict[str, Path], tmp_path: Path, target: Target) -> None:
    bits = {"bits": (4,)} if target.kind == "loss" else {"target": target}
    done = Done(settings_for(firing, "switch", tmp_path, calib=None, layout="columns", **bits))
    assert done.manifest.quantization.neurons is not None
    assert load_order(Pack.open(done.settings.out)) is None
    assert "note: neurons lie as in the checkpoint: without text none is known to fire often" in done.said
    if target.kind == "bits":
        assert done.manifest.effective_bits() <= target.value
    worst = verify(Pack.open(done.settings.out), Checkpoint.open(done.settings.model)).worst
    assert worst is not None
    assert worst <= 1


def test_a_model_without_zeros_is_refused_in_one_line(
    sources: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = str(sources["olmoe"]), tmp_path / "m.pack"
    assert _exit_code(["quantize", model, "--bits", "4", "--layout", "columns", "--out", str(out)]) == 2
    err = capsys.readouterr().err
    assert err == (
        "moeconv: --layout columns is for experts whose neurons are often exactly zero (relu, relu2), and this model's "
        "activation is silu: leave it out\n"
    )
    with pytest.raises(SettingsError, match="layout neuron is for experts"):
        moeconv.quantize(model, out, bits="4", layout="neuron")
    assert not any(tmp_path.iterdir())


def test_recipes_and_python_say_it_too(firing: dict[str, Path], tmp_path: Path) -> None:
    moeconv.quantize(firing["switch"], tmp_path / "a.pack", bits="4", layout="neuron")
    (tmp_path / "b.toml").write_text(
        f'model = "{firing["switch"]}"\nbits = [4]\nlayout = "neuron"\nprofile_paths = false\n'
    )
    assert _exit_code(["recipe", "run", str(tmp_path / "b.toml"), "--out", str(tmp_path)]) == 0
    packs = [Pack.open(tmp_path / name).manifest for name in ("a.pack", "b.pack")]
    assert packs[0].experts == packs[1].experts
    assert packs[0].quantization.neurons == Neurons(512, bundled=True)


def test_info_says_how_experts_lie(firing: dict[str, Path], tmp_path: Path) -> None:
    settings = settings_for(firing, "switch", tmp_path, calib=None, layout="columns", bits=(4,))
    Done(settings)
    pack = Pack.open(settings.out)
    facts = describe(pack)
    [lines] = [line for line in description_lines(pack) if line.startswith("neurons")]
    placed = pack.neurons(pack.manifest.experts[0].key)
    assert facts["neurons"] == {
        "piece_bytes": 512, "bundled": False, "together": True, "ordered": False, "blocks": placed.n_blocks,
        "rows_bytes": placed.rows_bytes, "columns_bytes": placed.columns_bytes,
    }  # fmt: skip
    assert f"{placed.n_blocks} blocks an expert: " in lines
    assert "apart from the rows" in lines
    json.dumps(facts)
