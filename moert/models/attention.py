"""Multi-head attention with shared key heads, as one object per layer that holds its weights."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from moert.models.kv import KvCache
from moert.models.layers import DistanceBias, RmsNorm, Rotary
from moert.pack.model_spec import ModelSpec

SCORE_BYTES = 1 << 24
"""Most that one tensor of scores may take; four of this size are alive at once."""


class SelfAttention:
    """Attention of a layer to its own sequence. Takes the layer's matrices out of `weights`; q, k and v are joined."""

    def __init__(self, spec: ModelSpec, weights: dict[str, Tensor], at: str) -> None:
        self.heads, self.kv_heads, self.head_dim = spec.n_heads, spec.n_kv_heads, spec.head_dim
        self.scale, self.clip = spec.attention_scale, spec.clip_qkv
        self.qkv = torch.cat([weights.pop(f"{at}.{name}.weight") for name in ("q", "k", "v")])
        self.o = weights.pop(f"{at}.o.weight")
        self.q_norm = self.k_norm = None
        if spec.qk_norm:
            self.q_norm = RmsNorm(weights.pop(f"{at}.q_norm.weight"), spec.norm_eps)
            self.k_norm = RmsNorm(weights.pop(f"{at}.k_norm.weight"), spec.norm_eps)

    def rotated(self, x: Tensor, cache: KvCache, rotary: Rotary, cos: Tensor, sin: Tensor) -> Tensor:
        """Causal attention with rotary positions. x [tokens, d_model] follows what the cache holds.

        More than one token only into an empty cache.
        """
        n, q_heads = x.shape[0], self.heads + self.kv_heads
        projected = self._normed(F.linear(x, self.qkv))
        if self.clip is not None:
            projected = projected.clamp(-self.clip, self.clip)
        split = projected.view(n, q_heads + self.kv_heads, self.head_dim)
        turned = rotary.rotate(split[:, :q_heads], cos, sin).transpose(0, 1)
        keys, values = cache.append(turned[self.heads :], split[:, q_heads:].transpose(0, 1))
        query = turned[: self.heads]
        if n > 1:
            return F.linear(_causal(query, keys, values, self.scale), self.o)
        return F.linear(attend(query, keys, values, self.scale, None), self.o)

    def biased(self, x: Tensor, cache: KvCache | None, bias: DistanceBias) -> Tensor:
        """Attention with a bias on the scores. x [tokens, d_model]; no cache in an encoder."""
        split = self._normed(F.linear(x, self.qkv)).view(x.shape[0], -1, self.head_dim).transpose(0, 1)
        query, keys, values = torch.split(split, [self.heads, self.kv_heads, self.kv_heads])
        if cache is not None:
            keys, values = cache.append(keys, values)
        return F.linear(attend(query, keys, values, self.scale, bias), self.o)

    def _normed(self, projected: Tensor) -> Tensor:
        """Norms over whole q and k, [tokens, q + k + v] → the same."""
        if self.q_norm is None or self.k_norm is None:
            return projected
        q_dim, kv_dim = self.heads * self.head_dim, self.kv_heads * self.head_dim
        query, key, value = torch.split(projected, [q_dim, kv_dim, kv_dim], dim=1)
        return torch.cat((self.q_norm(query), self.k_norm(key), value), dim=1)


class CrossAttention:
    """Attention of a decoder layer to the encoded input, whose keys and values are made once."""

    def __init__(self, spec: ModelSpec, weights: dict[str, Tensor], at: str) -> None:
        self.heads, self.kv_heads, self.head_dim = spec.n_heads, spec.n_kv_heads, spec.head_dim
        self.scale = spec.attention_scale
        self.q = weights.pop(f"{at}.q.weight")
        self.kv = torch.cat([weights.pop(f"{at}.{name}.weight") for name in ("k", "v")])
        self.o = weights.pop(f"{at}.o.weight")

    def encode(self, encoded: Tensor) -> tuple[Tensor, Tensor]:
        """encoded [tokens, d_model] → keys and values, [kv_heads, tokens, head_dim] each."""
        split = F.linear(encoded, self.kv).view(encoded.shape[0], 2, self.kv_heads, self.head_dim)
        keys, values = split.permute(1, 2, 0, 3).contiguous().unbind(0)
        return keys, values

    def __call__(self, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """x [tokens, d_model] → the same shape."""
        query = F.linear(x, self.q).view(x.shape[0], self.heads, self.head_dim).transpose(0, 1)
        return F.linear(attend(query, keys, values, self.scale, None), self.o)


def attend(query: Tensor, keys: Tensor, values: Tensor, scale: float, bias: DistanceBias | None) -> Tensor:
    """query [heads, n, head_dim]; keys, values [kv_heads, t, head_dim] → [n, heads * head_dim].

    A long sequence goes in blocks of queries, which bounds the scores; the blocks depend on nothing but the shapes.
    """
    heads, n, head_dim = query.shape
    rows = max(1, SCORE_BYTES // (4 * heads * keys.shape[1]))
    if n <= rows:
        return _attend(query, keys, values, scale, None if bias is None else bias.rows(0, n))
    mixed = query.new_empty(n, heads * head_dim)  # first, or small pieces split the room that each block leaves
    for start in range(0, n, rows):
        stop = min(start + rows, n)
        block = None if bias is None else bias.rows(start, stop)
        mixed[start:stop] = _attend(query[:, start:stop], keys, values, scale, block)
    return mixed


def _attend(query: Tensor, keys: Tensor, values: Tensor, scale: float, bias: Tensor | None) -> Tensor:
    """As `attend`, all at once; bias [heads, n, t]."""
    heads, n, head_dim = query.shape
    kv_heads, t = keys.shape[:2]
    scores = query.reshape(kv_heads, -1, head_dim) @ keys.mT
    if scale != 1.0:
        scores = scores * scale
    if bias is not None:
        scores = (scores.view(heads, n, t) + bias).view(kv_heads, -1, t)
    mixed = scores.softmax(-1) @ values
    return mixed.view(heads, n, head_dim).transpose(0, 1).reshape(n, heads * head_dim)


def _causal(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """As `attend` for a whole sequence, each token seeing itself and those before it, without storing all scores."""
    mixed = F.scaled_dot_product_attention(
        query[None], keys[None], values[None], is_causal=True, scale=scale, enable_gqa=query.shape[0] != keys.shape[0]
    )
    return mixed[0].transpose(0, 1).reshape(query.shape[1], -1)
