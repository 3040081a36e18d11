"""One evaluation, sample by sample: what the journal keeps, and what every figure is computed from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np

from moeconv.artifacts import Measurement
from moeconv.metrics import F64, Metric
from moeconv.scorers import Scores

DECIMALS = 7  # what is kept of a score; computations use what is kept, so that a resumed run decides alike


@dataclass(frozen=True)
class Record:
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
    def of(cls, what: str, found: Scores, seconds: float, flops: int, near_ties: int = 0) -> Record:
        scores = tuple(tuple(row) for row in found.scores.round(DECIMALS).tolist())
        nats, kls = (tuple(values.round(DECIMALS).tolist()) for values in (found.nats, found.kls))
        tokens = tuple(int(count) for count in found.tokens)
        return cls(what, scores, nats, tokens, kls, round(seconds, 4), flops, near_ties)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Record:
        """Raises KeyError or TypeError for values that are no record."""
        known = {field.name for field in fields(cls)}
        record = cls(**{name: value for name, value in values.items() if name in known})
        scores = tuple(tuple(row) for row in record.scores)
        nats, tokens, kls = tuple(record.nats), tuple(record.tokens), tuple(record.kls)
        return replace(record, scores=scores, nats=nats, tokens=tokens, kls=kls)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def columns(self) -> F64:
        """[samples, columns]"""
        return np.array(self.scores, dtype=np.float64)

    def measured(self, metric: Metric, reference: Record) -> Measurement:
        before, after = metric.value(reference.columns()), metric.value(self.columns())
        tokens = sum(self.tokens)
        return Measurement(after, metric.loss(before, after), sum(self.nats) / tokens, sum(self.kls) / tokens)


def joined(records: Sequence[Record]) -> Record:
    """Records of the same widths on other samples, as one."""
    return Record(
        records[0].what,
        tuple(row for record in records for row in record.scores),
        tuple(value for record in records for value in record.nats),
        tuple(count for record in records for count in record.tokens),
        tuple(value for record in records for value in record.kls),
        round(sum(record.seconds for record in records), 4),
        sum(record.flops for record in records),
        sum(record.near_ties for record in records),
    )
