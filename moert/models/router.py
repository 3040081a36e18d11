"""Which experts a token goes to: a router for each layer, as an object that can be replaced by another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from moert.kernels.backend import I64, Backend, Matrix, RouterWeights
from moert.pack.codec import F32

_GUESSED_FROM = 32  # tokens of a prompt that a guess looks at


class Routed(NamedTuple):
    """What a router has decided: hidden [tokens, d_model] is what the experts get (the layer's input, normed); experts
    [tokens, top_k], ascending, -1 where one was full; weights [tokens, top_k]."""

    hidden: F32
    experts: I64
    weights: F32


class Router(Protocol):
    """What a layer with experts asks. x is the layer's input, and is not changed."""

    def route(self, x: F32, lengths: Sequence[int]) -> Routed:
        """x [tokens, d_model], sequences of `lengths` tokens one after the other."""
        ...

    def guess(self, x: F32) -> F32:
        """What the router would say if x [tokens, d_model] came to this layer as it is: the mean of the numbers that it
        chooses by, [num_experts], over an even sample of many tokens."""
        ...


class LearnedRouter:
    """The model's own."""

    def __init__(self, weights: RouterWeights[Matrix], backend: Backend) -> None:
        self._weights, self._capacity, self._backend = weights, weights.part.capacity, backend

    def route(self, x: F32, lengths: Sequence[int]) -> Routed:
        hidden, scores = self._backend.scores(x, self._weights)
        n_experts = scores.shape[1]
        experts, weights = self._backend.choose(scores, self._weights)
        if self._capacity is not None and max(lengths) > self._capacity:
            parts = np.split(experts, np.cumsum(lengths)[:-1])
            experts = np.concatenate([without_overflow(part, n_experts, self._capacity) for part in parts])
        return Routed(hidden, experts, weights)

    def guess(self, x: F32) -> F32:
        if len(x) > _GUESSED_FROM:
            x = np.ascontiguousarray(x[np.linspace(0, len(x) - 1, _GUESSED_FROM).astype(np.int64)])
        scores: F32 = self._backend.scores(x, self._weights)[1].mean(axis=0)
        return scores if self._weights.choice_bias is None else scores + self._weights.choice_bias


def without_overflow(experts: I64, n_experts: int, capacity: int) -> I64:
    """experts [tokens, top_k] → the same with -1 for each token past the first `capacity` of an expert."""
    asked = np.zeros((len(experts), n_experts), np.int64)
    np.put_along_axis(asked, experts, 1, axis=1)
    place = np.take_along_axis(asked.cumsum(axis=0), experts, axis=1)  # counted from 1
    return np.where(place <= capacity, experts, -1)
