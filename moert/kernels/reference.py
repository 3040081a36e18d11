"""The readable kernels in numpy, which all others must equal."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from moert.kernels.backend import (
    I32,
    I64,
    AttentionWeights,
    ExpertView,
    KeptKeys,
    NormWeights,
    Positions,
    ProjectionView,
    RouterWeights,
    Stored,
)
from moert.kernels.pages import KEYS, KeptPage, Page, PageLayout
from moert.pack.codec import F32, U8, Mxfp4Matrix, QuantizedMatrix, TrellisMatrix, dequantize, dequantize_trellis
from moert.pack.layout import MatrixPlace, NeuronLayout, group_of
from moert.pack.parts import Act, Attention, Ffn, Latent, Router


class Plain(NamedTuple):
    """A matrix: weight [out, in], bias [out] or None."""

    weight: F32
    bias: F32 | None = None


def product(x: F32, matrix: Plain) -> F32:
    """Returns [tokens, out] for x [tokens, in]."""
    made: F32 = x @ matrix.weight.T
    return made if matrix.bias is None else made + matrix.bias


def ffn(matrices: Mapping[str, Plain], x: F32, spec: Ffn) -> F32:
    """Returns [rows, d_model] for x [rows, d_model]; see moert.pack.parts.Ffn and Act."""
    return product(bent(matrices, x, spec), matrices["down"])


def bent(matrices: Mapping[str, Plain], x: F32, spec: Ffn) -> F32:
    """Returns the input of `down`, [rows, d_ff]."""
    act = spec.act
    limit, bound = (np.float32(math.inf if each is None else each) for each in (act.limit, act.bound))
    up, gated = product(x, matrices["up"]), "gate" in matrices
    made: F32 = np.minimum(activated(act, np.minimum(product(x, matrices["gate"]) if gated else up, limit)), bound)
    if gated:
        most = min(limit, bound)
        made *= np.clip(up, -most, most) + np.float32(act.plus)
    return made


def normed(x: F32, norm: NormWeights) -> F32:
    """Returns x [..., n], normed; see moert.pack.parts.Norm, and NormWeights."""
    if norm.weight is None:
        same: F32 = x.copy()
        return same
    if norm.bias is not None:
        x = x - x.mean(axis=-1, keepdims=True, dtype=np.float32)
    scale = np.sqrt((x * x).mean(axis=-1, keepdims=True, dtype=np.float32) + np.float32(norm.eps))
    made: F32 = x / scale * norm.weight
    return made if norm.bias is None else made + norm.bias


def softmax(scores: F32, sink: np.float32 | None = None) -> F32:
    """Returns the softmax over the last axis; a `sink` is one score more, whose share is left out."""
    most = scores.max(axis=-1, keepdims=True)
    most = most if sink is None else np.maximum(most, sink)
    powers: F32 = np.exp(scores - most)
    total: F32 = powers.sum(axis=-1, keepdims=True)
    if sink is not None:
        total += np.exp(sink - most)
    shares: F32 = powers / total
    return shares


def sigmoid(x: F32) -> F32:
    with np.errstate(over="ignore"):
        value: F32 = np.reciprocal(1 + np.exp(-x))
    return value


def _erf(x: F32) -> F32:
    found: F32 = np.vectorize(math.erf, otypes=[np.float32])(x)
    return found


_ACTIVATIONS: Mapping[str, Callable[[F32], F32]] = {
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.square(np.maximum(x, 0)),
    "gelu": lambda x: np.float32(0.5) * x * (1 + _erf(x * np.float32(0.5**0.5))),
    "gelu_new": lambda x: (
        np.float32(0.5) * x * (1 + np.tanh(np.float32((2 / math.pi) ** 0.5) * (x + np.float32(0.044715) * x**3)))
    ),
}


def activated(act: Act, x: F32) -> F32:
    if act.name == "silu":
        return x * sigmoid(np.float32(act.slope) * x)
    return _ACTIVATIONS[act.name](x)


def weights(stored: Stored | Mxfp4Matrix) -> F32:
    """Returns a matrix as float32 [out, in]."""
    if isinstance(stored, TrellisMatrix):
        return dequantize_trellis(stored)
    return dequantize(stored) if isinstance(stored, QuantizedMatrix) else stored.widened()


def mixed(weights: AttentionWeights[Plain], query: F32, kept: tuple[F32, F32], start: int, positions: Positions) -> F32:
    """Returns each head's mean of the values, [tokens, heads, value_dim], for query [tokens, heads, dim]. `kept`: keys
    [kv, length, dim] and values [kv, length, value_dim]."""
    part, (keys, values) = weights.part, kept
    shared, mixed = part.n // part.kv, np.empty((*query.shape[:2], part.value_dim), np.float32)
    softcap = part.softcap if isinstance(part, Attention) else None
    for head in range(part.n):
        scores = query[:, head] @ keys[head // shared].T * np.float32(part.scale)
        if softcap is not None:
            scores = np.float32(softcap) * np.tanh(scores / np.float32(softcap))
        if positions.bias is not None:
            scores += _by_place(positions.bias[head], positions.zero - start, *scores.shape)
        if weights.causal:
            scores[_unseen(part, start, *scores.shape)] = -np.inf
        sink = None if weights.sinks is None else weights.sinks[head]
        mixed[:, head] = softmax(scores, sink) @ values[head // shared]
    return mixed


def keys_and_values(
    part: Attention, weights: AttentionWeights[Plain], hidden: F32, positions: Positions
) -> tuple[F32, F32]:
    """Returns keys [tokens, kv, dim] and values [tokens, kv, value_dim] for hidden [tokens, d_model]."""
    return tuple(heads(part, weights, name, hidden, positions) for name in "kv")  # type: ignore[return-value]


def heads(part: Attention, weights: AttentionWeights[Plain], name: str, hidden: F32, positions: Positions) -> F32:
    """Returns queries, keys or values [tokens, heads, dim], normed, bounded and turned, for hidden [tokens,
    d_model]."""
    made, norm = product(hidden, weights.matrices[name]), weights.norms.get(name)
    whole = (len(made), -1) if part.qk_norm == "whole" and name != "v" else (len(made), -1, part.dim)
    if norm is not None and (name == "v" or not part.norm_turned):
        made = normed(made.reshape(whole), norm)
    made = made.reshape(len(hidden), -1, part.dim)
    if part.clip is not None:
        made = np.clip(made, -np.float32(part.clip), np.float32(part.clip))
    if name == "v":
        return made
    made = _turned(made, positions)
    if norm is not None and part.norm_turned:
        made = normed(made.reshape(whole), norm).reshape(made.shape)
    return made


def _turned(heads: F32, positions: Positions) -> F32:
    """Returns heads [tokens, heads, dim], whose first features are turned."""
    if positions.turns is None:
        return heads
    half = positions.turns.shape[2]
    cos, sin = positions.turns[:, :1], positions.turns[:, 1:]
    low, high, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
    turned: F32 = np.concatenate((low * cos - high * sin, high * cos + low * sin, rest), axis=-1)
    return turned


def latent_queries(part: Latent, weights: AttentionWeights[Plain], hidden: F32, positions: Positions) -> F32:
    """Returns queries [tokens, heads, dim]: the features that meet c, and the features that meet the key that turns."""
    matrices, n = weights.matrices, len(hidden)
    asked = hidden if part.q_rank is None else normed(product(hidden, matrices["q_a"]), weights.norms["q"])
    still = product(asked, matrices["q"]).reshape(n, part.n, part.nope)
    turning = _turned(product(asked, matrices["q_turn"]).reshape(n, part.n, part.turning), positions)
    meets = np.einsum("tnd,ncd->tnc", still, matrices["keys"].weight.reshape(part.n, part.kv_rank, part.nope))
    queries: F32 = np.concatenate((meets, turning), axis=-1).astype(np.float32)
    return queries


def latent_kept(part: Latent, weights: AttentionWeights[Plain], hidden: F32, positions: Positions) -> tuple[F32, F32]:
    """Returns [tokens, 1, dim] and [tokens, 1, value_dim]: c with the key that turns, and c."""
    c = normed(product(hidden, weights.matrices["kv_a"]), weights.norms["kv"])[:, None]
    turned = _turned(product(hidden, weights.matrices["k_turn"])[:, None], positions)
    return np.concatenate((c, turned), axis=-1), c


def _by_place(by_distance: F32, zero: int, tokens: int, length: int) -> F32:
    """Returns biases [tokens, length], not copied (there may be many), for biases [offsets], of which the one at `zero`
    is for key 0 and query 0."""
    windows: F32 = np.lib.stride_tricks.sliding_window_view(by_distance, length)
    return windows[zero - tokens + 1 : zero + 1][::-1]


def _unseen(part: Attention | Latent, start: int, tokens: int, length: int) -> npt.NDArray[np.bool_]:
    """Returns a mask [tokens, length] of keys after the query, or before its window or chunk."""
    key, query = np.arange(length), np.arange(start, start + tokens)[:, None]
    unseen: npt.NDArray[np.bool_] = key > query
    if part.window is not None:
        unseen |= key <= query - part.window
    if isinstance(part, Attention) and part.chunk is not None:
        unseen |= key < query // part.chunk * part.chunk
    return unseen


def lstm(inputs: F32, recurrent: F32, state: F32, counts: Sequence[int], backward: bool = False) -> F32:
    """Runs an LSTM, see `moert.kernels.backend.Backend.lstm`."""
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
    """Returns for scores [..., n] the nearest point on the simplex, max(scores - threshold, 0), in which most may be 0
    (Martins & Astudillo 2016). Scores that are not above the threshold of the present support leave it, until none does
    (Michelot 1986): no score that is 1 below the largest has a share."""
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
    """Returns sparse attention, see `moert.kernels.backend.Backend.attend_sparsely`."""
    made = np.zeros_like(queries)
    for row, (first, stop) in enumerate(spans):
        if first < stop:
            scores = keys[first:stop] @ queries[row] / np.float32(queries.shape[1] ** 0.5)
            made[row] = sparsemax(scores) @ values[first:stop]
    return made


_LEAST, _MOST_HALF = 2.0**-10, 65504.0


def write(kept: KeptKeys, start: int, key: F32, value: F32) -> None:
    """Writes key [tokens, kv, dim] and value [tokens, kv, value_dim] to the pages from place `start` on."""
    first = 0
    while first < len(key):
        at, within = divmod(start + first, KEYS)
        last = min(len(key), first + KEYS - within)
        _write(kept.pages[at], slice(within, within + last - first), key[first:last], value[first:last])
        first = last


def _write(page: Page, places: slice, key: F32, value: F32) -> None:
    (keys, key_steps), (values, value_steps) = (kept_as(page.keys.dtype, each) for each in (key, value))
    page.keys[:, :, places] = keys.transpose(1, 2, 0)
    page.values[:, places] = values.swapaxes(0, 1)
    page.key_steps[:, places] = key_steps.T
    page.value_steps[:, places] = value_steps.T


def read(kept: KeptKeys) -> tuple[F32, F32]:
    """Returns the keys and values so far, [kv, tokens, dim] and [kv, tokens, value_dim]."""
    parts = zip(*map(_read_page, kept.pages), strict=True)
    keys, values = (np.concatenate(part, axis=1)[:, : kept.length] for part in parts)
    return keys, values


def _read_page(page: Page) -> tuple[F32, F32]:
    """Returns the keys and values of a page, [kv, KEYS, dim] and [kv, KEYS, value_dim]."""
    keys: F32 = page.keys.swapaxes(1, 2) * page.key_steps[:, :, None]
    values: F32 = page.values * page.value_steps[:, :, None]
    return np.ascontiguousarray(keys), values


def kept_as(dtype: npt.DTypeLike, x: F32) -> tuple[npt.NDArray[Any], F32]:
    """Returns x [tokens, kv, dim] as float16 or whole numbers of 8 bits, and their steps [tokens, kv]: a power of two
    that brings the largest magnitude to where float16 is exact, 1 for most; of 8 bits times a float16, 1/127 of it.
    Where a number is not finite, the step is NaN, and all numbers are 0."""
    largest = np.abs(x).max(-1, keepdims=True)
    fits = (largest == 0) | ((largest >= _LEAST) & (largest <= _MOST_HALF))
    power = np.where(fits | ~np.isfinite(largest), 0, np.maximum(np.frexp(largest)[1] - 15, -126))
    numbers = np.ldexp(np.where(np.isfinite(largest), x, np.float32(0)), -power)
    steps = np.where(np.isfinite(largest), np.ldexp(np.float32(1), power), np.float32(np.nan))
    if dtype == np.float16:
        return numbers.astype(np.float16), steps[..., 0]
    each = (np.abs(numbers).max(-1, keepdims=True) / np.float32(127)).astype(np.float16).astype(np.float32)
    whole = np.divide(numbers, each, out=np.zeros_like(x), where=each > 0)
    return np.clip(np.rint(whole), -127, 127).astype(np.int8), (steps * each)[..., 0]


def fire(layout: NeuronLayout, base: U8, offsets: I64, x: F32, spec: Ffn) -> F32:
    """Returns the neurons' activations, see `moert.kernels.backend.Backend.fire`."""
    return bent({name: _matrix(layout, place, base, offsets) for name, place in layout.rows.items()}, x, spec)


