"""The scores of one evaluation, sample by sample, as the journal keeps them; every figure is computed from these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np

from moeconv.artifacts import Summary
from moeconv.measure.metrics import F64, Metric
from moeconv.measure.metrics.likelihood import perplexity
from moeconv.measure.scorers import Scores

_MOST = 1e24  # seconds, tokens or operations that no measurement takes
DECIMALS = 7  # what is kept of a score; computations use what is kept, so that a resumed run decides alike


@dataclass(frozen=True)
class Evaluation:
    """For each sample the metric's columns, and nats and divergence summed over its tokens; and what it took:
    seconds, operations in expert rows, samples whose generated text hung on a tie that the order of summation
    decides."""

    what: str
    scores: tuple[tuple[float, ...], ...]
    nats: tuple[float, ...]
    tokens: tuple[int, ...]
    kls: tuple[float, ...]
    seconds: float
    flops: int
    near_ties: int = 0

    @classmethod
    def of(cls, what: str, found: Scores, seconds: float, flops: int, near_ties: int = 0) -> Evaluation:
        scores = tuple(tuple(row) for row in found.scores.round(DECIMALS).tolist())
        nats, kls = (tuple(values.round(DECIMALS).tolist()) for values in (found.nats, found.kls))
        tokens = tuple(int(count) for count in found.tokens)
        return cls(what, scores, nats, tokens, kls, round(seconds, 4), flops, near_ties)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Evaluation:
        """Raises KeyError, TypeError or ValueError for values that are no evaluation."""
        known = {field.name for field in fields(cls)}
        evaluation = cls(**{name: value for name, value in values.items() if name in known})
        scores = tuple(map(_numbers, evaluation.scores))
        nats, tokens, kls = _numbers(evaluation.nats), _numbers(evaluation.tokens), _numbers(evaluation.kls)
        lengths = {len(scores), len(nats), len(tokens), len(kls)}
        if len(lengths) > 1 or 0 in lengths or len(set(map(len, scores))) > 1:
            raise ValueError("as many scores, nats, tokens and divergences as samples were expected")
        counts = tokens + _numbers([evaluation.seconds, evaluation.flops, evaluation.near_ties])
        if not isinstance(evaluation.what, str) or not all(0 <= count <= _MOST for count in counts) or not sum(tokens):
            raise ValueError("no counts that a measurement can have")
        whole = tuple(int(count) for count in tokens)
        return replace(evaluation, scores=scores, nats=nats, tokens=whole, kls=kls)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def columns(self) -> F64:
        """[samples, columns]"""
        return np.array(self.scores, dtype=np.float64)

    def token_perplexity(self) -> float:
        """Returns the perplexity per token."""
        return float(perplexity(np.array([sum(self.nats), sum(self.tokens)])))

    def summary(self, metric: Metric, reference: Evaluation) -> Summary:
        before, after = metric.value(reference.columns()), metric.value(self.columns())
        tokens = sum(self.tokens)
        return Summary(after, metric.loss(before, after), sum(self.nats) / tokens, sum(self.kls) / tokens)


def _numbers(values: Sequence[float]) -> tuple[float, ...]:
    if not isinstance(values, (list, tuple)) or not {float, int}.issuperset(map(type, values)):
        raise TypeError("numbers were expected")
    return tuple(values)


def joined(evaluations: Sequence[Evaluation]) -> Evaluation:
    """Evaluations of the same widths on other samples, as one."""
    return Evaluation(
        evaluations[0].what,
        tuple(row for evaluation in evaluations for row in evaluation.scores),
        tuple(value for evaluation in evaluations for value in evaluation.nats),
        tuple(count for evaluation in evaluations for count in evaluation.tokens),
        tuple(value for evaluation in evaluations for value in evaluation.kls),
        round(sum(evaluation.seconds for evaluation in evaluations), 4),
        sum(evaluation.flops for evaluation in evaluations),
        sum(evaluation.near_ties for evaluation in evaluations),
    )
