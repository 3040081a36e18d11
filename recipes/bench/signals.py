"""How well do the sweep's signals rank experts, and what would racing have measured? From scores of every probe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.stats import rankdata

from moeconv.artifacts import SIGNALS
from moeconv.conversion.measuring import RACING_BLOCKS, RACING_SPAN
from moeconv.measure.metrics import F64, Metric
from moeconv.measure.scorers import Scores
from moeconv.sweep.racing import Race
from recipes.bench.result import Row, row_of_runs

RACING = 0.05
HALVINGS = 20

Places = npt.NDArray[np.integer[Any]]


class Signals:
    """The three signals of every probe, on any of the samples."""

    def __init__(self, name: str, metric: Metric, reference: Scores, base: Scores, found: Sequence[Scores]) -> None:
        self.name, self.metric = name, metric
        self.reference, self.base, self.found = reference.scores, base, found
        self.samples = len(base.nats)

    def rises(self, signal: str, samples: Places) -> F64:
        """Above the base, of each probe, on these places of samples. [probes]"""
        if signal != "metric":
            rises: F64 = self._above_base(signal)[:, samples].sum(axis=1)
            return rises
        before = self.metric.value(self.reference[samples])
        base = self.metric.loss(before, self.metric.value(self.base.scores[samples]))
        after = [self.metric.loss(before, self.metric.value(scores.scores[samples])) for scores in self.found]
        return np.array(after) - base

    def _above_base(self, signal: str) -> F64:
        """[probes, samples]"""
        name = {"nll": "nats", "kl": "kls"}[signal]
        above: F64 = np.array([getattr(scores, name) for scores in self.found]) - getattr(self.base, name)
        return above

    def rows(self) -> list[Row]:
        everything = np.arange(self.samples)
        whole = {signal: self.rises(signal, everything) for signal in SIGNALS}
        rows = []
        for signal in SIGNALS:
            alike, foretells = self._halves(signal)
            rows.append(row_of_runs(f"{self.name}: {signal} on other samples", alike, "rank correlation"))
            if signal != "metric":
                rows.append(row_of_runs(f"{self.name}: {signal}, metric on others", foretells, "rank correlation"))
        for one, other in (("metric", "nll"), ("metric", "kl"), ("nll", "kl")):
            rows.append(Row(f"{self.name}: {one} and {other}", correlation(whole[one], whole[other]),
                            "rank correlation"))  # fmt: skip
        return rows + self._racing("kl")

    def _halves(self, signal: str) -> tuple[list[float], list[float]]:
        """By random halves of the samples: the signal against itself, and against the metric."""
        alike, foretells = [], []
        for seed in range(HALVINGS):
            order = np.random.default_rng(seed).permutation(self.samples)
            first, second = order[: self.samples // 2], order[self.samples // 2 :]
            here = self.rises(signal, first)
            alike.append(correlation(here, self.rises(signal, second)))
            foretells.append(correlation(here, self.rises("metric", second)))
        return alike, foretells

    def _racing(self, signal: str) -> list[Row]:
        """How much a race would have measured, and by how many places its ranking is off."""
        count = min(RACING_BLOCKS, self.samples)
        blocks = [np.arange(block, self.samples, count) for block in range(count)]
        race = Race(len(self.found), [len(block) for block in blocks], delta=RACING, span=RACING_SPAN)
        columns = self._above_base(signal)
        for block in blocks:
            still = race.open()
            if not still:
                break
            race.add({probe: columns[probe][block] for probe in still})
        off = np.abs(rankdata(race.means()) - rankdata(columns.mean(axis=1))).max() / len(self.found)
        name = f"{self.name}: racing by {signal} at {RACING:.0%}"
        return [
            Row(f"{name}, measured", race.measured_share(), "of all"),
            Row(f"{name}, furthest from its place", float(off), "of all places").at_most(RACING_SPAN),
        ]


def correlation(one: F64, other: F64) -> float:
    """Spearman's; 0 where one of them is the same throughout."""
    ranks = rankdata(one), rankdata(other)
    if min(np.ptp(ranks[0]), np.ptp(ranks[1])) == 0:
        return 0.0
    return float(np.corrcoef(*ranks)[0, 1])