def project(layout: NeuronLayout, base: U8, offsets: I64, hidden: F32, bias: F32 | None) -> F32:
    """Returns the product with `down`, see `moert.kernels.backend.Backend.project`."""
    made = np.zeros((len(hidden), layout.d_model), np.float32)
    fired = np.flatnonzero((hidden != 0).any(axis=0))
    blocks = np.unique(fired // layout.per_block)
    if (offsets[blocks] < 0).any():
        raise ValueError("a neuron that fired is not there")
    columns = {block: _block(layout, layout.columns, base, int(offsets[block])).weight for block in blocks}
    for neuron in fired:
        block, place = divmod(int(neuron), layout.per_block)
        made += hidden[:, neuron, None] * columns[block][place]
    return made if bias is None else made + bias


def _matrix(layout: NeuronLayout, place: MatrixPlace, base: U8, offsets: I64) -> Plain:
    """Returns a matrix [d_ff, d_model], with zeros for blocks that are not there."""
    shape = layout.n_blocks * layout.per_block, layout.d_model
    weight, bias = np.zeros(shape, np.float32), np.zeros(shape[0], np.float32)
    for block in np.flatnonzero(offsets >= 0):
        rows = slice(block * layout.per_block, (block + 1) * layout.per_block)
        weight[rows], found = _block(layout, place, base, int(offsets[block]))
        if found is not None:
            bias[rows] = found
    return Plain(weight[: layout.d_ff], None if place.bias_place is None else bias[: layout.d_ff])


def _block(layout: NeuronLayout, place: MatrixPlace, base: U8, offset: int) -> Plain:
    """Returns the matrix of one piece, [per_block, d_model]."""
    shape, group = (layout.per_block, layout.d_model), group_of(layout.d_model, place.group_size)
    view = ProjectionView(shape, place.bits, group, place.form16, place.places, place.bias_place, place.power)
    piece = base[offset:]
    return Plain(weights(view.stored(piece)), view.bias(piece))


_LENGTH_EPS = np.float32(1e-6)


def conv(x: F32, taps: F32, bias: F32 | None, state: F32) -> F32:
    """Returns the convolution, see `moert.kernels.backend.Backend.conv`."""
    inputs, made = np.concatenate((state, x)), np.zeros_like(x)
    for place, tap in enumerate(taps):
        made += tap * inputs[place : place + len(x)]
    state[:] = inputs[len(x) :]
    return made if bias is None else made + bias


def delta(q: F32, k: F32, v: F32, decay: F32, beta: F32, state: F32) -> F32:
    """Runs the gated delta rule, see `moert.kernels.backend.Backend.delta`."""
    shared, made = v.shape[1] // k.shape[1], np.empty_like(v, order="C")
    q = _of_length_1(q).repeat(shared, axis=1) / np.float32(q.shape[2] ** 0.5)
    k, kept = _of_length_1(k).repeat(shared, axis=1), np.exp(decay)
    for at in range(len(v)):
        state *= kept[at].reshape(len(state), -1, 1)
        missing = v[at] - _read_state(state, k[at])
        state += k[at][:, :, None] * (beta[at][:, None] * missing)[:, None]
        made[at] = _read_state(state, q[at])
    return made


def _of_length_1(x: F32) -> F32:
    made: F32 = x / np.sqrt((x * x).sum(axis=-1, keepdims=True, dtype=np.float32) + _LENGTH_EPS)
    return made


def _read_state(state: F32, by: F32) -> F32:
    """Returns [heads, dv] for state [heads, dk, dv] and by [heads, dk]."""
    found: F32 = np.matmul(by[:, None], state)[:, 0]
    return found


def scan(x: F32, dt: F32, a: F32, b: F32, c: F32, d: F32, state: F32) -> F32:
    """Runs the scan of Mamba, see `moert.kernels.backend.Backend.scan`."""
    shared, made = x.shape[1] // b.shape[1], np.empty_like(x, order="C")
    b, c = b.repeat(shared, axis=1), c.repeat(shared, axis=1)
    for at in range(len(x)):
        state *= np.exp(dt[at][:, None] * a)[:, None]
        state += (dt[at][:, None] * x[at])[:, :, None] * b[at][:, None]
        made[at] = np.matmul(state, c[at][:, :, None])[:, :, 0] + d[:, None] * x[at]
    return made


def softplus(x: F32) -> F32:
    made: F32 = np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))
    return made


