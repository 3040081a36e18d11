"""How good is the model on trial, sample by sample? By the text it generates, or by the likelihood of given text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from moeconv.measure.metrics import F64
from moeconv.source.archs import Family
from moeconv.source.experts import Call, ExpertCalls
from moert.pack.model_spec import LayerKey, ModelSpec, StackName


@dataclass(frozen=True)
class Scores:
    """`scores` [n, columns] is what the metric takes. `nats` [n] is the negative log-likelihood of each sample's text
    and `kls` [n] the divergence from the unquantised model's distributions, both summed over its `tokens` [n].
    `outputs` are the generated texts, where the metric generates."""

    scores: F64
    nats: F64
    tokens: F64
    kls: F64
    outputs: tuple[str, ...] = field(default=())

    @property
    def nll(self) -> float:
        """Nats a token."""
        return float(self.nats.sum() / self.tokens.sum())

    @property
    def kl(self) -> float:
        """Nats a token."""
        return float(self.kls.sum() / self.tokens.sum())


@dataclass(frozen=True)
class Routed:
    """What every layer's router chose for some samples, one after the other.

    `experts`: [tokens, top_k] by (stack, layer), -1 where a token was dropped. `samples` are their places in the list
    of samples (or windows), `lengths` how many tokens each has, by stack.
    """

    experts: Mapping[LayerKey, Tensor]
    samples: Sequence[int]
    lengths: Mapping[StackName, Sequence[int]]


class Layers(Protocol):
    """A decoder that is run layer by layer, each on all of the text: ids [rows, tokens], real [rows, tokens] where
    there is a token. `what` is the work, for a person."""

    def finals(self, ids: Tensor, real: Tensor, scored: Tensor, what: str) -> Tensor:
        """Final states of the places where `scored` [rows, tokens] holds. [places, d_model]"""
        ...

    def calls_of(self, ids: Tensor, real: Tensor, what: str) -> Iterator[tuple[LayerKey, Call]]:
        """What each layer's experts are asked, by all rows together."""
        ...

    def head(self) -> AbstractContextManager[Any]:
        """Inside the block there is a moeconv.measure.scorers.head.Head of it."""
        ...


class Subject(Protocol):
    """The model that is scored: one on trial, or one out of a pack."""

    @property
    def model(self) -> Any: ...

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def family(self) -> Family: ...

    @property
    def calls(self) -> ExpertCalls: ...

    @property
    def layers(self) -> Layers | None:
        """How text goes through a model that is not in memory; None where it is."""
        ...

    @property
    def stored_head(self) -> Tensor | None:
        """The head [vocab_size, d_model] that other states of the model than the reference have; None: the same."""
        ...


class Scorer(Protocol):
    """Scores the model on trial over a fixed list of samples."""

    @property
    def n_samples(self) -> int: ...

    def score(self, *, as_reference: bool = False) -> Scores:
        """`as_reference` makes this state of the model, the unquantised one, what later divergences are against."""
        ...
