"""The native kernels as a backend, which passes the bytes of a pack, and the addresses of arrays, to the C in csrc."""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Mapping, Sequence
from ctypes import Structure, addressof, c_char, c_int32, c_int64, c_void_p
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from moert.kernels import filled, structs
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
from moert.kernels.filled import NativeMatrix, keys_of
from moert.kernels.filled import address as _at
from moert.kernels.filled import address_in_place as _in_place
from moert.kernels.library import Library, NativeFailed, check
from moert.kernels.memory import Arena
from moert.kernels.pages import KeptPage, PageLayout
from moert.kernels.structs import ACTIVATIONS, KINDS, Matrix
from moert.pack.codec import F32, MX_GROUP, U8, QuantizedMatrix
from moert.pack.fence import heard
from moert.pack.layout import NeuronLayout
from moert.pack.parts import Act, Ffn, Latent

_MOST = 256  # kinds of experts that are remembered


class NativeExpert:
    """A feed-forward network; `ffn`: the C struct of this name, or its words; `alive` is the object that holds its
    bytes."""

    __slots__ = ("_alive", "_ffn", "address")

    def __init__(self, ffn: structs.Ffn | I64, address: int, alive: object) -> None:
        self._ffn, self.address, self._alive = ffn, address, alive


class _Kind(NamedTuple):
    """The words of the struct of an expert that lies at address 0, and a mask of the words that are addresses (1,
    others 0)."""

    words: I64
    places: I64
    alive: object


class Kinds:
    """The kinds of the experts seen so far. Safe to use from several threads."""

    def __init__(self) -> None:
        self._known: dict[int, _Kind] = {}

    def expert(self, view: ExpertView) -> NativeExpert:
        """Returns the expert of a view. Experts whose `projections` are the same object are of one kind."""
        kind = self._known.get(id(view.projections))
        if kind is None:
            kind = self._learn(view.projections)
        words = kind.places * _place_of(view.buffer)
        words += kind.words
        return NativeExpert(words, _place_of(words), view.buffer)

    def _learn(self, projections: Mapping[str, ProjectionView]) -> _Kind:
        near, far = (_words(projections, start) for start in (1 << 12, 1 << 13))
        places = (far - near) >> 12
        if len(self._known) >= _MOST:
            self._known.clear()
        kind = self._known[id(projections)] = _Kind(near - (places << 12), places, projections)
        return kind


def _words(projections: Mapping[str, ProjectionView], start: int) -> I64:
    """Returns the words of the struct of an expert that lies at address `start`."""
    ffn = structs.Ffn()
    for name, part in projections.items():
        places = [start + at for at in part.places]
        kind = part.bits if part.form is None else KINDS[part.form]
        group = {None: part.group_size, "MXFP4": MX_GROUP}.get(part.form, part.shape[1])
        bias = None if part.bias_place is None else start + part.bias_place
        parts, (rows, cols) = (*places, *[None] * (3 - len(places))), part.shape
        setattr(ffn, name, Matrix(*parts, bias, kind, rows, cols, min(group, cols), power=part.power))
    assert ctypes.sizeof(ffn) % 8 == 0
    return np.frombuffer(bytes(ffn), np.int64)


def _place_of(array: npt.NDArray[Any]) -> int:
    """Returns the address of an array's first number."""
    try:
        return addressof(c_char.from_buffer(array))  # type: ignore[arg-type]
    except (TypeError, ValueError):  # not to be written
        return int(array.ctypes.data)


_LONG_S = 0.05  # a call that takes longer is another thread's
_MANY = 1 << 24  # products: a call of fewer takes less than _LONG_S
_SLOW = 1e9  # products a second, of a function that was not called with as many yet
_Item = TypeVar("_Item", bound=np.generic)
_W = TypeVar("_W")


