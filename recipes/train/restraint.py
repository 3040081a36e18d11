"""Fewer neurons that fire: a penalty on activations that rises until few enough of them are not zero.

The penalty of a layer is the mean of its activations in units of their root mean square: L1 as in ProSparse (Song et
al., 2024, arXiv 2402.13516), but blind to scale, so that activations cannot evade it by becoming small together. It is
sqrt(share) where a share of the neurons fires and all of them equally.
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WEIGHT = "restraint"  # the penalty's weight among what a task keeps from stop to start
TINY = 1e-12


@dataclass(frozen=True, kw_only=True)
class Restraint:
    """From which step on, to which share of neurons that fire for a token, and how fast the weight may move."""

    share: float
    since: int = 0
    first: float = 0.01  # the weight at that step
    pace: float = 0.01  # of its logarithm, a step, while twice the share or more fires

    def moved(self, weight: float, firing: float) -> float:
        """The next step's weight, after one at which a share ``firing`` of the neurons fired."""
        excess = min(max((firing - self.share) / self.share, -1.0), 1.0)
        return weight * math.exp(self.pace * excess)


class Watched(Protocol):
    """What is asked of a layer after a forward pass in training."""

    restrained: bool  # says whether ``spread`` is wanted
    spread: Tensor | None
    firing: Tensor | None  # share of activations that are not zero


class Moments(NamedTuple):
    """Mean and root mean square of activations, of ``count`` of them."""

    mean: float
    root: float
    count: int

    @classmethod
    def of(cls, hidden: Tensor, count: int) -> Moments:
        """Of activations that are not negative, any shape; those beyond ``count`` are zero and do not count."""
        total = float(hidden.sum(dtype=torch.float32))
        root = float(torch.linalg.vector_norm(hidden, dtype=torch.float32)) / math.sqrt(count)
        return cls(total / count, root + TINY, count)

    @property
    def spread(self) -> float:
        """Mean over root mean square, 0..1."""
        return self.mean / self.root

    def slope(self, hidden: Tensor) -> Tensor:
        """Gradient of the spread by each activation; the same shape."""
        factor = 1 / (self.root * self.count)
        return (hidden * (-factor * self.mean / self.root**2)).add_(factor)


class Spread(torch.autograd.Function):
    """The spread of activations [..., d_ff] that are not negative: a scalar."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.moments = Moments.of(hidden, hidden.numel())
        return hidden.new_tensor(ctx.moments.spread, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return ctx.moments.slope(ctx.saved_tensors[0]).mul_(float(grads[0]))


class WatchedReLU(nn.Module):
    """ReLU that keeps what the penalty needs after a forward pass in training; no weights."""

    def __init__(self) -> None:
        super().__init__()
        self.restrained = False  # says whether ``spread`` is wanted
        self.spread: Tensor | None = None
        self.firing: Tensor | None = None  # share of the activations that are not zero, of every eighth token

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, d_ff] → the same."""
        hidden = F.relu(x)
        if self.training:
            self.firing = (hidden.detach()[::8] > 0).mean(dtype=torch.float32)
            self.spread = Spread.apply(hidden) if self.restrained else None
        return hidden


class Watch:
    """The restrained layers of a model in training, and the weight of their penalty among what a task ``keeps``."""

    def __init__(self, restraint: Restraint | None, layers: Sequence[Watched], kept: MutableMapping[str, float]):
        self.restraint, self.layers, self.kept = restraint, layers, kept

    def begin(self, step: int) -> None:
        """Before a step's forward pass: say to the layers whether they are restrained in it."""
        for layer in self.layers:
            layer.restrained = self.restraint is not None and step >= self.restraint.since

    def end(self) -> tuple[Tensor, dict[str, float]]:
        """After it: what the loss gets, and figures for the log. Moves the weight."""
        shares = [float(layer.firing) for layer in self.layers if layer.firing is not None]
        if not shares:
            return torch.zeros(()), {}
        firing = sum(shares) / len(shares)
        spreads = [layer.spread for layer in self.layers if layer.spread is not None]
        if self.restraint is None or not spreads:
            return torch.zeros(()), {"firing": firing}
        weight = self.kept.setdefault(WEIGHT, self.restraint.first)
        self.kept[WEIGHT] = self.restraint.moved(weight, firing)
        spread = torch.stack(spreads).mean()
        return weight * spread, {"firing": firing, "spread": float(spread.detach()), "restraint": weight}
