"""The network of a hash function as SPEC.md has it: in float64, one token after the other."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moert.pack.learnt import Lstm, StackHash

Numbers = npt.NDArray[np.float64]


def plain_sparsemax(scores: Numbers) -> Numbers:
    """By its definition: the threshold is found by trying each size of the support."""
    found = np.zeros_like(scores)
    for size in range(1, len(scores) + 1):
        best = np.argsort(-scores)[:size]
        threshold = (scores[best].sum() - 1) / size
        if (scores[best] > threshold).all():
            found = np.maximum(scores - threshold, 0)
    return found


def _lstm(part: Lstm, x: Numbers) -> Numbers:
    """x [tokens, n] → [tokens, h]"""
    h = c = np.zeros(len(part.recurrent))
    rows = []
    for one in x:
        gates = part.inputs.astype(np.float64) @ one + part.bias + h @ part.recurrent.astype(np.float64)
        i, f, g, o = np.split(gates, 4)
        c = c / (1 + np.exp(-f)) + np.tanh(g) / (1 + np.exp(-i))
        h = np.tanh(c) / (1 + np.exp(-o))
        rows.append(h)
    return np.stack(rows)


def _attention(x: Numbers, other: Numbers, stored: dict[str, npt.NDArray[np.float16]], causal: bool) -> Numbers:
    matrices = {name: matrix.astype(np.float64) for name, matrix in stored.items()}
    keys, values = other @ matrices["key"].T, other @ matrices["value"].T
    rows = []
    for place, one in enumerate(x):
        seen = place + 1 if causal else len(other)
        scores = keys[:seen] @ (matrices["query"] @ one) / np.sqrt(len(one))
        rows.append(plain_sparsemax(scores) @ values[:seen])
    return np.stack(rows)


def plain(stack: StackHash, rows: npt.NDArray[np.float32], encoded: Numbers | None = None) -> tuple[Numbers, Numbers]:
    """rows [tokens, d_model] → numbers [tokens, layers, experts], y [tokens, w]. A stack that is read in one direction
    is a decoder's: its tokens attend to those before them."""
    x = rows @ stack.compress.astype(np.float64).T + stack.compress_bias
    for layer in stack.lstm:
        ways = [_lstm(layer[0], x)]
        if len(layer) > 1:
            ways.append(_lstm(layer[1], x[::-1])[::-1])
        x = np.concatenate(ways, axis=1)
    y = x + _attention(x, x, stack.own, causal=len(stack.lstm[0]) == 1)
    if encoded is not None:
        y = y + _attention(x, encoded, stack.encoded, causal=False)
    return np.einsum("lew,tw->tle", stack.heads.astype(np.float64), y) + stack.head_bias, y
