"""The plain parts that both families share: normalisation, dense feed-forward, positions."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from moert.kernels.reference import ACTIVATIONS
from moert.models.kv import rounded


class RmsNorm:
    """x / rms(x) * weight over the last dimension, which has the length of `weight`."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight, self.eps = weight, eps
        self._shape = tuple(weight.shape)

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self._shape, self.weight, self.eps)


class DenseFfn:
    """The feed-forward part of a layer without experts; `gate` is None for the plain kind."""

    def __init__(self, up: Tensor, down: Tensor, gate: Tensor | None, activation: str) -> None:
        self.up, self.down, self.gate = up, down, gate
        self.activation = ACTIVATIONS[activation]

    def __call__(self, hidden: Tensor) -> Tensor:
        """[tokens, d_model] → the same shape."""
        up = F.linear(hidden, self.up)
        if self.gate is None:
            return F.linear(self.activation(up), self.down)
        return F.linear(self.activation(F.linear(hidden, self.gate)) * up, self.down)


class Rotary:
    """Rotary positions (Su et al. 2021) over the two halves of each head; tables grow as positions are asked for."""

    def __init__(self, head_dim: int, theta: float) -> None:
        self.half = head_dim // 2
        self.frequencies = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
        self.cos = self.sin = torch.empty(0, 1, head_dim)

    def rows(self, start: int, n: int) -> tuple[Tensor, Tensor]:
        """cos and signed sin for positions start .. start + n - 1, [n, 1, head_dim] each."""
        if start + n > self.cos.shape[0]:
            angles = torch.arange(rounded(start + n), dtype=torch.float32)[:, None] * self.frequencies
            cos, sin = angles.cos(), angles.sin()
            self.cos = torch.cat((cos, cos), dim=-1)[:, None]
            self.sin = torch.cat((-sin, sin), dim=-1)[:, None]
        return self.cos[start : start + n], self.sin[start : start + n]

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [tokens, heads, head_dim] → rotated."""
        return x * cos + x.roll(self.half, -1) * sin


class DistanceBias:
    """Biases that depend on the distance between key and query only, for the last `n` of some keys as queries.

    They are made for a block of queries at a time, since all of them can be more than memory holds.
    """

    def __init__(self, by_offset: Tensor, keys: int) -> None:
        """by_offset [heads, n + keys - 1]: the first is that of the last query for the first key."""
        self._windows = by_offset.unfold(1, keys, 1)  # [heads, n, keys], a view; the last query comes first
        self._latest: tuple[int, int, Tensor] | None = None  # layers ask for the same block one after the other

    def rows(self, start: int, stop: int) -> Tensor:
        """For queries start .. stop - 1, [heads, stop - start, keys]."""
        if self._latest is None or self._latest[:2] != (start, stop):
            self._latest = None
            n = self._windows.shape[1]
            self._latest = (start, stop, self._windows[:, n - stop : n - start].flip(1).contiguous())
        return self._latest[2]


class RelativeBias:
    """A learnt bias for each head and bucket of distances between key and query (T5)."""

    def __init__(self, weight: Tensor, max_distance: int, bidirectional: bool) -> None:
        self.weight = weight  # [buckets, heads]
        self.max_distance, self.bidirectional = max_distance, bidirectional
        self._past = torch.empty(weight.shape[1], 0)  # [heads, distances], the largest distance first

    def both_ways(self, n: int) -> DistanceBias:
        """Of n queries for the same n keys."""
        return DistanceBias(self._values(torch.arange(1 - n, n)), n)

    def latest(self, keys: int) -> DistanceBias:
        """Of the query at position keys - 1 for all keys up to itself."""
        known = self._past.shape[1]
        if keys > known:
            known = rounded(keys)
            self._past = self._values(torch.arange(1 - known, 1))
        return DistanceBias(self._past[:, known - keys :], keys)

    def causal(self, n: int) -> DistanceBias:
        """Of queries 0 .. n - 1 for keys 0 .. n - 1, minus infinity for keys after the query."""
        if n == 1:
            return self.latest(1)
        by_offset = self._values(torch.arange(1 - n, n))
        by_offset[:, n:] = -math.inf
        return DistanceBias(by_offset, n)

    def _values(self, offsets: Tensor) -> Tensor:
        """offsets (key position − query position) [k] → [heads, k]."""
        return self.weight[self._buckets(offsets)].T.contiguous()

    def _buckets(self, offsets: Tensor) -> Tensor:
        """One bucket for each small distance, logarithmically wider ones up to max_distance, the last for the rest.

        Two-way biases keep half of the buckets for keys after the query; one-way biases put those at distance 0.
        """
        buckets, first = self.weight.shape[0], torch.zeros_like(offsets)
        if self.bidirectional:
            buckets //= 2
            first = (offsets > 0) * buckets
            distance = offsets.abs()
        else:
            distance = (-offsets).clamp(min=0)
        exact = buckets // 2
        ratio = torch.log(distance.clamp(min=1).float() / exact) / math.log(self.max_distance / exact)
        coarse = (exact + (ratio * (buckets - exact)).long()).clamp(max=buckets - 1)
        return first + torch.where(distance < exact, distance, coarse)
