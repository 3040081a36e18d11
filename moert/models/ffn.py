"""The feed-forward half of a layer: routers that choose experts for tokens, and networks that run them."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple, Protocol

import numpy as np

from moert.kernels.backend import I64, Backend, Expert, Matrix, NormWeights, RouterWeights, pieces
from moert.models.kv import Recent
from moert.pack.codec import F32
from moert.pack.model_spec import LayerKey
from moert.pack.parts import Ffn

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
        self.identities = weights.part.identities

    def route(self, x: F32, lengths: Sequence[int], recent: Sequence[Recent] = ()) -> Routed:
        hidden, scores = self._backend.scores(x, self.weights)
        plain = self._capacity is None and not self.identities
        chosen = self._backend.choose(scores, self.weights) if plain else self.choose(scores, lengths)
        return Routed(hidden, *chosen)

    def choose(self, scores: F32, lengths: Sequence[int]) -> tuple[I64, F32]:
        """Returns experts and weights as in Routed for scores [tokens, experts and identities]."""
        experts, weights = self._backend.choose(scores, self.weights)
        if self.identities:
            return self.without_identities(experts, scores), weights
        if self._capacity is not None and max(lengths) > self._capacity:
            parts = np.split(experts, np.cumsum(lengths)[:-1])
            experts = np.concatenate([without_overflow(part, scores.shape[1], self._capacity) for part in parts])
        return experts, weights

    def without_identities(self, experts: I64, scores: F32) -> I64:
        """Returns experts [tokens, top_k] with -1 for each choice that stands for none."""
        return np.where(experts < scores.shape[1] - self.identities, experts, -1)

    def guess(self, x: F32) -> F32:
        if len(x) > _GUESSED_FROM:
            x = np.ascontiguousarray(x[np.linspace(0, len(x) - 1, _GUESSED_FROM).astype(np.int64)])
        scores: F32 = self._backend.scores(x, self.weights)[1].mean(axis=0)
        scores = scores if self.weights.choice_bias is None else scores + self.weights.choice_bias
        return scores[: len(scores) - self.identities]


class TokenRouter:
    """A model's own router whose experts follow from a token's number, and only their weights from its input. `reads`
    comes before each pass."""

    def __init__(self, weights: RouterWeights[Matrix], table: I64, n: int, backend: Backend) -> None:
        """table [vocab, top_k]: each token's experts, ascending, of n."""
        self.weights, self._table, self._n, self._backend = weights, table, n, backend
        self._chosen = table[:0]

    def reads(self, ids: Sequence[int]) -> None:
        """Takes the numbers of all tokens of the next pass."""
        self._chosen = self._table[np.asarray(ids)]

    def route(self, x: F32, lengths: Sequence[int], recent: Sequence[Recent] = ()) -> Routed:
        hidden, scores = self._backend.scores(x, self.weights)
        part, weights = self.weights.part, np.take_along_axis(scores, self._chosen, axis=1)
        if part.renormalise:
            weights = weights / reduce(np.add, weights.T)[:, None]
        if self.weights.expert_scale is not None:
            weights = weights * self.weights.expert_scale[self._chosen]
        for chosen, kept in zip(np.split(self._chosen, np.cumsum(lengths)[:-1]), recent, strict=bool(recent)):
            exact = min(max(kept.exact - kept.length, 0), len(chosen))
            kept.add(chosen[:exact])
            kept.length += len(chosen) - exact
        return Routed(hidden, self._chosen, weights * np.float32(part.factor * self.weights.factor))

    def guess(self, x: F32) -> F32:
        """Returns the share of the pass's tokens that go to each expert [num_experts], which is no guess."""
        counts = np.bincount(self._chosen.ravel(), minlength=self._n)
        shares: F32 = counts.astype(np.float32) / np.float32(len(self._chosen))
        return shares


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
                parts.append(self._preferred(rows[at : at + 1], kept))
                kept.went()
            start += length
        if len(parts) == 1:
            return Routed(hidden, *parts[0])
        experts, weights = (np.concatenate(each) for each in zip(*parts, strict=True))
        return Routed(hidden, experts, weights)

    def _preferred(self, scores: F32, kept: Recent) -> tuple[I64, F32]:
        """Returns the experts and weights of one token, which become the latest of its sequence."""
        exact, recent = self._exact, kept.experts
        if not exact.identities:
            return self._backend.prefer(scores, exact.weights, self._bonus, self._sure, recent)
        roomy = np.concatenate([recent, np.full(exact.weights.part.top_k, -1, np.int32)])
        chosen, weights = self._backend.prefer(scores, exact.weights, self._bonus, self._sure, roomy)
        chosen = exact.without_identities(chosen, scores)
        used = np.concatenate([chosen[chosen >= 0], recent[~np.isin(recent, chosen)]])[: len(recent)]
        recent[: len(used)] = used
        return chosen, weights

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


