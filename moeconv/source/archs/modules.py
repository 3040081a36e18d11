"""Torch modules that take the place of those of a loaded model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Skipped(nn.Module):
    """Stands for a layer that has been computed already."""

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden


class Network(nn.Module):
    """That of a layer of OPT, as experts are called."""

    def __init__(self, up: nn.Module, act: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.up, self.act, self.down = up, act, down

    def forward(self, x: Tensor, _chosen: Tensor, _weights: Tensor) -> Tensor:
        """x [tokens, d_model] → the same shape"""
        found: Tensor = self.down(self.act(self.up(x)))
        return found


class Alone(nn.Module):
    """Sends all tokens to the one expert there is."""

    def __init__(self, experts: Network) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, d_model] → the same shape"""
        chosen = torch.zeros((len(x), 1), dtype=torch.int64)
        found: Tensor = self.experts(x, chosen, torch.ones((len(x), 1), dtype=x.dtype))
        return found
