"""Embeddings of several tokens together, whose rows are read from the drive (see moert.pack.parts.Ngrams)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from moert.kernels.backend import I64, ROWS, Backend, Floats, Matrix
from moert.models.streams import StreamNorm
from moert.pack.codec import F32
from moert.pack.parts import Ngrams


class NgramMixer:
    """The computation of moert.pack.parts.Ngrams."""

    def __init__(
        self, part: Ngrams, table: Floats, key: Matrix, value: Matrix, norms: Sequence[StreamNorm], taps: F32,
        backend: Backend,
    ) -> None:  # fmt: skip
        """`norms`: of keys, streams, and inputs of the convolution; taps [width, taps]."""
        self._part, self._table, self._key, self._value, self._backend = part, table, key, value, backend
        self._key_norm, self._stream_norm, self._conv_norm = norms
        self._taps = np.zeros((part.reach + 1, len(taps)), np.float32)
        self._taps[:: part.n] = taps.T
        self._sizes = np.array(part.sizes, np.int64).reshape(part.n - 1, -1)
        self._starts = np.cumsum([0, *part.sizes[:-1]], dtype=np.int64).reshape(self._sizes.shape)

    def join(self, streams: F32, ids: Sequence[int], state: Sequence[F32]) -> None:
        """Adds to the streams [tokens, n, d_model] of the next tokens of a sequence, in place. `state`: the arrays of
        the part, which the tokens before have left, changed in place."""
        before, inputs = state
        numbers = self._numbers(ids, before)
        with np.errstate(all="ignore"):  # whoever reads logits looks for numbers that are not finite
            for start in range(0, len(ids), ROWS):
                rows = streams[start : start + ROWS]
                rows += self._made(rows, numbers[start : start + ROWS], inputs)

    def _made(self, streams: F32, numbers: I64, inputs: F32) -> F32:
        backend, (tokens, n, d_model) = self._backend, streams.shape
        embedded = replace(self._table, data=self._table.data[numbers.reshape(-1)]).widened().reshape(tokens, -1)
        key, value = backend.linears(embedded, [self._key, self._value])
        key, asked = self._key_norm(key.reshape(streams.shape)), self._stream_norm(streams)
        fit = np.einsum("tnd,tnd->tn", key, asked) / np.float32(np.sqrt(d_model))
        fit = np.sqrt(np.maximum(np.abs(fit), np.float32(1e-6))) * np.sign(fit)
        made: F32 = backend.sigmoid(fit)[:, :, None] * value[:, None]
        normed = self._conv_norm(made).reshape(tokens, n * d_model)
        made += backend.conv(normed, self._taps, None, inputs, True).reshape(made.shape)
        return made

    def _numbers(self, ids: Sequence[int], before: F32) -> I64:
        """Returns the rows of the table for each token, [tokens, heads], and puts the last tokens into `before`, [n -
        1] numbers plus 1, 0 before the first token."""
        part = self._part
        told = np.concatenate([before.astype(np.int64) - 1, np.array(ids, np.int64)])
        told[told < 0] = part.end
        before[:] = told[len(told) - len(before) :] + 1
        found, last = [], told[part.n - 1 :]
        mixed, ended = last * part.multipliers[0], np.zeros(len(last), bool)
        for back in range(1, part.n):
            token = told[part.n - 1 - back : len(told) - back]
            ended |= token == part.end
            mixed = mixed ^ np.where(ended, part.end, token) * part.multipliers[back]
            found.append(mixed[:, None] % self._sizes[back - 1] + self._starts[back - 1])
        return np.concatenate(found, axis=1)
