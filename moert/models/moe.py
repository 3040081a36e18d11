"""Which experts a token goes to, and who runs them."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from moert.kernels.backend import Backend, Expert, Matrix, StoredWeights
from moert.models.layers import rms_norm, vector
from moert.pack.model_spec import ModelSpec, MoeSpec, Stack


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


def select(scores: Tensor, moe: MoeSpec) -> tuple[Tensor, Tensor]:
    """Router scores [tokens, num_experts] of one sequence → (experts, weights), [tokens, top_k], experts ascending.

    Experts are int64; tokens that come to an expert after `moe.capacity` others have -1 there.
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
    if moe.capacity is not None and scores.shape[0] > moe.capacity:
        experts = drop_overflow(experts, moe.num_experts, moe.capacity)
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

    def __call__(self, x: Tensor) -> None:
        """x [tokens, d_model] of one sequence += ffn(norm(x))."""
        hidden = rms_norm(x, self._norm, self._eps)
        experts, weights = select(self._backend.linear(hidden, [self._router]), self._moe)
        self._runner.run(self._stack, self._layer, hidden, experts, weights, x)

    def step(self, x: Tensor) -> None:
        """One token, x [1, d_model], for backends that route in one call."""
        assert self._steps is not None
        hidden, experts, weights = self._steps.route(x, self._norm, self._eps, self._router, self._moe)
        if self._moe.capacity == 0:  # every expert is full before the first token
            experts = []
        self._runner.run_one(self._stack, self._layer, hidden, experts, weights, x)


class DenseFfn:
    """The feed-forward part of a layer without experts, and the norm before it."""

    def __init__(self, spec: ModelSpec, norm: Tensor, ffn: Expert, backend: Backend) -> None:
        self._norm, self._eps, self._moe = norm, spec.norm_eps, spec.moe
        self._ffn, self._backend = ffn, backend
        self._whole = torch.ones(1)

    def __call__(self, x: Tensor) -> None:
        """x [tokens, d_model] += ffn(norm(x))."""
        n = len(x)
        hidden = rms_norm(x, self._norm, self._eps)
        self._backend.run(self._ffn, torch.arange(n), torch.ones(n), hidden, x, self._moe)

    def step(self, x: Tensor) -> None:
        """One token, x [1, d_model]."""
        self._backend.mix([self._ffn], self._whole, rms_norm(x, self._norm, self._eps), x, self._moe)


def feed_forward(
    spec: ModelSpec, weights: dict[str, StoredWeights], runner: ExpertRunner, stack: Stack, layer: int, backend: Backend
) -> MoeFfn | DenseFfn:
    """The feed-forward part of one layer, whichever kind it is. Takes its matrices out of `weights`."""
    at = f"{stack}.{layer}"
    norm = vector(weights, f"{at}.ffn_norm.weight")
    if f"{at}.router.weight" in weights:
        router = backend.matrix(weights.pop(f"{at}.router.weight"))
        return MoeFfn(spec, norm, router, runner, stack, layer, backend)
    gate, up, down = (
        backend.matrix(weights.pop(f"{at}.ffn.{name}.weight")) if name in spec.moe.projections else None
        for name in ("gate", "up", "down")
    )
    return DenseFfn(spec, norm, backend.dense(gate, up, down), backend)
