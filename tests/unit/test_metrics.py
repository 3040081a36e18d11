"""Metrics: values by hand, the sign of the loss, and intervals that cover what they should."""

from __future__ import annotations

import numpy as np
import pytest

from moeconv.metrics import METRICS, exact_match, rouge2


def test_rouge2_by_hand() -> None:
    # bigrams of the target: (a b) (b c) (c d); of the prediction: (a b) (b c): precision 1, recall 2/3
    assert rouge2("a b c", "a b c d") == pytest.approx(0.8)
    assert rouge2("", "a b") == 0
    assert rouge2("HH AH L OW", "hh ah l ow") == 1


def test_exact_match_ignores_spacing_only() -> None:
    assert exact_match("a  b", "a b") == 1
    assert exact_match("a c", "a b") == 0


def test_perplexity_is_per_word() -> None:
    scores = np.array([[4.0, 2], [8.0, 4]])
    assert METRICS["perplexity"].value(scores) == pytest.approx(np.exp(2.0))


def test_loss_is_relative_and_signed() -> None:
    assert METRICS["rouge2"].loss(0.5, 0.4) == pytest.approx(0.2)
    assert METRICS["rouge2"].loss(0.5, 0.6) == pytest.approx(-0.2)
    assert METRICS["perplexity"].loss(10, 11) == pytest.approx(0.1)
    assert np.isnan(METRICS["rouge2"].loss(0, 0))


def test_interval_is_paired() -> None:
    """Samples differ widely, the two models hardly: a paired interval is narrow, and holds the true loss."""
    rng = np.random.default_rng(0)
    base = rng.uniform(0, 1, 400)
    reference = np.stack([base, np.ones(400)], axis=1)
    worse = np.stack([base * 0.95, np.ones(400)], axis=1)
    low, high = METRICS["rouge2"].interval(reference, worse, seed=1)
    assert low == pytest.approx(0.05)
    assert high == pytest.approx(0.05)
    noisy = np.stack([base * 0.95 + rng.normal(0, 0.2, 400), np.ones(400)], axis=1)
    low, high = METRICS["rouge2"].interval(reference, noisy, seed=1)
    assert low < 0.05 < high
    assert 0.02 < high - low < 0.2
    assert METRICS["rouge2"].interval(reference, noisy, seed=1) == (low, high)
