"""Modules that families put into transformers' models."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moert.pack.parts import DIGITS

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


class TokensBefore(nn.Module):
    """An indexer's stand-in, which chooses for each token itself and all tokens before it."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer

    def forward(
        self, hidden_states: Tensor, q_resid: Tensor, attention_mask: Tensor, past_key_values: Any
    ) -> Tensor:  # fmt: skip
        """Returns the places of keys for each query, [sequences, queries, keys], -1 where there is none; attention_mask
        [sequences, queries] says which queries are tokens."""
        sequences, queries = hidden_states.shape[:2]
        n = queries if past_key_values is None else past_key_values.layers[self.layer].get_seq_length()
        keys = torch.arange(n, dtype=torch.int32)
        places = torch.where(keys <= keys[n - queries :, None], keys, -1).expand(sequences, -1, -1)
        if n == queries:
            places = places.masked_fill(~attention_mask[:, None], -1)
        return places.masked_fill(~attention_mask[..., None], -1)


class TableRows(nn.Module):
    """An embedding's stand-in, whose rows are read when they are asked for. `read`: numbers [n] → rows [n, dim]."""

    read: Callable[[Tensor], Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.empty(0)

    def forward(self, ids: Tensor) -> Tensor:
        asked, places = torch.unique(ids, return_inverse=True)
        return self.read(asked)[places]


class AllBefore(nn.Module):
    """An indexer's stand-in, which masks nothing."""

    def forward(self, _hidden: Tensor, _turns: Any, mask: Tensor, _past: Any) -> Tensor:
        """Returns a mask that is true everywhere, of the shape of `mask`."""
        return torch.ones_like(mask, dtype=torch.bool)


_BASE = 256
"""Numbers below it are exact in 16 bits, too."""


def carry_ids(tower: Any, layers: Iterable[Any], end: Any) -> None:
    """Makes hidden states between layers [..., width] end with the tokens' numbers in DIGITS more features, so that a
    tower that goes on from hidden states has them."""
    width = end.hc_count * end.hidden_size

    def told(hidden: Tensor | None, named: dict[str, Any]) -> dict[str, Any]:
        if hidden is None or hidden.shape[-1] <= width:
            return named
        digits = hidden.detach()[..., width:].round().long()
        return {**named, "ple_input_ids": (digits * _BASE ** torch.arange(DIGITS)).sum(-1)}

    def entered(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        return (given[0][..., :width], *given[1:]), told(given[0], named)

    tower.register_forward_pre_hook(
        lambda _, given, named: (given, told(named.get("inputs_embeds"), named)), with_kwargs=True
    )
    end.register_forward_pre_hook(lambda _, given: (given[0][..., :width],))
    for layer in layers:
        layer.register_forward_pre_hook(entered, with_kwargs=True)
        layer.register_forward_hook(_with_digits, with_kwargs=True)


def _with_digits(_: nn.Module, __: Any, named: dict[str, Any], made: Tensor) -> Tensor:
    digits = named["ple_input_ids"][..., None] // _BASE ** torch.arange(DIGITS) % _BASE
    return torch.cat([made, digits.to(made.dtype)], dim=-1)


def join_streams(layers: Iterable[Any], end: nn.Module, numbered: bool = False) -> None:
    """Makes layers whose hidden states are several streams [..., streams, d_model] take and give them one after the
    other [..., streams · d_model], and the module behind them take them so. If they are `numbered`, the digits of the
    token's number follow them, for layers that get it as `input_ids`."""
    n, digits = 0, DIGITS * numbered
    for layer in layers:
        n = layer.attn_hc.hc_mult
        layer.register_forward_pre_hook(partial(_apart, n, digits), with_kwargs=True)
        layer.register_forward_hook(partial(_together, digits), with_kwargs=True)
    end.register_forward_pre_hook(partial(_apart, n, digits), with_kwargs=True)


def _apart(n: int, digits: int, _: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Returns the arguments of a module with n streams apart. Hidden states that enter as embeddings are [sequences,
    tokens, 1, n · d_model and digits]."""
    hidden, *others = given
    if hidden.dim() == 4 and hidden.shape[2] == 1:
        hidden = hidden[:, :, 0]
    if hidden.dim() == 4:
        return given, named
    if digits:
        hidden, last = hidden[..., :-digits], hidden[..., -digits:]
        if "input_ids" in named:
            places = torch.tensor([_BASE**at for at in range(digits)])
            named = {**named, "input_ids": (last.detach().long() * places).sum(-1)}
    return (hidden.unflatten(-1, (n, -1)), *others), named


def _together(digits: int, _: nn.Module, __: Any, named: dict[str, Any], made: Any) -> Any:
    hidden, *others = (made,) if isinstance(made, Tensor) else made
    hidden = hidden.flatten(2)
    if digits:
        ids = named["input_ids"][..., None]
        last = [ids // _BASE**at % _BASE for at in range(digits)]
        hidden = torch.cat([hidden, *(each.to(hidden.dtype) for each in last)], dim=-1)
    return hidden if isinstance(made, Tensor) else (hidden, *others)
