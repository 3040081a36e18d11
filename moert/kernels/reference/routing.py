"""Which experts a token goes to, by the scores of its router."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from moert.kernels.backend import I64
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


def sparsely(numbers: F32, part: Router) -> tuple[I64, F32]:
    """See moert.pack.parts.Router: chosen and weights, both [tokens, top_k]."""
    left, chosen, weights = numbers.copy(), [], []
    for _ in range(part.top_k):
        best = left.argmax(axis=1)[:, None]
        most = np.take_along_axis(left, best, axis=1)
        with np.errstate(invalid="ignore", divide="ignore"):  # two zeros are near
            far = (most - numbers) / np.maximum(np.abs(numbers), most) > np.float32(2 * part.jitter)
        powers = np.where(far, 0, np.exp(left - most))
        chosen.append(best)
        weights.append(np.take_along_axis(powers, best, axis=1) / powers.sum(axis=1, keepdims=True))
        np.put_along_axis(left, best, -np.inf, axis=1)
    return np.concatenate(chosen, axis=1), np.concatenate(weights, axis=1).astype(np.float32)
