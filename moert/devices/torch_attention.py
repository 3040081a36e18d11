"""Attention of both kinds in torch: what moert.kernels.reference.attention says, for all heads at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from moert.devices.torch_matrices import TorchMatrix
from moert.devices.torch_ops import TorchNorm, by_head, normed, product, softmax
from moert.pack.parts import Attention, Latent

_SCORES = 1 << 25
"""Scores that are there at once, if one head of keys has no more: 128 MiB of them."""


class TorchAttention(NamedTuple):
    """See moert.kernels.backend.AttentionWeights."""

    part: Attention | Latent
    own: bool
    causal: bool
    norms: Mapping[str, TorchNorm]
    matrices: Mapping[str, TorchMatrix]
    sinks: Tensor | None


class TorchPositions(NamedTuple):
    """See moert.kernels.backend.Positions."""

    turns: Tensor | None = None
    bias: Tensor | None = None
    zero: int = 0
    query_scale: Tensor | None = None


class Keys(Protocol):
    """Keys and values of one sequence."""

    def write(self, start: int, key: Tensor, value: Tensor) -> None:
        """[tokens, kv, dim] and [tokens, kv, value_dim], from this token on."""
        ...

    def read(self) -> tuple[Tensor, Tensor]:
        """All of them, [kv, tokens, dim] and [kv, tokens, value_dim]."""
        ...


def attend(weights: TorchAttention, x: Tensor, keys: Keys, start: int, positions: TorchPositions) -> Tensor:
    """What joins x [tokens, d_model]; see moert.kernels.backend.Backend.attend."""
    part, matrices, hidden = weights.part, weights.matrices, normed(x, weights.norms["before"])
    if isinstance(part, Latent):
        query = _latent_queries(part, weights, hidden, positions)
        keys.write(start, *_latent_kept(weights, hidden, positions))
    else:
        query = _heads(part, weights, "q", hidden, positions)
        if weights.own:
            keys.write(start, *keys_and_values(part, weights, hidden, positions))
    if positions.query_scale is not None:
        query = query * positions.query_scale[:, None, None]
    found = _mixed(weights, query, keys.read(), start, positions)
    if isinstance(part, Latent):
        found = by_head(found, matrices["values"])
    flat = found.reshape(len(x), -1)
    if "gate" in matrices:
        flat = flat * torch.sigmoid(product(hidden, matrices["gate"]))
    made = product(flat, matrices["o"])
    return normed(made, weights.norms["after"]) if "after" in weights.norms else made


def keys_and_values(
    part: Attention, weights: TorchAttention, hidden: Tensor, positions: TorchPositions
) -> tuple[Tensor, Tensor]:
    """hidden [tokens, d_model] → [tokens, kv, dim] and [tokens, kv, value_dim]"""
    return _heads(part, weights, "k", hidden, positions), _heads(part, weights, "v", hidden, positions)


def _heads(
    part: Attention, weights: TorchAttention, name: str, hidden: Tensor, positions: TorchPositions
) -> Tensor:  # fmt: skip
    """Queries, keys or values: [tokens, d_model] → [tokens, heads, dim], normed, bounded and turned."""
    made, norm = product(hidden, weights.matrices[name]), weights.norms.get(name)
    split = (len(made), -1, part.dim)
    whole = (len(made), -1) if part.qk_norm == "whole" and name != "v" else split
    if norm is not None and (name == "v" or not part.norm_turned):
        made = normed(made.reshape(whole), norm)
    made = made.reshape(split)
    if part.clip is not None:
        made = made.clamp(-part.clip, part.clip)
    if name == "v":
        return made
    made = _turned(made, positions)
    if norm is not None and part.norm_turned:
        made = normed(made.reshape(whole), norm).reshape(split)
    return made


def _turned(heads: Tensor, positions: TorchPositions) -> Tensor:
    """[tokens, heads, dim], of which the first features turn."""
    if positions.turns is None:
        return heads
    half = positions.turns.shape[2]
    cos, sin = positions.turns[:, :1], positions.turns[:, 1:]
    low, high, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), dim=-1)


def _latent_queries(part: Latent, weights: TorchAttention, hidden: Tensor, positions: TorchPositions) -> Tensor:
    """[tokens, heads, dim]: what meets c, and what meets the key that turns."""
    matrices, n = weights.matrices, len(hidden)
    asked = hidden if part.q_rank is None else normed(product(hidden, matrices["q_a"]), weights.norms["q"])
    still = product(asked, matrices["q"]).reshape(n, part.n, part.nope)
    turning = _turned(product(asked, matrices["q_turn"]).reshape(n, part.n, part.turning), positions)
    return torch.cat((by_head(still, matrices["keys"]), turning), dim=-1)


def _latent_kept(weights: TorchAttention, hidden: Tensor, positions: TorchPositions) -> tuple[Tensor, Tensor]:
    """[tokens, 1, dim] and [tokens, 1, value_dim]: c with the key that turns, and c"""
    c = normed(product(hidden, weights.matrices["kv_a"]), weights.norms["kv"])[:, None]
    turned = _turned(product(hidden, weights.matrices["k_turn"])[:, None], positions)
    return torch.cat((c, turned), dim=-1), c


def _mixed(
    weights: TorchAttention, query: Tensor, kept: tuple[Tensor, Tensor], start: int, positions: TorchPositions
) -> Tensor:
    """What each head reads: query [tokens, heads, dim] → [tokens, heads, value_dim]. `kept`: keys [kv, length, dim] and
    values [kv, length, value_dim]. Few heads of keys at a time, where all of them would have too many scores."""
    part, (keys, values), tokens = weights.part, kept, len(query)
    shared, length = part.n // part.kv, keys.shape[1]
    by_place = _places(weights, start, tokens, length, query.device)
    found = torch.empty((tokens, part.n, part.value_dim), dtype=torch.float32, device=query.device)
    step = max(1, _SCORES // (shared * tokens * length))
    for first in range(0, part.kv, step):
        some = slice(first * shared, min(first + step, part.kv) * shared)
        asked = query[:, some].reshape(tokens, -1, shared, part.dim).permute(1, 2, 0, 3).flatten(1, 2)
        scores = (asked @ keys[first : first + step].transpose(1, 2)).view(-1, tokens, length) * part.scale
        sinks = None if weights.sinks is None else weights.sinks[some, None, None]
        shares = softmax(_seen(weights, scores, some, by_place, positions), sinks)
        mixed = shares.view(-1, shared * tokens, length) @ values[first : first + step]
        found[:, some] = mixed.view(-1, tokens, part.value_dim).transpose(0, 1)
    return found


class _Places(NamedTuple):
    """`after` [tokens, length]: how far a key lies after the query; `unseen`, of the same shape, or None."""

    after: Tensor
    unseen: Tensor | None


def _seen(
    weights: TorchAttention, scores: Tensor, some: slice, places: _Places, positions: TorchPositions
) -> Tensor:  # fmt: skip
    """scores [heads, tokens, length] of some heads, bounded, with what distances add, and -infinity where a query
    does not see a key."""
    softcap = weights.part.softcap if isinstance(weights.part, Attention) else None
    if softcap is not None:
        scores = torch.tanh(scores / softcap).mul_(softcap)
    if positions.bias is not None:
        scores += positions.bias[some][:, places.after + positions.zero]
    return scores if places.unseen is None else scores.masked_fill_(places.unseen, -torch.inf)


def _places(weights: TorchAttention, start: int, tokens: int, length: int, device: torch.device) -> _Places:
    """Keys after the query, or before its window or chunk, are unseen."""
    part, key = weights.part, torch.arange(length, device=device)
    query = torch.arange(start, start + tokens, device=device)[:, None]
    if not weights.causal:
        return _Places(key - query, None)
    unseen = key > query
    if part.window is not None:
        unseen |= key <= query - part.window
    if isinstance(part, Attention) and part.chunk is not None:
        unseen |= key < query // part.chunk * part.chunk
    return _Places(key - query, unseen)
