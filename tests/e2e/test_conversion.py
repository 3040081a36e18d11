"""Whole conversions of tiny models: what is measured is what is written, reruns, metrics, refusals."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conversions import Done, settings_for
from safetensors.torch import load_file, save_file
from tiny import tiny_olmoe, tiny_switch

from moeconv.artifacts import Probe, uniform
from moeconv.calibration import Sample
from moeconv.command.recipe import Expectations, Recipe
from moeconv.conversion import measuring
from moeconv.conversion.additions import profile_paths
from moeconv.conversion.settings import Settings
from moeconv.errors import CalibrationError, ConversionError, SettingsError, TargetMissed, VerifyFailed
from moeconv.matrices import matrices_of, read_expert
from moeconv.measure.metrics import METRICS
from moeconv.measure.scoring import Extent, build_scorer, load_tokenizer
from moeconv.measure.workdir import WorkDir
from moeconv.packing.packed import PackedModel, verify
from moeconv.source.checkpoint import Checkpoint
from moert.experts.policy import EVICTION
from moert.pack.errors import HashMismatch, WriteFailed
from moert.pack.model_spec import ExpertKey
from moert.pack.paths import DROPPED, PATHS, TRACE, Trace, TransitionTable
from moert.pack.reader import Pack
from tests.trials import trial_of


def test_a_packed_model_answers_like_its_source(tmp_path: Path) -> None:
    """Also where transformers keeps copies of what a pack stores once."""
    ids = torch.tensor([[5, 9, 14, 3]])
    for name, source in (
        ("untied", tiny_switch(tmp_path / "untied", tie_word_embeddings=False)),
        ("tied", tiny_olmoe(tmp_path / "tied", tie_word_embeddings=True)),
    ):
        settings = Settings(str(source), tmp_path / f"{name}.pack", tmp_path / "work", bits=(16,))
        Done(settings)
        packed = PackedModel.open(Pack.open(settings.out))
        original = Checkpoint.open(source).family.load(source, torch.float32)
        inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if packed.spec.encoder else {})
        with torch.inference_mode():
            torch.testing.assert_close(packed.model(**inputs).logits, original(**inputs).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("family", "quantizer"), [("switch", "channel"), ("olmoe", "channel"), ("olmoe", "gptq"), ("switch", "group")]
)
def test_conversion_meets_its_target_and_the_pack_is_the_model_that_was_measured(
    sources: dict[str, Path], family: str, quantizer: str, tmp_path: Path
) -> None:
    settings = settings_for(sources, family, tmp_path, loss=0.015, quantizer=quantizer)
    done = Done(settings)
    manifest, report = done.manifest, done.report
    assert report.calibration is not None
    assert report.calibration.loss <= 0.015
    assert report.upper_bound is None
    assert report.expert_bytes["pack"] == manifest.expert_tensor_bytes()
    assert sum(report.bits_histogram.values()) == len(manifest.experts) * len(manifest.model.moe.ffn.projections)
    chosen = [point for point in report.curve if point.chosen]
    assert [point.nbytes for point in chosen] == [report.expert_bytes["pack"]]
    assert chosen[0].loss == report.calibration.loss
    assert report.sensitivity is not None
    assert set(report.sensitivity.coverage) == set(manifest.model.expert_keys())
    importance = report.sensitivity.importance(2)
    assert all(entry.importance == importance[entry.key] for entry in manifest.experts)
    pack = Pack.open(settings.out)
    found = verify(pack, Checkpoint.open(settings.model))
    assert found.worst is not None
    assert 0 < found.worst <= 1
    packed, trial = PackedModel.open(pack), done.bench.trial
    trial.assign({entry.key: tuple(entry.bits.values()) for entry in manifest.experts})
    for key in manifest.model.expert_keys():
        for name in manifest.model.moe.ffn.projections:
            weight = trial.family.expert_weight(trial.model, key, name)
            assert torch.equal(weight, packed.family.expert_weight(packed.model, key, name))


def test_a_margin_is_left_free_on_the_calibration_text(sources: dict[str, Path], tmp_path: Path) -> None:
    plain = Done(settings_for(sources, "olmoe", tmp_path, loss=0.3, quantizer="channel")).report
    settings = settings_for(
        sources, "olmoe", tmp_path, loss=0.3, quantizer="channel", margin=0.9, out=tmp_path / "b.pack"
    )
    wary = Done(settings).report
    assert wary.calibration is not None
    assert wary.calibration.loss <= 0.03
    assert plain.expert_bytes["pack"] < wary.expert_bytes["pack"]
    assert wary.target.value == 0.3


def test_a_second_loss_measures_no_probe_again(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Done(settings_for(sources, "olmoe", tmp_path, loss=0.02, quantizer="channel"))
    lines = first.bench.journal.path.read_text().splitlines()
    second = Done(
        settings_for(sources, "olmoe", tmp_path, loss=0.06, quantizer="channel", out=tmp_path / "b.pack")
    )  # fmt: skip
    assert first.swept() > 0 == second.swept()
    assert second.bench.journal.path == first.bench.journal.path
    after = second.bench.journal.path.read_text().splitlines()
    assert after[: len(lines)] == lines
    names = [json.loads(line)["id"] for line in after]
    assert len(set(names)) == len(names), "something was measured twice"
    assert second.report.expert_bytes["pack"] <= first.report.expert_bytes["pack"]
    monkeypatch.delattr(measuring, "LoadedModel")  # all was measured before
    again = Done(settings_for(sources, "olmoe", tmp_path, loss=0.06, quantizer="channel", out=tmp_path / "c.pack"))
    assert len(again.bench.journal) == len(after)


def test_a_probe_costs_what_that_expert_alone_costs(sources: dict[str, Path], tmp_path: Path) -> None:
    """Measured here by whole runs of the model over the ranking text."""
    done = Done(settings_for(sources, "olmoe", tmp_path, loss=0.02, quantizer="channel"))
    mine, table = done.bench, done.report.sensitivity
    assert table is not None
    material, metric = mine.material, mine.material.metric
    scorer = material.scorer(mine.trial, material.ranking, None)
    mine.trial.restore()
    reference = metric.value(scorer.score().scores)
    base = uniform(mine.spec, 4)

    def loss(widths: dict) -> float:
        mine.trial.assign(widths)
        return metric.loss(reference, metric.value(scorer.score().scores))

    for key in (ExpertKey("decoder", 0, 1), ExpertKey("decoder", 1, 4)):
        for bits in (2, 3):
            found = table.costs[Probe(key, (bits,) * 3)][0]
            assert found != 0
            assert found == pytest.approx(loss({**base, key: (bits,) * 3}) - loss(base), abs=1e-6)


@pytest.fixture(scope="module")
def answered(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inputs with what the unquantized model writes to them as targets: a random model scores nothing on any other."""
    trial = trial_of(sources["switch"])
    inputs = [json.loads(line)["input"] for line in sources["pairs"].read_text().splitlines()]
    samples = [Sample(text, "abc") for text in inputs]
    tokenizer = load_tokenizer(sources["switch"] / "tokenizer.json")
    scorer = build_scorer(trial, tokenizer, samples, METRICS["rouge2"], Extent(None, 32, 12))
    outputs = scorer.score().outputs
    path = tmp_path_factory.mktemp("answered") / "answered.jsonl"
    rows = [{"input": text, "target": output} for text, output in zip(inputs, outputs, strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("metric", ["rouge2", "exact_match"])
def test_generated_text_is_judged(sources: dict[str, Path], answered: Path, tmp_path: Path, metric: str) -> None:
    done = Done(
        settings_for(
            sources, "switch", tmp_path, metric=metric, loss=0.3, max_new_tokens=12, calib=str(answered),
            quantizer="channel",
        )
    )  # fmt: skip
    report = done.report
    assert report.metric == metric
    assert report.calibration is not None
    assert report.calibration.reference > 0.5
    assert 0 < report.calibration.loss <= 0.3
    assert any("all experts at  3 bits" in line for line in done.said), "two bits cost nothing: nothing was tested"
    assert set(report.samples[0]) == {"input", "target", "reference", "pack"}


def test_a_reference_that_scores_nothing_is_refused(sources: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no loss can be measured"):
        Done(settings_for(sources, "switch", tmp_path, metric="exact_match"))
    assert not (tmp_path / "m.pack").exists()


def test_float32_sources_are_rounded_in_the_pack_and_in_no_reference(tmp_path: Path, sources: dict[str, Path]) -> None:
    path = tiny_olmoe(tmp_path / "f32")
    tensors = {name: tensor.float() * 1.0001 for name, tensor in load_file(path / "model.safetensors").items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    both = [
        Done(
            settings_for(
                sources, "olmoe", tmp_path, model=str(path), bits=bits, work=tmp_path / str(bits), loss=0.5,
                out=tmp_path / f"{bits}.pack",
            )
        ).report
        for bits in ((16,), (8,))
    ]  # fmt: skip
    losses = [report.calibration.loss for report in both if report.calibration]
    references = [report.calibration.reference for report in both if report.calibration]
    assert references[0] == references[1]
    assert 0 != losses[0] != losses[1]
    assert abs(losses[0]) < abs(losses[1])


def test_a_recipe_that_misses_its_heldout_target_fails(sources: dict[str, Path], tmp_path: Path) -> None:
    settings = settings_for(sources, "olmoe", tmp_path, bits=(4,), loss=0.9)
    report = Done(settings).report
    assert report.heldout is not None
    recipe = Recipe("r", settings, Expectations(), paths=False)
    missed = replace(report, heldout=replace(report.heldout, loss=0.91))
    met = replace(report, heldout=replace(report.heldout, loss=0.89))
    assert any("above the target" in line for line in recipe.failures(missed))
    assert recipe.failures(met) == []
    limits = Expectations(heldout_loss_at_most=0.02, expert_bytes_at_most=10, reference_at_most=1.0)
    assert len(replace(recipe, expect=limits).failures(missed)) == 3


def test_work_and_out_are_refused_before_anything_long(sources: dict[str, Path], tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("keep me")
    with pytest.raises(WriteFailed):
        Done(settings_for(sources, "olmoe", tmp_path, out=mine))
    assert (mine / "notes.txt").read_text() == "keep me"
    with pytest.raises(ConversionError, match="work directory"):
        Done(settings_for(sources, "olmoe", tmp_path, work=mine / "notes.txt"))
    assert not (tmp_path / "work").exists()


def test_one_work_directory_serves_one_run_at_a_time(tmp_path: Path) -> None:
    with WorkDir(tmp_path / "w"), pytest.raises(ConversionError, match="another run"), WorkDir(tmp_path / "w"):
        pass


@pytest.mark.parametrize("width", [4, 8, 16])
@pytest.mark.parametrize("family", ["switch", "olmoe"])
def test_one_width_alone(sources: dict[str, Path], family: str, tmp_path: Path, width: int) -> None:
    """At 4 bits there is nothing to sweep: that is what probes are compared with."""
    done = Done(settings_for(sources, family, tmp_path, bits=(width,), loss=0.9, quantizer="channel"))
    assert set(done.report.bits_histogram) == {width}
    assert done.report.calibration is not None
    assert math.isfinite(done.report.calibration.loss)
    assert (done.report.calibration.loss == 0) == (width == 16)
    assert (done.swept() == 0) == (width == 4)
    worst = verify(Pack.open(done.settings.out), Checkpoint.open(done.settings.model)).worst
    assert worst is not None
    assert (worst == 0) == (width == 16)


def test_sixteen_bits_alone_need_no_text_and_lose_nothing(sources: dict[str, Path], tmp_path: Path) -> None:
    settings = settings_for(sources, "switch", tmp_path, calib=None, bits=(16,))
    done = Done(settings)
    assert done.manifest.quality is None
    assert done.report.bits_histogram == {16: len(done.manifest.experts) * 2}
    checkpoint, pack = Checkpoint.open(settings.model), Pack.open(settings.out)
    for key in done.manifest.model.expert_keys():
        stored = matrices_of(pack, key, read_expert(pack, key))
        for name, weight in checkpoint.expert(key).items():
            assert np.array_equal(stored[name], weight)


def test_text_that_does_not_fit_the_model_is_refused(sources: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="needs the field 'text'"):
        Done(settings_for(sources, "olmoe", tmp_path, calib=str(sources["pairs"])))
    with pytest.raises(SettingsError, match="use perplexity"):
        Done(settings_for(sources, "olmoe", tmp_path, metric="rouge2"))
    with pytest.raises(SettingsError, match="choices"):
        Done(settings_for(sources, "olmoe", tmp_path, metric="accuracy"))
    short = tmp_path / "short.jsonl"
    short.write_text('{"text": "ab"}\n{"text": "cd"}\n')
    with pytest.raises(CalibrationError, match=r"too few|give more"):
        Done(settings_for(sources, "olmoe", tmp_path, calib=str(short)))


def test_verify_finds_other_weights_and_damage(sources: dict[str, Path], tmp_path: Path) -> None:
    settings = settings_for(sources, "switch", tmp_path, bits=(4,), loss=0.9)
    Done(settings)
    other = tiny_switch(tmp_path / "other", seed=1)
    with pytest.raises(VerifyFailed, match="made from other weights"):
        verify(Pack.open(settings.out), Checkpoint.open(other))
    with pytest.raises(VerifyFailed, match="shapes differ"):
        verify(Pack.open(settings.out), Checkpoint.open(sources["olmoe"]))
    victim = settings.out / "tokenizer.json"
    victim.write_bytes(victim.read_bytes().replace(b"a", b"b", 1))
    with pytest.raises(HashMismatch):
        verify(Pack.open(settings.out), None)


@pytest.mark.parametrize("family", ["switch", "olmoe"])
def test_profiled_paths_are_what_the_routers_chose(sources: dict[str, Path], family: str, tmp_path: Path) -> None:
    settings = settings_for(sources, family, tmp_path, bits=(8,), loss=0.9)
    Done(settings)
    found, nbytes = profile_paths(
        Pack.open(settings.out), calib=None, heldout=None, seed=None, samples=None, context=None, say=lambda line: None
    )
    pack = Pack.open(settings.out)
    table = TransitionTable.from_bytes(pack.read_file(PATHS))
    trace = Trace.from_bytes(pack.read_file(TRACE))
    trace.check(pack.manifest.model)
    assert list(trace.eviction) == [12, 25, 50, 75]
    assert set(trace.eviction.values()) <= {*EVICTION}
    assert nbytes == (settings.out / PATHS).stat().st_size + (settings.out / TRACE).stat().st_size
    moe = pack.manifest.model.moe
    for stack in pack.manifest.model.stacks:
        layers = table.of_stack(stack)
        totals = {int(layer.frequency.sum()) for layer in layers}
        assert len(totals) == 1, "each layer saw each token"
        total = totals.pop()
        assert total % moe.router.top_k == 0
        experts = trace.stacks[stack].experts
        assert (experts != DROPPED).sum() == total * len(layers), "a short text is recorded whole"
        counts = [np.bincount(experts[:, place].ravel(), minlength=moe.n) for place in range(len(layers))]
        assert np.array_equal(counts, [layer.frequency for layer in layers])
        assert 0.2 <= found.coverage20[stack] <= 1
    assert found.accuracy == (None, None, None), "two layers: none has two before it"
    assert list(table.layers) == pack.manifest.model.moe_layers()
    assert family == "switch" or found.tokens % 32 == 0, "whole windows"


def test_the_same_conversion_again_keeps_the_profile_and_another_says_that_it_is_gone(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    settings = settings_for(sources, "olmoe", tmp_path, bits=(8,), loss=0.9)
    Done(settings)
    profile_paths(
        Pack.open(settings.out), calib=None, heldout=None, seed=None, samples=None, context=None, say=lambda line: None
    )
    before = {name: (settings.out / name).read_bytes() for name in (PATHS, TRACE)}
    again = Done(settings)
    assert any("is a pack already" in line for line in again.said)
    assert not any("is gone" in line for line in again.said)
    pack = Pack.open(settings.out)
    assert {name: pack.read_file(name) for name in (PATHS, TRACE)} == before
    other = Done(replace(settings, bits=(4,)))
    gone = [line for line in other.said if "is gone" in line]
    assert [line.partition("run ")[2] for line in gone] == [f"moeconv profile-paths {settings.out} again"]
    assert not {PATHS, TRACE} & set(Pack.open(settings.out).manifest.files)


def test_named_errors_reach_the_shell_as_one_line(sources: dict[str, Path], tmp_path: Path) -> None:
    """In a process of its own once; every other line of the command line is tested without one."""
    done = subprocess.run(
        [sys.executable, "-m", "moeconv", "quantize", str(tmp_path / "none"), "--calib", str(sources["pairs"])],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("moeconv: "), done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stdout == ""


def test_every_error_is_a_conversion_error() -> None:
    for kind in (CalibrationError, SettingsError, TargetMissed, VerifyFailed):
        assert issubclass(kind, ConversionError)
