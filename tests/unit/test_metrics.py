"""Metrics: values by hand, the sign of the loss, and intervals that cover what they should."""

from __future__ import annotations

import numpy as np
import pytest

from moeconv.errors import SettingsError
from moeconv.measure.metrics import METRICS, Metric, default_metric, find_metric, likeliest


def score(name: str, one: object, other: object) -> float:
    return METRICS[name].judge(one, other)[0]


def test_rouge_by_hand() -> None:
    # bigrams of the target: (a b) (b c) (c d); of the prediction: (a b) (b c): precision 1, recall 2/3
    assert score("rouge2", "a b c", "a b c d") == pytest.approx(0.8)
    assert score("rouge2", "", "a b") == 0
    assert score("rouge2", "HH AH L OW", "hh ah l ow") == 1
    # words in any order: 3 of 3 and 3 of 4; longest common subsequence (a b): 2 of 3 and 2 of 4
    assert score("rouge1", "c a b", "a b c d") == pytest.approx(6 / 7)
    assert score("rougeL", "c a b", "a b c d") == pytest.approx(4 / 7)


def test_exact_match_ignores_spacing_only() -> None:
    assert score("exact_match", "a  b", "a b") == 1
    assert score("exact_match", "a c", "a b") == 0


@pytest.mark.parametrize("name", ["perplexity", "token_perplexity"])
def test_perplexity_is_per_unit_and_stays_finite(name: str) -> None:
    assert METRICS[name].value(np.array([[4.0, 2], [8.0, 4]])) == pytest.approx(np.exp(2.0))
    assert np.isfinite(METRICS[name].value(np.array([[1e6, 1]])))
    assert METRICS["perplexity"].unit == "words"
    assert METRICS["token_perplexity"].unit == "tokens"


def test_accuracy_and_f1_by_hand() -> None:
    """Three true positives, one chosen wrongly, two missed, four true negatives: F1 = 6 / (4 + 5)."""
    answers = [(1, 1)] * 3 + [(1, 0)] + [(0, 1)] * 2 + [(0, 0)] * 4
    for name, expected in (("accuracy", 0.7), ("f1", 6 / 9)):
        metric = METRICS[name]
        scores = np.array([metric.judge(*answer) for answer in answers])
        assert scores.shape == (10, metric.columns)
        assert metric.value(scores) == pytest.approx(expected)
    assert METRICS["f1"].value(np.zeros((4, 3))) == 0
    with pytest.raises(SettingsError, match="two choices"):
        METRICS["f1"].judge(0, 2)


def test_the_choice_with_the_fewest_nats_in_all_is_taken() -> None:
    assert likeliest([3.0, 1.0, 2.0]) == 1
    assert likeliest([2.0, 2.0]) == 0


@pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)
def test_values_of_many_sums_are_the_values_of_each(metric: Metric) -> None:
    scores = np.random.default_rng(1).uniform(0.1, 1, (5, 7, metric.columns))
    values = metric.value_of_sums(scores.sum(axis=1))
    assert values.shape == (5,)
    assert values.tolist() == pytest.approx([metric.value(part) for part in scores])


def test_every_metric_says_what_it_reads() -> None:
    assert {name for name, metric in METRICS.items() if metric.generates} == {
        "rouge1", "rouge2", "rougeL", "exact_match",
    }  # fmt: skip
    assert {name for name, metric in METRICS.items() if metric.reads == "choice"} == {"accuracy", "f1"}
    for metric in METRICS.values():
        assert (metric.judge is None) == (metric.reads == "nats") == bool(metric.unit)


def test_names_are_found_and_others_answered_with_the_known_ones() -> None:
    assert find_metric("f1") is METRICS["f1"]
    with pytest.raises(SettingsError, match=r"--metric bleu: not known; there are rouge1, .*f1"):
        find_metric("bleu")
    assert [default_metric(True), default_metric(False), default_metric(True, True)] == [
        "rouge2", "perplexity", "accuracy",
    ]  # fmt: skip


def test_loss_is_relative_and_signed() -> None:
    assert METRICS["rouge2"].loss(0.5, 0.4) == pytest.approx(0.2)
    assert METRICS["rouge2"].loss(0.5, 0.6) == pytest.approx(-0.2)
    assert METRICS["perplexity"].loss(10, 11) == pytest.approx(0.1)
    assert np.isnan(METRICS["rouge2"].loss(0, 0))
    found = METRICS["rouge2"].loss(np.array([0.5, 0.0]), np.array([0.4, 0.4]))
    assert found[0] == pytest.approx(0.2)
    assert np.isnan(found[1])
