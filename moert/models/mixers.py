"""Layers that mix tokens through a state of fixed size: see moert.pack.parts.mixers for what each computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol

import numpy as np

from moert.kernels.backend import ROWS, Backend, Matrix, NormWeights
from moert.models.kv import Fixed
from moert.pack.codec import F32
from moert.pack.parts import GatedDelta, Mamba, Mamba2, Norm, ShortConv

State = Sequence[F32]
"""The arrays that its part names, to be changed in place."""


class Weights(Protocol):
    """What moert.models.build.Builder gives by name."""

    backend: Backend

    def matrix(self, name: str) -> Matrix: ...

    def floats(self, name: str) -> F32: ...

    def norm(self, part: Norm, name: str) -> NormWeights: ...


class Mix(Protocol):
    """Tokens of one sequence, of which those before them left a state."""

    def __call__(self, hidden: F32, state: State) -> F32:
        """hidden [tokens, d_model] → what joins the stream, of the same shape. One token or many: the same bits."""
        ...


class FixedMixer:
    """x joins mix(norm(x)); see moert.pack.parts.Join."""

    def __init__(self, mix: Mix, norm: NormWeights, after: NormWeights | None, add: float, backend: Backend) -> None:
        self._mix, self._norm, self._after, self._add, self._backend = mix, norm, after, add, backend

    def read(self, x: F32, kept: Fixed) -> None:
        """x [tokens, d_model], the next ones of a sequence."""
        for start in range(0, len(x), ROWS):
            piece = x[start : start + ROWS]
            kept.extend(len(piece))
            made = self._mix(self._backend.norm(piece, self._norm), kept.arrays)
            if self._after is not None:
                made = self._backend.norm(made, self._after)
            piece += made if self._add == 1 else np.float32(self._add) * made


class ShortConvMix:
    """See moert.pack.parts.ShortConv."""

    def __init__(self, part: ShortConv, at: str, weights: Weights) -> None:
        self._backend = weights.backend
        self._in, self._out = weights.matrix(f"{at}.in"), weights.matrix(f"{at}.out")
        self._conv = _Conv(at, part.bias, weights, silu=False)
        self._cut = _Cut(*[self._conv.channels] * 3)

    def __call__(self, hidden: F32, state: State) -> F32:
        b, c, u = self._cut(self._backend.linear(hidden, self._in))
        return self._backend.linear(c * self._conv(b * u, state[0]), self._out)


class DeltaMix:
    """See moert.pack.parts.GatedDelta."""

    def __init__(self, part: GatedDelta, at: str, weights: Weights) -> None:
        self._part, self._backend = part, weights.backend
        self._in = [weights.matrix(f"{at}.{name}") for name in "qkvzab"]
        self._conv = _Conv(at, False, weights, silu=True)
        self._cut = _Cut(part.key_features, part.key_features, part.value_features)
        self._rate, self._dt_bias = -np.exp(weights.floats(f"{at}.a_log")), weights.floats(f"{at}.dt_bias")
        self._norm, self._out = weights.norm(part.norm, f"{at}.norm"), weights.matrix(f"{at}.out")

    def __call__(self, hidden: F32, state: State) -> F32:
        part, backend, tokens = self._part, self._backend, len(hidden)
        *qkv, z, a, b = backend.linears(hidden, self._in)
        mixed = self._conv(np.concatenate(qkv, axis=1), state[0])
        q, k, v = self._cut(mixed)
        heads = (tokens, part.keys, part.dim)
        decay = self._rate * backend.softplus(a, self._dt_bias)
        q, k, v = q.reshape(heads), k.reshape(heads), v.reshape(tokens, part.n, part.v)
        made = backend.delta(q, k, v, decay, backend.sigmoid(b), state[1])
        made = backend.gated(made.reshape(-1, part.v), z.reshape(-1, part.v), self._norm)
        return backend.linear(made.reshape(tokens, -1), self._out)


class Mamba2Mix:
    """See moert.pack.parts.Mamba2."""

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
    """See moert.pack.parts.Mamba."""

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
"""Part → what is made with (part, the name that its tensors begin with, Weights), a Mix."""


class _Conv:
    def __init__(self, at: str, bias: bool, weights: Weights, silu: bool) -> None:
        self._taps = np.ascontiguousarray(weights.floats(f"{at}.conv.weight").T)
        self._bias = weights.floats(f"{at}.conv.bias") if bias else None
        self._backend, self._silu, self.channels = weights.backend, silu, self._taps.shape[1]

    def __call__(self, x: F32, state: F32) -> F32:
        """x [tokens, channels] → the same; state [taps - 1, channels]"""
        return self._backend.conv(x, self._taps, self._bias, state, self._silu)


class _Cut:
    """Columns of so many each, one after the other."""

    def __init__(self, *sizes: int) -> None:
        ends = accumulate(sizes)
        self._pieces = [(slice(None), slice(end - size, end)) for end, size in zip(ends, sizes, strict=True)]

    def __call__(self, x: F32) -> list[F32]:
        """[tokens, all of them] → views [tokens, size]"""
        return [x[piece] for piece in self._pieces]
