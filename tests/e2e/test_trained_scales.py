"""Conversions whose scales and norms are trained: the pack has the numbers that were measured."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import tiny_of

from moeconv.artifacts import Target
from moeconv.command.present import conversion_table
from moeconv.conversion import scales
from moeconv.conversion.planning import plan
from moeconv.errors import VerifyFailed
from moeconv.packing.packed import PackedModel, verify
from moeconv.quantizers import QUANTIZERS
from moeconv.quantizers.trained import Trained, norms_of
from moeconv.report.writer import write_report
from moeconv.source.archs.weights import parameter
from moeconv.source.checkpoint import Checkpoint
from moert.pack.codec import QuantizedMatrix, TrellisMatrix, dequantize, dequantize_trellis
from moert.pack.model_spec import ExpertKey
from moert.pack.reader import Pack
from tests.e2e.conversions import Done, settings_for, words

SMALL: dict[str, Any] = {"samples": 64, "sweep_samples": 4, "heldout_samples": 6, "target": Target("bits", 2.3)}


@pytest.fixture(scope="module")
def sources(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """With more text, so that learnt numbers hold for other text of the kind."""
    root, rng = tmp_path_factory.mktemp("more"), random.Random(1)
    pairs = [{"input": words(rng, 3) + str(i % 10), "target": words(rng, 2)} for i in range(2400)]
    (root / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    (root / "text.jsonl").write_text("".join(json.dumps({"text": words(rng, 18)}) + "\n" for _ in range(400)))
    return {**sources, "pairs": root / "pairs.jsonl", "text": root / "text.jsonl"}


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """A little text is enough, and few steps, whatever they cost."""
    monkeypatch.setattr(scales, "LEAST_TOKENS", 1)
    monkeypatch.setattr(scales, "STEPS", 12)
    monkeypatch.setattr(scales, "JUDGED", 1000)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    ("family", "quantizer"), [("olmoe", "trellis"), ("switch", "trellis"), ("olmoe", "gptq"), ("olmoe", "channel")]
)
def test_the_pack_has_the_numbers_that_were_measured(
    sources: dict[str, Path], tmp_path: Path, family: str, quantizer: str
) -> None:
    target = Target("bits", {"olmoe": 2.3, "switch": 1.6}[family] if quantizer == "trellis" else 3.5)
    done = Done(settings_for(sources, family, tmp_path, quantizer=quantizer, **{**SMALL, "target": target}))
    found, source, pack = done.report.scales, Checkpoint.open(sources[family]), Pack.open(done.settings.out)
    assert found is not None
    assert found.after < found.before
    assert (found.norms, found.matrices > 0) == (len(norms_of(source.description)), True)
    bench, packed = done.bench, PackedModel.open(pack)
    (file,) = bench.journal.path.parent.glob("scales-*.safetensors")
    bench.coding.dense.trained = bench.coder.trained = Trained.from_bytes(file.read_bytes())
    bench.trial.assign({entry.key: tuple(entry.bits.values()) for entry in done.manifest.experts})
    description = source.description
    for name in source.spec.tensors:
        if name in description.parameters:
            mine, theirs = (parameter(each.model, description, name) for each in (bench.trial, packed))
            assert torch.equal(mine, theirs)
    for key in source.spec.expert_keys():
        for mine, theirs in zip(bench.trial.calls.weights(key), packed.calls.weights(key), strict=True):
            assert torch.equal(mine, theirs)
    norms = norms_of(source.description)
    changed = [not torch.equal(parameter(packed.model, description, name), source.backbone_tensor(
        name, source.spec.tensors[name].shape).float()) for name in norms]  # fmt: skip
    assert any(changed)
    worst = verify(pack, source, trained=True).worst
    assert worst is not None
    assert worst < 1
    with pytest.raises(VerifyFailed, match=r"norm\.weight differs"):
        verify(pack, source)
    assert "norms were trained" in conversion_table(done.report, "m.pack")
    write_report(pack, tmp_path / "page")
    assert "norms were trained on the text" in (tmp_path / "page" / "index.html").read_text()


@pytest.mark.usefixtures("eager")
def test_it_is_trained_once_and_planned_from(sources: dict[str, Path], tmp_path: Path) -> None:
    changes = {**SMALL, "target": Target("loss", 0.05)}
    first, again = (Done(settings_for(sources, "olmoe", tmp_path, quantizer="trellis", **changes)) for _ in range(2))
    started = f"training scales of {scales.STEPS}"
    assert (first.said.count(started), again.said.count(started)) == (1, 0)
    assert first.manifest.experts == again.manifest.experts
    planned = plan(tmp_path / "work", Target("loss", 0.05), "knapsack", "kl", None)
    measured = [point for point in planned.points if point.loss is not None]
    assert any(point.loss == pytest.approx(first.report.calibration.loss) for point in measured)


@pytest.mark.usefixtures("eager")
def test_an_interrupted_training_goes_on_to_the_same_numbers(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Done(settings_for(sources, "olmoe", tmp_path / "whole", quantizer="trellis", **SMALL))
    settings = settings_for(sources, "olmoe", tmp_path / "cut", quantizer="trellis", **SMALL)
    steps: list[int] = []

    class Ended(scales._Course):
        def step(self) -> None:
            super().step()
            steps.append(self.schedule.last_epoch)
            if len(steps) == 5:
                raise KeyboardInterrupt

    monkeypatch.setattr(scales, "KEPT_SECONDS", 0.0)
    monkeypatch.setattr(scales, "_Course", Ended)
    with pytest.raises(KeyboardInterrupt):
        Done(settings)
    (kept,) = (tmp_path / "cut").rglob("scales-*.part")
    again = Done(settings)
    assert steps == list(range(1, scales.STEPS + 1))
    assert not kept.exists()
    found = [next((tmp_path / name).rglob("scales-*.safetensors")).read_bytes() for name in ("whole", "cut")]
    assert found[0] == found[1]
    assert again.manifest.experts == whole.manifest.experts


def test_little_text_and_fitted_scales_train_nothing(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    little = Done(settings_for(sources, "olmoe", tmp_path, quantizer="trellis", **SMALL))
    monkeypatch.setattr(scales, "LEAST_TOKENS", 1)
    changes = {**SMALL, "out": tmp_path / "b", "work": tmp_path / "fitted", "scales": "fitted"}
    fitted = Done(settings_for(sources, "olmoe", tmp_path, quantizer="trellis", **changes))
    assert little.report.scales is fitted.report.scales is None
    reasons = [line for each in (little, fitted) for line in each.said if line.startswith("scales stay as fitted: ")]
    assert [line.split(": ")[1].split()[0] for line in reasons] == ["they", "--tune"]
    assert little.manifest.experts == fitted.manifest.experts


@pytest.mark.usefixtures("eager")
def test_what_does_not_help_is_left(sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scales, "RATE", 3.0)
    done = Done(settings_for(sources, "olmoe", tmp_path, quantizer="trellis", **SMALL))
    assert done.report.scales is None
    assert any("did not help" in line for line in done.said)
    verify(Pack.open(done.settings.out), Checkpoint.open(sources["olmoe"]))
    planned = plan(tmp_path / "work", Target("bits", 2.3), "knapsack", "kl", None)
    assert done.report.calibration is not None
    assert planned.chosen.loss == pytest.approx(done.report.calibration.loss)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("family", ["llama4_text", "gemma4_text", "gemma3_text", "longcat_flash"])
def test_norms_that_no_checkpoint_has_are_left(sources: dict[str, Path], tmp_path: Path, family: str) -> None:
    there = {**sources, family: tiny_of(family)(tmp_path / family)}
    done = Done(settings_for(there, family, tmp_path, quantizer="trellis", **{**SMALL, "target": Target("bits", 3)}))
    source = Checkpoint.open(there[family])
    verify(Pack.open(done.settings.out), source, trained=done.report.scales is not None)
    assert any(line.startswith("the same widths with trained scales") for line in done.said)


@pytest.mark.parametrize("quantizer", ["trellis", "channel"])
def test_gains_are_factors_of_rows(quantizer: str) -> None:
    chance = np.random.default_rng(0)
    weights, gain = chance.standard_normal((1, 24, 32), np.float32), chance.uniform(0.6, 1.7, 24).astype(np.float32)
    (matrix,) = QUANTIZERS[quantizer](0).quantize(weights, 2, None)
    key = ExpertKey("decoder", 1, 3)
    trained = Trained({"decoder.norm.weight": torch.ones(32).bfloat16()}, {(key, "up", 2): gain})
    again = Trained.from_bytes(trained.to_bytes())
    assert again.digest == trained.digest
    scaled = again.coded(key, "up", 2, matrix)
    assert again.coded(key, "up", 3, matrix) is matrix is again.coded(key, "gate", 2, matrix)
    back = {QuantizedMatrix: dequantize, TrellisMatrix: dequantize_trellis}[type(matrix)]
    assert np.allclose(back(scaled), back(matrix) * gain[:, None], rtol=2e-3, atol=2e-3)  # type: ignore[arg-type]
