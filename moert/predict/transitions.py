"""The paper's predictor (EdgeMoE §3.3.2): the experts of the two layers before say which come next."""

from __future__ import annotations

import numpy as np

from moert.pack.paths import F64, TransitionTable
from moert.predict.predictor import Prediction, Situation, of_any_token, of_one_token, ranked

_SAMPLE = 32


class Transitions:
    """Probabilities from the pack's tables; for a large group of tokens from an even sample of it."""

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
