"""The plain parts that both families share: normalisation, positions, the head."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from moert.kernels.backend import Backend, Matrix, StoredWeights
from moert.models.kv import rounded
from moert.pack.model_spec import ModelSpec


def vector(weights: dict[str, StoredWeights], name: str) -> Tensor:
    """Takes a one-dimensional weight out of `weights`: a copy in float32."""
    stored = weights.pop(name)
    assert isinstance(stored, Tensor), f"{name} is no matrix"
    return stored.to(torch.float32, copy=True)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension."""
    return F.rms_norm(x, (len(weight),), weight, eps)


class Head:
    """The last norm and the matrix that makes logits."""

    def __init__(self, norm: Tensor, matrix: Matrix, spec: ModelSpec, backend: Backend) -> None:
        self._norm, self._matrix, self._backend = norm, matrix, backend
        self._eps, self._factor = spec.norm_eps, spec.logit_scale

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, d_model] → [tokens, vocab]."""
        steps = self._backend.steps
        if len(x) == 1 and steps is not None:
            return steps.head(x, self._norm, self._eps, self._factor, self._matrix)
        hidden = rms_norm(x, self._norm, self._eps)
        return self._backend.linear(hidden if self._factor == 1.0 else hidden * self._factor, [self._matrix])


class Rotary:
    """Rotary positions (Su et al. 2021) over the two halves of each head; tables grow as positions are asked for."""

    def __init__(self, head_dim: int, theta: float) -> None:
        self.half = head_dim // 2
        self.frequencies = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
        self._turns = torch.empty(0, 2, head_dim)  # cosines and signed sines of each position

    def turn(self, position: int) -> Tensor:
        """Cosines and signed sines of one position, [2, head_dim]."""
        if position >= len(self._turns):
            angles = torch.arange(rounded(position + 1), dtype=torch.float32)[:, None] * self.frequencies
            cos, sin = angles.cos(), angles.sin()
            self._turns = torch.stack((torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)), dim=1)
        return self._turns[position]

    def rows(self, start: int, n: int) -> tuple[Tensor, Tensor]:
        """cos and signed sin for positions start .. start + n - 1, [n, 1, head_dim] each."""
        self.turn(start + n - 1)
        turns = self._turns[start : start + n]
        return turns[:, :1], turns[:, 1:]

    def rotate(self, x: Tensor, start: int) -> None:
        """Turns x [tokens, heads, head_dim], whose first token is at the position `start`, in place."""
        cos, sin = self.rows(start, x.shape[0])
        crossed = x.roll(self.half, -1).mul_(sin)
        x.mul_(cos).add_(crossed)


class DistanceBias:
    """Biases that depend on the distance between key and query only, for the last `n` of some keys as queries.

    They are made for a block of queries at a time, since all of them can be more than memory holds.
    """

    def __init__(self, by_offset: Tensor, keys: int) -> None:
        """by_offset [heads, n + keys - 1]: the first is that of the last query for the first key."""
        self.by_offset, self.keys = by_offset, keys
        self._windows = by_offset.unfold(1, keys, 1)  # [heads, n, keys], a view; the last query comes first
        self._latest: tuple[int, int, Tensor] | None = None  # layers ask for the same block one after the other

    def rows(self, start: int, stop: int) -> Tensor:
        """The biases of queries start .. stop - 1, [heads, stop - start, keys]."""
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
        """The biases of n queries for the same n keys."""
        return DistanceBias(self._values(torch.arange(1 - n, n)), n)

    def latest(self, keys: int) -> DistanceBias:
        """The biases of the query at position keys - 1 for all keys up to itself."""
        known = self._past.shape[1]
        if keys > known:
            known = rounded(keys)
            self._past = self._values(torch.arange(1 - known, 1))
        return DistanceBias(self._past[:, known - keys :], keys)

    def causal(self, n: int) -> DistanceBias:
        """The biases of queries 0 .. n - 1 for keys 0 .. n - 1, minus infinity for keys after the query."""
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
