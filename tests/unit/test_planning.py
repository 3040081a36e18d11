"""Planning from what was measured: the same curve for every target, and nothing is measured again."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from resealing import reseal
from tiny import tiny_olmoe
from trials import running

from moeconv.artifacts import SIGNALS, Probe, SensitivityTable, Summary, Target
from moeconv.command.present import plan_table
from moeconv.conversion.conversion import Conversion
from moeconv.conversion.planning import Inputs, plan
from moeconv.conversion.settings import Settings
from moeconv.errors import SettingsError, TargetMissed
from moeconv.measure.workdir import INPUTS, identity
from moeconv.plan.search import uniform_bytes, weights_of
from moeconv.progress import unseen
from moeconv.report import page
from moeconv.source.checkpoint import Checkpoint
from moert.pack.model_spec import ExpertKey

TinyModel = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def finished(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The work directory of a conversion."""
    path = tmp_path_factory.mktemp("conversion")
    for name, seed in (("calib", 0), ("heldout", 1)):
        rows = [json.dumps({"text": sample.source}) for sample in running(80, seed)]
        (path / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    Conversion(settings_in(path, tiny_model), lambda _: None, unseen).run()
    return path / "work"


def settings_in(path: Path, tiny_model: TinyModel) -> Settings:
    return Settings(
        model=str(tiny_model("olmoe", "plain")), out=path / "p", work=path / "work", target=Target("loss", 0.3),
        confidence=None, calib=str(path / "calib.jsonl"), heldout=str(path / "heldout.jsonl"),
        metric="token_perplexity", quantizer="channel", bits=(2, 4, 8), context=16, samples=24, sweep_samples=8,
        heldout_samples=8, dense_bits={"attention": 8, "head": 16},
    )  # fmt: skip


def lines(work: Path) -> list[Any]:
    return [path.read_text() for path in sorted(work.glob("*/journal.jsonl"))]


def test_inputs_come_back_from_json() -> None:
    keys = [ExpertKey("encoder", 0, 1), ExpertKey("decoder", 1, 3)]
    costs = {Probe(key, bits): (0.1, -0.2, 0.3) for key in keys for bits in ((2, 4), (8, 8))}
    table = SensitivityTable(4, Summary(3.0, 0.1, 2.0, 0.01), costs, {})
    inputs = Inputs("m", "group", 64, "rouge2", "acceptance/all", table, {"attention": 4, "head": 8})
    assert Inputs.from_json(json.loads(json.dumps(inputs.to_json()))) == inputs


@pytest.mark.parametrize("allocation", ["knapsack", "greedy", "uniform"])
def test_targets_are_met_without_measuring(allocation: str, finished: Path, tiny_model: TinyModel) -> None:
    spec, before = Checkpoint.open(tiny_model("olmoe", "plain")).spec, lines(finished)
    most, least = uniform_bytes(spec, 8), uniform_bytes(spec, 2)
    for size in (least, (most + least) // 2, most):
        found = plan(finished, Target("size", size), allocation, "kl", None)
        assert found.chosen.nbytes <= size
        assert found.chosen in found.points
    found = plan(finished, Target("bits", 6.0), allocation, "kl", None)
    assert found.chosen.nbytes * 8 <= 6.0 * found.weights
    assert found.weights == weights_of(spec) == 12 * 3 * 24 * 40
    assert (found.int4_bytes, found.quantizer, found.group_size) == (uniform_bytes(spec, 4), "channel", 0)
    sizes = [plan(finished, Target("loss", loss), allocation, "kl", None).chosen.nbytes for loss in (0.05, 0.3, 0.9)]
    assert sizes == sorted(sizes, reverse=True)
    assert lines(finished) == before
    assert any(point.loss is not None for point in found.points), "no measured plan is on the curve"


@pytest.mark.parametrize("signal", SIGNALS)
def test_every_signal_makes_a_curve(signal: str, finished: Path) -> None:
    found = plan(finished, Target("loss", 0.9), "knapsack", signal, (2, 4))
    assert sum(point.chosen for point in found.points) == 1
    assert list(found.points) == sorted(found.points, key=lambda point: point.nbytes)
    assert found.points[-1].nbytes <= found.int4_bytes


def test_what_the_sweep_does_not_know_is_refused(finished: Path, tmp_path: Path) -> None:
    target = Target("loss", 0.3)
    with pytest.raises(SettingsError, match=r"--bits 3: the sweep in .* has no measurements at that width, only \["):
        plan(finished, target, "knapsack", "kl", (2, 3))
    with pytest.raises(SettingsError, match="holds no finished sweep"):
        plan(tmp_path, target, "knapsack", "kl", None)
    (tmp_path / "abc").mkdir()
    (tmp_path / "abc" / "journal.jsonl").write_text(lines(finished)[0])
    with pytest.raises(SettingsError, match="holds no finished sweep"):
        plan(tmp_path, target, "knapsack", "kl", None)


@pytest.mark.parametrize(
    ("target", "allocation", "signal", "says"),
    [
        (Target("loss", 0.3), "luck", "kl", "--tune allocation=luck: expected one of greedy, knapsack, uniform"),
        (Target("loss", 0.3), "knapsack", "noise", "--tune signal=noise: expected one of metric, nll, kl"),
        (Target("bits", math.inf), "knapsack", "kl", "--bits-per-weight inf"),
        (Target("bits", math.nan), "knapsack", "kl", "--bits-per-weight nan"),
        (Target("bits", 1e308), "knapsack", "kl", "--bits-per-weight 1e.308"),
        (Target("size", math.inf), "knapsack", "kl", "--size inf"),
        (Target("loss", 1.5), "knapsack", "kl", "--loss 1.5"),
    ],
)
def test_options_are_checked_as_for_a_conversion(
    target: Target, allocation: str, signal: str, says: str, finished: Path
) -> None:
    with pytest.raises(SettingsError, match=says):
        plan(finished, target, allocation, signal, None)


@pytest.mark.parametrize("allocation", ["knapsack", "uniform"])
def test_more_than_everything_takes_is_all_there_is(allocation: str, finished: Path) -> None:
    found = plan(finished, Target("size", 1e30), allocation, "kl", None)
    assert found.chosen.nbytes == max(point.nbytes for point in found.points)


def test_no_bound_is_shown_that_no_promise_made(finished: Path) -> None:
    found = plan(finished, Target("loss", 0.3), "knapsack", "kl", None)
    assert {point.upper for point in found.points} == {None}
    assert "upper" not in plan_table(found, Target("loss", 0.3), whole_curve=True)


def test_the_plan_leads_and_the_curve_is_shown_on_demand(finished: Path) -> None:
    target = Target("loss", 0.3)
    found = plan(finished, target, "knapsack", "kl", None)
    short, long = (plan_table(found, target, whole_curve=whole).splitlines() for whole in (False, True))
    assert len(short) == 3
    assert short[:2] == long[:2]
    assert short[1].startswith(f"  for a loss of at most 30.00%: {page.size(found.chosen.nbytes)}, ")
    assert short[2] == f"  --curve shows all {len(found.points)} plans, size against loss"
    assert len(long) == 4 + len(found.points)


def test_the_widths_that_the_measurements_were_made_with_are_said(finished: Path, tmp_path: Path) -> None:
    target = Target("loss", 0.3)
    table = plan_table(plan(finished, target, "knapsack", "kl", None), target, whole_curve=True)
    assert table.splitlines()[0].endswith(", with dense matrices at attention 8, head 16 bits")
    changes: tuple[Change, ...] = (lambda values: values.update(dense={}), lambda values: values.pop("dense"))
    for place, change in enumerate(changes):  # as they were in the model; by an older version
        work = changed(finished, tmp_path / str(place), change)
        assert "dense" not in plan_table(plan(work, target, "knapsack", "kl", None), target, whole_curve=True)


Change = Callable[[dict[str, Any]], object]


def changed(work: Path, to: Path, change: Change) -> Path:
    """A copy of a work directory with other inputs of planning."""
    shutil.copytree(work, to)
    (inputs,) = to.glob(f"*/{INPUTS}")
    values = json.loads(inputs.read_text())
    change(values)
    inputs.write_text(json.dumps(values))
    reseal(inputs)
    return to


@pytest.mark.parametrize(
    "change",
    [
        lambda values: values.pop("costs"),
        lambda values: values.pop("group_size"),
        lambda values: values.update(costs=3),
        lambda values: values["costs"][0].pop(),
        lambda values: values["costs"][0].__setitem__(-1, [0.1, 0.2]),
        lambda values: values["costs"][0].__setitem__(-1, [0.1, 0.2, "much"]),
        lambda values: values["costs"][0].__setitem__(3, 2),
        lambda values: values["costs"][0].__setitem__(3, [2, 2, 5]),
        lambda values: values.update(base=[1.0]),
        lambda values: values.update(base_bits="4"),
        lambda values: values.update(group_size=[32]),
        lambda values: values.update(dense=4),
        lambda values: values.update(dense={"head": "wide"}),
    ],
)
def test_damaged_inputs_are_one_line(change: Change, finished: Path, tmp_path: Path) -> None:
    work = changed(finished, tmp_path / "work", change)
    says = r"planning\.json is not what a sweep writes \(.*\): run `moeconv quantize` again"
    with pytest.raises(SettingsError, match=says) as caught:
        plan(work, Target("loss", 0.3), "knapsack", "kl", None)
    assert "\n" not in str(caught.value)


def test_a_sweep_of_another_version_is_refused(finished: Path, tmp_path: Path) -> None:
    work = changed(finished, tmp_path / "work", lambda values: values.update(schema=1))
    with pytest.raises(SettingsError, match="has schema 1, this version of moeconv reads"):
        plan(work, Target("loss", 0.3), "knapsack", "kl", None)


def test_a_model_that_was_replaced_is_noticed(finished: Path, tiny_model: TinyModel, tmp_path: Path) -> None:
    """By another number of experts, or of projections."""
    more = tiny_olmoe(tmp_path / "more", num_experts=8)
    for place, model in enumerate((more, tiny_model("switch_transformers", "all layers sparse"))):
        work = changed(finished, tmp_path / str(place), lambda values, now=model: values.update(model=str(now)))
        with pytest.raises(SettingsError, match=r"is not about the experts of .*: the model was replaced"):
            plan(work, Target("loss", 0.3), "knapsack", "kl", None)


def test_a_rerun_that_ended_after_its_sweep_is_planned_from(
    finished: Path, tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With other widths, so that it replaced what the one before had sealed."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    work = shutil.copytree(finished, tmp_path / "work")
    (inputs,) = work.glob(f"*/{INPUTS}")
    before = inputs.read_bytes()
    monkeypatch.setattr("moeconv.conversion.conversion.fitted", interrupted)
    settings = replace(settings_in(finished.parent, tiny_model), out=tmp_path / "p", work=work, bits=(3, 4))
    with pytest.raises(KeyboardInterrupt):
        Conversion(settings, lambda _: None, unseen).run()
    assert list(work.glob(f"*/{INPUTS}")) == [inputs]
    assert inputs.read_bytes() != before
    assert plan(work, Target("bits", 6.0), "knapsack", "kl", None).points


def test_a_journal_without_the_reference_predicts_only(finished: Path, tmp_path: Path) -> None:
    """Its lines may be removed, as it says itself of damaged ones."""
    samples: list[str] = []
    work = changed(finished, tmp_path / "work", lambda values: samples.append(values["samples"]))
    (journal,) = work.glob("*/journal.jsonl")
    entries = journal.read_text().splitlines(keepends=True)
    kept = [entry for entry in entries if json.loads(entry)["id"] != identity(samples[0], None)]
    assert len(kept) == len(entries) - 1
    journal.write_text("".join(kept))
    found = plan(work, Target("bits", 6.0), "knapsack", "kl", None)
    assert {point.loss for point in found.points} == {None}


@pytest.mark.parametrize("target", [Target("size", 100.0), Target("bits", 1.0), Target("loss", 0.001)])
def test_a_target_out_of_reach_is_one_line(target: Target, finished: Path) -> None:
    with pytest.raises(TargetMissed) as caught:
        plan(finished, target, "knapsack", "kl", (2,))
    assert "\n" not in str(caught.value)
