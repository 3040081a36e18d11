"""The judge of plans by the promise, and the limits of the promise."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from moeconv.artifacts import LEAST_SEEN, SensitivityTable, Standing
from moeconv.calibration import RANKING_SHARE
from moeconv.errors import ConversionError, SettingsError
from moeconv.measure.metrics import F64
from moeconv.measure.trial import Evaluation, Measure
from moeconv.measure.workdir import identity
from moeconv.promise.bound import (
    WORTH,
    Documents,
    Evidence,
    Needed,
    Terms,
    effective,
    effects,
    interval,
    least,
    least_heldout,
    samples_needed,
    upper_bound,
    worst_harm,
)
from moeconv.strict_json import NotJson, bounded, parse
from moeconv.tuned import said
from moert.machine import locked
from moert.pack.files import write_atomically
from moert.pack.manifest import LossEstimate

# The judge of plans, on calibration text that took no part in ranking experts.

LARGEST_REFERENCE = 1e30


class Judge:
    """A judge of plans. `measure` measures on the acceptance samples; a plan holds if its bound is at most
    `planned_loss`, or without a confidence, if its measured loss is.

    `confidence` is the wanted one, `stated` the one that can be stated: None where the text has too few documents. The
    bound then holds for more text of the same documents only, and is never named with the confidence.
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
        """The evidence of intervals: documents, or where those are too few, samples of them."""
        short = self.confidence is not None and self.stated is None
        return self.evidence.of_samples() if short else self.evidence

    @property
    def counted(self) -> Evidence:
        """The evidence of bounds: the same as of intervals, or rows where documents are runs of rows. The first judged
        plan shows whether rows are alike."""
        return self._counted or self.used

    def counted_text(self) -> str | None:
        """Returns a line that rows are counted instead of runs; None for runs, and for documents that the text
        tells."""
        counted = self.counted
        if self.stated is None or not self.evidence.runs or counted.runs:
            return None
        return (
            f"rows next to each other are hardly alike in what plans do to them: {len(counted.acceptance)} rows count "
            f"as {counted.number:.0f} documents, and not as {self.evidence.count} runs"
        )

    def too_few(self) -> str | None:
        """Returns a line that there are too few documents for the wanted confidence; None where they are enough."""
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
        """Returns the bound that the loss of as much text as was held out stays under; None without a confidence,
        infinite where the samples can't tell."""
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
        """Returns the loss as text, and the bound with its confidence or its limit."""
        bound = self.bound(evaluation)
        promised = "" if bound is None else f", {bound_text(bound, self.stated)}"
        return f"loss {self.loss(evaluation):.2%}{promised}"

    def needed(self, tried: Sequence[Evaluation]) -> Needed | None:
        """Returns the number of documents that the promise needs; None where there are enough, or nothing is
        promised."""
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
    """Returns a bound as text, with its confidence, or without one the text that it holds for."""
    if not math.isfinite(bound):
        return "no bound can be told from so few samples"
    return f"under {bound:.2%} " + ("for more text of these documents" if stated is None else f"at {stated:.0%}")


def estimate(measure: Measure, evaluation: Evaluation, documents: Documents, seed: int) -> LossEstimate:
    """Returns the loss with a 95% interval. `documents` [samples] says which samples are of one document."""
    reference = measure.reference
    low, high = interval(measure.metric, reference.columns(), evaluation.columns(), seed=seed, groups=documents)
    figures = measure.summary(evaluation)
    before, count = measure.metric.value(reference.columns()), len(evaluation.nats)
    by_tokens: tuple[float | None, float | None] = None, None
    if measure.metric.unit == "words":
        by_tokens = reference.token_perplexity(), evaluation.token_perplexity()
    return LossEstimate(before, figures.value, figures.loss, low, high, count, *by_tokens)


def at_chance(reference: Evaluation, entropy: float, what: str) -> str | None:
    """Returns a line that the unquantized model is no better on this text than guessing by its frequencies of tokens;
    None where it is better. `entropy` is the entropy of these frequencies, in nats a token; `what` names the text."""
    nats = sum(reference.nats) / sum(reference.tokens)
    if nats < entropy:
        return None
    return (
        f"the unquantized model is at chance on the {what} text: {nats:.2f} nats a token, where guessing by how "
        f"frequent each token is there gives {entropy:.2f}; losses on it say little: use text that the model is for"
    )


def check_reference(name: str, value: float, what: str) -> None:
    """Raises SettingsError where no loss can be measured against this value of the metric."""
    if not 0 < value < LARGEST_REFERENCE:
        raise SettingsError(
            f"the unquantized model has {name} {value:.4g} on the {what}, so no loss can be measured: check the text, "
            f"--metric, {said('max_new_tokens')}, and the number of samples"
        )


# Looks: the conversions that were judged on the same text, since a promise holds for one of them and not for the
# best.
# `looks.jsonl` at the root of the work directory has a line for each conversion that was judged there: its digest,
# digests of the texts it was judged on, and a seal, which is a digest of the line and of the seal before it. The last
# line counts the others and has a seal too, so that no line can be cut off unnoticed. A conversion that has any of the
# texts in common with this one was a look at the same text, whatever its seed, quantizer or target. The same command,
# resumed or repeated, is the same look.

LOOKS = "looks.jsonl"
_MOST_BYTES = 1 << 26


