"""Measurements of assignments of widths, on the model with any of its experts replaced by quantized ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import transformers
from torch import Tensor

from moeconv.artifacts import Assignment, Bits, DenseUnit, Summary, uniform
from moeconv.dense import head_of
from moeconv.measure.metrics import F64, Metric, perplexity
from moeconv.measure.scorers import Scorer, Scores
from moeconv.measure.workdir import Journal, identity
from moeconv.quantizers.coder import ORIGINAL, DenseCoder, ExpertCoder, Form, batches
from moeconv.source.archs.config import transformers_model
from moeconv.source.archs.weights import fill_backbone
from moeconv.source.checkpoint import Checkpoint
from moeconv.source.experts import ExpertCalls, Weights, multiplied_by_linear
from moeconv.source.routers import Preferring
from moert.pack.manifest import Preference
from moert.pack.model_spec import ExpertKey, LayerKey

# The original model in memory, its matrices outside the experts as the checkpoint has them or as the pack will.


class LoadedModel:
    """A Subject of moeconv.measure.scorers: the whole model in memory."""

    layers = None

    def __init__(self, checkpoint: Checkpoint, dense: DenseCoder | None = None) -> None:
        self.checkpoint, self.family, self.spec = checkpoint, checkpoint.family, checkpoint.spec
        self.dense = dense or DenseCoder(checkpoint, None)
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        with transformers_model(checkpoint.path):
            self.model: Any = checkpoint.model(torch.float32).requires_grad_(False)
        multiplied_by_linear(self.model)
        self.calls = ExpertCalls(self.model, self.family, self.spec)
        self._stored: dict[str, Form | str] = {}
        """The present forms of the tensors outside the experts that are changed; none for originals."""

    @property
    def stored_head(self) -> Tensor | None:
        """The head as the pack will give it back [vocab_size, d_model]; None if it stays the original."""
        name = head_of(self.spec)
        return self.dense.stored_weight(name) if name in self.dense.names else None

    def set_dense(self, *, stored: bool) -> None:
        """Puts in the matrices outside the experts as the pack will store them, or as they were."""
        dense, before = self.dense, self._stored
        self._stored = dense.changed if stored else {}
        changed = [name for name in self.spec.tensors if before.get(name) != self._stored.get(name)]
        weights = (
            (name, dense.stored_weight(name) if name in self._stored else dense.source(name).float())
            for name in changed
        )
        if changed:
            fill_backbone(self.model, self.checkpoint.description, weights)


# The scores of one evaluation, sample by sample, as the journal keeps them; all figures follow from these scores.

_MOST = 1e24  # seconds, tokens or operations that no measurement takes
DECIMALS = 7  # of a score in the journal; computations use these rounded scores, so that a resumed run decides alike


@dataclass(frozen=True)
class Evaluation:
    """The scores of one evaluation: for each sample the metric's columns, and nats and divergence summed over its
    tokens. Also its cost in seconds and in operations of expert rows, and the number of samples whose generated text
    hung on a tie that the order of summation decides."""

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
        """Returns the evaluation of a journal's entry. Raises KeyError, TypeError or ValueError if it is none."""
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
        """Returns the metric's columns. [samples, columns]"""
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
    """Returns evaluations of the same widths on several lists of samples, joined to one."""
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


# A model on trial: the original in memory, with weights replaced by those that a pack gives back.


