"""Judges whether a plan keeps the promise, on calibration text that took no part in ranking experts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from moeconv.errors import SettingsError
from moeconv.measure.assignments import Measure
from moeconv.measure.evaluation import Evaluation
from moeconv.measure.metrics import F64
from moeconv.promise.bound import Needed, Terms, effects, interval, samples_needed, upper_bound, worst_harm
from moeconv.promise.evidence import WORTH, Documents, Evidence, effective, least, least_heldout
from moert.pack.manifest import LossEstimate

LARGEST_REFERENCE = 1e30


class Judge:
    """`measure` is that of the acceptance samples; a plan holds that keeps to `planned_loss`. Without a confidence the
    measured loss itself must hold.

    `confidence` is what was asked for, `stated` what can be said: None where the text is of too few documents. The
    bound is then one for more text of the same documents, and is never called by the confidence.
    """

    def __init__(
        self, measure: Measure, evidence: Evidence, planned_loss: float, confidence: float | None, seed: int
    ) -> None:
        self.measure, self.evidence = measure, evidence
        self.planned_loss, self.confidence, self.seed = planned_loss, confidence, seed
        self._counted: Evidence | None = None
        self._harms: dict[tuple[tuple[float, ...], ...], F64 | None] = {}
        self._bounds: dict[tuple[object, ...], float] = {}  # each costs thousands of draws

    @property
    def stated(self) -> float | None:
        enough = self.confidence is not None and self.evidence.enough(self.confidence)
        return self.confidence if enough else None

    @property
    def used(self) -> Evidence:
        """What intervals rest on: documents, or where those are too few, samples of them."""
        short = self.confidence is not None and self.stated is None
        return self.evidence.of_samples() if short else self.evidence

    @property
    def counted(self) -> Evidence:
        """What bounds rest on: the same, or rows where documents are runs of them. The first plan that is judged says
        whether these are alike."""
        return self._counted or self.used

    def counted_text(self) -> str | None:
        """Returns a line on what is counted instead of runs; None for runs, and for documents that the text tells."""
        counted = self.counted
        if self.stated is None or not self.evidence.runs or counted.runs:
            return None
        return (
            f"rows next to each other are hardly alike in what plans do to them: {len(counted.acceptance)} rows count "
            f"as {counted.number:.0f} documents, and not as {self.evidence.count} runs"
        )

    def too_few(self) -> str | None:
        """One line where the documents do not carry the confidence that was asked for."""
        if self.confidence is None or self.stated is not None:
            return None
        found, heldout, wanted = self.evidence, effective(self.evidence.heldout), least(self.confidence)
        return (
            f"{found.count} documents to judge plans by (worth {found.number:.0f} of one size) and {heldout:.0f} "
            f"held-out ones are too few for a promise at {self.confidence:.0%}, which takes {wanted} (worth "
            f"{WORTH * wanted:.0f}) and {least_heldout(self.confidence)}: bounds and intervals hold for more text of "
            "these documents only"
        )

    def loss(self, evaluation: Evaluation) -> float:
        return self.measure.summary(evaluation).loss

    def bound(self, evaluation: Evaluation) -> float | None:
        """What the loss of as much text as was held out stays under; None without a confidence, infinite where the
        samples can't tell."""
        if self.confidence is None:
            return None
        scores, reference, columns = evaluation.scores, self.measure.reference.columns(), evaluation.columns()
        if self._counted is None:
            used, metric = self.used, self.measure.metric
            self._counted = used.of_rows(effects(metric, reference, columns)) if used.runs and self.stated else used
        if scores not in self._harms:
            self._harms[scores] = worst_harm(self.measure.metric, reference, columns, self.counted.acceptance)
        if self._harms[scores] is not None:
            return self._bound(scores, columns)
        harms = [harm for harm in self._harms.values() if harm is not None]
        if not harms:
            return self._bound(scores, columns, unseen=True)
        return min(self._bound(scores, columns, harm) for harm in harms)

    def holds(self, evaluation: Evaluation) -> bool:
        bound = self.bound(evaluation)
        return (self.loss(evaluation) if bound is None else bound) <= self.planned_loss

    def text(self, evaluation: Evaluation) -> str:
        """The loss, and the bound with what it holds for."""
        bound = self.bound(evaluation)
        promised = "" if bound is None else f", {bound_text(bound, self.stated)}"
        return f"loss {self.loss(evaluation):.2%}{promised}"

    def needed(self, tried: Sequence[Evaluation]) -> Needed | None:
        """How many documents the promise takes; None where there is enough, or nothing is promised."""
        if self.stated is None:
            return None
        found = samples_needed(
            self.measure.metric, self.measure.reference.columns(), [evaluation.columns() for evaluation in tried],
            self._terms(self.stated), target=self.planned_loss,
        )  # fmt: skip
        return None if found.enough else found

    def _bound(self, scores: object, columns: F64, harm: F64 | None = None, unseen: bool = False) -> float:
        """Returns the bound of these scores; `harm` and `unseen` as in Terms."""
        name = scores, unseen if harm is None else tuple(harm.tolist())
        if name not in self._bounds:
            assert self.confidence is not None
            terms = replace(self._terms(self.confidence), harm=harm, unseen=unseen)
            self._bounds[name] = upper_bound(self.measure.metric, self.measure.reference.columns(), columns, terms)
        return self._bounds[name]

    def _terms(self, confidence: float) -> Terms:
        counted = self.counted
        return Terms(confidence, counted.heldout_number, self.seed, counted.acceptance, alike=counted.alike)


def bound_text(bound: float, stated: float | None) -> str:
    """A bound as text, with its confidence or with what it holds for instead."""
    if not math.isfinite(bound):
        return "no bound can be told from so few samples"
    return f"under {bound:.2%} " + ("for more text of these documents" if stated is None else f"at {stated:.0%}")


def estimate(measure: Measure, evaluation: Evaluation, documents: Documents, seed: int) -> LossEstimate:
    """The loss, with a 95% interval. `documents` [samples] says which samples are of one document."""
    reference = measure.reference
    low, high = interval(measure.metric, reference.columns(), evaluation.columns(), seed=seed, groups=documents)
    figures = measure.summary(evaluation)
    before, count = measure.metric.value(reference.columns()), len(evaluation.nats)
    by_tokens: tuple[float | None, float | None] = None, None
    if measure.metric.unit == "words":
        by_tokens = reference.token_perplexity(), evaluation.token_perplexity()
    return LossEstimate(before, figures.value, figures.loss, low, high, count, *by_tokens)


def at_chance(reference: Evaluation, entropy: float, what: str) -> str | None:
    """One line where the unquantised model does no better on this text than guessing by how frequent each token is in
    it. `entropy` is that of these frequencies, in nats a token."""
    nats = sum(reference.nats) / sum(reference.tokens)
    if nats < entropy:
        return None
    return (
        f"the unquantised model is at chance on the {what} text: {nats:.2f} nats a token, where guessing by how "
        f"frequent each token is there gives {entropy:.2f}; losses on it say little: use text that the model is for"
    )


def check_reference(name: str, value: float, what: str) -> None:
    """Raises SettingsError where no loss can be measured against this value of the metric."""
    if not 0 < value < LARGEST_REFERENCE:
        raise SettingsError(
            f"the unquantised model has {name} {value:.4g} on the {what}, so no loss can be measured: check the text, "
            "--metric, --max-new-tokens, and the number of samples"
        )