Routers = MutableMapping[LayerKey, Router]
"""The router of each layer with experts; a layer calls the one that stands here when it runs."""


class ExpertRunner(Protocol):
    """The runner of a layer's experts; how it comes by their weights is its own affair."""

    def run(self, at: LayerKey, hidden: F32, experts: I64, weights: F32, out: F32, x: F32) -> None:
        """Adds to out for each token the sum of weight times expert(hidden), both [tokens, features of an expert]; see
        Routed for the rest. x [tokens, d_model] is the stream as the experts find it, which may be out itself."""
        ...


class Network:
    """A feed-forward network that every token passes."""

    def __init__(self, part: Ffn, weights: Expert, backend: Backend) -> None:
        self._part, self._weights, self._backend = part, weights, backend

    def add(self, hidden: F32, weights: F32, out: F32) -> None:
        """Adds weights[:, None] · network(hidden) to out [tokens, d_model]."""
        n = len(hidden)
        self._backend.mixture([self._weights], [n], np.arange(n, dtype=np.int32), weights, hidden, out, self._part)


@dataclass(frozen=True)
class SharedExpert:
    """The network that every token passes beside the chosen experts. `gate`: its gate's matrix, or None."""

    network: Network
    gate: Matrix | None


@dataclass(frozen=True)
class BesideExperts:
    """The weights of moert.pack.parts.Beside."""

    network: Network
    norm: NormWeights
    after: NormWeights
    experts_after: NormWeights


@dataclass(frozen=True)
class NarrowExperts:
    """The weights of moert.pack.parts.Narrow."""

    features: int
    narrow: Matrix
    widen: Matrix


@dataclass(frozen=True)
class MoeJoin:
    """The way in which the experts' output joins the stream, see moert.pack.parts.Join and Router. `apart`: outputs are
    put together before they join; else each joins at once, and `add` is in the router's weights. `weighs_input`: the
    router's weights multiply the experts' input. `keeps`: a choice that is no expert, -1, adds the experts' input times
    its weight. `shortcut`: the experts' output is returned, to join the stream later."""

    after: NormWeights | None
    add: float
    apart: bool
    weighs_input: bool
    keeps: bool = False
    shortcut: bool = False