class Trial:
    """The model on trial: `assign` quantizes experts in the loaded model, and puts in the matrices outside the experts
    as a pack stores them; `restore` brings back the original weights. Only experts whose widths change are written."""

    layers = None

    def __init__(self, loaded: LoadedModel, coder: ExpertCoder) -> None:
        self.loaded, self.coder, self.dense, self.calls = loaded, coder, loaded.dense, loaded.calls
        self.checkpoint, self.family, self.spec = loaded.checkpoint, loaded.family, loaded.spec
        self.model = loaded.model
        self._widths: dict[ExpertKey, Bits] = uniform(self.spec, ORIGINAL)

    @property
    def stored_head(self) -> Tensor | None:
        return self.loaded.stored_head

    @cached_property
    def preferring(self) -> Preferring:
        """Cache-aware routing for the model's decoder, for use in the routers' place (`ExpertCalls.rerouted`)."""
        return Preferring(self.model, self.checkpoint.description)

    def widths(self, key: ExpertKey) -> Bits:
        """Returns the present widths of an expert."""
        return self._widths[key]

    def assign(self, widths: Assignment) -> None:
        """Gives every expert in `widths` its widths (float32 weights, as the pack will give them back)."""
        self.loaded.set_dense(stored=True)
        self._set_experts(widths)

    def restore(self) -> None:
        """Brings back the unquantized model."""
        self.loaded.set_dense(stored=False)
        self._set_experts(uniform(self.spec, ORIGINAL))

    def original_experts(self) -> None:
        """Gives every expert its original weights, and all other matrices the weights that a pack gives back."""
        self.assign(uniform(self.spec, ORIGINAL))

    def _set_experts(self, widths: Assignment) -> None:
        changed = {key: bits for key, bits in widths.items() if self._widths[key] != bits}
        for batch in batches(self.spec, changed.items()):
            self.coder.prepare(batch)
            for key, bits in batch:
                with torch.no_grad():
                    for mine, weight in zip(self.calls.weights(key), self.weights(key, bits), strict=True):
                        mine.copy_(weight)
                self._widths[key] = bits

    def weights(self, key: ExpertKey, bits: Bits) -> Weights:
        """Returns an expert's weights at these widths: float32 [out, in] for each projection."""
        found = self.checkpoint.expert(key) if set(bits) == {ORIGINAL} else self.coder.weights(key, bits)
        return tuple(torch.from_numpy(found[name]) for name in self.spec.moe.ffn.projections)


# Measurements of assignments of widths on one list of samples, each made only once: the journal keeps them.


class Preferred(NamedTuple):
    """The result of an evaluation with a preference: for each layer of the decoder, how often each expert was chosen
    without being among the preferred ones [experts]; the routed tokens, written ones included; and for each layer, how
    much better the experts that a token takes are than the next ones, as many again."""

    evaluation: Evaluation
    missed: Mapping[LayerKey, tuple[int, ...]]
    tokens: int
    gaps: tuple[float, ...]


class Instead(Protocol):
    """A change of the model during a measurement: other routing, or neurons left out. `rule` describes it fully, as
    JSON values."""

    @property
    def rule(self) -> Any: ...

    def on(self, trial: Trial) -> AbstractContextManager[object]:
        """Makes the change for the length of a with block."""
        ...


class _Prefers(NamedTuple):
    preference: Preference

    @property
    def rule(self) -> Any:
        return [self.preference.recent, self.preference.sure, list(self.preference.bonus)]

    @contextmanager
    def on(self, trial: Trial) -> Iterator[None]:
        with trial.calls.during(rerouting=trial.preferring), trial.preferring.on(self.preference):
            yield

    def seen(self, trial: Trial) -> dict[str, Any]:
        """Returns the counts from inside the last block, as JSON values."""
        heard = trial.preferring
        missed = [[*at, counts.tolist()] for at, counts in heard.missed.items()]
        gaps = [round(gap, DECIMALS) for gap in heard.gap.values()]
        return {"missed": missed, "routed_tokens": heard.tokens, "gaps": gaps}


