"""How well case and punctuation are restored: F1 of the words that bear any, as a metric of ``evaluate``."""

from __future__ import annotations

import re
from collections import Counter

import datasets
import evaluate


def plain(word: str) -> str:
    """The word in lower case without the marks around it."""
    return re.sub(r"^[\W_]+|[\W_]+$", "", word.lower())


def marked(text: str) -> Counter[tuple[str, str]]:
    """Words with a capital or with a mark before or behind them, each with the plain word before it."""
    words = text.split()
    before = ["", *map(plain, words)]
    return Counter((last, word) for last, word in zip(before, words, strict=False) if word != plain(word))


def f1(prediction: str, reference: str) -> float:
    """Of the marked words of both texts; 1 where neither has any."""
    found, right = marked(prediction), marked(reference)
    count = found.total() + right.total()
    return 2 * (found & right).total() / count if count else 1.0


class MarkedWords(evaluate.Metric):
    """Mean of ``f1`` over texts."""

    def _info(self) -> evaluate.MetricInfo:
        texts = {"predictions": datasets.Value("string"), "references": datasets.Value("string")}
        return evaluate.MetricInfo(description=__doc__, citation="", features=datasets.Features(texts))

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        scores = [f1(one, other) for one, other in zip(predictions, references, strict=True)]
        return {"f1": sum(scores) / len(scores)}
