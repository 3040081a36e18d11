"""Multi-head attention with shared key heads, as one object per layer that holds its weights."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from moert.kernels.backend import Backend, Matrix, StoredWeights
from moert.models.kv import KvCache
from moert.models.layers import DistanceBias, Rotary, rms_norm, vector
from moert.pack.model_spec import ModelSpec

SCORE_BYTES = 1 << 24
"""Most that one tensor of scores may take; four of this size are alive at once."""


class SelfAttention:
    """Attention of a layer to its own sequence, with the norm before it; takes its matrices out of `weights`.

    x [tokens, d_model] follows what the cache holds and is changed in place: x += attention(norm(x)).
    """

    def __init__(self, spec: ModelSpec, weights: dict[str, StoredWeights], layer: str, backend: Backend) -> None:
        at = f"{layer}.attn"
        self.heads, self.kv_heads, self.head_dim = spec.n_heads, spec.n_kv_heads, spec.head_dim
        self.eps, self.scale, self.clip = spec.norm_eps, spec.attention_scale, spec.clip_qkv
        self.norm = vector(weights, f"{at}_norm.weight")
        self.q, self.k, self.v, self.o = (
            backend.matrix(weights.pop(f"{at}.{name}.weight")) for name in ("q", "k", "v", "o")
        )
        self.q_norm = vector(weights, f"{at}.q_norm.weight") if spec.qk_norm else None
        self.k_norm = vector(weights, f"{at}.k_norm.weight") if spec.qk_norm else None
        self._backend = backend
        self._step = None if backend.steps is None else backend.steps.attention(self)

    def step(self, x: Tensor, cache: KvCache, turn: Tensor | None, bias: Tensor | None) -> None:
        """One token, x [1, d_model], as one call of a backend that has such; `turn` and `bias`: see AttentionStep."""
        assert self._step is not None
        keys, values = cache.extend(1)
        self._step(x, keys, values, cache.length, turn, bias)

    def rotated(self, x: Tensor, cache: KvCache, rotary: Rotary) -> None:
        """Causal attention with rotary positions. More than one token only into an empty cache."""
        n = x.shape[0]
        cos, sin = rotary.rows(cache.length, n)
        q_heads = self.heads + self.kv_heads
        projected = self._projected(x)
        if self.clip is not None:
            projected = projected.clamp(-self.clip, self.clip)
        split = projected.view(n, q_heads + self.kv_heads, self.head_dim)
        turned = rotary.rotate(split[:, :q_heads], cos, sin).transpose(0, 1)
        keys, values = cache.append(turned[self.heads :], split[:, q_heads:].transpose(0, 1))
        mix = _causal if n > 1 else _unbiased
        x += self._backend.linear(mix(turned[: self.heads], keys, values, self.scale), [self.o])

    def biased(self, x: Tensor, cache: KvCache | None, bias: DistanceBias) -> None:
        """Attention with a bias on the scores; no cache in an encoder."""
        split = self._projected(x).view(x.shape[0], -1, self.head_dim).transpose(0, 1)
        query, keys, values = torch.split(split, [self.heads, self.kv_heads, self.kv_heads])
        if cache is not None:
            keys, values = cache.append(keys, values)
        x += self._backend.linear(attend(query, keys, values, self.scale, bias), [self.o])

    def _projected(self, x: Tensor) -> Tensor:
        """x [tokens, d_model] → q, k and v side by side [tokens, q + k + v], with the norms over whole q and k."""
        projected = self._backend.linear(rms_norm(x, self.norm, self.eps), [self.q, self.k, self.v])
        if self.q_norm is None or self.k_norm is None:
            return projected
        q_dim, kv_dim = self.heads * self.head_dim, self.kv_heads * self.head_dim
        query, key, value = torch.split(projected, [q_dim, kv_dim, kv_dim], dim=1)
        return torch.cat((rms_norm(query, self.q_norm, self.eps), rms_norm(key, self.k_norm, self.eps), value), dim=1)


class CrossAttention:
    """Attention of a decoder layer to the encoded input, whose keys and values are made once.

    As SelfAttention, x [tokens, d_model] is changed in place.
    """

    def __init__(self, spec: ModelSpec, weights: dict[str, StoredWeights], layer: str, backend: Backend) -> None:
        at = f"{layer}.cross"
        self.heads, self.kv_heads, self.head_dim = spec.n_heads, spec.n_kv_heads, spec.head_dim
        self.eps, self.scale = spec.norm_eps, spec.attention_scale
        self.clip: float | None = None
        self.norm = vector(weights, f"{at}_norm.weight")
        self.q, self.o = (backend.matrix(weights.pop(f"{at}.{name}.weight")) for name in ("q", "o"))
        self.q_norm: Tensor | None = None
        self.k_norm: Tensor | None = None
        self.k: Matrix | None = None  # keys and values are given
        self.v: Matrix | None = None
        self._kv = [backend.matrix(weights.pop(f"{at}.{name}.weight")) for name in ("k", "v")]
        self._backend = backend
        self._step = None if backend.steps is None else backend.steps.attention(self)

    def encode(self, encoded: Tensor) -> tuple[Tensor, Tensor]:
        """encoded [tokens, d_model] → keys and values, [kv_heads, tokens, head_dim] each."""
        split = self._backend.linear(encoded, self._kv).view(encoded.shape[0], 2, self.kv_heads, self.head_dim)
        keys, values = split.permute(1, 2, 0, 3).contiguous().unbind(0)
        return keys, values

    def step(self, x: Tensor, keys: Tensor, values: Tensor) -> None:
        """One token, as SelfAttention.step."""
        assert self._step is not None
        self._step(x, keys, values, keys.shape[1], None, None)

    def __call__(self, x: Tensor, keys: Tensor, values: Tensor) -> None:
        query = self._backend.linear(rms_norm(x, self.norm, self.eps), [self.q])
        query = query.view(x.shape[0], self.heads, self.head_dim).transpose(0, 1)
        x += self._backend.linear(attend(query, keys, values, self.scale, None), [self.o])


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


def _unbiased(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    return attend(query, keys, values, scale, None)


def _causal(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """As `attend` for a whole sequence, each token seeing itself and those before it, without storing all scores."""
    mixed = F.scaled_dot_product_attention(
        query[None], keys[None], values[None], is_causal=True, scale=scale, enable_gqa=query.shape[0] != keys.shape[0]
    )
    return mixed[0].transpose(0, 1).reshape(query.shape[1], -1)
