"""Attention: queries, keys and values of a layer, and what the heads read of those that are kept."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moert.kernels.backend import AttentionWeights, Positions
from moert.kernels.reference.arithmetic import Plain, normed, product, softmax
from moert.pack.codec import F32
from moert.pack.parts import Attention, Latent


def mixed(weights: AttentionWeights[Plain], query: F32, kept: tuple[F32, F32], start: int, positions: Positions) -> F32:
    """What each head reads: query [tokens, heads, dim] → [tokens, heads, value_dim]. `kept`: keys [kv, length, dim] and
    values [kv, length, value_dim]."""
    part, (keys, values) = weights.part, kept
    shared, mixed = part.n // part.kv, np.empty((*query.shape[:2], part.value_dim), np.float32)
    softcap = part.softcap if isinstance(part, Attention) else None
    for head in range(part.n):
        scores = query[:, head] @ keys[head // shared].T * np.float32(part.scale)
        if softcap is not None:
            scores = np.float32(softcap) * np.tanh(scores / np.float32(softcap))
        if positions.bias is not None:
            scores += _by_place(positions.bias[head], positions.zero - start, *scores.shape)
        if weights.causal:
            scores[_unseen(part, start, *scores.shape)] = -np.inf
        sink = None if weights.sinks is None else weights.sinks[head]
        mixed[:, head] = softmax(scores, sink) @ values[head // shared]
    return mixed


def keys_and_values(
    part: Attention, weights: AttentionWeights[Plain], hidden: F32, positions: Positions
) -> tuple[F32, F32]:
    """hidden [tokens, d_model] → [tokens, kv, dim] and [tokens, kv, value_dim]"""
    return tuple(heads(part, weights, name, hidden, positions) for name in "kv")  # type: ignore[return-value]


def heads(part: Attention, weights: AttentionWeights[Plain], name: str, hidden: F32, positions: Positions) -> F32:
    """Queries, keys or values: [tokens, d_model] → [tokens, heads, dim], normed, bounded and turned."""
    made, norm = product(hidden, weights.matrices[name]), weights.norms.get(name)
    whole = (len(made), -1) if part.qk_norm == "whole" and name != "v" else (len(made), -1, part.dim)
    if norm is not None and (name == "v" or not part.norm_turned):
        made = normed(made.reshape(whole), norm)
    made = made.reshape(len(hidden), -1, part.dim)
    if part.clip is not None:
        made = np.clip(made, -np.float32(part.clip), np.float32(part.clip))
    if name == "v":
        return made
    made = _turned(made, positions)
    if norm is not None and part.norm_turned:
        made = normed(made.reshape(whole), norm).reshape(made.shape)
    return made


def _turned(heads: F32, positions: Positions) -> F32:
    """[tokens, heads, dim], of which the first features turn."""
    if positions.turns is None:
        return heads
    half = positions.turns.shape[2]
    cos, sin = positions.turns[:, :1], positions.turns[:, 1:]
    low, high, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
    turned: F32 = np.concatenate((low * cos - high * sin, high * cos + low * sin, rest), axis=-1)
    return turned


def latent_queries(part: Latent, weights: AttentionWeights[Plain], hidden: F32, positions: Positions) -> F32:
    """[tokens, heads, dim]: what meets c, and what meets the key that turns."""
    matrices, n = weights.matrices, len(hidden)
    asked = hidden if part.q_rank is None else normed(product(hidden, matrices["q_a"]), weights.norms["q"])
    still = product(asked, matrices["q"]).reshape(n, part.n, part.nope)
    turning = _turned(product(asked, matrices["q_turn"]).reshape(n, part.n, part.turning), positions)
    meets = np.einsum("tnd,ncd->tnc", still, matrices["keys"].weight.reshape(part.n, part.kv_rank, part.nope))
    queries: F32 = np.concatenate((meets, turning), axis=-1).astype(np.float32)
    return queries


def latent_kept(part: Latent, weights: AttentionWeights[Plain], hidden: F32, positions: Positions) -> tuple[F32, F32]:
    """[tokens, 1, dim] and [tokens, 1, value_dim]: c with the key that turns, and c"""
    c = normed(product(hidden, weights.matrices["kv_a"]), weights.norms["kv"])[:, None]
    turned = _turned(product(hidden, weights.matrices["k_turn"])[:, None], positions)
    return np.concatenate((c, turned), axis=-1), c


def _by_place(by_distance: F32, zero: int, tokens: int, length: int) -> F32:
    """[offsets], the one at `zero` that of key 0 and query 0 → [tokens, length], not copied: there may be many."""
    windows: F32 = np.lib.stride_tricks.sliding_window_view(by_distance, length)
    return windows[zero - tokens + 1 : zero + 1][::-1]


def _unseen(part: Attention | Latent, start: int, tokens: int, length: int) -> npt.NDArray[np.bool_]:
    """[tokens, length]: keys after the query, or before its window or chunk."""
    key, query = np.arange(length), np.arange(start, start + tokens)[:, None]
    unseen: npt.NDArray[np.bool_] = key > query
    if part.window is not None:
        unseen |= key <= query - part.window
    if isinstance(part, Attention) and part.chunk is not None:
        unseen |= key < query // part.chunk * part.chunk
    return unseen
