"""Two opinions of what a layer will ask for, as one: that of its router, asked early, and that of the hash function.

Which of both knows more differs by model and layer: an early router is nearly right deep in a model and often wrong in
its first layers. So each has a weight for each layer, and these learn from what comes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moert.pack.model_spec import LayerKey
from moert.pack.paths import F64

_FIRST = (0.8, 0.6)  # of the router, of the hash function
_RATE = 0.02
_LEAST = 1e-6  # what is held for less likely counts as this


class Pool:
    """The logarithmic pool, softmax(a · log p + b · log q) (Genest & Zidek 1986). After each answer of a layer, a step
    up the likelihood of its choices under the pool, so that its claims also come out about right."""

    def __init__(self) -> None:
        self._weights: dict[LayerKey, F64] = {}
        self._asked: tuple[LayerKey, F64, F64] | None = None

    def both(self, at: LayerKey, router: F64, hashed: F64) -> F64:
        """Two opinions of one layer, [num_experts], in any unit → a distribution over its experts."""
        logs = np.log(np.maximum(np.stack([router, hashed]), _LEAST))
        weights = self._weights.get(at)
        if weights is None:
            weights = self._weights[at] = np.array(_FIRST)
        numbers = weights @ logs
        pooled = np.exp(numbers - numbers.max())
        pooled /= pooled.sum()
        self._asked = at, logs, pooled
        found: F64 = pooled
        return found

    def came(self, at: LayerKey, experts: Sequence[int]) -> None:
        """The layer has decided for one token."""
        if self._asked is not None and self._asked[0] == at and len(experts):
            _, logs, pooled = self._asked
            self._asked, weights = None, self._weights[at]
            weights += _RATE * (logs[:, list(experts)].mean(axis=1) - logs @ pooled)
            np.maximum(weights, 0.0, out=weights)