def look(root: Path, conversion: str, texts: Iterable[str]) -> int:
    """Notes this conversion, unless it was noted before; returns the number of conversions on any of these texts,
    itself among them.

    `conversion` and `texts` are digests. Raises ConversionError if the disk refuses, and for a file that was changed.
    """
    path, wanted = root / LOOKS, set(texts)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with locked(root, wait=True):
            every = _read(path)
            found = {one["conversion"] for one in every if wanted & set(one["texts"])}
            if conversion not in found:
                every.append(_sealed(every[-1]["seal"] if every else "", conversion, sorted(wanted)))
                lines = (json.dumps(one) + "\n" for one in (*every, _end(every)))
                write_atomically(path, "".join(lines).encode())
    except OSError as error:
        raise ConversionError(f"can't use {path}: {error.strerror or error}; free it or give another --work") from None
    return len(found | {conversion})


def _sealed(before: str, conversion: str, texts: list[str]) -> dict[str, Any]:
    """Returns the JSON object of a line. `before`: the seal of the line before; "" for the first."""
    return {"conversion": conversion, "texts": texts, "seal": identity(before, conversion, texts)}


def _end(every: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the JSON object of the last line, behind `every` other line."""
    return {"looks": len(every), "seal": identity(*(one["seal"] for one in every[-1:]), "looks", len(every))}


def _read(path: Path) -> list[dict[str, Any]]:
    """Returns all lines but the last; none if there is no file. Raises OSError, ConversionError."""
    try:
        lines = bounded(path, _MOST_BYTES).splitlines()
    except FileNotFoundError:
        return []
    except NotJson as error:
        raise ConversionError(f"can't use {path}: {error}; move it away or give another --work") from None
    found: list[dict[str, Any]] = []
    for number, line in enumerate(lines or [b""], 1):
        try:
            one = parse(line)
            if number >= len(lines):
                sealed = one == _end(found)
            else:
                sealed = one == _sealed(found[-1]["seal"] if found else "", one["conversion"], one["texts"])
                sealed = sealed and all(isinstance(name, str) for name in (one["conversion"], *one["texts"]))
        except (NotJson, TypeError, KeyError):
            sealed = False
        if not sealed:
            raise ConversionError(
                f"{path}:{number} was changed since it was made (or an older version wrote it): delete the file, and "
                "conversions that were judged on this text are counted anew, or give another --work"
            )
        found.append(one)
    return found[:-1]


# Lines on the evidence of a promise: how much text, how often it was used, which experts it never reached.

NAMED = 8  # experts that a line names; the report's page has all of them


def standing(judge: Judge, looks: int, notes: Sequence[str]) -> Standing:
    """Returns the evidence of the promise and its limits, for the report."""
    asked, evidence = judge.confidence, judge.evidence
    return Standing(
        asked, evidence.count, round(evidence.number, 2), len(set(evidence.heldout.tolist())),
        None if asked is None else least(asked), None if asked is None else least_heldout(asked), looks, tuple(notes),
    )  # fmt: skip


def looks_text(looks: int, stated: float | None) -> str | None:
    """Returns a line on the number of looks at a text; None for the first look."""
    if looks == 1:
        return None
    text = f"conversion {looks} of this model that is judged on this text, as the work directory counts them"
    if stated is None:
        return f"{text}: the best of several looks better than it is"
    together = max(0.0, 1 - looks * (1 - stated))
    return (
        f"{text}: each promise holds at {stated:.0%} by itself, all {looks} together at {together:.0%} or more; choose "
        "among them by size and not by loss, or measure the chosen one on other text"
    )


def bound_doubt(bound: float | None, high: float) -> str | None:
    """Returns a line on an infinite bound, or on a loss with an interval, up to `high`, below zero; None otherwise."""
    if bound is None or (math.isfinite(bound) and high >= 0):
        return None
    if not math.isfinite(bound):
        return "from so few samples no bound of the loss can be told, so nothing is promised: give more text"
    return (
        f"the loss is negative (95% interval up to {high:.2%}): the pack scores better than the unquantized model, "
        "which quantizing does not explain; this text says little about the model, so measure on text that it is for"
    )


def unreached_text(table: SensitivityTable) -> str | None:
    """Returns a line on the experts that the ranking text hardly reached; None without any."""
    unseen = table.barely_seen()
    if not unseen:
        return None
    more = f" and {len(unseen) - NAMED} more (the report names all)" if len(unseen) > NAMED else ""
    named = ", ".join(map(str, unseen[:NAMED]))
    return (
        f"{len(unseen)} of {len(table.coverage)} experts saw fewer than {LEAST_SEEN} tokens of the ranking text: "
        f"{named}{more}; they are planned as if they cost no less than the middle expert of their layer: more text "
        "would say"
    )


def needed_text(needed: Needed, used: Evidence, promised: str, share: float = 1 - RANKING_SHARE) -> str:
    """Returns a line that the text is short for the promise. `promised` is the loss and its confidence, `share` the
    share of the calibration text that plans are judged on."""
    if needed.both is None:
        more = "from so few no bound can be told"
    elif needed.acceptance is None:
        more = f"{needed.both:,} of each would do"
    else:
        more = f"{needed.acceptance:,} of the former would do"
    what = "documents" if used.is_grouped else "samples"
    return (
        f"{needed.have} calibration {what} to judge plans by ({share:.0%} of the text, at most --samples) "
        f"and {used.heldout_number:.0f} held-out ones are few to promise {promised}: {more}; with these the pack will "
        "be larger than it needs to be, or no plan is accepted"
    )
