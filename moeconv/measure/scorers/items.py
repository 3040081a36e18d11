"""Texts whose likelihood is scored, and how samples are judged by them: one for each sample, or one for each choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moeconv.calibration import Sample
from moeconv.measure.metrics import F64, Metric, likeliest
from moeconv.measure.scorers import Scores

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Items:
    """Item i belongs to the sample `owner[i]` and has `tokens[i]` scored tokens and `words[i]` words; `right[i]` says
    whether it is the sample's own text (and not a wrong choice)."""

    owner: I64
    right: npt.NDArray[np.bool_]
    tokens: F64
    words: F64

    def at(self, places: I64) -> Items:
        """Those items, in that order."""
        return Items(self.owner[places], self.right[places], self.tokens[places], self.words[places])


def texts_of(samples: Sequence[Sample]) -> tuple[list[str], I64, npt.NDArray[np.bool_]]:
    """What is scored of each sample: its target, or each of its choices. → texts, owners, which are right."""
    texts, owner, right = [], [], []
    for place, sample in enumerate(samples):
        for at, text in enumerate(sample.choices or (sample.target,)):
            texts.append(text)
            owner.append(place)
            right.append(not sample.choices or at == sample.label)
    return texts, np.array(owner), np.array(right)


def documents_of(samples: Sequence[Sample]) -> I64:
    """A number for the document of each sample; one without a document is its own. [samples]"""
    numbers: dict[object, int] = {}
    return np.array([numbers.setdefault(sample.document or at, len(numbers)) for at, sample in enumerate(samples)])


def tally(
    metric: Metric, items: Items, samples: Sequence[Sample], nats: F64, kls: F64, outputs: Sequence[str] = ()
) -> Scores:
    """Nats and divergences [items], and generated texts [samples] where the metric reads them → Scores."""
    own = items.right
    sample_nats, tokens = nats[own], items.tokens[own]
    if metric.reads == "nats":
        units = items.words[own] if metric.unit == "words" else tokens
        scores = np.stack([sample_nats, units], axis=1)
    elif metric.reads == "choice":
        scores = _choices(metric, items, samples, nats)
    else:
        assert metric.judge is not None
        judged = [metric.judge(text, sample.target) for text, sample in zip(outputs, samples, strict=True)]
        scores = np.array(judged, dtype=np.float64)
    return Scores(scores, sample_nats, tokens, kls[own], tuple(outputs))


def _choices(metric: Metric, items: Items, samples: Sequence[Sample], nats: F64) -> F64:
    assert metric.judge is not None
    starts = np.searchsorted(items.owner, np.arange(len(samples)))
    rows = [
        metric.judge(likeliest(nats[start : start + len(sample.choices)].tolist()), sample.label)
        for start, sample in zip(starts, samples, strict=True)
    ]
    return np.array(rows, dtype=np.float64)
