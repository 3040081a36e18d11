"""The paper's predictor (EdgeMoE §3.3.2): the experts of the two layers before say which come next."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from moert.pack.model_spec import Stack
from moert.pack.paths import TransitionTable
from moert.predict.predictor import Selected, in_order_of

_SAMPLE = 32


class Transitions:
    """Probabilities from the pack's tables; for a group of tokens their mean, over an even sample of a large group."""

    def __init__(self, tables: TransitionTable) -> None:
        self._tables = tables

    def next_experts(self, stack: Stack, layer: int, history: Sequence[Selected]) -> list[int]:
        return in_order_of(self.probabilities(stack, layer, history))

    def probabilities(self, stack: Stack, layer: int, history: Sequence[Selected]) -> npt.NDArray[np.float64]:
        """[num_experts], the mean over the tokens of `history`."""
        tables = self._tables
        if not history or not len(history[-1]):
            return tables.probabilities(stack, layer)
        one, two = history[-1], history[-2] if len(history) > 1 else None
        n_tokens = len(one)
        rows = range(n_tokens) if n_tokens <= _SAMPLE else np.linspace(0, n_tokens - 1, _SAMPLE).astype(int).tolist()
        total = np.zeros(tables.num_experts)
        for row in rows:
            earlier = () if two is None else two[row].tolist()
            total += tables.probabilities(stack, layer, one[row].tolist(), earlier)
        return total / len(rows)
