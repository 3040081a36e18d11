"""A metric of the `evaluate` library by path: its number is taken, and each way to be unusable is one line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moeconv.errors import SettingsError
from moeconv.measure.metrics import find_metric

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
    with pytest.raises(SettingsError, match=says) as caught:
        find_metric(write_module(tmp_path, returned))
    assert "\n" not in str(caught.value)


def test_missing_and_broken_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="is not there"):
        find_metric(str(tmp_path / "none.py:key"))
    broken = tmp_path / "broken.py"
    broken.write_text("def (", encoding="utf-8")
    with pytest.raises(SettingsError, match="can't be loaded as an evaluate module") as caught:
        find_metric(str(broken))
    assert "\n" not in str(caught.value)
