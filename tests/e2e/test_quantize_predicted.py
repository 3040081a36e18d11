"""moeconv quantize --tune neurons=predicted: widths and a predictor of which neurons fire keep a loss together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from conversions import Done, check_parts, settings_for

import moeconv
from moeconv.artifacts import Target, uniform
from moeconv.command.cli import _exit_code
from moeconv.command.present import conversion_table, next_steps
from moeconv.conversion import taught
from moeconv.conversion.measuring import References
from moeconv.conversion.planning import plan
from moeconv.conversion.taught import placed
from moeconv.errors import ConversionError, SettingsError, TargetMissed
from moeconv.foresight.neurons import NamedNeurons, NeuronCourse, PredictedNeurons
from moeconv.order import NeuronOrder, load_order
from moeconv.quantizers.coder import ORIGINAL
from moeconv.report.page import result
from moeconv.report.writer import read_report
from moert.pack.layout import Neurons
from moert.pack.learnt import PREDICTOR, NeuronPredictor
from moert.pack.model_spec import ExpertKey
from moert.pack.reader import Pack

FAMILIES = ("switch", "olmoe", "opt")


@pytest.fixture(scope="module", autouse=True)
def much_unnamed() -> Iterator[None]:
    """Predictors leave a fifth unnamed: of such small experts all blocks are named otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(taught, "NeuronCourse", partial(NeuronCourse, missed=0.2))
        yield


@pytest.fixture(scope="module")
def converted(firing: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Done]:
    found = {}
    for family in FAMILIES:
        root = tmp_path_factory.mktemp(family)
        found[family] = Done(settings_for(firing, family, root, bits=(4, 8), loss=0.9, neurons="predicted"))
    return found


def predictor_of(done: Done) -> NeuronPredictor:
    return NeuronPredictor.from_bytes(Pack.open(done.settings.out).read_file(PREDICTOR))


def learnt_by(done: Done) -> tuple[NeuronPredictor, NeuronOrder]:
    """The predictor as it was trained, in the checkpoint's order, and the order of the pack."""
    [file] = done.settings.work.glob("*/neurons-*.safetensors")
    order = load_order(Pack.open(done.settings.out))
    assert order is not None
    return NeuronPredictor.from_bytes(file.read_bytes()), order


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pack_has_its_predictor_and_what_it_loses_with_it(converted: dict[str, Done], family: str) -> None:
    done = converted[family]
    report, predictor = done.report, predictor_of(done)
    predictor.check(done.manifest.model)
    assert done.manifest.quantization.neurons == Neurons(512, bundled=True), "that is usual with it"
    assert report.heldout is not None
    assert report.neurons is not None
    assert predictor.loss is not None
    assert (predictor.loss.loss, predictor.loss.low, predictor.loss.high) == (
        report.heldout.loss, report.heldout.low, report.heldout.high,
    )  # fmt: skip
    learnt, order = learnt_by(done)
    assert any((rows != np.arange(rows.shape[1])).any() for rows in order.layers.values())
    assert replace(placed(learnt, order), loss=predictor.loss).to_bytes() == predictor.to_bytes(), "with its neurons"
    assert (predictor.rank, predictor.missed, predictor.per_block) == (
        report.neurons.rank, report.neurons.missed, report.neurons.per_block,
    )  # fmt: skip
    assert "With all neurons the pack loses" in result(report, 8)
    assert "only named neurons are computed, which by itself loses" in conversion_table(report, "x")
    assert read_report(Pack.open(done.settings.out)).neurons == report.neurons
    assert report.neurons.exact.loss != report.heldout.loss, "without it it is another model"
    assert any(line.startswith("computing only named neurons, experts unquantized: loss ") for line in done.said)
    assert done.manifest.quality is not None
    assert done.manifest.quality.heldout == report.heldout
    assert '"some text" --tune neurons=predicted' in next_steps(report, done.settings.out, profiled=False)


def test_nothing_that_judges_was_trained_on(converted: dict[str, Done]) -> None:
    check_parts(converted["opt"].bench.material)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_pack_is_the_model_that_was_measured(converted: dict[str, Done], family: str) -> None:
    """Beside the finished pack's own experts, whose blocks are as many neurons as their widths allow."""
    from moeconv.measure.scoring import build_scorer, load_tokenizer
    from moeconv.packing.packed import PackedModel

    done = converted[family]
    pack, material = Pack.open(done.settings.out), done.bench.material
    packed = PackedModel.open(pack)
    tokenizer = load_tokenizer(done.settings.out / "tokenizer.json")
    scorer = build_scorer(packed, tokenizer, material.splits.heldout, material.metric, material.extent(None))
    with packed.calls.during(naming=NamedNeurons(predictor_of(done), lambda key: pack.neurons(key).per_block)):
        found = material.metric.value(scorer.score(as_reference=True).scores)
    assert done.report.heldout is not None
    assert found == pytest.approx(done.report.heldout.value, rel=1e-4)
    assert done.report.neurons is not None
    exact = material.metric.value(scorer.score().scores)
    assert exact == pytest.approx(done.report.neurons.exact.value, rel=1e-4)


def test_blocks_follow_the_widths_on_trial(converted: dict[str, Done]) -> None:
    """Of 2 bits more neurons lie in a block than of 16, so that more is computed."""
    done = converted["opt"]
    bench, asked = done.bench, []
    bench.instead = PredictedNeurons(predictor_of(done), Neurons(512, bundled=True))
    key = bench.spec.expert_keys()[0]
    for bits in (2, 4, ORIGINAL):
        trial = bench.trial
        trial.assign(uniform(bench.spec, bits))
        with bench.instead.on(trial):
            naming = trial.calls.now.naming
            assert isinstance(naming, NamedNeurons)
            asked.append(naming._per_block(ExpertKey(*key)))
    assert asked == sorted(asked, reverse=True)
    assert asked[0] > asked[-1]
    assert bench.trial.calls.now.naming is None