class NativeBackend:
    """The backend of the native kernels, see `moert.kernels.backend.Backend`. `isa` is a number of Library.choose."""

    widens = False

    def __init__(self, library: Library, isa: int, threads: int) -> None:
        self.name, self.threads = library.instruction_sets[isa].name, threads
        self._call: Any = library.functions
        self._pool = self._call.moert_pool_open(isa, threads)
        if not self._pool:
            raise NativeFailed(f"no memory for {threads} threads")
        self._speeds: dict[str, float] = {}  # products a second, by function: about the fewest of its last long calls
        self._arena = Arena()
        self._staying: set[int] = set()  # addresses in it that were given away, to be filled
        self._made: dict[tuple[int, str], tuple[Structure, int, object]] = {}
        self._acts: dict[Act, structs.Act] = {}
        self._layouts: dict[tuple[object, ...], structs.Neurons] = {}
        self._kinds = Kinds()

    def close(self) -> None:
        """Ends the threads. No method may be called after that."""
        if self._pool:
            self._call.moert_pool_close(self._pool)
            self._pool, self._call = None, None

    def stay(self, nbytes: int) -> U8:
        """Returns large pages: see `moert.kernels.backend.Keeps`."""
        room = self._arena.allocate(nbytes)
        self._staying.add(_at(room))
        return room

    def _compute(self, products: int, name: str, *arguments: Any) -> Any:
        """Calls a function of the library that makes `products` products; Ctrl-C is handled meanwhile where the call
        takes long."""
        call = getattr(self._call, name)
        if products < _MANY:
            return call(self._pool, *arguments)
        speed, started = self._speeds.get(name, _SLOW), time.perf_counter()
        if products < _LONG_S * speed:
            failed = call(self._pool, *arguments)
        else:
            try:
                failed = heard(lambda: call(self._pool, *arguments), lambda: self._call.moert_pool_stop(self._pool, 1))
            finally:
                self._call.moert_pool_stop(self._pool, 0)
        self._speeds[name] = min(products / (time.perf_counter() - started), 1.25 * speed)
        return failed

    def matrix(self, stored: Stored, bias: F32 | None = None) -> NativeMatrix:
        place = None if bias is None else _at(bias)
        if isinstance(stored, QuantizedMatrix):
            qweight, scale, minimum = self._kept(stored.qweight), self._kept(stored.scale), self._kept(stored.minimum)
            kept = replace(stored, qweight=qweight, scale=scale, minimum=minimum)
            struct = Matrix(
                _at(qweight), _at(scale), _at(minimum), place, stored.bits, len(qweight), stored.in_features,
                stored.group_size, power=stored.power,
            )  # fmt: skip
            return NativeMatrix(kept, bias, struct)
        data = self._kept(np.ascontiguousarray(stored.data))
        rows, cols = data.shape
        struct = Matrix(_at(data), None, None, place, KINDS[stored.dtype], rows, cols, cols, power=stored.power)
        return NativeMatrix(replace(stored, data=data), bias, struct)

    def biased(self, matrix: NativeMatrix, bias: F32) -> NativeMatrix:
        struct = Matrix.from_buffer_copy(matrix.struct)
        struct.bias = _at(bias)
        return NativeMatrix(matrix.stored, bias, struct)

    def rows(self, matrix: NativeMatrix, ids: Sequence[int]) -> F32:
        out = np.empty((len(ids), matrix.cols), np.float32)
        places = (c_int64 * len(ids))(*ids)
        check(self._compute(out.size, "moert_rows", matrix.struct, len(ids), places, _at(out)))
        return out

    def linear(self, x: F32, matrix: NativeMatrix) -> F32:
        return self.linears(x, (matrix,))[0]

    def linears(self, x: F32, matrices: Sequence[NativeMatrix]) -> list[F32]:
        made, count = [np.empty((len(x), matrix.rows), np.float32) for matrix in matrices], len(matrices)
        structs_at = (c_void_p * count)(*[addressof(matrix.struct) for matrix in matrices])
        outputs = (c_void_p * count)(*map(_at, made))
        products = len(x) * sum(matrix.rows * matrix.cols for matrix in matrices)
        check(self._compute(products, "moert_linear", count, structs_at, _at(x), len(x), outputs))
        return made

    def norm(self, x: F32, norm: NormWeights) -> F32:
        out = np.empty_like(x)
        self._compute(2 * x.size, "moert_normalise", self._place(norm, "norm", filled.norm), *x.shape, _at(x), _at(out))
        return out

    def pages(self, layout: PageLayout, count: int) -> list[KeptPage]:
        return layout.pages(count)

    def attend(
        self, weights: AttentionWeights[NativeMatrix], x: F32, kept: KeptKeys, start: int, positions: Positions
    ) -> None:
        latent = isinstance(weights.part, Latent)
        block = self._place(weights, "attend", filled.latent if latent else filled.attention)
        name = "moert_attend_latent" if latent else "moert_attend"
        part, heads = weights.part, weights.part.n * (kept.layout.dim + kept.layout.value_dim)
        products = len(x) * (kept.length * heads + 2 * x.shape[1] * (part.q_features + part.kv_features))
        at = filled.positions(positions)
        check(
            self._compute(
                products, name, block, len(x), _at(x), addressof(keys_of(kept)), start, kept.length, addressof(at)
            )
        )  # fmt: skip

    def keep(self, weights: AttentionWeights[NativeMatrix], encoded: F32, kept: KeptKeys, start: int) -> None:
        block = self._place(weights, "keep", filled.with_keys)
        keys, products = addressof(keys_of(kept)), encoded.size * weights.part.kv_features
        check(self._compute(products, "moert_keep", block, len(encoded), _at(encoded), start, keys))

    def scores(self, x: F32, router: RouterWeights[NativeMatrix]) -> tuple[F32, F32]:
        hidden, scores = np.empty_like(x), np.empty((len(x), router.matrix.rows), np.float32)
        place = self._place(router, "router", filled.router)
        check(
            self._compute(x.size * router.matrix.rows, "moert_scores", place, len(x), _at(x), _at(hidden), _at(scores))
        )
        return hidden, scores

    def choose(self, scores: F32, router: RouterWeights[NativeMatrix]) -> tuple[I64, F32]:
        shape = len(scores), router.part.top_k
        chosen, weights = np.empty(shape, np.int64), np.empty(shape, np.float32)
        place = self._place(router, "router", filled.router)
        products = scores.size * router.part.top_k
        check(self._compute(products, "moert_choose", place, _at(scores), len(scores), _at(chosen), _at(weights)))
        return chosen, weights

    def prefer(
        self, scores: F32, router: RouterWeights[NativeMatrix], bonus: float, sure: int, recent: I32
    ) -> tuple[I64, F32]:
        chosen, weights = np.empty((1, router.part.top_k), np.int64), np.empty((1, router.part.top_k), np.float32)
        place, k = self._place(router, "router", filled.router), len(recent)
        check(
            self._call.moert_prefer(place, _at(scores), bonus, sure, k, _at(recent), _at(chosen), _at(weights))
        )  # fmt: skip
        return chosen, weights

    def gate(self, hidden: F32, matrix: NativeMatrix, factor: float) -> F32:
        out = np.empty(len(hidden), np.float32)
        check(self._compute(hidden.size, "moert_gate", matrix.struct, len(hidden), _at(hidden), factor, _at(out)))
        return out

    def head(self, x: F32, norm: NormWeights, factor: float, softcap: float | None, matrix: NativeMatrix) -> F32:
        out, place = np.empty((len(x), matrix.rows), np.float32), self._place(norm, "norm", filled.norm)
        check(
            self._compute(
                len(x) * matrix.rows * matrix.cols, "moert_head", place, factor, softcap or 0.0, matrix.struct, len(x),
                _at(x), _at(out),
            )
        )  # fmt: skip
        return out

    def expert(self, view: ExpertView) -> NativeExpert:
        return self._kinds.expert(view)

    def dense(self, gate: NativeMatrix | None, up: NativeMatrix, down: NativeMatrix) -> NativeExpert:
        ffn = structs.Ffn(up=up.struct, down=down.struct)
        if gate is not None:
            ffn.gate = gate.struct
        return NativeExpert(ffn, addressof(ffn), (gate, up, down))

    def mixture(
        self, experts: Sequence[NativeExpert], counts: Sequence[int], tokens: npt.NDArray[np.int32], weights: F32,
        x: F32, out: F32, spec: Ffn,
    ) -> None:  # fmt: skip
        products = sum(counts) * len(spec.projections) * spec.d_ff * x.shape[1]
        addresses, starts = _addresses(experts), (c_int32 * (len(counts) + 1))(*accumulate(counts, initial=0))
        check(
            self._compute(
                products, "moert_mixture", self._act(spec), len(experts), addresses, starts, _at(tokens), _at(weights),
                _at(x),
                len(x), _at(out),
            )
        )  # fmt: skip

    def parts(self, experts: Sequence[NativeExpert], x: F32, out: F32, spec: Ffn) -> None:
        count = len(experts)
        starts, first = np.arange(count + 1, dtype=np.int32), np.zeros(count, np.int32)
        products = count * len(spec.projections) * spec.d_ff * x.shape[1]
        check(
            self._compute(
                products, "moert_parts", self._act(spec), count, _addresses(experts), _at(starts), _at(first), _at(x),
                1, _at(out),
            )
        )  # fmt: skip

    def add_parts(self, parts: F32, weights: F32, out: F32, tokens: npt.NDArray[np.int32] | None = None) -> None:
        rows = np.zeros(len(parts), np.int32) if tokens is None else tokens
        self._compute(
            parts.size, "moert_add_parts", _at(parts), _at(weights), _at(rows), *parts.shape, _at(out)
        )  # fmt: skip

    def fire(self, layout: NeuronLayout, base: U8, offsets: I64, x: F32, spec: Ffn) -> F32:
        x, offsets = np.ascontiguousarray(x), np.ascontiguousarray(offsets)
        hidden = np.empty((len(x), layout.d_ff), np.float32)
        assert len(offsets) == layout.n_blocks
        assert x.shape[1] == layout.d_model
        check(
            self._compute(
                2 * x.size * layout.d_ff, "moert_fire", self._neurons(layout), self._act(spec), _at(base), _at(offsets),
                _at(x), len(x), _at(hidden),
            )
        )  # fmt: skip
        return hidden

    def project(self, layout: NeuronLayout, base: U8, offsets: I64, hidden: F32, bias: F32 | None) -> F32:
        hidden, offsets = np.ascontiguousarray(hidden), np.ascontiguousarray(offsets)
        out, biases = np.empty((len(hidden), layout.d_model), np.float32), None if bias is None else _at(bias)
        assert len(offsets) == layout.n_blocks
        assert hidden.shape[1] == layout.d_ff
        failed = self._compute(
            hidden.size * layout.d_model, "moert_project", self._neurons(layout), _at(base), _at(offsets), _at(hidden),
            len(hidden), biases, _at(out),
        )  # fmt: skip
        if failed > 0:
            raise ValueError("a neuron that fired is not there")
        check(failed)
        return out

    def conv(self, x: F32, taps: F32, bias: F32 | None, state: F32, silu: bool) -> F32:
        x, taps = np.ascontiguousarray(x), np.ascontiguousarray(taps)
        out, (k, channels) = np.empty_like(x), taps.shape
        struct = structs.Taps(_at(taps), None if bias is None else _at(bias), channels, k, silu)
        self._compute(x.size * (k + 2), "moert_convolve", addressof(struct), len(x), _at(x), _in_place(state), _at(out))
        return out

    def delta(self, q: F32, k: F32, v: F32, decay: F32, beta: F32, state: F32) -> F32:
        given = [np.ascontiguousarray(each) for each in (q, k, v, decay, beta)]
        out, (tokens, heads, dv), (_, key_heads, dk) = np.empty_like(given[2]), v.shape, k.shape
        struct = structs.Delta(*map(_at, given), _in_place(state), _at(out), tokens, key_heads, heads, dk, dv)
        check(self._compute(3 * v.size * dk, "moert_delta_rule", addressof(struct)))
        return out

    def scan(self, x: F32, dt: F32, a: F32, b: F32, c: F32, d: F32, state: F32) -> F32:
        given = [np.ascontiguousarray(each) for each in (x, dt, a, b, c, d)]
        out, (tokens, heads, p), (_, groups, n) = np.empty_like(given[0]), x.shape, b.shape
        struct = structs.Scan(*map(_at, given), _in_place(state), _at(out), tokens, heads, groups, p, n, a.shape[1])
        check(self._compute(2 * x.size * n, "moert_scan_tokens", addressof(struct)))
        return out

    def lstm(self, inputs: F32, recurrent: F32, state: F32, counts: Sequence[int], backward: bool = False) -> F32:
        given, lengths = [np.ascontiguousarray(each) for each in (inputs, recurrent)], (c_int32 * len(counts))(*counts)
        out, sizes = np.empty((len(inputs), len(recurrent)), np.float32), (len(counts), len(recurrent), backward)
        assert (len(inputs), *state.shape) == (sum(counts), len(counts), 2, len(recurrent))
        struct = structs.Lstm(*map(_at, given), addressof(lengths), _in_place(state), _at(out), *sizes)
        check(self._compute(inputs.size * len(recurrent), "moert_lstm_tokens", addressof(struct)))
        return out

    def attend_sparsely(self, queries: F32, keys: F32, values: F32, spans: I32) -> F32:
        given = [np.ascontiguousarray(each) for each in (queries, keys, values, spans)]
        out = np.empty(queries.shape, np.float32)
        struct = structs.Sparse(*map(_at, given), _at(out), *queries.shape)
        products = 2 * queries.shape[1] * int(np.diff(given[3]).sum(dtype=np.int64))
        check(self._compute(products, "moert_attend_sparsely", addressof(struct)))
        return out

    def softplus(self, x: F32, bias: F32) -> F32:
        x = np.ascontiguousarray(x)
        out = np.empty_like(x)
        self._compute(8 * x.size, "moert_softplus", *x.shape, _at(x), _at(bias), _at(out))
        return out

    def sigmoid(self, x: F32) -> F32:
        x = np.ascontiguousarray(x)
        out = np.empty_like(x)
        self._compute(4 * x.size, "moert_sigmoid", x.size, _at(x), _at(out))
        return out

    def gated(self, x: F32, gate: F32, norm: NormWeights | None = None, groups: int = 1, last: bool = False) -> F32:
        x, gate = np.ascontiguousarray(x), np.ascontiguousarray(gate)
        out, place = np.empty_like(x), None if norm is None else self._place(norm, "norm", filled.norm)
        self._compute(4 * x.size, "moert_gated", place, groups, last, *x.shape, _at(x), _at(gate), _at(out))
        return out

    def _place(self, weights: _W, purpose: str, make: Callable[[_W], Structure]) -> int:
        """Returns the address of the struct that stands for these weights, which are kept alive: made once for each
        purpose."""
        key = id(weights), purpose
        if key not in self._made:
            struct = make(weights)
            self._made[key] = struct, addressof(struct), weights
        return self._made[key][1]

    def _act(self, spec: Ffn) -> int:
        act = spec.act
        if act not in self._acts:
            limit = math.inf if act.limit is None else act.limit
            self._acts[act] = structs.Act(ACTIVATIONS[act.name], limit, act.slope, act.plus)
        return addressof(self._acts[act])

    def _neurons(self, layout: NeuronLayout) -> int:
        key = layout.d_model, layout.d_ff, layout.per_block, layout.columns, *layout.rows.items()
        if key not in self._layouts:
            self._layouts[key] = filled.neurons(layout)
        return addressof(self._layouts[key])

    def _kept(self, array: npt.NDArray[_Item]) -> npt.NDArray[_Item]:
        """Returns the array in large pages: a copy, or the array itself where it lies in memory from `stay`."""
        if _at(array) in self._staying:
            self._staying.discard(_at(array))
            return array
        room = self._arena.allocate(array.nbytes).view(array.dtype).reshape(array.shape)
        np.copyto(room, array)
        return room


def _addresses(experts: Sequence[NativeExpert]) -> Any:
    return (c_void_p * len(experts))(*[expert.address for expert in experts])
