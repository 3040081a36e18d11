"""Predictors: pure policies that name the experts of the next layer before its router has decided."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from moert.pack.model_spec import LayerKey
from moert.pack.paths import F64, TransitionTable

Selected = npt.NDArray[np.integer[Any]]
"""The choice of one layer's router: expert ids [tokens, top_k], -1 where a token was dropped."""

Prediction = list[tuple[int, float]]
"""(expert, probability that the group of tokens demands it), most probable first, none of probability zero."""


def no_scores() -> F64 | None:
    """Returns no scores: for layers whose router can't be called yet."""
    return None


@dataclass(frozen=True)
class Situation:
    """The input of a prediction of the experts that a layer will demand.

    `at` is the layer predicted. `n_tokens` will go through it together, each to `top_k` experts. `history` holds the
    selections of these tokens in the layers with experts before it, in order; it is empty before the first of them.
    `scores` runs that layer's router on the present hidden state and returns the mean of its probabilities over the
    tokens, [num_experts]; None where there is no hidden state yet.
    """

    at: LayerKey
    history: Sequence[Selected]
    n_tokens: int
    top_k: int
    scores: Callable[[], F64 | None] = no_scores


class Predictor(Protocol):
    def predict(self, situation: Situation) -> Prediction:
        """Returns the experts that are likely to be demanded; an empty list where the predictor can't tell.

        For one token the probabilities add up to about top_k. They are the predictor's own claim, which
        `moert.experts.ahead` checks against the demand.
        """
        ...


def of_one_token(weights: F64, top_k: int) -> F64:
    """Returns probabilities [num_experts] in proportion to weights of at least 0, each at most 1, that add up to top_k.

    With fewer than top_k weights above zero all of these get 1.
    """
    ascending = np.sort(weights)
    rest = np.cumsum(ascending)[::-1]  # [i]: of all but the i largest
    one = 0.0  # the weight from which on the probability is 1
    for full, largest in enumerate(ascending[: -top_k - 1 : -1].tolist()):
        if largest * (top_k - full) < rest[full]:
            one = rest[full] / (top_k - full)
            break
        one = largest
    return np.minimum(weights / one, 1.0) if one > 0 else (weights > 0).astype(np.float64)


def of_any_token(probabilities: F64, n_tokens: int) -> F64:
    """Returns the probability that at least one of n independent tokens demands each expert: 1 - (1 - p)^n."""
    return probabilities if n_tokens == 1 else 1.0 - (1.0 - probabilities) ** n_tokens


def ranked(probabilities: F64) -> Prediction:
    """Returns the prediction of probabilities [num_experts], highest first, ties by expert."""
    order = np.argsort(-probabilities, kind="stable")
    order = order[: np.count_nonzero(probabilities)]
    return list(zip(order.tolist(), probabilities[order].tolist(), strict=True))


class GateAhead:
    def predict(self, situation: Situation) -> Prediction:
        """Returns the prediction of the layer's router on the present hidden state; an empty list before the first
        layer of a token, which has no such state."""
        scores = situation.scores()
        if scores is None:
            return []
        # Squared, since only the largest are selected: claims of trained models came out closer to the demand.
        return ranked(of_any_token(of_one_token(scores**2, situation.top_k), situation.n_tokens))


_SAMPLE = 32


class Transitions:
    """The predictor of the pack's path tables; of a large group of tokens it takes an even sample."""

    def __init__(self, tables: TransitionTable) -> None:
        self._tables = tables

    def predict(self, situation: Situation) -> Prediction:
        history, n_tokens = situation.history, situation.n_tokens
        if not history or not len(history[-1]):
            return ranked(of_any_token(self._of_token(situation, (), ()), n_tokens))
        one, two = history[-1], history[-2] if len(history) > 1 else None
        rows = range(len(one)) if len(one) <= _SAMPLE else np.linspace(0, len(one) - 1, _SAMPLE).astype(int).tolist()
        none_does = np.ones(self._tables.num_experts)
        for row in rows:
            none_does *= 1.0 - self._of_token(situation, one[row].tolist(), () if two is None else two[row].tolist())
        return ranked(1.0 - none_does ** (n_tokens / len(rows)))

    def _of_token(
        self, situation: Situation, one_before: list[int] | tuple[()], two_before: list[int] | tuple[()]
    ) -> F64:
        share = self._tables.probabilities(situation.at, one_before, two_before)
        return of_one_token(share, situation.top_k)
