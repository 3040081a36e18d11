"""Measuring assignments: each once, and known again in a later run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from trials import pairs, scorers, trial_of

from moeconv.artifacts import uniform
from moeconv.measure.metrics import METRICS
from moeconv.measure.scorers import Scorer, Scores
from moeconv.measure.trial import Measure, Trial, known_plans, unquantized
from moeconv.measure.workdir import Journal
from moert.pack.model_spec import ExpertKey

TinyModel = Callable[[str, str], Path]


class Counting:
    """A scorer that counts."""

    def __init__(self, scorer: Scorer) -> None:
        self.scorer, self.calls = scorer, 0

    @property
    def n_samples(self) -> int:
        return self.scorer.n_samples

    def score(self, *, as_reference: bool = False) -> Scores:
        self.calls += 1
        return self.scorer.score(as_reference=as_reference)

    def refer(self) -> None:
        self.calls += 1
        self.scorer.refer()


@pytest.fixture(scope="module")
def trial(tiny_model: TinyModel) -> Trial:
    return trial_of(tiny_model("switch_transformers", "all layers sparse"))


@pytest.fixture
def scorer(trial: Trial) -> Counting:
    return Counting(scorers(trial, pairs(5), "perplexity")[0])


def measure_of(trial: Trial, scorer: Counting, path: Path, samples: str = "these") -> Measure:
    return Measure(lambda: trial, lambda: scorer, METRICS["perplexity"], Journal(path, "subject"), samples)


def test_an_assignment_is_measured_once(trial: Trial, scorer: Counting, tmp_path: Path) -> None:
    widths = uniform(trial.spec, 2)
    measure = measure_of(trial, scorer, tmp_path / "j")
    first = measure(widths, "all at 2")
    assert measure(dict(reversed(widths.items())), "the same again") == first
    assert scorer.calls == 2  # the reference, and the assignment
    assert list(measure.used.values()) == [first]
    resumed = measure_of(trial, scorer, tmp_path / "j")
    assert resumed(widths, "all at 2") == first
    assert resumed.reference == measure.reference
    assert scorer.calls == 2
    assert resumed(uniform(trial.spec, 3), "all at 3") != first
    assert scorer.calls == 4, "the reference is run again, for divergences from it"
    other = measure_of(trial, scorer, tmp_path / "j", "other samples")
    other(widths, "all at 2")
    assert scorer.calls == 6


def test_figures_are_against_the_unquantized_model(trial: Trial, scorer: Counting, tmp_path: Path) -> None:
    measure = measure_of(trial, scorer, tmp_path / "j")
    trial.assign(uniform(trial.spec, 2))  # whatever the model was before
    assert measure.summary(measure.reference).loss == 0
    assert abs(measure.summary(measure.reference).kl) < 1e-5
    found = measure.summary(measure(uniform(trial.spec, 2), "all at 2"))
    nearly = measure.summary(measure(uniform(trial.spec, 8), "all at 8"))
    assert found.kl > 10 * abs(nearly.kl) > 0
    assert found.loss == pytest.approx(found.value / measure.metric.value(measure.reference.columns()) - 1)
    trial.restore()
    expected = scorer.score()
    assert np.allclose(measure.reference.nats, expected.nats, atol=1e-5)
    assert measure.reference.flops > 0


def test_known_plans_are_every_assignment_on_these_samples(trial: Trial, scorer: Counting, tmp_path: Path) -> None:
    measure = measure_of(trial, scorer, tmp_path / "j")
    mixed = {**uniform(trial.spec, 4), ExpertKey("decoder", 1, 2): (2, 8)}
    plans = [uniform(trial.spec, 2), mixed]
    records = [measure(plan, "plan") for plan in plans]
    measure_of(trial, scorer, tmp_path / "j", "others")(uniform(trial.spec, 3), "elsewhere")
    journal = Journal(tmp_path / "j", "subject")
    assert list(known_plans(journal, "these", trial.spec.expert_keys())) == [
        (plan, {}, found) for plan, found in zip(plans, records, strict=True)
    ]
    assert unquantized(journal, "these") == measure.reference
    assert unquantized(journal, "unknown") is None
    assert not list(known_plans(journal, "unknown", trial.spec.expert_keys()))
