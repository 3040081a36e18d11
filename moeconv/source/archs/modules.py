"""Modules that families put into transformers' models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

# Torch modules that take the place of a loaded model's own.


class Skipped(nn.Module):
    """A stand-in for a layer that does not run: it returns its input, and `more` times None."""

    def __init__(self, more: int = 0) -> None:
        super().__init__()
        self.more = more

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Any:
        return (hidden, *[None] * self.more) if self.more else hidden


class Network(nn.Module):
    """A dense layer's network, with the call of an experts module."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor, _chosen: Tensor, _weights: Tensor) -> Tensor:
        """Returns the network's output for x, both [tokens, d_model]."""
        found: Tensor = self.network(x)
        return found


class Alone(nn.Module):
    """A dense layer's network as the only expert, which gets all tokens."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.experts = Network(network)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the expert's output for x, both [..., d_model]."""
        tokens = x.reshape(-1, x.shape[-1])
        chosen = torch.zeros((len(tokens), 1), dtype=torch.int64)
        found: Tensor = self.experts(tokens, chosen, torch.ones((len(tokens), 1), dtype=x.dtype))
        return found.reshape(x.shape)


class AllTokens(nn.Module):
    """An indexer's stand-in, which chooses all tokens."""

    def forward(self, hidden: Tensor, _asked: Tensor, _turns: Any, mask: Tensor, *_: Any, **__: Any) -> Tensor:
        """Returns the places of all keys for each query, [sequences, queries, keys]; mask [..., keys]."""
        keys = torch.arange(mask.shape[-1], dtype=torch.int32)
        return keys.expand(*hidden.shape[:2], -1)
