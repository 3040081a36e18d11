"""What foresees a model's experts (SiDA, Du et al. 2023): an LSTM, and attention to few keys."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moert.kernels.backend import I32
from moert.kernels.reference.arithmetic import sigmoid
from moert.pack.codec import F32


def lstm(inputs: F32, recurrent: F32, state: F32, counts: Sequence[int], backward: bool) -> F32:
    """See `moert.kernels.backend.Backend.lstm`."""
    made, lengths = np.empty((len(inputs), len(recurrent)), np.float32), np.array(counts, np.int64)
    starts = np.cumsum(lengths) - lengths
    for step in range(max(counts, default=0)):
        active = np.flatnonzero(lengths > step)
        rows = starts[active] + (lengths[active] - 1 - step if backward else step)
        gates = inputs[rows] + state[active, 0] @ recurrent
        enter, forget, cell, leave = np.split(gates, 4, axis=1)
        c = sigmoid(forget) * state[active, 1] + sigmoid(enter) * np.tanh(cell)
        made[rows] = sigmoid(leave) * np.tanh(c)
        state[active, 0], state[active, 1] = made[rows], c
    return made


def sparsemax(scores: F32) -> F32:
    """scores [..., n] → the nearest point on the simplex, max(scores - threshold, 0), in which most may be 0 (Martins &
    Astudillo 2016). Those that are not above the threshold which they and the others would have leave, until none does
    (Michelot 1986): none that is 1 below the largest has a share."""
    scores = scores - scores.max(axis=-1, keepdims=True)
    support = scores > -1
    while True:
        total = np.where(support, scores, 0).sum(axis=-1, keepdims=True, dtype=np.float32)
        threshold = (total - 1) / support.sum(axis=-1, keepdims=True, dtype=np.float32)
        left = support & (scores > threshold)
        if np.array_equal(left, support):
            shares: F32 = np.maximum(scores - threshold, 0)
            return shares
        support = left


def attend_sparsely(queries: F32, keys: F32, values: F32, spans: I32) -> F32:
    """See `moert.kernels.backend.Backend.attend_sparsely`."""
    made = np.zeros_like(queries)
    for row, (first, stop) in enumerate(spans):
        if first < stop:
            scores = keys[first:stop] @ queries[row] / np.float32(queries.shape[1] ** 0.5)
            made[row] = sparsemax(scores) @ values[first:stop]
    return made