class Measure:
    """Measurements on one list of samples. `samples_id` names the samples; with the widths it is the identity of a
    measurement. Trial and scorer are made only when the journal lacks a measurement; the unquantized model is then run
    first, for divergences from it. The change `instead` applies to every assignment, unless a method says otherwise;
    None: no change. `dense`: the coder of the matrices outside the experts, where a conversion chooses their widths;
    its present choice is a part of what is measured."""

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
        self.dense: DenseCoder | None = None
        self.used: dict[str, Evaluation] = {}  # by this run, measured now or before
        self._trial, self._make_scorer, self._journal = trial, scorer, journal
        self._scorer: Scorer | None = None
        self._head_form: Form | None = None  # of the head that the scorer's reference is for

    @cached_property
    def reference(self) -> Evaluation:
        """The unquantized model's evaluation."""
        found = unquantized(self._journal, self.samples_id)
        if found is None:
            self.scorer()
            found = unquantized(self._journal, self.samples_id)
        assert found is not None
        return found

    def scorer(self) -> Scorer:
        """Returns the scorer, with the reference of divergences for the head that is measured next."""
        head_form = None if self.dense is None else self.dense.head_form
        if self._scorer is None or head_form != self._head_form:
            trial, name = self._trial(), identity(self.samples_id, None)
            scorer = self._scorer or self._make_scorer()
            trial.restore()
            with transformers_model(trial.checkpoint.path):
                if self._journal.get(name) is None:
                    self._journal.add(name, self._scored(scorer, "unquantized", as_reference=True).to_json())
                else:
                    scorer.refer()
            self._scorer, self._head_form = scorer, head_form
        return self._scorer

    def __call__(self, widths: Assignment, what: str) -> Evaluation:
        """Returns the evaluation of an assignment (all experts given), from the journal or measured now. `what` names
        it, for a person."""
        return self._used(self._entry(widths, what, self.instead))

    def by_itself(self, widths: Assignment, what: str) -> Evaluation:
        """Returns the evaluation of an assignment with the model's own routers and all its neurons, without the change
        `instead`."""
        return self._used(self._entry(widths, what, None))

    def preferring(self, widths: Assignment, preference: Preference, what: str) -> Preferred:
        """Returns the evaluation of an assignment with cache-aware routing, and the experts that it demands beyond the
        preferred ones."""
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
        """Returns a measurement's name in the journal, and its entry, which is measured if the journal lacks it."""
        beside = {} if self.dense is None else _beside(self.dense)
        rule = [*([beside] if beside else []), *([] if instead is None else [instead.rule])]
        name = identity(self.samples_id, [[str(key), bits] for key, bits in sorted(widths.items())], *rule)

        def measured() -> dict[str, Any]:
            scorer, trial = self.scorer(), self._trial()
            trial.assign(widths)
            with nullcontext() if instead is None else instead.on(trial):
                evaluation = self._scored(scorer, what).to_json()
            if instead is not self.instead:
                return evaluation | (instead.seen(trial) if isinstance(instead, _Prefers) else {})
            about = {"samples": self.samples_id, "widths": [bits for _, bits in sorted(widths.items())]}
            return {**evaluation, **about, **beside}

        return name, self._journal.remember(name, measured)

    def summary(self, evaluation: Evaluation) -> Summary:
        return evaluation.summary(self.metric, self.reference)

    def _scored(self, scorer: Scorer, what: str, *, as_reference: bool = False) -> Evaluation:
        calls, started = self._trial().calls, time.perf_counter()
        rows = calls.rows
        scores = scorer.score(as_reference=as_reference)
        return Evaluation.of(what, scores, time.perf_counter() - started, calls.flops(calls.rows - rows))


def _beside(dense: DenseCoder) -> dict[str, Any]:
    """Returns the choices beside experts' widths that are a part of a measurement, as JSON values."""
    units = {"dense": [[*unit, bits] for unit, bits in dense.chosen.items()]} if dense.chosen else {}
    return units | ({"trained": dense.trained.digest} if dense.trained else {})


def unquantized(journal: Journal, samples_id: str) -> Evaluation | None:
    """Returns the unquantized model's evaluation; None if it was not measured."""
    found = journal.get(identity(samples_id, None))
    with journal.believed():
        return None if found is None else Evaluation.from_json(found)


def known_plans(
    journal: Journal, samples_id: str, keys: Sequence[ExpertKey], trained: str = ""
) -> Iterator[tuple[Assignment, Mapping[DenseUnit, int], Evaluation]]:
    """Yields every assignment that was measured on these samples, with the widths that were chosen for matrices outside
    the experts, and its evaluation: with the trained numbers of this digest. `keys` are all experts."""
    for entry in journal.entries():
        if entry.get("samples") == samples_id and entry.get("trained", "") == trained:
            with journal.believed():
                widths = [tuple(bits) for bits in entry["widths"]]
                assignment = dict(zip(sorted(keys), widths, strict=True))
                dense = {DenseUnit(*unit): bits for *unit, bits in entry.get("dense", [])}
                found = assignment, dense, Evaluation.from_json(entry)
            yield found
