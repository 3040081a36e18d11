"""Conversions whose dense matrices get widths too: their loss is in every figure, and reruns tell widths apart."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conversions import Done, settings_for
from dense_packs import widened

from moeconv.artifacts import to_json, uniform
from moeconv.command.cli import _exit_code
from moeconv.conversion import measuring
from moeconv.conversion.additions import profile_paths
from moeconv.errors import SettingsError, TargetMissed
from moeconv.measure.scoring import build_scorer, load_tokenizer
from moeconv.packing.packed import PackedModel, verify
from moeconv.promise.judging import estimate
from moeconv.quantizers.coder import ORIGINAL
from moeconv.report.writer import read_report
from moeconv.source.checkpoint import Checkpoint
from moert.command.description import describe, description_lines
from moert.engine.engine import Engine
from moert.models.backbone import load_backbone
from moert.pack.reader import Pack

BITS = {"switch": {"attention": 4, "head": 8}, "olmoe": 8}
ROLES = {"switch": {"attention": 4, "head": 8}, "olmoe": dict.fromkeys(("attention", "router", "head", "embed"), 8)}


@pytest.mark.parametrize("family", BITS)
def test_the_pack_is_the_model_that_was_measured(sources: dict[str, Path], family: str, tmp_path: Path) -> None:
    done = Done(settings_for(sources, family, tmp_path, loss=0.3, quantizer="channel", dense_bits=BITS[family]))
    report, trial, settings = done.report, done.bench.trial, done.settings
    assert report.dense is not None
    assert (dict(report.dense.bits), report.dense.quantizer, report.dense.group_size) == (ROLES[family], "group", 64)
    pack = Pack.open(settings.out)
    assert pack.manifest.quantization.dense is not None
    assert pack.manifest.quantization.dense.bits == ROLES[family]
    told = to_json(report)
    assert [told.pop(name) for name in ("residences", "route", "neurons", "scales")] == [[], None, None, None]
    assert json.loads((settings.out / "report.json").read_text()) == told
    assert read_report(pack).dense == report.dense
    found = verify(pack, Checkpoint.open(settings.model))
    assert found.worst is not None
    assert found.worst <= 1

    trial.assign({entry.key: tuple(entry.bits.values()) for entry in pack.manifest.experts})
    packed, names = PackedModel.open(pack), trial.checkpoint.description.parameters
    buffers, made = dict(trial.model.named_buffers()), {"rope.0.frequencies": "model.rotary_emb.inv_freq"}
    for name, weight in widened(load_backbone(pack)).items():
        theirs = buffers[made[name]] if name in made else trial.model.get_parameter(names[name].name)
        assert np.array_equal(weight, theirs.detach().numpy()), name
    for name, weight in trial.model.named_parameters():
        assert torch.equal(weight, packed.model.get_parameter(name)), name

    material, heldout = done.bench.material, report.heldout
    tokenizer = load_tokenizer(settings.out / "tokenizer.json")
    scorer = build_scorer(packed, tokenizer, material.splits.heldout, material.metric, material.extent(None))
    assert heldout is not None
    assert material.metric.value(scorer.score().scores) == pytest.approx(heldout.value, rel=1e-5)

    judge = done.judge
    alone = judge.measure(uniform(trial.spec, ORIGINAL), "dense matrices alone")
    assert report.dense.alone == estimate(judge.measure, alone, judge.used.acceptance, settings.seed)
    assert report.dense.alone.loss != 0
    plain = Done(settings_for(sources, family, tmp_path, loss=0.3, quantizer="channel", out=tmp_path / "plain.pack"))
    assert plain.report.dense is None
    assert "dense" not in json.loads((tmp_path / "plain.pack/report.json").read_text())
    assert plain.report.heldout is not None
    assert plain.report.heldout.reference == heldout.reference, "the reference is the original model"
    assert json.loads((tmp_path / "plain.pack/manifest.json").read_text())["quantization"]["dense"] is None
    sizes = [(tmp_path / f"{name}.pack/backbone.safetensors").stat().st_size for name in ("m", "plain")]
    assert sizes[0] < 0.9 * sizes[1]


def test_the_runtime_reads_such_a_pack(sources: dict[str, Path], tmp_path: Path) -> None:
    settings = settings_for(sources, "olmoe", tmp_path, loss=0.3, quantizer="channel", bits=(4, 8), dense_bits=4)
    Done(settings)
    ids = [5, 9, 14, 3, 7]
    with Engine.open(settings.out, predict="none") as engine:
        engine.reserve(len(ids), 1)
        _, logits = engine.model.prefill(ids)
    with torch.inference_mode():
        expected = PackedModel.open(Pack.open(settings.out)).model(torch.tensor([ids])).logits[0, -1]
    assert np.corrcoef(logits, expected.numpy())[0, 1] > 0.99, "kernels may round activations"


def test_tools_understand_such_a_pack(sources: dict[str, Path], tmp_path: Path) -> None:
    bits = {"attention": 4, "head": 16}
    settings = settings_for(sources, "switch", tmp_path, loss=0.3, quantizer="channel", bits=(4, 8), dense_bits=bits)
    Done(settings)
    pack = Pack.open(settings.out)
    facts = describe(pack)
    assert facts["dense"] == {
        "quantizer": "group",
        "group_size": 64,
        "bits": bits,
        "powers": None,
        "matrices": None,
        "trellis": (),
    }
    assert facts["bytes"]["backbone"] == (settings.out / "backbone.safetensors").stat().st_size
    lines = [line for line in description_lines(pack) if line.startswith("dense matrices")]
    assert lines == ["dense matrices   attention: 4 bits, head: 16 bits; quantizer group, groups of 64"]
    found, _ = profile_paths(pack, calib=None, heldout=None, seed=None, samples=8, context=None, say=lambda line: None)
    assert found.tokens > 0


def test_a_rerun_measures_nothing_and_other_widths_measure_anew(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(out: str, dense_bits: object) -> Done:
        return Done(settings_for(sources, "olmoe", tmp_path, loss=0.3, quantizer="channel", dense_bits=dense_bits,
                                 out=tmp_path / out))  # fmt: skip

    first = convert("a.pack", {"head": 8, "attention": 8})
    with monkeypatch.context() as unloaded:
        unloaded.delattr(measuring, "LoadedModel")  # all was measured before
        again = convert("b.pack", {"attention": 8, "head": 8})
    assert again.swept() == 0 < first.swept()
    for name in ("manifest.json", "backbone.safetensors"):
        one, other = ((tmp_path / out / name).read_bytes() for out in ("a.pack", "b.pack"))
        assert one == other or name == "manifest.json"
    other = convert("c.pack", {"attention": 8, "head": 4})
    assert other.swept() == first.swept()
    plain = convert("d.pack", "source")
    assert plain.swept() == first.swept()
    paths = {done.bench.journal.path for done in (first, again, other, plain)}
    assert len(paths) == 3
    assert first.report.dense is not None
    assert other.report.dense is not None
    assert first.report.dense.alone != other.report.dense.alone


def test_inputs_of_experts_are_those_behind_the_stored_dense_matrices(sources: dict[str, Path], tmp_path: Path) -> None:
    """A quantizer that weighs errors by them gives other codes."""
    packs = []
    for name, bits in (("plain", "source"), ("dense", 2)):
        settings = settings_for(sources, "olmoe", tmp_path, quantizer="group", bits=(3,), loss=0.9, dense_bits=bits,
                                out=tmp_path / name)  # fmt: skip
        Done(settings)
        packs.append(Pack.open(settings.out))
    assert [entry.bits for entry in packs[0].manifest.experts] == [entry.bits for entry in packs[1].manifest.experts]
    assert any(
        one.sha256 != other.sha256
        for one, other in zip(packs[0].manifest.experts, packs[1].manifest.experts, strict=True)
    )


def test_a_target_that_dense_widths_alone_miss_is_said_first(sources: dict[str, Path], tmp_path: Path) -> None:
    settings = settings_for(sources, "switch", tmp_path, loss=0.0001, quantizer="channel", dense_bits=3)
    with pytest.raises(TargetMissed, match=r"dense matrices at attention 3.*the target of 0\.01% is missed") as caught:
        Done(settings)
    assert "\n" not in str(caught.value)
    assert not settings.out.exists()
    [journal] = tmp_path.glob("work/*/journal.jsonl")
    measured_plans = [json.loads(line)["what"] for line in journal.read_text().splitlines()]
    assert sorted(measured_plans) == ["dense matrices alone", "unquantized", "unquantized"]


def test_a_role_that_the_model_has_not_is_refused_before_anything_is_read(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    settings = settings_for(sources, "olmoe", tmp_path, dense_bits={"ffn": 8}, calib=str(tmp_path / "none.jsonl"))
    with pytest.raises(SettingsError, match="has no ffn matrices"):
        Done(settings)
    assert not settings.work.exists()


def test_the_command_line(sources: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*more: str) -> tuple[int, str, str]:
        text = ["--calib", str(sources["text"]), "--metric", "perplexity", "--context", "32"]
        how = ["--bits", "4,8", "--quantizer", "channel", "--out", str(tmp_path / "m.pack")]
        code = _exit_code(["quantize", str(sources["olmoe"]), *text, *how, *more])
        return code, *capsys.readouterr()

    code, out, err = run("--loss", "0.01%", "--dense-bits", "attention=2")
    assert (code, out) == (3, "")
    assert "with unquantized experts and the dense matrices at attention 2 bits: loss" in err.splitlines()[-1]
    code, out, err = run("--loss", "30%", "--confidence", "none", "--dense-bits", "attention=4,head=8")
    assert code == 0
    assert "dense matrices at attention 4, head 8 bits, experts unquantized: loss" in err
    assert "dense matrices: attention 4, head 8 bits; by themselves they lose" in out
    assert "bytes beside the experts:" in out
    code, out, err = run("--dense-bits", "attention=5")
    assert (code, out) == (2, "")
    assert err.startswith("moeconv: --dense-bits attention=5: attention can't have 5 bits")
