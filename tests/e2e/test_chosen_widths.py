"""Conversions that choose widths for all matrices: what is promised is the pack as it is written."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conversions import Done, settings_for
from dense_packs import widened

from moeconv.artifacts import Target
from moeconv.command.cli import _exit_code
from moeconv.command.present import conversion_table, plan_table
from moeconv.conversion import measuring
from moeconv.conversion.planning import plan
from moeconv.dense import dense_units
from moeconv.errors import SettingsError
from moeconv.measure.scoring import build_scorer, load_tokenizer
from moeconv.packing.packed import PackedModel, verify
from moeconv.report.writer import write_report
from moeconv.source.checkpoint import Checkpoint
from moeconv.writer import MATRICES_MINOR
from moert.engine.engine import Engine
from moert.models.backbone import load_backbone
from moert.pack.manifest import dense_width
from moert.pack.reader import Pack


def convert(sources: dict[str, Path], family: str, place: Path, **changes: object) -> Done:
    chosen = {"loss": 0.3, "quantizer": "channel", "bits": (2, 4, 8), "dense_bits": None, **changes}
    return Done(settings_for(sources, family, place, **chosen))


@pytest.mark.parametrize("family", ["switch", "olmoe"])
def test_the_pack_is_the_model_that_was_measured(sources: dict[str, Path], family: str, tmp_path: Path) -> None:
    done = convert(sources, family, tmp_path)
    report, settings = done.report, done.settings
    pack = Pack.open(settings.out)
    spec, dense = pack.manifest.model, pack.manifest.quantization.dense
    assert dense is not None
    assert report.dense is not None
    assert (report.dense.purpose, dict(report.dense.bits)) == ("size", dict(dense.bits))
    assert report.dense.matrices == dense.matrices
    assert pack.manifest.minor == (MATRICES_MINOR if dense.matrices else 0)
    widths = {name: dense_width(spec, dense, name) for name, tensor in spec.tensors.items() if tensor.role}
    assert {name for name, width in widths.items() if width is None} == {name for name in widths if "router" in name}
    assert min(width for width in widths.values() if width) < 16
    assert report.dense.nbytes < 0.7 * report.dense.source_nbytes
    found = verify(pack, Checkpoint.open(settings.model))
    assert found.worst is not None
    assert found.worst <= 1

    packed, material, heldout = PackedModel.open(pack), done.bench.material, report.heldout
    tokenizer = load_tokenizer(settings.out / "tokenizer.json")
    scorer = build_scorer(packed, tokenizer, material.splits.heldout, material.metric, material.extent(None))
    assert heldout is not None
    assert material.metric.value(scorer.score().scores) == pytest.approx(heldout.value, rel=1e-5)
    assert report.calibration is not None
    assert report.calibration.loss <= 0.3
    assert "dense matrices: " in conversion_table(report, "m.pack")

    probes = [line for line in done.said if line.startswith("dense sweep of ")]
    assert probes == [f"dense sweep of {4 * len(dense_units(spec))}"]
    trial = done.bench.trial
    trial.dense.choose(dict.fromkeys(dense_units(spec), 4))
    trial.assign({entry.key: tuple(entry.bits.values()) for entry in pack.manifest.experts})
    trial.dense.dense = dense
    trial.assign({})
    names = trial.checkpoint.description.parameters
    for name, weight in widened(load_backbone(pack)).items():
        if name in names:
            theirs = trial.model.get_parameter(names[name].name).detach().numpy()
            assert np.array_equal(weight, theirs), f"{name} stayed at a width that it had before"


@pytest.mark.parametrize("quantizer", ["group", "gptq"])
def test_a_pack_says_what_made_its_other_codes(sources: dict[str, Path], quantizer: str, tmp_path: Path) -> None:
    """Inputs weigh their errors where the experts' quantizer takes the products of inputs: group takes squares."""
    dense = convert(sources, "olmoe", tmp_path, quantizer=quantizer).manifest.quantization.dense
    assert dense is not None
    assert dense.quantizer == quantizer


def test_the_runtime_computes_what_transformers_computes(sources: dict[str, Path], tmp_path: Path) -> None:
    settings = convert(sources, "olmoe", tmp_path).settings
    ids = [5, 9, 14, 3, 7]
    with Engine.open(settings.out, predict="none", kernels="reference") as engine:
        engine.reserve(len(ids), 1)
        _, logits = engine.model.prefill(ids)
    with torch.inference_mode():
        expected = PackedModel.open(Pack.open(settings.out)).model(torch.tensor([ids])).logits[0, -1]
    np.testing.assert_allclose(logits, expected.numpy(), rtol=1e-2, atol=2e-3)  # keys and values are float16


