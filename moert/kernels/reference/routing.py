"""Which experts a token goes to, by the scores of its router."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from moert.kernels.backend import I32, I64
from moert.kernels.reference.arithmetic import sigmoid, softmax
from moert.pack.codec import F32
from moert.pack.parts import Router

SCORES: Mapping[str, Callable[[F32], F32]] = {
    "softmax": softmax,
    "sigmoid": sigmoid,
    "sigmoid_of_chosen": lambda numbers: numbers,
    "sparsemixer": lambda numbers: numbers,
}
"""What a router makes of its numbers [tokens, experts]."""


class Preferred(NamedTuple):
    """See Backend.prefer; `experts` are those that are preferred."""

    bonus: np.float32
    sure: int
    experts: I32

    def raised(self, deciding: F32, taken: int) -> F32:
        """What decides, once so many are taken. [tokens, experts]"""
        if taken != self.sure:
            return deciding
        deciding = deciding.copy()
        deciding[:, self.experts] += self.bonus
        return deciding


def best(deciding: F32, top_k: int, preferred: Preferred | None = None) -> I64:
    """Those with the largest of deciding [tokens, experts], in that order, the first of equal ones: [tokens, top_k]."""
    if preferred is None:
        return np.argsort(-deciding, axis=1, kind="stable")[:, :top_k]
    chosen = np.argsort(-deciding, axis=1, kind="stable")[:, : min(preferred.sure, top_k)]
    left = preferred.raised(deciding, preferred.sure)
    np.put_along_axis(left, chosen, -np.inf, axis=1)
    others = np.argsort(-left, axis=1, kind="stable")[:, : top_k - chosen.shape[1]]
    return np.concatenate([chosen, others], axis=1)


def of_best_groups(deciding: F32, part: Router) -> F32:
    """[tokens, experts], -infinity for those of other groups."""
    if (groups := part.groups) is None:
        return deciding
    tokens, experts = deciding.shape
    split = deciding.reshape(tokens, groups.n, -1)
    worth = -np.sort(-split, axis=-1)[..., : groups.top].sum(axis=-1)
    best = np.argsort(-worth, axis=1, kind="stable")[:, : groups.best]
    left = np.full_like(split, -np.inf)
    np.put_along_axis(left, best[..., None], np.take_along_axis(split, best[..., None], axis=1), axis=1)
    return left.reshape(tokens, experts)


def sparsely(numbers: F32, part: Router, preferred: Preferred | None = None) -> tuple[I64, F32]:
    """See moert.pack.parts.Router: chosen and weights, both [tokens, top_k]."""
    left, chosen, weights = numbers.copy(), [], []
    for taken in range(part.top_k):
        deciding = left if preferred is None or taken < preferred.sure else preferred.raised(left, preferred.sure)
        best = deciding.argmax(axis=1)[:, None]
        most = np.take_along_axis(left, best, axis=1)
        with np.errstate(invalid="ignore", divide="ignore"):  # two zeros are near
            far = (most - numbers) / np.maximum(np.abs(numbers), most) > np.float32(2 * part.jitter)
        powers = np.where(far, 0, np.exp(left - most))
        chosen.append(best)
        weights.append(np.take_along_axis(powers, best, axis=1) / powers.sum(axis=1, keepdims=True))
        np.put_along_axis(left, best, -np.inf, axis=1)
    return np.concatenate(chosen, axis=1), np.concatenate(weights, axis=1).astype(np.float32)
