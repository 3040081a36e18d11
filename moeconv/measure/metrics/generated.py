"""Metrics of generated text. Each judge gives (score, 1) for a sample; the value is the mean score."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

from moeconv.measure.metrics.metric import Metric, mean


def rouge(kind: str, prediction: str, target: str) -> tuple[float, float]:
    """F-measure of "rouge1", "rouge2" or "rougeL" (Lin 2004), by the package rouge-score, without stemming."""
    return float(_rouge_scorer(kind).score(target, prediction)[kind].fmeasure), 1.0


@cache
def _rouge_scorer(kind: str) -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer([kind], use_stemmer=False)


def exact_match(prediction: str, target: str) -> tuple[float, float]:
    """1 when the texts have the same words in the same order, whatever the white space between them."""
    return float(prediction.split() == target.split()), 1.0


GENERATED = (
    Metric("rouge1", True, "output", 2, partial(rouge, "rouge1"), mean),
    Metric("rouge2", True, "output", 2, partial(rouge, "rouge2"), mean),
    Metric("rougeL", True, "output", 2, partial(rouge, "rougeL"), mean),
    Metric("exact_match", True, "output", 2, exact_match, mean),
)