def test_another_target_and_another_purpose_measure_no_part_again(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = convert(sources, "olmoe", tmp_path, out=tmp_path / "a.pack")
    with monkeypatch.context() as unloaded:
        unloaded.delattr(measuring, "LoadedModel")  # all was measured before
        again = convert(sources, "olmoe", tmp_path, out=tmp_path / "b.pack")
    assert again.swept() == 0 < first.swept()
    for name in ("manifest.json", "backbone.safetensors"):
        one, other = ((tmp_path / out / name).read_bytes() for out in ("a.pack", "b.pack"))
        assert one == other or name == "manifest.json"
    saving = convert(sources, "olmoe", tmp_path, out=tmp_path / "c.pack", purpose="memory")
    assert saving.swept() == 0
    assert saving.bench.journal.path == first.bench.journal.path
    assert saving.report.dense is not None
    assert first.report.dense is not None
    assert saving.report.dense.purpose == "memory"
    assert saving.report.dense.nbytes <= first.report.dense.nbytes
    assert saving.report.expert_bytes["pack"] >= first.report.expert_bytes["pack"]


def test_an_interrupted_sweep_goes_on(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = convert(sources, "olmoe", tmp_path / "whole")
    made: list[str] = []
    scored = measuring.Measure._scored

    def dies(self: measuring.Measure, scorer: object, what: str, **how: object) -> object:
        made.append(what)
        if sum(" at " in one and "all" not in one for one in made) > 5:
            raise KeyboardInterrupt
        return scored(self, scorer, what, **how)  # type: ignore[arg-type]

    with monkeypatch.context() as dying:
        dying.setattr(measuring.Measure, "_scored", dies)
        with pytest.raises(KeyboardInterrupt):
            convert(sources, "olmoe", tmp_path / "parts")
    before = set(made)
    made.clear()
    monkeypatch.setattr(measuring.Measure, "_scored", lambda self, scorer, what, **how: (
        made.append(what), scored(self, scorer, what, **how))[1])  # fmt: skip
    parts = convert(sources, "olmoe", tmp_path / "parts")
    again = {what for what in made if " at " in what} & before
    assert len(again) <= 1, "only what was measured as it was interrupted"
    assert parts.manifest.quantization == whole.manifest.quantization
    assert [entry.sha256 for entry in parts.manifest.experts] == [entry.sha256 for entry in whole.manifest.experts]


def test_plans_from_what_was_measured(sources: dict[str, Path], tmp_path: Path) -> None:
    done = convert(sources, "olmoe", tmp_path)
    work, units = done.bench.journal.path.parent.parent, dense_units(done.manifest.model)
    sizes = {}
    for purpose, words in (("size", "of all matrices"), ("memory", "in memory"), ("speed", "read for a token")):
        planned = plan(work, Target("loss", 0.3), "knapsack", "kl", None, purpose)
        assert list(planned.units) == [str(unit) for unit in units]
        sizes[purpose] = planned.chosen.nbytes
        text = plan_table(planned, Target("loss", 0.3), whole_curve=True)
        assert f" {words}, loss predicted" in text
        assert "of INT4" not in text
        named = [name for line in text.splitlines() if " bits: " in line for name in line.split(": ")[1].split(", ")]
        assert sorted(named) == sorted(map(str, units))
    assert sizes["speed"] < sizes["size"]
    assert sizes["memory"] < sizes["size"]
    for target, allocation in ((Target("bits", 4.5), "knapsack"), (Target("loss", 0.3), "greedy")):
        experts = plan(work, target, allocation, "kl", None)
        assert experts.units == {}
        assert experts.expert_bytes == experts.chosen.nbytes
        with pytest.raises(SettingsError, match="--for memory has no effect"):
            plan(work, target, allocation, "kl", None, "memory")
    with pytest.raises(SettingsError, match="--for disk: expected one of size, memory, speed"):
        plan(work, Target("loss", 0.3), "knapsack", "kl", None, "disk")


def test_where_no_loss_decides_other_matrices_have_eight_bits(sources: dict[str, Path], tmp_path: Path) -> None:
    done = Done(
        settings_for(sources, "olmoe", tmp_path, target=Target("bits", 5.0), quantizer="channel", bits=(2, 4, 8),
                     dense_bits=None)
    )  # fmt: skip
    dense = done.manifest.quantization.dense
    assert dense is not None
    assert (dict(dense.bits), dense.matrices) == ({"attention": 8, "head": 8, "embed": 8}, None)
    assert done.report.dense is not None
    assert done.report.dense.purpose is None
    assert done.report.dense.alone is not None


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--for", "disk"], "--for disk: expected one of size, memory, speed"),
        (["--for", "memory", "--dense-bits", "8"], "--for memory has no effect with --dense-bits: leave it out"),
        (["--for", "speed", "--size", "1MB"], "--for speed has no effect without --loss: leave it out"),
        (["--for", "speed", "--tune", "allocation=greedy"], "--for speed has no effect with --tune allocation"),
        (["--dense-bits", "sauce"], "--dense-bits 'sauce': expected a width such as 8, or attention=4,head=8"),
    ],
)
def test_wrong_flags(
    sources: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], says: str
) -> None:
    out = tmp_path / "m.pack"
    command = ["quantize", str(sources["olmoe"]), "--calib", str(sources["text"]), "--out", str(out), *more]
    assert _exit_code(command) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert says in printed.err
    assert printed.err.count("\n") == 1
    assert not out.exists()


def test_a_purpose_without_text_is_refused(sources: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit_code(["quantize", str(sources["olmoe"]), "--bits", "4", "--for", "memory"]) == 2
    assert "--for has no effect without --calib: leave it out" in capsys.readouterr().err


def test_the_report_lists_every_matrix(sources: dict[str, Path], tmp_path: Path) -> None:
    done = convert(sources, "olmoe", tmp_path, loss=0.1)
    pack = Pack.open(done.settings.out)
    write_report(pack, tmp_path / "page")
    page = (tmp_path / "page" / "index.html").read_text()
    dense = pack.manifest.quantization.dense
    assert dense is not None
    for name in dense.matrices or dense.bits:
        assert f"<td>{name}</td>" in page
    assert json.loads((done.settings.out / "report.json").read_text())["dense"]["purpose"] == "size"