def test_the_same_again_trains_nothing_and_another_target_neither(firing: dict[str, Path], tmp_path: Path) -> None:
    settings = settings_for(firing, "opt", tmp_path, bits=(8,), loss=0.9, neurons="predicted")
    first = Done(settings)
    assert any(line.startswith("D00 after ") for line in first.said)
    assert not list(settings.work.glob("*/neurons")), "examples are removed"
    left = next(settings.work.glob("*/neurons-*.safetensors")).parent / "neurons"
    left.mkdir()
    again = Done(replace(settings, target=replace(settings.target, value=0.8)))
    assert not left.exists(), "nor are those of a run that was killed when it had learnt"
    assert not any(line.startswith("D00 after ") for line in again.said)
    assert predictor_of(again).to_bytes() == predictor_of(first).to_bytes()
    points = plan(settings.work, settings.target, "knapsack", "kl", None).points
    assert any(point.loss is not None for point in points)
    kept = next(settings.work.glob("*/neurons-*.safetensors"))
    kept.write_bytes(b"nonsense")
    with pytest.raises(ConversionError, match="was changed since it was made: delete it"):
        Done(replace(settings, out=tmp_path / "other.pack"))
    apart = Done(replace(settings, layout="columns", out=tmp_path / "columns.pack", work=tmp_path / "work2"))
    assert apart.manifest.quantization.neurons == Neurons(512, bundled=False)
    assert predictor_of(apart).to_bytes() == predictor_of(first).to_bytes(), "blocks are the same"


def test_plans_are_measured_with_it_and_the_reference_without(converted: dict[str, Done]) -> None:
    done = converted["olmoe"]
    bench, (predictor, order) = done.bench, learnt_by(done)
    bench.instead = PredictedNeurons(predictor, Neurons(512, bundled=True), order)
    measure = References.of(bench).judge.measure
    widths, known = uniform(bench.spec, ORIGINAL), len(bench.journal)
    evaluation = measure(widths, "known")
    assert len(bench.journal) == known, "it is what the conversion measured"
    own = measure.by_itself(widths, "with all neurons")
    assert np.allclose(own.columns(), measure.reference.columns())
    assert not np.allclose(evaluation.columns(), own.columns())


def test_what_it_loses_alone_may_be_too_much(converted: dict[str, Done], tmp_path: Path) -> None:
    """Of a random model it may even gain, so it is one that it loses on."""
    lost = {family: done.report.neurons.alone.loss for family, done in converted.items() if done.report.neurons}
    family = max(lost, key=lost.__getitem__)
    assert lost[family] > 0
    settings = replace(converted[family].settings, target=Target("loss", lost[family] / 2), out=tmp_path / "m.pack")
    with pytest.raises(TargetMissed, match=r"only named neurons: loss [\d.]+%; .* leave --tune neurons out"):
        Done(settings)
    assert not (tmp_path / "m.pack").exists()


def test_gradients_rank_its_experts_too(firing: dict[str, Path], tmp_path: Path) -> None:
    done = Done(settings_for(firing, "switch", tmp_path, loss=0.5, signal="fisher", neurons="predicted"))
    assert done.report.signal == "fisher"
    assert done.report.neurons is not None


def test_by_name_in_python(firing: dict[str, Path], tmp_path: Path) -> None:
    found = moeconv.quantize(
        firing["opt"], tmp_path / "m.pack", calib=str(firing["text"]), confidence="none", loss="90%", bits=[8],
        context=32, layout="auto", neurons="predicted",
    )  # fmt: skip
    assert found.neurons is not None
    assert Pack.open(tmp_path / "m.pack").has_neurons


def test_what_does_not_go_with_it_is_one_line(
    sources: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["quantize", str(sources["switch"]), "--out", str(tmp_path / "m.pack"), "--tune"]
    text = ["--calib", str(sources["pairs"])]
    for more, said in (
        (["neurons=predicted", "--bits", "8"], "--tune neurons has no effect without --calib"),
        (["neurons=nonsense", *text], "--tune neurons=nonsense: 'nonsense' is not one of 'exact', 'predicted'"),
        (
            ["neurons=predicted", *text, "--layout", "expert"],
            "--layout expert does not go with --tune neurons=predicted",
        ),
        (["neurons=predicted", *text, "--layout", "layer"], "--layout layer does not go with --tune neurons=predicted"),
        (["neurons=predicted", *text, "--tune", "route=hash"], "--tune neurons=predicted goes with routers"),
        (["neurons=predicted", *text, "--resident", "50%"], "--resident is measured with all neurons"),
    ):
        assert _exit_code([*words, *more]) == 2
        assert said in capsys.readouterr().err
    smooth = settings_for(sources, "olmoe", tmp_path, neurons="predicted")
    with pytest.raises(SettingsError, match="this model's activation is silu: leave it out"):
        Done(smooth)


def test_a_model_that_does_not_fit_is_refused(
    firing: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moeconv.conversion import room

    monkeypatch.setattr(room, "LEAST_TOKENS", 32)
    small = room.PROCESS_BYTES + (2 << 20)
    with pytest.raises(SettingsError, match="--tune neurons=predicted takes a model in memory"):
        Done(settings_for(firing, "olmoe", tmp_path, neurons="predicted", memory_bytes=small))
