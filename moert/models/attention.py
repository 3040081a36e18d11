"""Multi-head attention with shared key heads, as one object per layer that holds its weights."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

from moert.kernels.backend import ROWS, Backend, Matrix, StoredWeights
from moert.models.kv import KvCache
from moert.models.layers import DistanceBias, Rotary, rms_norm, vector
from moert.pack.model_spec import ModelSpec

SCORE_BYTES = 1 << 22
"""Most that one tensor of scores may take; five of this size are alive at once."""


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
        self.backend = backend
        self._step = None if backend.steps is None else backend.steps.attention(self)

    def step(self, x: Tensor, cache: KvCache, turn: Tensor | None, bias: Tensor | None) -> None:
        """One token, x [1, d_model], as one call of a backend that has such; `turn` and `bias`: see AttentionStep."""
        assert self._step is not None
        keys, values = cache.extend(1)
        self._step(x, keys, values, cache.length, turn, bias)

    def rotated(self, x: Tensor, cache: KvCache, rotary: Rotary) -> None:
        """Causal attention with rotary positions."""
        for rows in torch.split(x, ROWS):
            self._rotated(rows, cache, rotary)

    def _rotated(self, x: Tensor, cache: KvCache, rotary: Rotary) -> None:
        n = x.shape[0]
        q_heads = self.heads + self.kv_heads
        projected = self.backend.linear(rms_norm(x, self.norm, self.eps), [self.q, self.k, self.v])
        self._finish(projected)
        split = projected.view(n, q_heads + self.kv_heads, self.head_dim)
        rotary.rotate(split[:, :q_heads], cache.length)
        parts = [self.heads, self.kv_heads, self.kv_heads]
        query, new_keys, new_values = torch.split(split.transpose(0, 1), parts)
        keys, values = cache.append(new_keys, new_values)
        mixed = _causal(query, keys, values, self.scale) if n > 1 else _attend(query, keys, values, self.scale, None)
        x += self.backend.linear(mixed, [self.o])

    def biased(self, x: Tensor, cache: KvCache | None, bias: DistanceBias) -> None:
        """Attention with a bias on the scores; no cache in an encoder."""
        rows = (rms_norm(rows, self.norm, self.eps) for rows in torch.split(x, ROWS))
        keys, values = _keys_values(rows, x.shape[0], [self.k, self.v], self.kv_heads, self.backend)
        if cache is not None:
            keys, values = cache.append(keys, values)
        _mix(self, x, keys, values, bias)

    def _finish(self, projected: Tensor) -> None:
        """What is done to q, k and v side by side [tokens, q + k + v] before positions: norms over whole q and k."""
        q_dim, kv_dim = self.heads * self.head_dim, self.kv_heads * self.head_dim
        query, key = projected[:, :q_dim], projected[:, q_dim : q_dim + kv_dim]
        for part, weight in ((query, self.q_norm), (key, self.k_norm)):
            if weight is not None:
                part.copy_(rms_norm(part, weight, self.eps))
        if self.clip is not None:
            projected.clamp_(-self.clip, self.clip)


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
        self.backend = backend
        self._step = None if backend.steps is None else backend.steps.attention(self)

    def encode(self, encoded: Tensor) -> tuple[Tensor, Tensor]:
        """encoded [tokens, d_model] → keys and values, [kv_heads, tokens, head_dim] each."""
        return _keys_values(torch.split(encoded, ROWS), encoded.shape[0], self._kv, self.kv_heads, self.backend)

    def step(self, x: Tensor, keys: Tensor, values: Tensor) -> None:
        """One token, as SelfAttention.step."""
        assert self._step is not None
        self._step(x, keys, values, keys.shape[1], None, None)

    def __call__(self, x: Tensor, keys: Tensor, values: Tensor) -> None:
        _mix(self, x, keys, values, None)


def _keys_values(
    blocks: Iterable[Tensor], n: int, matrices: list[Matrix], kv_heads: int, backend: Backend
) -> tuple[Tensor, Tensor]:
    """Blocks of the n rows [rows, d_model] → keys and values, [kv_heads, n, head_dim] each."""
    both, start = torch.empty(0), 0
    for block in blocks:
        split = backend.linear(block, matrices).view(len(block), 2, kv_heads, -1)
        if start == 0:
            both = split.new_empty(2, kv_heads, n, split.shape[-1])
        both[:, :, start : start + len(block)] = split.permute(1, 2, 0, 3)
        start += len(block)
    return both[0], both[1]


def _mix(
    block: SelfAttention | CrossAttention, x: Tensor, keys: Tensor, values: Tensor, bias: DistanceBias | None
) -> None:
    """x [n, d_model] += attention of norm(x) to keys and values [kv_heads, t, head_dim].

    A long sequence goes in blocks of queries, which bounds the scores; the blocks depend on nothing but the shapes.
    """
    n, rows = x.shape[0], query_rows(block.heads, keys.shape[1])
    for start in range(0, n, rows):
        stop = min(start + rows, n)
        query = block.backend.linear(rms_norm(x[start:stop], block.norm, block.eps), [block.q])
        query = query.view(stop - start, block.heads, block.head_dim).transpose(0, 1)
        mixed = _attend(query, keys, values, block.scale, None if bias is None else bias.rows(start, stop))
        x[start:stop] += block.backend.linear(mixed, [block.o])


def query_rows(heads: int, keys: int) -> int:
    """Queries whose scores for so many keys are in memory at once."""
    return min(ROWS, max(1, SCORE_BYTES // (4 * heads * keys)))


def _attend(query: Tensor, keys: Tensor, values: Tensor, scale: float, bias: Tensor | None) -> Tensor:
    """query [heads, n, head_dim]; keys, values [kv_heads, t, head_dim]; bias [heads, n, t] → [n, heads * head_dim]."""
    heads, n, head_dim = query.shape
    kv_heads, t = keys.shape[:2]
    scores = query.reshape(kv_heads, -1, head_dim) @ keys.mT
    if scale != 1.0:
        scores *= scale
    if bias is not None:
        scores.view(heads, n, t).add_(bias)
    mixed = scores.softmax(-1) @ values
    return mixed.view(heads, n, head_dim).transpose(0, 1).reshape(n, heads * head_dim)


def _causal(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """As `_attend` for the last of the keys as queries, each seeing itself and those before it, without storing all
    scores."""
    n, t = query.shape[1], keys.shape[1]
    later = None if n == t else query.new_full((n, t), -math.inf).triu_(t - n + 1)
    mixed = F.scaled_dot_product_attention(
        query[None], keys[None], values[None], attn_mask=later, is_causal=later is None, scale=scale,
        enable_gqa=query.shape[0] != keys.shape[0],
    )  # fmt: skip
    return mixed[0].transpose(0, 1).reshape(n, -1)