def balance(matrices: F32, rounds: int, floor: np.float32) -> None:
    """Computes Backend.balance. Sums are added up one number after the other."""
    for turn in range(rounds):
        if turn:
            matrices /= (_added(np.moveaxis(matrices, 2, 0)) + floor)[:, :, None]
        matrices /= (_added(np.moveaxis(matrices, 1, 0)) + floor)[:, None]


def _added(parts: F32) -> F32:
    found: F32 = reduce(np.add, parts)
    return found


def swish(x: F32) -> F32:
    return x * sigmoid(x)


def gated(x: F32, gate: F32, norm: NormWeights | None = None, groups: int = 1, last: bool = False) -> F32:
    """Returns the gated product, see `moert.kernels.backend.Backend.gated`."""
    by = swish(gate)
    if norm is None:
        return x * by
    made = _normed_parts(x * by if last else x, norm, groups)
    return made if last else made * by


def _normed_parts(x: F32, norm: NormWeights, groups: int) -> F32:
    assert norm.weight is not None
    parts = replace(norm, weight=norm.weight.reshape(groups, -1))
    return normed(x.reshape(len(x), groups, -1), parts).reshape(x.shape)


SCORES: Mapping[str, Callable[[F32], F32]] = {
    "softmax": softmax,
    "sigmoid": sigmoid,
    "sigmoid_of_chosen": lambda numbers: numbers,
    "sparsemixer": lambda numbers: numbers,
    "sqrt_softplus": lambda numbers: np.sqrt(softplus(numbers)),
}
"""The scores that a router makes of its numbers [tokens, experts]."""


