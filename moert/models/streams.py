"""Several streams in place of one between the halves of a decoder's layers (see moert.pack.parts.Streams and
moert.pack.parts.GatedStreams)."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import numpy as np

from moert.kernels.backend import Backend, Matrix, NormWeights, pieces
from moert.pack.codec import F32
from moert.pack.parts import GatedStreams, Streams

Half = Callable[[F32], None]
"""A half of a layer, which changes x [tokens, d_model] in place: its output joins x."""


def begun(x: F32, n: int) -> F32:
    """Returns n streams of each token, [tokens, n, d_model], all of them x [tokens, d_model]."""
    return np.repeat(x[:, None], n, axis=1)


def ended(streams: F32) -> F32:
    """Returns the mean of each token's streams, [tokens, d_model]."""
    n = streams.shape[1]
    found: F32 = reduce(np.add, (streams[:, at] for at in range(n))) / np.float32(n)
    return found


class StreamEnd:
    """The weights of the sum that ends streams, which follow from them."""

    def __init__(
        self, part: Streams, matrix: Matrix, bias: F32, scale: F32, norm: NormWeights, backend: Backend
    ) -> None:  # fmt: skip
        """bias [n], scale [1]; `norm`: of all of a token's streams, one after the other."""
        self._floor, self._matrix, self._norm, self._backend = np.float32(part.floor), matrix, norm, backend
        self._bias, self._scale = bias, scale

    def ended(self, streams: F32) -> F32:
        """Returns the sum of each token's streams [tokens, n, d_model], [tokens, d_model]."""
        found = np.empty((len(streams), streams.shape[2]), np.float32)
        with np.errstate(all="ignore"):
            for rows in pieces(len(streams)):
                flat = self._backend.norm(streams[rows].reshape(-1, streams[0].size), self._norm)
                numbers = self._backend.linear(flat, self._matrix) * self._scale + self._bias
                weights = self._backend.sigmoid(np.ascontiguousarray(numbers)) + self._floor
                np.einsum("ti,tid->td", weights, streams[rows], out=found[rows])
        return found


class StreamMixer:
    """The weights by which a half of a layer gets its input from the streams, and joins them."""

    def __init__(
        self, part: Streams, matrix: Matrix, bias: F32, scale: F32, norm: NormWeights, backend: Backend
    ) -> None:  # fmt: skip
        """bias [weights], scale [3]; `norm`: of all of a token's streams, one after the other."""
        self._part, self._matrix, self._norm, self._backend = part, matrix, norm, backend
        self._bias, self._scale = bias, scale.repeat([part.n, part.n, part.n * part.n])

    def around(self, streams: F32, half: Half) -> None:
        """Runs a half of a layer on streams [tokens, n, d_model], which are changed in place. Each token's numbers are
        the same bits alone and among others."""
        tokens, n, d_model = streams.shape
        x = np.empty((tokens, d_model), np.float32)
        weights = np.empty((tokens, self._part.weights), np.float32)
        with np.errstate(all="ignore"):  # whoever reads logits looks for numbers that are not finite
            for rows in pieces(tokens):
                weights[rows] = self._weights(streams[rows].reshape(-1, n * d_model))
                np.einsum("ti,tid->td", weights[rows, :n], streams[rows], out=x[rows])
        made = x.copy()
        half(made)
        with np.errstate(all="ignore"):
            made -= x
            for rows in pieces(tokens):
                mixed = np.einsum("tij,tid->tjd", weights[rows, 2 * n :].reshape(-1, n, n), streams[rows])
                mixed += weights[rows, n : 2 * n, None] * made[rows, None]
                streams[rows] = mixed

    def _weights(self, flat: F32) -> F32:
        """Returns the weights of tokens [tokens, weights], of their streams one after the other [tokens, n · d_model]:
        those to enter, those to join, and the matrix [from, to] between the streams before and after."""
        part, n = self._part, self._part.n
        found = self._backend.linear(self._backend.norm(flat, self._norm), self._matrix) * self._scale + self._bias
        floor = np.float32(part.floor)
        gates = self._backend.sigmoid(np.ascontiguousarray(found[:, : 2 * n]))
        found[:, :n] = gates[:, :n] + floor
        found[:, n : 2 * n] = 2 * gates[:, n:]
        matrices = found[:, 2 * n :].reshape(-1, n, n)  # [tokens, from, to]
        matrices = np.exp(matrices - matrices.max(axis=2, keepdims=True))
        matrices = matrices / reduce(np.add, np.moveaxis(matrices, 2, 0))[:, :, None] + floor
        self._backend.balance(matrices, part.rounds, part.floor)
        found[:, 2 * n :] = matrices.reshape(-1, n * n)
        return found


class StreamGates:
    """The gates by which a half of a layer gets its input from the streams, and joins them; or, without `join`, by
    which the streams become one behind the last layer."""

    def __init__(
        self, part: GatedStreams, norm: StreamNorm, narrow: Matrix, wide: Matrix, join: Matrix | None, backend: Backend
    ) -> None:  # fmt: skip
        self._n, self._norm, self._backend = np.float32(part.n), norm, backend
        self._narrow, self._wide, self._join = narrow, wide, join

    def around(self, streams: F32, half: Half) -> None:
        """Runs a half of a layer on streams [tokens, n, d_model], which are changed in place. Each token's numbers are
        the same bits alone and among others."""
        assert self._join is not None
        x, joins = self._mixed(streams, self._join)
        made = x.copy()
        half(made)
        with np.errstate(all="ignore"):
            made -= x
            for rows in pieces(len(streams)):
                streams[rows] += joins[rows, :, None] * made[rows, None]

    def end(self, streams: F32) -> F32:
        """Returns one vector of each token's streams, [tokens, d_model]."""
        return self._mixed(streams, None)[0]

    def _mixed(self, streams: F32, join: Matrix | None) -> tuple[F32, F32]:
        """Returns the input that gates make of the streams [tokens, d_model], and the weights by which a half's output
        joins them [tokens, n]."""
        tokens, n, d_model = streams.shape
        x, joins, backend = np.empty((tokens, d_model), np.float32), np.empty((tokens, n), np.float32), self._backend
        with np.errstate(all="ignore"):  # whoever reads logits looks for numbers that are not finite
            for rows in pieces(tokens):
                normed = self._norm(streams[rows])
                flat = normed.reshape(-1, n * d_model)
                narrow = backend.linear(flat, self._narrow) / self._n
                narrow = backend.gated(np.ones_like(narrow), narrow)
                gates = backend.sigmoid(backend.linear(narrow, self._wide)).reshape(normed.shape)
                x[rows] = ended(gates * normed)
                if join is not None:
                    joins[rows] = 2 * backend.sigmoid(backend.linear(flat, join) / self._n)
        return x, joins


class StreamNorm:
    """A norm of each stream by itself, with weights of its own."""

    def __init__(self, weight: F32, n: int, eps: float, backend: Backend) -> None:
        """weight [n · d_model]"""
        self._weight = weight.reshape(n, -1)
        self._norm, self._backend = NormWeights(np.ones_like(self._weight[0]), None, eps), backend

    def __call__(self, streams: F32) -> F32:
        """Returns streams [tokens, n, d_model], normed."""
        flat = np.ascontiguousarray(streams).reshape(-1, streams.shape[2])
        found: F32 = self._backend.norm(flat, self._norm).reshape(streams.shape) * self._weight
        return found
