"""Metrics behind one protocol: per-sample scores in, one value, one loss, one interval out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
LARGEST_EXPONENT = 600.0  # a perplexity beyond this is as bad as any, and still a finite number


@dataclass(frozen=True)
class Metric:
    """How a value comes out of per-sample scores [n, 2] (numerator, denominator), and which direction is better.

    `generates` says whether samples are judged on generated text (`judge(prediction, target)`) or on the negative
    log-likelihood of the text itself (scores are then nats and words).
    """

    name: str
    higher_is_better: bool
    generates: bool
    judge: Callable[[str, str], float] | None

    def value(self, scores: F64) -> float:
        mean = scores[:, 0].sum() / scores[:, 1].sum()
        return float(mean if self.generates else np.exp(min(mean, LARGEST_EXPONENT)))

    def loss(self, reference: float, value: float) -> float:
        """Relative drop of the metric; for perplexity its relative rise. Negative where the value got better; NaN
        against a reference of 0."""
        if reference == 0:
            return float("nan")
        return (reference - value) / reference if self.higher_is_better else (value - reference) / reference

    def interval(self, reference: F64, scores: F64, *, seed: int, draws: int = 2000) -> tuple[float, float]:
        """95% interval of the loss by the paired bootstrap: both models are judged on the same resampled samples."""
        rng = np.random.default_rng(seed)
        n, losses = len(scores), np.empty(draws)
        for draw in range(draws):
            rows = rng.integers(0, n, n)
            losses[draw] = self.loss(self.value(reference[rows]), self.value(scores[rows]))
        low, high = np.nanquantile(losses, [0.025, 0.975])
        return float(low), float(high)


def rouge2(prediction: str, target: str) -> float:
    """ROUGE-2 F-measure of one sample (Lin 2004), by the package rouge-score, without stemming."""
    return float(_rouge_scorer().score(target, prediction)["rouge2"].fmeasure)


@cache
def _rouge_scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rouge2"], use_stemmer=False)


def exact_match(prediction: str, target: str) -> float:
    return float(prediction.split() == target.split())


METRICS: dict[str, Metric] = {
    "rouge2": Metric("rouge2", True, True, rouge2),
    "exact_match": Metric("exact_match", True, True, exact_match),
    "perplexity": Metric("perplexity", False, False, None),
}


def default_metric(seq2seq: bool) -> str:
    return "rouge2" if seq2seq else "perplexity"
