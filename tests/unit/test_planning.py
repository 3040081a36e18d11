"""Planning from what was measured: the same curve for every target, and nothing is measured again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from trials import running

from moeconv.artifacts import SIGNALS, Measurement, Probe, SensitivityTable, Target
from moeconv.checkpoint import Checkpoint
from moeconv.conversion import Conversion
from moeconv.errors import SettingsError, TargetMissed
from moeconv.planning import Inputs, plan, uniform_bytes, weights_of
from moeconv.settings import Settings
from moert.pack.model_spec import ExpertKey

TinyModel = Callable[[str, str], Path]


class Unseen:
    def update(self, n: int) -> None:
        pass


@contextmanager
def unseen(_label: str, _total: int) -> Iterator[Unseen]:
    yield Unseen()


@pytest.fixture(scope="module")
def finished(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The work directory of a conversion."""
    path = tmp_path_factory.mktemp("conversion")
    for name, seed in (("calib", 0), ("heldout", 1)):
        rows = [json.dumps({"text": sample.source}) for sample in running(80, seed)]
        (path / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    settings = Settings(
        model=str(tiny_model("olmoe", "plain")), out=path / "p", work=path / "work", target=Target("loss", 0.3),
        confidence=None, calib=str(path / "calib.jsonl"), heldout=str(path / "heldout.jsonl"),
        metric="token_perplexity", quantizer="channel", bits=(2, 4, 8), context=16, samples=24, sweep_samples=8,
        heldout_samples=8,
    )  # fmt: skip
    Conversion(settings, lambda _: None, unseen).run()
    return path / "work"


def lines(work: Path) -> list[Any]:
    return [path.read_text() for path in sorted(work.glob("*/journal.jsonl"))]


def test_inputs_come_back_from_json() -> None:
    keys = [ExpertKey("encoder", 0, 1), ExpertKey("decoder", 1, 3)]
    costs = {Probe(key, bits): (0.1, -0.2, 0.3) for key in keys for bits in ((2, 4), (8, 8))}
    table = SensitivityTable(4, Measurement(3.0, 0.1, 2.0, 0.01), costs, {})
    inputs = Inputs("m", "group", 64, "rouge2", "acceptance/all", table)
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


@pytest.mark.parametrize("target", [Target("size", 100.0), Target("bits", 1.0), Target("loss", 0.001)])
def test_a_target_out_of_reach_is_one_line(target: Target, finished: Path) -> None:
    with pytest.raises(TargetMissed) as caught:
        plan(finished, target, "knapsack", "kl", (2,))
    assert "\n" not in str(caught.value)
