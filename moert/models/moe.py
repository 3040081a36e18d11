"""Which experts a token goes to, and who runs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from moert.kernels.backend import ROWS, Backend, Expert, Matrix, StoredWeights
from moert.models.layers import rms_norm, vector
from moert.pack.model_spec import ModelSpec, MoeSpec, Stack

_GUESSED_FROM = 32  # tokens of a prompt that a guess looks at

Guess = Callable[[Tensor], Tensor]
"""MoeFfn.guess of some layer."""


class ExpertRunner(Protocol):
    """Runs the experts of a layer; how it comes by their weights is its own affair."""

    def run(self, stack: Stack, layer: int, hidden: Tensor, experts: Tensor, weights: Tensor, out: Tensor) -> None:
        """out [tokens, d_model] += for each token the sum of weight times expert(hidden).

        hidden [tokens, d_model]; experts [tokens, top_k] int64, ascending, -1 where dropped; weights [tokens, top_k].
        """
        ...

    def run_one(
        self, stack: Stack, layer: int, hidden: Tensor, experts: list[int], weights: Tensor, out: Tensor
    ) -> None:
        """The same for one token: experts ascending, weights [len(experts)]."""
        ...


def select(scores: Tensor, moe: MoeSpec, lengths: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
    """Router scores [tokens, num_experts] → (experts, weights), [tokens, top_k], experts ascending.

    The tokens are one sequence, or several of `lengths` tokens one after the other. Experts are int64; tokens that come
    to an expert after `moe.capacity` others of their sequence have -1 there.
    """
    probabilities = scores.softmax(-1)
    if moe.top_k == 1:
        weights, experts = probabilities.max(-1, keepdim=True)
    else:
        weights, experts = probabilities.topk(moe.top_k, dim=-1)
        experts, order = experts.sort(-1)
        weights = weights.gather(-1, order)
    if moe.norm_topk:
        weights = weights / weights.sum(-1, keepdim=True)
    if moe.capacity is not None and max(lengths or [len(scores)]) > moe.capacity:
        parts = torch.split(experts, list(lengths or [len(scores)]))
        experts = torch.cat([drop_overflow(part, moe.num_experts, moe.capacity) for part in parts])
    return experts, weights


def drop_overflow(experts: Tensor, num_experts: int, capacity: int) -> Tensor:
    """experts [tokens, top_k] → the same with -1 for each token past the first `capacity` of an expert."""
    asked = F.one_hot(experts, num_experts).sum(1)  # [tokens, num_experts]
    place = asked.cumsum(0).gather(1, experts)  # [tokens, top_k], counted from 1
    return torch.where(place <= capacity, experts, -1)


class MoeFfn:
    """The feed-forward part of a layer with experts, and the norm before it."""

    def __init__(
        self, spec: ModelSpec, norm: Tensor, router: Matrix, runner: ExpertRunner, stack: Stack, layer: int,
        backend: Backend,
    ) -> None:  # fmt: skip
        self._norm, self._eps, self._router, self._moe = norm, spec.norm_eps, router, spec.moe
        self._runner, self._stack, self._layer = runner, stack, layer
        self._backend, self._steps = backend, backend.steps

    def __call__(self, x: Tensor, lengths: Sequence[int] | None = None) -> None:
        """x [tokens, d_model] += ffn(norm(x)), for one sequence or several of `lengths` tokens."""
        hidden = rms_norm(x, self._norm, self._eps)
        experts, weights = select(self._backend.linear(hidden, [self._router]), self._moe, lengths)
        self._runner.run(self._stack, self._layer, hidden, experts, weights, x)

    def guess(self, x: Tensor) -> Tensor:
        """What the router would say if x [tokens, d_model] came to this layer as it is: the mean of its probabilities,
        [num_experts], over an even sample of many tokens."""
        if len(x) > _GUESSED_FROM:
            x = x[torch.linspace(0, len(x) - 1, _GUESSED_FROM).long()]
        hidden = rms_norm(x, self._norm, self._eps)
        return self._backend.linear(hidden, [self._router]).softmax(-1).mean(0)

    def step(self, x: Tensor) -> None:
        """One token, x [1, d_model], for backends that route in one call."""
        assert self._steps is not None
        hidden, experts, weights = self._steps.route(x, self._norm, self._eps, self._router, self._moe)
        if self._moe.capacity == 0:  # every expert is full before the first token
            experts = []
        self._runner.run_one(self._stack, self._layer, hidden, experts, weights, x)

    def step_many(self, x: Tensor) -> None:
        """The same for one token each of several sequences, x [sequences, d_model]: each expert runs once."""
        assert self._steps is not None
        hidden, weights, chosen = torch.empty_like(x), torch.empty(len(x), self._moe.top_k), []
        for row, token in enumerate(torch.split(x, 1)):
            hidden[row], experts, weights[row] = self._steps.route(
                token, self._norm, self._eps, self._router, self._moe
            )
            chosen.append(experts)
        all_experts = torch.tensor(chosen)
        if self._moe.capacity == 0:
            all_experts.fill_(-1)
        self._runner.run(self._stack, self._layer, hidden, all_experts, weights, x)


class DenseFfn:
    """The feed-forward part of a layer without experts, and the norm before it."""

    def __init__(self, spec: ModelSpec, norm: Tensor, ffn: Expert, backend: Backend) -> None:
        self._norm, self._eps, self._moe = norm, spec.norm_eps, spec.moe
        self._ffn, self._backend = ffn, backend
        self._whole = torch.ones(1)

    def __call__(self, x: Tensor, lengths: Sequence[int] | None = None) -> None:
        """x [tokens, d_model] += ffn(norm(x)); which sequence a token belongs to makes no difference."""
        for rows in torch.split(x, ROWS):
            n = len(rows)
            hidden = rms_norm(rows, self._norm, self._eps)
            self._backend.run_all([self._ffn], [n], torch.arange(n), torch.ones(n), hidden, rows, self._moe)

    def step(self, x: Tensor) -> None:
        """One token, x [1, d_model]."""
        self._backend.mix([self._ffn], self._whole, rms_norm(x, self._norm, self._eps), x, self._moe)

    def step_many(self, x: Tensor) -> None:
        """One token each of several sequences, x [sequences, d_model]."""
        self(x)


def guesses(stack: Stack, layers: Sequence[MoeFfn | DenseFfn]) -> Mapping[tuple[Stack, int], Guess]:
    """The routers of the layers with experts of a stack."""
    return {(stack, layer): ffn.guess for layer, ffn in enumerate(layers) if isinstance(ffn, MoeFfn)}


def feed_forward(
    spec: ModelSpec, weights: dict[str, StoredWeights], runner: ExpertRunner, stack: Stack, layer: int, backend: Backend
) -> MoeFfn | DenseFfn:
    """The feed-forward part of one layer, whichever kind it is. Takes its matrices out of `weights`."""
    at = f"{stack}.{layer}"
    norm = vector(weights, f"{at}.ffn_norm.weight")
    if f"{at}.router.weight" in weights:
        router = backend.matrix(weights.pop(f"{at}.router.weight"))
        return MoeFfn(spec, norm, router, runner, stack, layer, backend)

    def taken(name: str) -> Matrix:
        return backend.matrix(weights.pop(f"{at}.ffn.{name}.weight"))

    gate = taken("gate") if "gate" in spec.moe.projections else None
    return DenseFfn(spec, norm, backend.dense(gate, taken("up"), taken("down")), backend)
