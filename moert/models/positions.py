"""Where tokens stand: angles by which heads turn, biases by distance, both in tables that grow as positions are asked
for, and vectors that embeddings get added."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from moert.kernels.backend import I64, Floats
from moert.models.kv import rounded
from moert.pack.codec import F32
from moert.pack.parts import Buckets, Rope, Stretch

_ROWS = 64  # of a table in float32 at once


class Rotary:
    """Rotary positions (Su et al. 2021)."""

    def __init__(self, rope: Rope, frequencies: F32) -> None:
        """frequencies [dims / 2]"""
        self._frequencies, self._factor = frequencies, np.float32(rope.factor)
        self._turns = np.empty((0, 2, len(frequencies)), np.float32)

    def turns(self, start: int, tokens: int) -> F32:
        """Cosines and sines of positions from `start` on, [tokens, 2, dims / 2]."""
        if start + tokens > len(self._turns):
            angles = np.arange(rounded(start + tokens), dtype=np.float32)[:, None] * self._frequencies
            self._turns = np.stack((np.cos(angles), np.sin(angles)), axis=1) * self._factor
        return self._turns[start : start + tokens]


def query_scales(stretch: Stretch, start: int, tokens: int) -> F32:
    """Of positions from `start` on, [tokens]."""
    passed = np.floor((np.arange(start, start + tokens, dtype=np.float32) + 1) / np.float32(stretch.every))
    scales: F32 = 1 + np.float32(stretch.by) * np.log1p(passed)
    return scales


class AddedPositions:
    """Vectors by position (see moert.pack.parts.PositionTable)."""

    def __init__(self, table: Floats, pad: int | None, counts_pad: bool) -> None:
        """table [n, d_model], kept as it is stored. `pad`: the token that gets none, if there is one; is it counted?"""
        self._table, self._pad, self._counts_pad = table, pad, counts_pad

    @property
    def n(self) -> int:
        return len(self._table.data)

    def add(self, x: F32, ids: Sequence[int], start: int) -> None:
        """x [tokens, d_model] of a sequence's tokens from position `start` on gets theirs added. Raises ValueError for
        positions past the table."""
        if self._pad is None or self._pad not in ids:
            self.add_from(x, start)
            return
        self._check(start + len(ids))
        there = np.array(ids) != self._pad
        places = start + (np.arange(len(ids)) if self._counts_pad else there.cumsum() - 1)
        x[there] += replace(self._table, data=self._table.data[places[there]]).widened()

    def add_from(self, x: F32, start: int) -> None:
        """The same for tokens of which none is the pad token."""
        self._check(start + len(x))
        for at in range(0, len(x), _ROWS):
            some = x[at : at + _ROWS]
            some += replace(self._table, data=self._table.data[start + at : start + at + len(some)]).widened()

    def _check(self, end: int) -> None:
        if end > self.n:
            raise ValueError(f"the model has positions for {self.n} tokens, {end} are read")


class DistanceBias:
    """A learnt bias for each head and bucket of distances between key and query (T5)."""

    def __init__(self, buckets: Buckets, table: F32, bidirectional: bool) -> None:
        """table [buckets, heads]"""
        self._table, self._most, self._bidirectional = table, buckets.max_distance, bidirectional
        self._bias, self._reach = np.empty((table.shape[1], 0), np.float32), 0

    def by_distance(self, reach: int) -> tuple[F32, int]:
        """[heads, offsets] by how far a key lies after the query, at least from -reach to reach; and where the query's
        own stands."""
        if reach > self._reach or not self._bias.size:
            self._reach = rounded(reach)
            offsets = np.arange(-self._reach, self._reach + 1)
            self._bias = np.ascontiguousarray(self._table[self._buckets(offsets)].T)
        return self._bias, self._reach

    def _buckets(self, offsets: I64) -> I64:
        """One bucket for each small distance, logarithmically wider ones up to max_distance, the last for the rest.

        Two-way biases keep half of the buckets for keys after the query; one-way biases put those at distance 0.
        """
        buckets, first = len(self._table), np.zeros_like(offsets)
        if self._bidirectional:
            buckets //= 2
            first = (offsets > 0) * buckets
            distance = np.abs(offsets)
        else:
            distance = np.maximum(-offsets, 0)
        exact = buckets // 2
        ratio = np.log(np.maximum(distance, 1).astype(np.float32) / np.float32(exact)) / math.log(self._most / exact)
        coarse = np.minimum(exact + (ratio * (buckets - exact)).astype(np.int64), buckets - 1)
        buckets_of: I64 = first + np.where(distance < exact, distance, coarse)
        return buckets_of
