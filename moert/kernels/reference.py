"""The readable version of all arithmetic with weights, in numpy. Native kernels are tested against it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from moert.kernels.backend import (
    I64,
    AttentionWeights,
    ExpertView,
    KeptKeys,
    Positions,
    Stored,
)
from moert.pack.codec import F32, QuantizedMatrix
from moert.pack.parts import Attention, Ffn

_MOST_HALF = 65504.0


def weights(stored: Stored) -> F32:
    """A matrix as float32 [out, in], bit for bit what `moert.pack.codec.dequantize` gives."""
    return _dequantize(stored) if isinstance(stored, QuantizedMatrix) else stored.widened()


def product(x: F32, matrix: F32) -> F32:
    """x [tokens, in], matrix [out, in] → [tokens, out]"""
    made: F32 = x @ matrix.T
    return made


def ffn(matrices: Mapping[str, F32], x: F32, spec: Ffn) -> F32:
    """x [rows, d_model] → [rows, d_model]: down(act(up x)), or down(act(gate x) * up x) if there is a gate.

    With `spec.act.limit` the gate is clamped to at most the limit and up to ± the limit; without a gate, up to
    at most the limit.
    """
    act, limit = ACTIVATIONS[spec.act.name], np.float32(math.inf if spec.act.limit is None else spec.act.limit)
    up = product(x, matrices["up"])
    if "gate" not in matrices:
        return product(act(np.minimum(up, limit)), matrices["down"])
    gate = np.minimum(product(x, matrices["gate"]), limit)
    return product(act(gate) * np.clip(up, -limit, limit), matrices["down"])


Made = Callable[[], Mapping[str, F32]]


class ReferenceBackend:
    """See `moert.kernels.backend.Backend`. Dense matrices are held in float32, experts unpacked at each use."""

    name = "reference"
    widens = True
    threads = 1

    def matrix(self, stored: Stored) -> F32:
        return weights(stored)

    def rows(self, matrix: F32, ids: Sequence[int]) -> F32:
        found: F32 = matrix[np.asarray(ids)]
        return found

    def linear(self, x: F32, matrix: F32) -> F32:
        return product(x, matrix)

    def norm(self, x: F32, weight: F32, eps: float) -> F32:
        scale = np.sqrt((x * x).mean(axis=-1, keepdims=True, dtype=np.float32) + np.float32(eps))
        normed: F32 = x / scale * weight
        return normed

    def attend(self, weights: AttentionWeights[F32], x: F32, kept: KeptKeys, start: int, positions: Positions) -> None:
        part, hidden = weights.part, self.norm(x, weights.norm, weights.eps)
        query = self._heads(weights, product(hidden, weights.q), part.n, weights.q_norm, positions)
        if weights.own:
            self._keep(weights, hidden, kept, start, positions)
        keys, values = self._kept(kept)
        shared, mixed = part.n // part.kv, np.empty((len(x), part.n, part.dim), np.float32)
        for head in range(part.n):
            scores = product(query[:, head], keys[head // shared]) * np.float32(part.scale)
            if part.softcap is not None:
                scores = np.float32(part.softcap) * np.tanh(scores / np.float32(part.softcap))
            if positions.bias is not None:
                scores += _by_place(positions.bias[head], positions.zero - start, *scores.shape)
            if weights.causal:
                scores[_unseen(part, start, *scores.shape)] = -np.inf
            sink = None if weights.sinks is None else weights.sinks[head]
            mixed[:, head] = _softmax(scores, sink) @ values[head // shared]
        x += product(mixed.reshape(len(x), -1), weights.o)

    def keep(self, weights: AttentionWeights[F32], encoded: F32, kept: KeptKeys, start: int) -> None:
        self._keep(weights, encoded, kept, start, Positions())

    def scores(self, x: F32, norm: F32, eps: float, router: F32) -> tuple[F32, F32]:
        hidden = self.norm(x, norm, eps)
        return hidden, _softmax(product(hidden, router))

    def choose(self, probabilities: F32, top_k: int, renormalise: bool) -> tuple[I64, F32]:
        chosen = np.sort(np.argsort(-probabilities, axis=1, kind="stable")[:, :top_k], axis=1)
        weights = np.take_along_axis(probabilities, chosen, axis=1)
        return chosen, weights / weights.sum(axis=1, keepdims=True) if renormalise else weights

    def head(self, x: F32, norm: F32, eps: float, factor: float, matrix: F32) -> F32:
        return product(self.norm(x, norm, eps) * np.float32(factor), matrix)

    def expert(self, view: ExpertView) -> Made:
        return lambda: {name: weights(part.stored(view.buffer)) for name, part in view.projections.items()}

    def dense(self, gate: F32 | None, up: F32, down: F32) -> Made:
        matrices = {"up": up, "down": down} | ({} if gate is None else {"gate": gate})
        return lambda: matrices

    def mixture(
        self, experts: Sequence[Made], counts: Sequence[int], tokens: npt.NDArray[np.int32], weights: F32, x: F32,
        out: F32, spec: Ffn,
    ) -> None:  # fmt: skip
        ends = np.cumsum(counts)
        for expert, end, count in zip(experts, ends, counts, strict=True):
            rows = tokens[end - count : end]
            out[rows] += ffn(expert(), x[rows], spec) * weights[end - count : end, None]

    def parts(self, experts: Sequence[Made], x: F32, out: F32, spec: Ffn) -> None:
        for place, expert in enumerate(experts):
            out[place] = ffn(expert(), x, spec)[0]

    def add_parts(self, parts: F32, weights: F32, out: F32) -> None:
        for part, weight in zip(parts, weights, strict=True):
            out += part * weight

    def close(self) -> None:
        pass

    def _keep(
        self, weights: AttentionWeights[F32], hidden: F32, kept: KeptKeys, start: int, positions: Positions
    ) -> None:
        key = self._heads(weights, product(hidden, weights.k), weights.part.kv, weights.k_norm, positions)
        value = self._heads(weights, product(hidden, weights.v), weights.part.kv, None, Positions())
        self._write(kept, start, key, value)

    def _write(self, kept: KeptKeys, start: int, key: F32, value: F32) -> None:
        """key, value [tokens, kv, dim]"""
        places = np.arange(start, start + len(key))
        size = kept.keys.shape[3]
        if kept.key_steps is None or kept.value_steps is None:
            kept.keys[:, places // size, :, places % size] = _halves(key)
            kept.values[:, places] = _halves(value).swapaxes(0, 1)
            return
        (keys, key_steps), (values, value_steps) = _small(key), _small(value)
        kept.keys[:, places // size, :, places % size] = keys
        kept.values[:, places] = values.swapaxes(0, 1)
        kept.key_steps[:, places // size, places % size] = key_steps.T
        kept.value_steps[:, places] = value_steps.T

    def _kept(self, kept: KeptKeys) -> tuple[F32, F32]:
        """Keys and values so far, [kv, tokens, dim]."""
        values: F32 = kept.values[:, : kept.length].astype(np.float32)
        if kept.value_steps is not None:
            values *= kept.value_steps[:, : kept.length, None]
        return all_keys(kept), values

    def _heads(
        self, weights: AttentionWeights[F32], projected: F32, heads: int, norm: F32 | None, positions: Positions
    ) -> F32:
        """[tokens, heads · dim] → [tokens, heads, dim], normed, bounded and turned."""
        part, n = weights.part, len(projected)
        if norm is not None:
            width = projected.shape[1] if part.qk_norm == "whole" else part.dim
            projected = self.norm(projected.reshape(n, -1, width), norm, weights.eps).reshape(n, -1)
        if part.clip is not None:
            projected = np.clip(projected, -np.float32(part.clip), np.float32(part.clip))
        split: F32 = projected.reshape(n, heads, part.dim).copy()
        if positions.turns is not None:
            half = positions.turns.shape[2]
            cos, sin = positions.turns[:, :1], positions.turns[:, 1:]
            low, high = split[..., :half].copy(), split[..., half : 2 * half].copy()
            split[..., :half], split[..., half : 2 * half] = low * cos - high * sin, high * cos + low * sin
        return split


def _by_place(by_distance: F32, zero: int, tokens: int, length: int) -> F32:
    """[offsets], the one at `zero` that of key 0 and query 0 → [tokens, length], not copied: there may be many."""
    windows: F32 = np.lib.stride_tricks.sliding_window_view(by_distance, length)
    return windows[zero - tokens + 1 : zero + 1][::-1]


def all_keys(kept: KeptKeys) -> F32:
    """[kv, tokens, dim] of what lies in blocks."""
    heads, blocks, dim, size = kept.keys.shape
    whole = kept.keys.transpose(0, 1, 3, 2).reshape(heads, blocks * size, dim)
    keys: F32 = whole[:, : kept.length].astype(np.float32)
    if kept.key_steps is not None:
        keys *= kept.key_steps.reshape(heads, blocks * size)[:, : kept.length, None]
    return keys


def _halves(x: F32) -> npt.NDArray[np.float16]:
    """float16, the largest finite one where a number is larger."""
    return np.clip(x, -_MOST_HALF, _MOST_HALF).astype(np.float16)


def _small(x: F32) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float16]]:
    """x [tokens, kv, dim] → whole numbers, and what they count [tokens, kv]: 1/127 of the largest magnitude."""
    largest = np.abs(x).max(-1, keepdims=True)
    steps = np.where(np.isfinite(largest), np.minimum(largest / np.float32(127), _MOST_HALF), largest)
    halves = steps.astype(np.float16)
    each = halves.astype(np.float32)
    whole = np.divide(x, each, out=np.zeros_like(x), where=each > 0)
    return np.clip(np.nan_to_num(np.rint(whole)), -127, 127).astype(np.int8), halves[..., 0]


def _unseen(part: Attention, start: int, tokens: int, length: int) -> npt.NDArray[np.bool_]:
    """[tokens, length]: keys after the query, or before its window."""
    key, query = np.arange(length), np.arange(start, start + tokens)[:, None]
    unseen: npt.NDArray[np.bool_] = key > query
    return unseen if part.window is None else unseen | (key <= query - part.window)


def _softmax(scores: F32, sink: np.float32 | None = None) -> F32:
    """Over the last axis; with a `sink` that is one score more, whose share is left out."""
    most = scores.max(axis=-1, keepdims=True)
    most = most if sink is None else np.maximum(most, sink)
    powers = np.exp(scores - most)
    total = powers.sum(axis=-1, keepdims=True)
    shares: F32 = powers / (total if sink is None else total + np.exp(sink - most))
    return shares


def _erf(x: F32) -> F32:
    found: F32 = np.vectorize(math.erf, otypes=[np.float32])(x)
    return found


def _silu(x: F32) -> F32:
    with np.errstate(over="ignore"):
        value: F32 = x / (1 + np.exp(-x))
    return value


ACTIVATIONS: Mapping[str, Callable[[F32], F32]] = {
    "relu": lambda x: np.maximum(x, 0),
    "silu": _silu,
    "gelu": lambda x: np.float32(0.5) * x * (1 + _erf(x * np.float32(0.5**0.5))),
    "gelu_new": lambda x: (
        np.float32(0.5) * x * (1 + np.tanh(np.float32((2 / math.pi) ** 0.5) * (x + np.float32(0.044715) * x**3)))
    ),
}


def _dequantize(matrix: QuantizedMatrix) -> F32:
    out_features, n, group = matrix.qweight.shape[0], matrix.in_features, matrix.group_size
    values = _codes(matrix)  # [out, in] float32
    scale, minimum = matrix.scale.astype(np.float32), matrix.minimum.astype(np.float32)
    if n % group == 0:
        grouped = values.reshape(out_features, n // group, group)
        np.multiply(grouped, scale[:, :, None], out=grouped)
        np.add(grouped, minimum[:, :, None], out=grouped)
        return values
    values *= np.repeat(scale, group, axis=1)[:, :n]
    values += np.repeat(minimum, group, axis=1)[:, :n]
    return values


def _codes(matrix: QuantizedMatrix) -> F32:
    """Codes [out, in] as a fresh float32 array, looked up a byte at a time."""
    packed, bits, n = matrix.qweight, matrix.bits, matrix.in_features
    if bits != 3:
        return _plane(packed, bits, n, 1.0)
    low_bytes = (2 * n + 7) // 8
    values = _plane(packed[:, :low_bytes], 2, n, 1.0)
    values += _plane(packed[:, low_bytes:], 1, n, 4.0)
    return values


def _plane(packed: npt.NDArray[np.uint8], width: int, n: int, unit: float) -> F32:
    """A packed plane [out, bytes] → [out, n] float32, each code times `unit`."""
    if width == 8:
        return packed[:, :n].astype(np.float32)
    wide: F32 = _table(width, unit)[packed].reshape(packed.shape[0], -1)
    return wide if wide.shape[1] == n else np.ascontiguousarray(wide[:, :n])


@cache
def _table(width: int, unit: float) -> F32:
    """[256, 8 // width]: the codes that each byte holds, lowest bits first."""
    shifts = np.arange(8 // width) * width
    codes = (np.arange(256)[:, None] >> shifts) & ((1 << width) - 1)
    table: F32 = codes.astype(np.float32) * np.float32(unit)
    return table
