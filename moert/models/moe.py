"""Which experts a token goes to, and who runs them."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from moert.models.layers import DenseFfn
from moert.pack.model_spec import ModelSpec, MoeSpec, Stack


class ExpertRunner(Protocol):
    """Runs the experts of a layer; how it comes by their weights is its own affair."""

    def run(self, stack: Stack, layer: int, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """hidden [tokens, d_model]; experts [tokens, top_k] int64, -1 where dropped; weights [tokens, top_k].

        Returns the weighted sum over the selected experts, [tokens, d_model], as
        `moert.kernels.reference.grouped_ffn` defines it.
        """
        ...


def route(hidden: Tensor, router: Tensor, moe: MoeSpec) -> tuple[Tensor, Tensor]:
    """hidden [tokens, d_model] of one sequence, router [num_experts, d_model] → (experts, weights), [tokens, top_k].

    Experts are int64; tokens that come to an expert after `moe.capacity` others have -1 there.
    """
    probabilities = F.linear(hidden, router).softmax(-1)
    if moe.top_k == 1:
        weights, experts = probabilities.max(-1, keepdim=True)
    else:
        weights, experts = probabilities.topk(moe.top_k, dim=-1)
    if moe.norm_topk:
        weights = weights / weights.sum(-1, keepdim=True)
    if moe.capacity is not None and hidden.shape[0] > moe.capacity:
        experts = drop_overflow(experts, moe.num_experts, moe.capacity)
    return experts, weights


def drop_overflow(experts: Tensor, num_experts: int, capacity: int) -> Tensor:
    """experts [tokens, top_k] → the same with -1 for each token past the first `capacity` of an expert."""
    asked = F.one_hot(experts, num_experts).sum(1)  # [tokens, num_experts]
    place = asked.cumsum(0).gather(1, experts)  # [tokens, top_k], counted from 1
    return torch.where(place <= capacity, experts, -1)


class MoeFfn:
    """The feed-forward part of a layer with experts."""

    def __init__(self, router: Tensor, moe: MoeSpec, runner: ExpertRunner, stack: Stack, layer: int) -> None:
        self.router, self.moe, self.runner = router, moe, runner
        self.stack, self.layer = stack, layer

    def __call__(self, hidden: Tensor) -> Tensor:
        """[tokens, d_model] of one sequence → the same shape."""
        experts, weights = route(hidden, self.router, self.moe)
        return self.runner.run(self.stack, self.layer, hidden, experts, weights)


def feed_forward(
    spec: ModelSpec, weights: dict[str, Tensor], runner: ExpertRunner, stack: Stack, layer: int
) -> MoeFfn | DenseFfn:
    """The feed-forward part of one layer, whichever kind it is. Takes its matrices out of `weights`."""
    at = f"{stack}.{layer}"
    if f"{at}.router.weight" in weights:
        return MoeFfn(weights.pop(f"{at}.router.weight"), spec.moe, runner, stack, layer)
    gate = weights.pop(f"{at}.ffn.gate.weight") if spec.moe.gated else None
    up, down = weights.pop(f"{at}.ffn.up.weight"), weights.pop(f"{at}.ffn.down.weight")
    return DenseFfn(up, down, gate, spec.moe.activation)