class MoeFfn:
    """The feed-forward part of a layer with experts: x joins experts(norm(x)), as the layer's router decides; the norm
    is part of the router."""

    def __init__(
        self, at: LayerKey, routers: Routers, runner: ExpertRunner, backend: Backend, join: MoeJoin,
        shared: SharedExpert | None, beside: BesideExperts | None, narrow: NarrowExperts | None,
        bypass: Matrix | None = None,
    ) -> None:  # fmt: skip
        self._at, self._routers, self._runner, self._backend = at, routers, runner, backend
        self._join, self._shared, self._beside, self._narrow = join, shared, beside, narrow
        self._bypass = bypass

    def __call__(
        self, x: F32, lengths: Sequence[int], recent: Sequence[Recent], entered: F32 | None = None
    ) -> F32 | None:  # fmt: skip
        """Changes x [tokens, d_model] in place, sequences of `lengths` tokens one after the other; see Router for
        `recent`. `entered` [tokens, d_model]: the layer's input, in a parallel layer; None: x. Returns the output of
        experts that takes a shortcut, [tokens, d_model]."""
        entered = x if entered is None else entered
        hidden, experts, weights = self._routers[self._at].route(entered, lengths, recent)
        out = np.zeros_like(x) if self._join.apart or self._join.shortcut else x
        if self._shared is not None:
            joined = x if self._join.shortcut else out
            for rows in pieces(len(x)):
                self._add_shared(self._shared, hidden[rows], joined[rows])
        if self._bypass is not None:
            for rows in pieces(len(x)):
                out[rows] += self._tanh(self._backend.linear(hidden[rows], self._bypass))
        given, made = hidden, out
        if self._narrow is not None:
            given, made = self._narrowed(self._narrow, hidden)
        if self._join.weighs_input:
            given, weights = given * weights, np.ones_like(weights)
        self._runner.run(self._at, given, experts, weights, made, x)
        if self._join.keeps and experts.min() < 0:
            made += np.where(experts < 0, weights, 0).sum(axis=1, keepdims=True, dtype=np.float32) * given
        if self._narrow is not None:
            for rows in pieces(len(x)):
                out[rows] += self._backend.linear(made[rows], self._narrow.widen)
        if self._join.apart:
            self._bring_in(x, out, entered)
        return out if self._join.shortcut else None

    def _tanh(self, x: F32) -> F32:
        made: F32 = 2 * self._backend.sigmoid(2 * x) - 1
        return made

    def _narrowed(self, narrow: NarrowExperts, hidden: F32) -> tuple[F32, F32]:
        """Returns the experts' input, and zeros for their output, both [tokens, features]."""
        given, made = np.zeros((2, len(hidden), narrow.features), np.float32)
        for rows in pieces(len(hidden)):
            given[rows] = self._backend.linear(hidden[rows], narrow.narrow)
        return given, made

    def _add_shared(self, shared: SharedExpert, hidden: F32, out: F32) -> None:
        add = 1.0 if self._join.apart else self._join.add
        if shared.gate is None:
            weights = np.full(len(hidden), add, np.float32)
        else:
            weights = self._backend.gate(hidden, shared.gate, add)
        shared.network.add(hidden, weights, out)

    def _bring_in(self, x: F32, made: F32, entered: F32) -> None:
        """Adds the experts' output to x in place; `entered`: the layer's input."""
        if (beside := self._beside) is not None:
            made = self._backend.norm(made, beside.experts_after)
            for rows in pieces(len(x)):
                hidden, other = self._backend.norm(entered[rows], beside.norm), np.zeros_like(x[rows])
                beside.network.add(hidden, np.ones(len(hidden), np.float32), other)
                made[rows] += self._backend.norm(other, beside.after)
        if self._join.after is not None:
            made = self._backend.norm(made, self._join.after)
        x += made if self._join.add == 1 else np.float32(self._join.add) * made


class DenseFfn:
    """The feed-forward part of a layer without experts: x joins ffn(norm(x))."""

    def __init__(self, network: Network, norm: NormWeights, after: NormWeights | None, add: float, backend: Backend):
        self._network, self._norm, self._after, self._add, self._backend = network, norm, after, add, backend

    def __call__(
        self, x: F32, lengths: Sequence[int], recent: Sequence[Recent], entered: F32 | None = None
    ) -> None:  # fmt: skip
        """Changes x [tokens, d_model] in place; the sequence that a token belongs to makes no difference. For
        `entered` see MoeFfn."""
        for piece in pieces(len(x)):
            rows = x[piece]
            hidden = self._backend.norm(rows if entered is None else entered[piece], self._norm)
            factors = np.full(len(rows), self._add, np.float32)
            if self._after is None:
                self._network.add(hidden, factors, rows)
                continue
            made = np.zeros_like(rows)
            self._network.add(hidden, np.ones_like(factors), made)
            rows += np.float32(self._add) * self._backend.norm(made, self._after)
