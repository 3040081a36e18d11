"""The routers of a loaded model: what they read, heard while it runs, and what they make of it.

What a layer's router reads is heard at the module that has its matrix, and scores are made of it as the pack will have
them (moert.pack.parts.Router).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moeconv.source.archs.description import Description
from moeconv.source.archs.weights import parameter
from moert.pack.model_spec import LayerKey
from moert.pack.parts import Experts, Router

F32 = npt.NDArray[np.float32]


class RouterWeights(NamedTuple):
    """Of one layer's router, as they were when it was asked for."""

    part: Router
    weight: Tensor
    bias: Tensor | None
    choice_bias: F32 | None
    expert_scale: Tensor | None


class Routers:
    """Those of some layers; `heard` [tokens, d_model] is what each read last while they are listened to."""

    def __init__(self, model: Any, description: Description, places: Sequence[LayerKey]) -> None:
        self.heard: dict[LayerKey, Tensor] = {}
        self.layers = {at: router_of(model, description, at) for at in places}
        self._modules: dict[LayerKey, Any] = {}
        for at in places:
            owner = description.parameters[f"{at.stack}.{at.layer}.router.weight"].name.rpartition(".")[0]
            self._modules[at] = model.get_submodule(owner)

    @contextmanager
    def listening(self) -> Iterator[None]:
        with ExitStack() as hooks:
            for at, module in self._modules.items():
                hooks.callback(module.register_forward_pre_hook(partial(self._hear, at)).remove)
            try:
                yield
            finally:
                self.heard.clear()

    def _hear(self, at: LayerKey, module: Any, inputs: tuple[Any, ...]) -> None:
        self.heard[at] = inputs[0].detach().reshape(-1, inputs[0].shape[-1]).float()


def router_of(model: Any, description: Description, at: LayerKey) -> RouterWeights:
    name = f"{at.stack}.{at.layer}.router"
    part = description.spec.stacks[at.stack][at.layer].ffn
    assert isinstance(part, Experts)

    def tensor(suffix: str) -> Tensor | None:
        canonical = f"{name}{suffix}"
        if canonical not in description.parameters:
            return None
        return parameter(model, description, canonical).float()

    weight, choice = tensor(".weight"), tensor(".choice_bias")
    assert weight is not None
    numbers = None if choice is None else choice.numpy()
    return RouterWeights(part.router, weight, tensor(".bias"), numbers, tensor(".expert_scale"))


def numbers_of(x: Tensor, layer: RouterWeights) -> Tensor:
    """What scores are made of: x [tokens, d_model] → [tokens, experts]"""
    return torch.nn.functional.linear(x, layer.weight, layer.bias)


def scores_of(numbers: Tensor, layer: RouterWeights) -> Tensor:
    """numbers [..., experts] → [..., experts]"""
    if layer.part.score == "softmax":
        return numbers.softmax(-1)
    return numbers.sigmoid() if layer.part.score == "sigmoid" else numbers


def deciding_of(scores: F32, layer: RouterWeights) -> F32:
    """scores [..., experts] → what experts are chosen by, -infinity for those of groups that are left out."""
    deciding = scores if layer.choice_bias is None else scores + layer.choice_bias
    if (groups := layer.part.groups) is None:
        return deciding
    split = torch.from_numpy(deciding).reshape(*deciding.shape[:-1], groups.n, -1)
    worth = split.topk(min(groups.top, split.shape[-1]), dim=-1).values.sum(-1)
    kept = torch.zeros_like(worth).scatter_(-1, worth.topk(groups.best, dim=-1).indices, 1).bool()
    found: F32 = split.masked_fill(~kept[..., None], -torch.inf).flatten(-2).numpy()
    return found


def weights_of(scores: Tensor, chosen: Tensor, layer: RouterWeights) -> Tensor:
    """scores [tokens, experts], chosen [tokens, top_k], the first choice first → what chosen experts are weighed by."""
    part = layer.part
    weights = _mixed_sparsely(scores, chosen, part.jitter) if part.score == "sparsemixer" else scores.gather(1, chosen)
    if part.score == "sigmoid_of_chosen":
        weights = weights.sigmoid()
    if part.renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    if layer.expert_scale is not None:
        weights = weights * layer.expert_scale[chosen]
    return weights * part.factor


def _mixed_sparsely(scores: Tensor, chosen: Tensor, jitter: float) -> Tensor:
    """Of the sparse mixer: each choice has its share of the softmax over those that are left and near it."""
    left, weights = scores.clone(), []
    for place in range(chosen.shape[1]):
        best = chosen[:, place : place + 1]
        most = scores.gather(1, best)
        far = (most - scores) / torch.maximum(scores.abs(), most) > 2 * jitter  # two zeros are not
        weights.append(left.masked_fill(far, -torch.inf).softmax(-1).gather(1, best))
        left = left.scatter(1, best, -torch.inf)
    return torch.cat(weights, dim=1)
