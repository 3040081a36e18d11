"""The routers that choose experts for tokens: one for each layer, and routers that prefer recent experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from moert.kernels.backend import I64, Backend, Matrix, RouterWeights
from moert.models.kv import Recent
from moert.pack.codec import F32

_GUESSED_FROM = 32  # tokens of a prompt that a guess looks at


class Routed(NamedTuple):
    """The decision of a router: hidden [tokens, d_model] is the experts' input (the layer's input, normed); experts
    [tokens, top_k], ascending, -1 where one was full; weights [tokens, top_k]."""

    hidden: F32
    experts: I64
    weights: F32


class Router(Protocol):
    """The router of a layer with experts. x is the layer's input, and is not changed."""

    def route(self, x: F32, lengths: Sequence[int], recent: Sequence[Recent] = ()) -> Routed:
        """Returns the decision for x [tokens, d_model], sequences of `lengths` tokens one after the other. `recent`:
        each sequence's recent experts of this layer, empty where none are kept."""
        ...

    def guess(self, x: F32) -> F32:
        """Returns the router's output if x [tokens, d_model] came to this layer as it is: the mean of the scores that
        it chooses by, [num_experts], over an even sample of many tokens."""
        ...


class LearnedRouter:
    """The model's own router."""

    def __init__(self, weights: RouterWeights[Matrix], backend: Backend) -> None:
        self.weights, self._capacity, self._backend = weights, weights.part.capacity, backend

    def route(self, x: F32, lengths: Sequence[int], recent: Sequence[Recent] = ()) -> Routed:
        hidden, scores = self._backend.scores(x, self.weights)
        return Routed(hidden, *self.choose(scores, lengths))

    def choose(self, scores: F32, lengths: Sequence[int]) -> tuple[I64, F32]:
        """Returns experts and weights as in Routed for scores [tokens, experts]."""
        experts, weights = self._backend.choose(scores, self.weights)
        if self._capacity is not None and max(lengths) > self._capacity:
            parts = np.split(experts, np.cumsum(lengths)[:-1])
            experts = np.concatenate([without_overflow(part, scores.shape[1], self._capacity) for part in parts])
        return experts, weights

    def guess(self, x: F32) -> F32:
        if len(x) > _GUESSED_FROM:
            x = np.ascontiguousarray(x[np.linspace(0, len(x) - 1, _GUESSED_FROM).astype(np.int64)])
        scores: F32 = self._backend.scores(x, self.weights)[1].mean(axis=0)
        return scores if self.weights.choice_bias is None else scores + self.weights.choice_bias


class PreferringRouter:
    """The model's own router, which prefers experts that the sequence has used lately: a token that is written adds
    `bonus` to the score of each expert in its Recent, but for the `sure` best, which it takes as they are; weights are
    those of the scores without bonus. Prompts are routed exactly, since there each expert is read once for all tokens
    anyway.

    So nearly as good experts that are likely to be in memory take the place of better ones that are not (cache-aware
    routing: Skliar et al. 2024, arXiv 2412.00099, who add to the logits of experts in memory). The contents of memory
    have no say here: the same tokens go the same ways on every machine.
    """

    def __init__(self, exact: LearnedRouter, backend: Backend, bonus: float, sure: int) -> None:
        self._exact, self._backend, self._bonus, self._sure = exact, backend, bonus, sure
        self._latest: Sequence[Recent] = ()

    def route(self, x: F32, lengths: Sequence[int], recent: Sequence[Recent] = ()) -> Routed:
        self._latest = recent
        hidden, scores = self._backend.scores(x, self._exact.weights)
        parts, start = [], 0
        for length, kept in zip(lengths, recent, strict=True):
            rows = scores[start : start + length]
            exact = min(max(kept.exact - kept.length, 0), length)
            if exact:
                found = self._exact.choose(rows[:exact], [exact])
                kept.add(found[0])
                parts.append(found)
            for at in range(exact, length):
                parts.append(
                    self._backend.prefer(rows[at : at + 1], self._exact.weights, self._bonus, self._sure, kept.experts)
                )
                kept.went()
            start += length
        if len(parts) == 1:
            return Routed(hidden, *parts[0])
        experts, weights = (np.concatenate(each) for each in zip(*parts, strict=True))
        return Routed(hidden, experts, weights)

    def guess(self, x: F32) -> F32:
        """Returns the guess for sequences that each write their next token."""
        scores = self._exact.guess(x)
        for kept in self._latest:
            scores[kept.experts[kept.experts >= 0]] += np.float32(self._bonus / len(self._latest))
        return scores


def without_overflow(experts: I64, n_experts: int, capacity: int) -> I64:
    """Returns experts [tokens, top_k] with -1 for each token past the first `capacity` of an expert."""
    asked = np.zeros((len(experts), n_experts), np.int64)
    np.put_along_axis(asked, experts, 1, axis=1)
    place = np.take_along_axis(asked.cumsum(axis=0), experts, axis=1)  # counted from 1
    return np.where(place <= capacity, experts, -1)