class Preferred(NamedTuple):
    """The preference of Backend.prefer; `experts` are the preferred ones."""

    bonus: np.float32
    sure: int
    experts: I32

    def raised(self, deciding: F32, taken: int) -> F32:
        """Returns the scores to choose by, [tokens, experts], once `taken` experts are taken."""
        if taken != self.sure:
            return deciding
        deciding = deciding.copy()
        deciding[:, self.experts] += self.bonus
        return deciding


def best(deciding: F32, top_k: int, preferred: Preferred | None = None) -> I64:
    """Returns the experts with the largest of deciding [tokens, experts], in that order, the first of equal ones:
    [tokens, top_k]."""
    if preferred is None:
        return np.argsort(-deciding, axis=1, kind="stable")[:, :top_k]
    chosen = np.argsort(-deciding, axis=1, kind="stable")[:, : min(preferred.sure, top_k)]
    left = preferred.raised(deciding, preferred.sure)
    np.put_along_axis(left, chosen, -np.inf, axis=1)
    others = np.argsort(-left, axis=1, kind="stable")[:, : top_k - chosen.shape[1]]
    return np.concatenate([chosen, others], axis=1)


def of_best_groups(deciding: F32, part: Router) -> F32:
    """Returns scores [tokens, experts], -infinity for the experts of other groups."""
    if (groups := part.groups) is None:
        return deciding
    tokens, experts = deciding.shape
    split = deciding.reshape(tokens, groups.n, -1)
    worth = -np.sort(-split, axis=-1)[..., : groups.top].sum(axis=-1)
    best = np.argsort(-worth, axis=1, kind="stable")[:, : groups.best]
    left = np.full_like(split, -np.inf)
    np.put_along_axis(left, best[..., None], np.take_along_axis(split, best[..., None], axis=1), axis=1)
    return left.reshape(tokens, experts)


