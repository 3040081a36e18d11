"""Mixers with a recurrent state, and the positions that attention takes into account."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, Protocol

import numpy as np

from moert.kernels.backend import I64, ROWS, Backend, Floats, Matrix, NormWeights
from moert.models.kv import Fixed, rounded
from moert.pack.codec import F32
from moert.pack.mixers import GatedDelta, Mamba, Mamba2, ShortConv
from moert.pack.parts import Buckets, Norm, Rope, Stretch

_ROWS = 64  # of a table in float32 at once


class Rotary:
    """Rotary positions (Su et al. 2021)."""

    def __init__(self, rope: Rope, frequencies: F32) -> None:
        """frequencies [dims / 2]"""
        self._frequencies, self._factor = frequencies, np.float32(rope.factor)
        self._turns = np.empty((0, 2, len(frequencies)), np.float32)

    def turns(self, start: int, tokens: int) -> F32:
        """Returns cosines and sines of positions from `start` on, [tokens, 2, dims / 2]."""
        if start + tokens > len(self._turns):
            self.reach(start + tokens)
        return self._turns[start : start + tokens]

    def reach(self, tokens: int) -> None:
        """Makes the table for so many positions, if it has fewer. Whoever has a part of the table before holds all of
        that in memory."""
        if tokens > len(self._turns):
            made = np.empty((rounded(tokens), 2, len(self._frequencies)), np.float32)
            angles = np.multiply(np.arange(len(made), dtype=np.float32)[:, None], self._frequencies, out=made[:, 0])
            np.sin(angles, out=made[:, 1])
            np.cos(angles, out=made[:, 0])
            made *= self._factor
            self._turns = made


def query_scales(stretch: Stretch, start: int, tokens: int) -> F32:
    """Returns the factors on queries at positions from `start` on, [tokens]."""
    passed = np.floor((np.arange(start, start + tokens, dtype=np.float32) + 1) / np.float32(stretch.every))
    scales: F32 = 1 + np.float32(stretch.by) * np.log1p(passed)
    return scales


class AddedPositions:
    """Vectors that are added by position (see moert.pack.parts.PositionTable)."""

    def __init__(self, table: Floats, pad: int | None, counts_pad: bool) -> None:
        """table [n, d_model], kept as it is stored. `pad`: the token that gets no vector, if there is one;
        `counts_pad`: whether that token takes a position."""
        self._table, self._pad, self._counts_pad = table, pad, counts_pad

    @property
    def n(self) -> int:
        return len(self._table.data)

    def add(self, x: F32, ids: Sequence[int], start: int) -> None:
        """Adds to x [tokens, d_model], a sequence's tokens from position `start` on, their vectors. Raises ValueError
        for positions past the table."""
        if self._pad is None or self._pad not in ids:
            self.add_from(x, start)
            return
        self._check(start + len(ids))
        there = np.array(ids) != self._pad
        places = start + (np.arange(len(ids)) if self._counts_pad else there.cumsum() - 1)
        x[there] += replace(self._table, data=self._table.data[places[there]]).widened()

    def add_from(self, x: F32, start: int) -> None:
        """Adds the vectors to tokens of which none is the pad token."""
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
        """Returns biases [heads, offsets] by how far a key lies after the query, at least from -reach to reach; and the
        place of the query's own."""
        if reach > self._reach or not self._bias.size:
            self._reach = rounded(reach)
            offsets = np.arange(-self._reach, self._reach + 1)
            self._bias = np.ascontiguousarray(self._table[self._buckets(offsets)].T)
        return self._bias, self._reach

    def _buckets(self, offsets: I64) -> I64:
        """Returns the buckets of offsets: one bucket for each small distance, logarithmically wider ones up to
        max_distance, the last for the rest.

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


State = Sequence[F32]
"""The arrays of a recurrent state, as the part names them, changed in place."""


class Weights(Protocol):
    """The methods of moert.models.model.Builder that mixers call, which return weights by name."""

    backend: Backend

    def matrix(self, name: str) -> Matrix: ...

    def floats(self, name: str) -> F32: ...

    def norm(self, part: Norm, name: str) -> NormWeights: ...


class Mix(Protocol):
    """The computation of a mixer for tokens of one sequence; the tokens before them left a state."""

    def __call__(self, hidden: F32, state: State) -> F32:
        """Returns the output that joins the stream, of the same shape as hidden [tokens, d_model]. One token or many:
        the same bits."""
        ...


class FixedMixer:
    """A mixer with a recurrent state: x joins mix(norm(x)); see moert.pack.parts.Join."""

    def __init__(self, mix: Mix, norm: NormWeights, after: NormWeights | None, add: float, backend: Backend) -> None:
        self._mix, self._norm, self._after, self._add, self._backend = mix, norm, after, add, backend

    def read(self, x: F32, kept: Fixed, counted: bool = False) -> None:
        """Changes x [tokens, d_model] in place, the next tokens of a sequence, which `kept` has `counted` or not."""
        for start in range(0, len(x), ROWS):
            piece = x[start : start + ROWS]
            if not counted:
                kept.extend(len(piece))
            made = self._mix(self._backend.norm(piece, self._norm), kept.arrays)
            if self._after is not None:
                made = self._backend.norm(made, self._after)
            piece += made if self._add == 1 else np.float32(self._add) * made


class ShortConvMix:
    """The computation of moert.pack.parts.ShortConv."""

    def __init__(self, part: ShortConv, at: str, weights: Weights) -> None:
        self._backend = weights.backend
        self._in, self._out = weights.matrix(f"{at}.in"), weights.matrix(f"{at}.out")
        self._conv = _Conv(at, part.bias, weights, silu=False)
        self._cut = _Cut(*[self._conv.channels] * 3)

    def __call__(self, hidden: F32, state: State) -> F32:
        b, c, u = self._cut(self._backend.linear(hidden, self._in))
        return self._backend.linear(c * self._conv(b * u, state[0]), self._out)


class DeltaMix:
    """The computation of moert.pack.parts.GatedDelta."""

    def __init__(self, part: GatedDelta, at: str, weights: Weights) -> None:
        self._part, self._backend = part, weights.backend
        self._wide = [] if part.rank is None else [weights.matrix(f"{at}.{name}") for name in "za"]
        gates = ("z", "a") if part.rank is None else ("z_narrow", "a_narrow")
        self._in = [weights.matrix(f"{at}.{name}") for name in (*"qkv", *gates, "b")]
        self._conv = _Conv(at, False, weights, silu=True)
        self._cut = _Cut(part.key_features, part.key_features, part.value_features)
        self._rate = np.exp(weights.floats(f"{at}.a_log")).repeat(part.decays // part.n)
        self._dt_bias = weights.floats(f"{at}.dt_bias")
        self._norm, self._out = weights.norm(part.norm, f"{at}.norm"), weights.matrix(f"{at}.out")

    def __call__(self, hidden: F32, state: State) -> F32:
        part, backend, tokens = self._part, self._backend, len(hidden)
        *qkv, z, a, b = backend.linears(hidden, self._in)
        if self._wide:
            z, a = (backend.linear(each, wide) for each, wide in zip((z, a), self._wide, strict=True))
        mixed = self._conv(np.concatenate(qkv, axis=1), state[0])
        q, k, v = self._cut(mixed)
        heads = (tokens, part.keys, part.dim)
        if part.bound is None:
            decay = -self._rate * backend.softplus(a, self._dt_bias)
        else:
            decay = np.float32(-part.bound) * backend.sigmoid(self._rate * (a + self._dt_bias))
        if part.by_feature:
            decay = decay.reshape(tokens, part.n, part.dim)
        q, k, v = q.reshape(heads), k.reshape(heads), v.reshape(tokens, part.n, part.v)
        made = backend.delta(q, k, v, decay, backend.sigmoid(b), state[1]).reshape(-1, part.v)
        z = z.reshape(made.shape)
        if part.gate == "silu":
            made = backend.gated(made, z, self._norm)
        else:
            made = backend.norm(made, self._norm) * backend.sigmoid(z)
        return backend.linear(made.reshape(tokens, -1), self._out)


class Mamba2Mix:
    """The computation of moert.pack.parts.Mamba2."""

    def __init__(self, part: Mamba2, at: str, weights: Weights) -> None:
        self._part, self._backend = part, weights.backend
        self._in, self._out = [weights.matrix(f"{at}.{name}") for name in ("in", "dt")], weights.matrix(f"{at}.out")
        self._conv = _Conv(at, part.conv_bias, weights, silu=True)
        self._a = -np.exp(weights.floats(f"{at}.a_log"))[:, None]
        self._dt_bias, self._d = weights.floats(f"{at}.dt_bias"), weights.floats(f"{at}.d")
        self._norm, held = weights.norm(part.norm, f"{at}.norm"), part.groups * part.state
        self._cut, self._cut_mixed = _Cut(part.features, part.channels), _Cut(part.features, held, held)

    def __call__(self, hidden: F32, state: State) -> F32:
        part, backend, tokens = self._part, self._backend, len(hidden)
        wide, dt = backend.linears(hidden, self._in)
        z, inner = self._cut(wide)
        u, b, c = self._cut_mixed(self._conv(inner, state[0]))
        u, groups = u.reshape(tokens, part.n, part.dim), (tokens, part.groups, part.state)
        steps = backend.softplus(dt, self._dt_bias)
        made = backend.scan(u, steps, self._a, b.reshape(groups), c.reshape(groups), self._d, state[1])
        made = backend.gated(made.reshape(tokens, -1), z, self._norm, part.groups, last=True)
        return backend.linear(made, self._out)


class MambaMix:
    """The computation of moert.pack.parts.Mamba."""

    def __init__(self, part: Mamba, at: str, weights: Weights) -> None:
        self._backend = weights.backend
        self._in, self._inner = weights.matrix(f"{at}.in"), weights.matrix(f"{at}.inner")
        self._conv = _Conv(at, part.conv_bias, weights, silu=True)
        self._norms = [weights.norm(part.norm, f"{at}.{name}_norm") for name in ("dt", "b", "c") if part.norm]
        self._steps, self._dt_bias = weights.matrix(f"{at}.steps"), weights.floats(f"{at}.dt_bias")
        self._a, self._d = -np.exp(weights.floats(f"{at}.a_log")), weights.floats(f"{at}.d")
        self._out = weights.matrix(f"{at}.out")
        self._cut = _Cut(part.features, part.features)
        self._cut_inner = _Cut(part.rank, part.state, part.state)

    def __call__(self, hidden: F32, state: State) -> F32:
        backend = self._backend
        u, z = self._cut(backend.linear(hidden, self._in))
        u = self._conv(u, state[0])
        r, b, c = map(np.ascontiguousarray, self._cut_inner(backend.linear(u, self._inner)))
        if self._norms:
            r, b, c = (backend.norm(each, norm) for each, norm in zip((r, b, c), self._norms, strict=True))
        steps = backend.softplus(backend.linear(r, self._steps), self._dt_bias)
        made = backend.scan(u[:, :, None], steps, self._a, b[:, None], c[:, None], self._d, state[1])
        return backend.linear(backend.gated(made[:, :, 0], z), self._out)


MIXES: Mapping[type, Any] = {ShortConv: ShortConvMix, GatedDelta: DeltaMix, Mamba2: Mamba2Mix, Mamba: MambaMix}
"""Part → its Mix, which is made with (part, the name that its tensors begin with, Weights)."""


class _Conv:
    def __init__(self, at: str, bias: bool, weights: Weights, silu: bool) -> None:
        self._taps = np.ascontiguousarray(weights.floats(f"{at}.conv.weight").T)
        self._bias = weights.floats(f"{at}.conv.bias") if bias else None
        self._backend, self._silu, self.channels = weights.backend, silu, self._taps.shape[1]

    def __call__(self, x: F32, state: F32) -> F32:
        """Returns the convolution of x [tokens, channels], of the same shape; state [taps - 1, channels]."""
        return self._backend.conv(x, self._taps, self._bias, state, self._silu)


class _Cut:
    """A cut of an array's columns into pieces of these sizes, one after the other."""

    def __init__(self, *sizes: int) -> None:
        ends = accumulate(sizes)
        self._pieces = [(slice(None), slice(end - size, end)) for end, size in zip(ends, sizes, strict=True)]

    def __call__(self, x: F32) -> list[F32]:
        """Returns views [tokens, size] of x [tokens, all sizes together]."""
        return [x[piece] for piece in self._pieces]
