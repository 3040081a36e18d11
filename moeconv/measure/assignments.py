"""Measures assignments of widths on one list of samples, each only once: the journal knows the rest."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from moeconv.artifacts import Assignment, Summary
from moeconv.measure.evaluation import DECIMALS, Evaluation
from moeconv.measure.journal import Journal, identity
from moeconv.measure.metrics import Metric
from moeconv.measure.scorers import Scorer
from moeconv.measure.trial import Trial
from moeconv.source.archs.errors import transformers_model
from moert.pack.manifest import Preference
from moert.pack.model_spec import ExpertKey, LayerKey


class Preferred(NamedTuple):
    """What an evaluation with a preference found: of each layer of the decoder how often each expert was asked for that
    was not among the preferred [experts], tokens that were routed (those that were written among them), and of each
    layer how much better the experts that a token takes are than as many that come next."""

    evaluation: Evaluation
    missed: Mapping[LayerKey, tuple[int, ...]]
    tokens: int
    gaps: tuple[float, ...]


class Instead(Protocol):
    """What takes the routers' place while something is measured, or leaves out neurons. `rule` says all that it goes
    by, as JSON values."""

    @property
    def rule(self) -> Any: ...

    def on(self, trial: Trial) -> AbstractContextManager[object]:
        """Inside the block it does so."""
        ...

    def seen(self, trial: Trial) -> dict[str, Any]:
        """What it has seen in there, as JSON values."""
        ...


class _Prefers(NamedTuple):
    preference: Preference

    @property
    def rule(self) -> Any:
        return [self.preference.recent, self.preference.sure, list(self.preference.bonus)]

    @contextmanager
    def on(self, trial: Trial) -> Iterator[None]:
        with trial.calls.rerouted(trial.preferring), trial.preferring.on(self.preference):
            yield

    def seen(self, trial: Trial) -> dict[str, Any]:
        heard = trial.preferring
        missed = [[*at, counts.tolist()] for at, counts in heard.missed.items()]
        gaps = [round(gap, DECIMALS) for gap in heard.gap.values()]
        return {"missed": missed, "routed_tokens": heard.tokens, "gaps": gaps}


class Measure:
    """`samples_id` names the samples; with the widths it is the identity of a measurement. Trial and scorer are made
    when something must be measured at all; the unquantised model is then run first, for divergences from it. `instead`
    is a part of all but that; None: nothing is."""

    def __init__(
        self,
        trial: Callable[[], Trial],
        scorer: Callable[[], Scorer],
        metric: Metric,
        journal: Journal,
        samples_id: str,
        instead: Instead | None = None,
    ) -> None:
        self.metric, self.instead = metric, instead
        self.samples_id = samples_id
        self.used: dict[str, Evaluation] = {}  # what this run asked for, measured now or before
        self._trial, self._make_scorer, self._journal = trial, scorer, journal
        self._scorer: Scorer | None = None

    @cached_property
    def reference(self) -> Evaluation:
        """The unquantised model's evaluation."""
        found = unquantised(self._journal, self.samples_id)
        if found is None:
            self.scorer()
            found = unquantised(self._journal, self.samples_id)
        assert found is not None
        return found

    def scorer(self) -> Scorer:
        if self._scorer is None:
            scorer, trial, name = self._make_scorer(), self._trial(), identity(self.samples_id, None)
            trial.restore()
            with transformers_model(trial.checkpoint.path):
                evaluation = self._scored(scorer, "unquantised", as_reference=True)
            if self._journal.get(name) is None:
                self._journal.add(name, evaluation.to_json())
            self._scorer = scorer
        return self._scorer

    def __call__(self, widths: Assignment, what: str) -> Evaluation:
        """The evaluation of an assignment (all experts given), from the journal or measured now."""
        return self._used(self._entry(widths, what, self.instead))

    def by_itself(self, widths: Assignment, what: str) -> Evaluation:
        """The same with the model's own routers and all its neurons, whatever is measured otherwise."""
        return self._used(self._entry(widths, what, None))

    def preferring(self, widths: Assignment, preference: Preference, what: str) -> Preferred:
        """The same where routers prefer what was used lately, and what that asks for."""
        name, found = self._entry(widths, what, _Prefers(preference))
        with self._journal.believed():
            missed = {LayerKey(stack, layer): tuple(counts) for stack, layer, counts in found["missed"]}
            return Preferred(self._used((name, found)), missed, found["routed_tokens"], tuple(found["gaps"]))

    def _used(self, entry: tuple[str, dict[str, Any]]) -> Evaluation:
        name, found = entry
        with self._journal.believed():
            self.used[name] = Evaluation.from_json(found)
        return self.used[name]

    def _entry(self, widths: Assignment, what: str, instead: Instead | None) -> tuple[str, dict[str, Any]]:
        """A measurement, with its name in the journal."""
        rule = [] if instead is None else [instead.rule]
        name = identity(self.samples_id, [[str(key), bits] for key, bits in sorted(widths.items())], *rule)

        def measured() -> dict[str, Any]:
            scorer, trial = self.scorer(), self._trial()
            trial.assign(widths)
            with nullcontext() if instead is None else instead.on(trial):
                evaluation = self._scored(scorer, what).to_json()
            if instead is not self.instead:
                return {**evaluation, **({} if instead is None else instead.seen(trial))}
            about = {"samples": self.samples_id, "widths": [bits for _, bits in sorted(widths.items())]}
            return {**evaluation, **about}

        return name, self._journal.remember(name, measured)

    def summary(self, evaluation: Evaluation) -> Summary:
        return evaluation.summary(self.metric, self.reference)

    def _scored(self, scorer: Scorer, what: str, *, as_reference: bool = False) -> Evaluation:
        calls, started = self._trial().calls, time.perf_counter()
        rows = calls.rows
        scores = scorer.score(as_reference=as_reference)
        return Evaluation.of(what, scores, time.perf_counter() - started, calls.flops(calls.rows - rows))


def unquantised(journal: Journal, samples_id: str) -> Evaluation | None:
    """The unquantised model's evaluation, if it was measured."""
    found = journal.get(identity(samples_id, None))
    with journal.believed():
        return None if found is None else Evaluation.from_json(found)


def known_plans(
    journal: Journal, samples_id: str, keys: Sequence[ExpertKey]
) -> Iterator[tuple[Assignment, Evaluation]]:
    """Every assignment that was measured on these samples. `keys` are all experts."""
    for entry in journal.entries():
        if entry.get("samples") == samples_id:
            with journal.believed():
                widths = [tuple(bits) for bits in entry["widths"]]
                assignment = dict(zip(sorted(keys), widths, strict=True)), Evaluation.from_json(entry)
            yield assignment