def sparsely(numbers: F32, part: Router, preferred: Preferred | None = None) -> tuple[I64, F32]:
    """Returns the experts that a sparsemixer chooses and their weights, both [tokens, top_k]: see
    moert.pack.parts.Router."""
    left, chosen, weights = numbers.copy(), [], []
    for taken in range(part.top_k):
        deciding = left if preferred is None or taken < preferred.sure else preferred.raised(left, preferred.sure)
        best = deciding.argmax(axis=1)[:, None]
        most = np.take_along_axis(left, best, axis=1)
        with np.errstate(invalid="ignore", divide="ignore"):  # two zeros are near
            far = (most - numbers) / np.maximum(np.abs(numbers), most) > np.float32(2 * part.jitter)
        powers = np.where(far, 0, np.exp(left - most))
        chosen.append(best)
        weights.append(np.take_along_axis(powers, best, axis=1) / powers.sum(axis=1, keepdims=True))
        np.put_along_axis(left, best, -np.inf, axis=1)
    return np.concatenate(chosen, axis=1), np.concatenate(weights, axis=1).astype(np.float32)


Made = Callable[[], Mapping[str, Plain]]


class ReferenceBackend:
    """The reference backend, see `moert.kernels.backend.Backend`. Dense matrices are held in float32, experts unpacked
    at each use."""

    name = "reference"
    widens = True
    threads = 1

    def matrix(self, stored: Stored, bias: F32 | None = None) -> Plain:
        return Plain(weights(stored), bias)

    def biased(self, matrix: Plain, bias: F32) -> Plain:
        return matrix._replace(bias=bias)

    def rows(self, matrix: Plain, ids: Sequence[int]) -> F32:
        found: F32 = matrix.weight[np.asarray(ids)]
        return found

    linear = staticmethod(product)

    def linears(self, x: F32, matrices: Sequence[Plain]) -> list[F32]:
        return [product(x, matrix) for matrix in matrices]

    norm = staticmethod(normed)

    def pages(self, layout: PageLayout, count: int) -> list[KeptPage]:
        return layout.pages(count)

    def attend(
        self, weights: AttentionWeights[Plain], x: F32, kept: KeptKeys, start: int, positions: Positions
    ) -> None:
        part, matrices, hidden = weights.part, weights.matrices, normed(x, weights.norms["before"])
        if isinstance(part, Latent):
            query = latent_queries(part, weights, hidden, positions)
            self._write(kept, start, *latent_kept(part, weights, hidden, positions))
        else:
            query = heads(part, weights, "q", hidden, positions)
            if weights.own:
                self._write(kept, start, *keys_and_values(part, weights, hidden, positions))
        if positions.query_scale is not None:
            query = query * positions.query_scale[:, None, None]
        found = mixed(weights, query, self._kept(kept), start, positions)
        if isinstance(part, Latent):
            found = np.einsum("tnc,nvc->tnv", found, matrices["values"].weight.reshape(part.n, part.v, -1))
        if "gate" in matrices:
            found = found * sigmoid(product(hidden, matrices["gate"])).reshape(len(x), part.n, -1)
        made = product(found.reshape(len(x), -1), matrices["o"])
        if "after" in weights.norms:
            made = normed(made, weights.norms["after"])
        x += np.float32(weights.add) * made

    def keep(self, weights: AttentionWeights[Plain], encoded: F32, kept: KeptKeys, start: int) -> None:
        assert isinstance(weights.part, Attention)
        self._write(kept, start, *keys_and_values(weights.part, weights, encoded, Positions()))

    def scores(self, x: F32, router: RouterWeights[Plain]) -> tuple[F32, F32]:
        hidden = normed(x, router.norm)
        numbers = product(hidden if router.own is None else normed(x, router.own), router.matrix)
        return hidden, SCORES[router.part.score](numbers)

    def choose(self, scores: F32, router: RouterWeights[Plain], preferred: Preferred | None = None) -> tuple[I64, F32]:
        part = router.part
        if part.score == "sparsemixer":
            chosen, weights = sparsely(scores, part, preferred)
        else:
            deciding = scores if router.choice_bias is None else scores + router.choice_bias
            chosen = best(of_best_groups(deciding, part), part.top_k, preferred)
            weights = np.take_along_axis(scores, chosen, axis=1)
            if part.score == "sigmoid_of_chosen":
                weights = sigmoid(weights)
        order = np.argsort(chosen, axis=1)
        chosen = np.take_along_axis(chosen, order, axis=1)
        weights = np.take_along_axis(weights, order, axis=1)
        if part.renormalise:
            weights = weights / weights.sum(axis=1, keepdims=True)
        if router.expert_scale is not None:
            weights = weights * router.expert_scale[chosen]
        return chosen, weights * np.float32(part.factor * router.factor)

    def prefer(
        self, scores: F32, router: RouterWeights[Plain], bonus: float, sure: int, recent: I32
    ) -> tuple[I64, F32]:
        chosen, weights = self.choose(scores, router, Preferred(np.float32(bonus), sure, recent[recent >= 0]))
        others = recent[~np.isin(recent, chosen)]
        recent[:] = np.concatenate([chosen[0], others])[: len(recent)]
        return chosen, weights

    def gate(self, hidden: F32, matrix: Plain, factor: float) -> F32:
        made: F32 = np.float32(factor) * sigmoid(product(hidden, matrix))[:, 0]
        return made

    def head(self, x: F32, norm: NormWeights, factor: float, softcap: float | None, matrix: Plain) -> F32:
        logits = product(normed(x, norm) * np.float32(factor), matrix)
        return logits if softcap is None else np.float32(softcap) * np.tanh(logits / np.float32(softcap))

    def expert(self, view: ExpertView) -> Made:
        return lambda: {
            name: Plain(weights(part.stored(view.buffer)), part.bias(view.buffer))
            for name, part in view.projections.items()
        }

    def dense(self, gate: Plain | None, up: Plain, down: Plain) -> Made:
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

    def add_parts(self, parts: F32, weights: F32, out: F32, tokens: npt.NDArray[np.int32] | None = None) -> None:
        rows = np.zeros(len(parts), np.int32) if tokens is None else tokens
        for part, weight, row in zip(parts, weights, rows, strict=True):
            out[row] += part * weight

    fire, project = staticmethod(fire), staticmethod(project)

    def conv(self, x: F32, taps: F32, bias: F32 | None, state: F32, silu: bool) -> F32:
        made = conv(x, taps, bias, state)
        return swish(made) if silu else made

    delta, scan, lstm = staticmethod(delta), staticmethod(scan), staticmethod(lstm)
    attend_sparsely = staticmethod(attend_sparsely)

    def softplus(self, x: F32, bias: F32) -> F32:
        return softplus(x + bias)

    sigmoid = staticmethod(sigmoid)

    def balance(self, matrices: F32, rounds: int, floor: float) -> None:
        balance(matrices, rounds, np.float32(floor))

    gated = staticmethod(gated)

    def close(self) -> None:
        pass

    _write, _kept = staticmethod(write), staticmethod(read)
