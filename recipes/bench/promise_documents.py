"""The promise in simulation: how often a bound holds, over numbers and sizes of documents. Only numpy.

A case has documents to judge by and held-out ones, of some windows each; the damage to a window is that of its document
(skewed, as harm is) and its own. Sizes are equal, or heavy-tailed: of 100 documents the largest three have a quarter of
all windows. A confidence is stated where `Evidence` says that the documents are enough for it, as in a conversion; all
other rows give no promise, and their coverage is shown without an aim.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from moeconv.measure.metrics import F64, METRICS
from moeconv.promise.bound import Evidence, Terms, upper_bounds
from recipes.bench.result import Row
from recipes.bench.sized import sized

DOCUMENTS = sized((10, 20, 30, 50, 100, 300), (10, 30))
RATIOS = (0.5, 1.0, 4.0)
WITHIN = {"low": 0.05, "high": 0.7}  # share of the damage's variance that is the document's
WINDOWS = 8  # of a document, on average
LOSS, DEVIATION = 0.03, 0.05
ALLOWED = 0.02  # that coverage may lie below the confidence
ROUNDS, PLANS, DRAWS = sized((10, 200, 1000), (1, 20, 50))

Rng = np.random.Generator


class Setting(NamedTuple):
    documents: int
    heavy: bool
    within: str
    ratio: float
    confidence: float = 0.95

    @property
    def name(self) -> str:
        sizes = "heavy-tailed" if self.heavy else "equal"
        return (
            f"{self.documents} documents of {sizes} sizes, {self.within} correlation, held out {self.ratio:g} times as "
            f"many, {self.confidence:.0%}"
        )


class Coverage(NamedTuple):
    """Cases, how many of them had a promise, and the share of bounds that held: of those, and of all."""

    cases: int
    given: int
    held_given: float
    held: float


def settings(confidence: float = 0.95) -> Iterator[Setting]:
    for documents, heavy, within, ratio in itertools.product(DOCUMENTS, (False, True), WITHIN, RATIOS):
        yield Setting(documents, heavy, within, ratio, confidence)


def coverage(setting: Setting, seed: int, rounds: int = ROUNDS, plans: int = PLANS, draws: int = DRAWS) -> Coverage:
    """`rounds` draws of sizes, each with `plans` independent cases."""
    rng, metric = np.random.default_rng(seed), METRICS["perplexity"]
    held: list[bool] = []
    given: list[bool] = []
    for at in range(rounds):
        judged = sizes(rng, setting.documents, setting.heavy)
        other = sizes(rng, max(1, round(setting.ratio * setting.documents)), setting.heavy)
        evidence = Evidence(*(np.repeat(np.arange(len(each)), each) for each in (judged, other)))
        reference, scores = windows(rng, judged, WITHIN[setting.within], plans)
        terms = Terms(setting.confidence, evidence.heldout_number, at, evidence.acceptance, draws)
        bounds = upper_bounds(metric, reference, scores, terms)
        before, after = (rows.sum(axis=0) for rows in windows(rng, other, WITHIN[setting.within], plans))
        losses = metric.loss(metric.value_of_sums(before), metric.value_of_sums(after))
        held += (losses <= bounds).tolist()
        given += [evidence.enough(setting.confidence)] * plans
    promised = [one for one, stated in zip(held, given, strict=True) if stated]
    return Coverage(len(held), len(promised), float(np.mean(promised)) if promised else 0.0, float(np.mean(held)))


def sizes(rng: Rng, documents: int, heavy: bool) -> np.ndarray:
    """Windows of each document."""
    if not heavy:
        return np.full(documents, WINDOWS)
    return np.maximum(1, np.minimum(rng.pareto(1.5, documents) + 1, 60) * WINDOWS / 2).round().astype(int)


def windows(rng: Rng, counts: np.ndarray, within: float, plans: int) -> tuple[F64, F64]:
    """→ reference, scores [windows, plans, 2]: nats and words of each window."""
    shape = (int(counts.sum()), plans)
    shared = np.repeat(rng.exponential(1.0, (len(counts), plans)) - 1.0, counts, axis=0)
    own = rng.standard_normal(shape)
    damage = LOSS + DEVIATION * (np.sqrt(within) * shared + np.sqrt(1 - within) * own)
    words = rng.integers(60, 129, shape).astype(float)
    nats = rng.normal(3.5, 0.4, shape)
    return np.stack([nats * words, words], axis=2), np.stack([(nats + damage) * words, words], axis=2)


def rows(confidences: tuple[float, ...] = (0.9, 0.95)) -> list[Row]:
    """One for each setting; those without a promise have no aim."""
    found = []
    for seed, setting in enumerate(one for confidence in confidences for one in settings(confidence)):
        held = coverage(setting, seed)
        if held.given:
            row = Row(setting.name, 100 * held.held_given, f"% of {held.given:,} promises", runs=held.given)
            found.append(row.at_least(100 * (setting.confidence - ALLOWED)))
        else:
            found.append(Row(f"{setting.name}: no promise given", 100 * held.held, "% of bounds", runs=held.cases))
    return found
