"""Metrics of likelihood: of a given text (perplexity), or of the labels that a sample may have (accuracy, F1)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moeconv.errors import SettingsError
from moeconv.measure.metrics.metric import F64, Metric, mean

LARGEST_EXPONENT = 600.0  # a perplexity beyond this is as bad as any, and still a finite number


def perplexity(sums: F64) -> F64:
    """Sums of (nats, units) [..., 2] → exp(nats a unit) [...]."""
    values: F64 = np.exp(np.minimum(mean(sums), LARGEST_EXPONENT))
    return values


def likeliest(nats: Sequence[float]) -> int:
    """The place of the choice that the model takes: the one with the fewest nats in all, the first of equals.

    Nats are summed over a choice's tokens and not divided by their number. This is the usual accuracy of GLUE and
    SuperGLUE tasks, whose labels are a few fixed words (rank classification: Brown et al. 2020, Sanh et al. 2022).
    """
    return int(np.argmin(np.asarray(nats, dtype=np.float64)))


def correct(chosen: int, label: int) -> tuple[float, float]:
    """(1 when the choice is right, 1)."""
    return float(chosen == label), 1.0


def positives(chosen: int, label: int) -> tuple[float, float, float]:
    """(true positive, chosen as positive, positive by its label), each 0 or 1. Choice 1 is the positive one, as in
    MRPC ("equivalent") and MultiRC ("true"). Raises SettingsError for a third choice, where F1 has no one meaning."""
    if max(chosen, label) > 1:
        raise SettingsError("--metric f1 is for two choices, the second being the positive one: use accuracy here")
    return float(chosen and label), float(chosen), float(label)


def f1(sums: F64) -> F64:
    """Sums of `positives` [..., 3] → 2 TP / (chosen + labelled) [...]; 0 where neither chose nor labelled any."""
    both = sums[..., 1] + sums[..., 2]
    values: F64 = 2 * sums[..., 0] / np.where(both > 0, both, 1.0)
    return values


LIKELIHOOD = (
    Metric("perplexity", False, "nats", 2, None, perplexity, "words"),
    Metric("token_perplexity", False, "nats", 2, None, perplexity, "tokens"),
    Metric("accuracy", True, "choice", 2, correct, mean),
    Metric("f1", True, "choice", 3, positives, f1),
)
