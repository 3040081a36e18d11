"""How many documents a promise rests on, and whether they are enough for its confidence. Pure.

Samples of one document are alike, so what counts is documents; and of documents of unlike sizes, one large one counts
for more. (Σ size)² / Σ size² is the number of equal ones that would be as noisy (Kish 1965): the documents counted,
their sizes too.

How many it takes was found by simulation (`make bench-promise`, numbers and sizes of documents): with BEYOND = 1.5
documents expected beyond the bound (15 at 90%, 30 at 95%, 150 at 99%) that are worth half as many of one size, bounds
hold as often as they say, less 2 points at most. 20 of very unlike sizes, worth 12, held in 92.8% at 95%, and 10 of
them, worth 7, in 91%. Held-out text must not be so little that a draw may have none: GUESSES times the number that
leaves a chance of 1 − confidence for that.
Where nothing tells which rows are alike, documents are runs of rows. Whether rows of a run are alike is seen in what a
plan does to them (`alike`). Where so few as two rows say more than one alone, rows are what is counted, as many as they
are worth; else runs are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from moeconv.measure.metrics import F64

Documents = npt.NDArray[np.integer[Any]]
"""For each sample a number that stands for its document."""

BEYOND = 1.5
WORTH = 0.5  # of these, counted as if of one size
GUESSES = 2.0
MOST_ALIKE = 2.0  # rows that say as much as one; of more, runs are counted


@dataclass(frozen=True)
class Evidence:
    """The documents [samples] of the text that plans are judged on, and of the held-out text, in words `why` these.
    `runs`: they are runs of rows, which may say more than that. `alike` as in `Terms`."""

    acceptance: Documents
    heldout: Documents
    why: str = ""
    runs: bool = False
    alike: float = 1.0

    @property
    def count(self) -> int:
        """Documents that plans are judged on, large and small."""
        return len(np.unique(self.acceptance))

    @property
    def number(self) -> float:
        """Documents that plans are judged on, as if of one size and like no other."""
        return effective(self.acceptance) / self.alike

    @property
    def heldout_number(self) -> float:
        """Held-out documents beside them. Where fewer samples were taken from each, they are worth less: the smaller of
        the ratios of documents and of samples counts."""
        samples = len(self.heldout) / len(self.acceptance)
        return min(effective(self.heldout) / self.alike, self.number * samples)

    @property
    def is_grouped(self) -> bool:
        """Whether any two samples are of one document."""
        return self.count < len(self.acceptance)

    def enough(self, confidence: float) -> bool:
        wanted = least(confidence)
        judged = self.count >= wanted and self.number >= WORTH * wanted
        return judged and effective(self.heldout) >= least_heldout(confidence)

    def of_samples(self) -> Evidence:
        """The same text, each sample as its own document: bounds then hold for more text of the same documents."""
        return replace(self, acceptance=np.arange(len(self.acceptance)), heldout=np.arange(len(self.heldout)))

    def of_rows(self, effects: F64) -> Evidence:
        """Returns the rows of these runs, where what a plan does to each (`effects` [samples]) says that they are
        hardly alike; else the runs."""
        found = alike(effects, self.acceptance)
        is_more = found < min(MOST_ALIKE, len(self.acceptance) / self.count)
        return replace(self.of_samples(), runs=False, alike=found) if is_more else self


def effective(documents: Documents) -> float:
    """The number of documents of equal size that would be as noisy."""
    _, sizes = np.unique(documents, return_counts=True)
    return float(sizes.sum() ** 2 / (sizes**2).sum())


def alike(effects: F64, runs: Documents) -> float:
    """Returns how many rows say as much as one that is like no other, 1 or more: the variance of sums over runs, beside
    the sum of the rows' variances, and one standard error more. effects [rows] have a mean of zero."""
    _, places = np.unique(runs, return_inverse=True)
    sums = np.bincount(places.reshape(-1), effects)
    rows = float((effects**2).sum())
    if len(sums) < 2 or not rows > 0:
        return math.inf
    ratio = float((sums**2).sum()) / rows
    return max(1.0, ratio * math.exp(math.sqrt(2 / (len(sums) - 1))))


def least(confidence: float) -> int:
    """How many documents to judge by a promise takes."""
    return math.ceil(round(BEYOND / (1 - confidence), 6))


def least_heldout(confidence: float) -> int:
    """How many held-out documents it takes."""
    return math.ceil(-GUESSES * math.log(1 - confidence))
