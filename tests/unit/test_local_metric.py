"""A metric of the `evaluate` library by path: its number is taken, and each way to be unusable is one line."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from converting import running_text
from tiny import tiny_olmoe

from moeconv import quantize
from moeconv.artifacts import Target
from moeconv.calibration import Splits
from moeconv.command.cli import _exit_code
from moeconv.conversion import material
from moeconv.conversion.additions import Asked, _metric_of
from moeconv.conversion.settings import Settings
from moeconv.errors import SettingsError
from moeconv.measure.metrics import find_metric, recorded_metric
from moeconv.source.checkpoint import Checkpoint
from tests.refusing import one_line

MODULE = """
import datasets
import evaluate


class Overlap(evaluate.Metric):
    def _info(self):
        texts = {"predictions": datasets.Value("string"), "references": datasets.Value("string")}
        return evaluate.MetricInfo(description="", citation="", features=datasets.Features(texts))

    def _compute(self, predictions, references):
        shared = len(set(predictions[0].split()) & set(references[0].split()))
        return RETURNED
"""


@pytest.fixture(autouse=True)
def cache_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate = pytest.importorskip("evaluate")
    monkeypatch.setattr(evaluate.config, "HF_METRICS_CACHE", str(tmp_path / "cache"))


def write_module(folder: Path, returned: str) -> str:
    path = folder / "overlap.py"
    path.write_text(MODULE.replace("RETURNED", returned), encoding="utf-8")
    return str(path)


def test_value_is_the_mean_of_the_only_number(tmp_path: Path) -> None:
    metric = find_metric(write_module(tmp_path, "{'shared': shared}"))
    assert metric.generates
    assert metric.higher_is_better
    scores = np.array([metric.judge("a b", "a b"), metric.judge("a", "b"), metric.judge("a b c d", "d c b a")])
    assert metric.value(scores) == pytest.approx(2.0)


def test_one_of_several_numbers_is_named_and_may_be_better_when_lower(tmp_path: Path) -> None:
    path = write_module(tmp_path, "{'shared': shared, 'missed': 5 - shared}")
    assert find_metric(path + ":shared").judge("a b", "a") == (1.0, 1.0)
    missed = find_metric(path + ":-missed")
    assert missed.judge("a b", "a") == (4.0, 1.0)
    assert missed.loss(1.0, 2.0) == 1.0
    with pytest.raises(SettingsError, match=r"several values \(shared, missed\): name one"):
        find_metric(path)
    with pytest.raises(SettingsError, match="no 'f1': it gives shared, missed"):
        find_metric(path + ":f1")


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        ("{'shared': 'many'}", "'many', which is no number"),
        ("{'shared': float('nan')}", "must be finite"),
        ("{}", "a dict of numbers"),
        ("1 / 0", "division by zero"),
    ],
)
def test_what_is_no_number_is_refused(tmp_path: Path, returned: str, says: str) -> None:
    with one_line(SettingsError, says):
        find_metric(write_module(tmp_path, returned))


def test_missing_and_broken_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="is not there"):
        find_metric(str(tmp_path / "none.py:key"))
    broken = tmp_path / "broken.py"
    broken.write_text("def (", encoding="utf-8")
    with one_line(SettingsError, "can't be loaded as an evaluate module"):
        find_metric(str(broken))


RAISES = "open({marker!r}, 'w').close()\nraise RuntimeError('it ran')\n"


def test_what_was_judged_is_reckoned_with_and_nothing_runs(tmp_path: Path) -> None:
    path, marker = tmp_path / "ours.py", tmp_path / "ran"
    path.write_text(RAISES.format(marker=str(marker)))
    metric = recorded_metric(f"{path}:-key")
    assert (metric.name, metric.loss(1.0, 2.0), metric.judge) == ("ours.py:-key", 1.0, None)
    assert recorded_metric("rouge2") is find_metric("rouge2")
    assert not marker.exists()


def test_that_a_program_runs_is_said_before_it_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By recipes too."""
    model, path, marker = tiny_olmoe(tmp_path / "m"), tmp_path / "ours.py", tmp_path / "ran"
    path.write_text(RAISES.format(marker=str(marker)))
    text = running_text(tmp_path / "text.jsonl")
    said: list[tuple[str, bool]] = []

    def heard(line: str) -> None:
        said.append((line, marker.exists()))

    with pytest.raises(SettingsError, match="can't be loaded as an evaluate module"):
        quantize(
            model,
            tmp_path / "p",
            calib=str(text),
            metric=str(path),
            say=lambda line: said.append((line, marker.exists())),
        )
    notes = [ran for line, ran in said if "is a program: it runs now" in line and str(path) in line]
    assert notes == [False]
    assert marker.exists()
    recipe = tmp_path / "r.toml"
    recipe.write_text('model = "m"\ncalib = "text.jsonl"\nmetric = "ours.py"\nprofile_paths = false\n')
    assert _exit_code(["recipe", "run", str(recipe), "--out", str(tmp_path / "o"), "--allow-code"]) == 2
    assert "is a program: it runs now" in capsys.readouterr().err


def test_neither_a_pack_nor_a_catalogue_makes_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ours.py"
    path.write_text("raise RuntimeError('it ran')\n")
    monkeypatch.chdir(tmp_path)
    pack = SimpleNamespace(manifest=SimpleNamespace(quality=SimpleNamespace(metric="ours.py")))
    with pytest.raises(SettingsError, match=r"judged by ours\.py, a module: say where it is with --metric"):
        _metric_of(pack, Asked(), Splits("x", True, (), ()))  # type: ignore[arg-type]
    monkeypatch.setattr(material, "load_splits", lambda *_, **__: Splits("mine", True, (), (), "ours.py"))
    model = Checkpoint.open(tiny_olmoe(tmp_path / "m"))
    asked = Settings(str(model.path), tmp_path / "p", tmp_path / "w", Target("loss", 0.05), calib="mine")
    with pytest.raises(SettingsError, match=r"mine asks for the metric ours\.py, a module: name it with --metric"):
        material.Material.read(asked, model)
