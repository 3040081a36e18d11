"""How good is the model on trial, sample by sample? By the text it generates, or by the likelihood of given text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from moeconv.metrics import F64
from moert.pack.model_spec import ModelSpec, Stack


@dataclass(frozen=True)
class Scores:
    """`per_sample` [n, 2] is what the metric takes; `nll` the mean negative log-likelihood of the targets, in nats
    a token (a quieter signal than most metrics); `outputs` the generated texts, where the metric generates."""

    per_sample: F64
    nll: float
    outputs: tuple[str, ...] = field(default=())


class Subject(Protocol):
    """The model that is scored: one on trial, or one out of a pack."""

    @property
    def model(self) -> Any: ...

    @property
    def spec(self) -> ModelSpec: ...

    def stack_state(self, stack: Stack) -> tuple[tuple[int, ...], ...]:
        """Changes whenever the weights of the stack's experts do: one entry for each of its layers."""
        ...


class Scorer(Protocol):
    """Scores the model on trial over a fixed list of samples."""

    @property
    def n_samples(self) -> int: ...

    def score(self, *, keep: bool = False) -> Scores:
        """`keep` remembers intermediate results, so that later calls repeat only what differs from this state."""
        ...
