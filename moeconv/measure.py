"""Measures assignments of widths on one list of samples, each only once: the journal knows the rest."""

from __future__ import annotations

import hashlib
import json
import time

from moeconv.artifacts import Measurement
from moeconv.journal import Journal
from moeconv.metrics import F64, Metric
from moeconv.scorers import Scorer
from moeconv.trial import Trial, Widths


class Measure:
    """`samples_id` names the samples (a hash); with the widths it is the identity of a measurement."""

    def __init__(
        self, trial: Trial, scorer: Scorer, metric: Metric, reference: F64, journal: Journal, samples_id: str
    ) -> None:
        self.trial = trial
        self.scorer = scorer
        self.metric = metric
        self.reference = metric.value(reference)
        self.journal = journal
        self.samples_id = samples_id
        self.used: dict[str, Measurement] = {}  # what this run asked for, measured now or before

    def known(self, widths: Widths) -> bool:
        return self.journal.get(self._identity(widths)) is not None

    def __call__(self, widths: Widths, what: str) -> Measurement:
        """The loss of an assignment (all experts given), from the journal or measured now."""
        identity = self._identity(widths)
        found = self.journal.get(identity)
        if found is None:
            found = self._measure(widths, what)
            self.journal.add(identity, found)
        self.used[identity] = found
        return found

    def _measure(self, widths: Widths, what: str) -> Measurement:
        started = time.perf_counter()
        self.trial.assign(widths)
        scores = self.scorer.score()
        value = self.metric.value(scores.per_sample)
        seconds = time.perf_counter() - started
        return Measurement(what, value, self.metric.loss(self.reference, value), scores.nll, round(seconds, 4))

    def keep(self, widths: Widths) -> None:
        """Remembers the intermediate results of this assignment, so that its neighbours cost less."""
        self.trial.assign(widths)
        self.scorer.score(keep=True)

    def _identity(self, widths: Widths) -> str:
        listed = [[str(key), bits] for key, bits in sorted(widths.items())]
        return hashlib.sha256(json.dumps([self.samples_id, listed]).encode()).hexdigest()[:32]
