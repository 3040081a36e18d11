"""The native kernels as a backend, which passes the bytes of a pack, and arrays, to the C in csrc.

From top to bottom: dense matrices, experts, the C's structs filled in for the weights of a model, and the backend. A
struct has the addresses of numpy's arrays: whoever fills one in keeps the arrays alive.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Mapping, Sequence
from ctypes import Structure, addressof, c_int32, c_int64, c_void_p
from dataclasses import replace
from functools import partial
from itertools import accumulate
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from moert.kernels import library
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
from moert.kernels.library import ACTIVATIONS, KINDS, SCORES, Library, Matrix, NativeFailed, check
from moert.kernels.library import address as _at
from moert.kernels.memory import Arena
from moert.kernels.pages import KeptPage, PageLayout
from moert.pack.codec import CODES, F32, MX_GROUP, U8, QuantizedMatrix, TrellisMatrix
from moert.pack.fence import heard
from moert.pack.layout import MatrixPlace, NeuronLayout, group_of
from moert.pack.parts import Attention, Ffn, Latent

_S = TypeVar("_S", bound=Structure)
_Item = TypeVar("_Item", bound=np.generic)


class NativeMatrix:
    """A dense matrix of `rows` and `cols`; `struct` points to `stored` and `bias`."""

    def __init__(self, stored: Stored, bias: F32 | None, struct: Matrix) -> None:
        self.stored, self.bias, self.struct = stored, bias, struct
        self.rows, self.cols = int(struct.rows), int(struct.cols)


class NativeExpert(NamedTuple):
    """A feed-forward network; `ffn`: the C struct of this name, or its words; `alive` is the object that holds its
    bytes."""

    ffn: library.Ffn | I64
    address: int
    alive: object


_MOST = 256  # kinds of experts that are remembered


class _Kind(NamedTuple):
    """The words of the struct of an expert that lies at address 0, and a mask of the words that are addresses (1,
    others 0)."""

    words: I64
    places: I64
    alive: object


def _words(projections: Mapping[str, ProjectionView], start: int) -> I64:
    """Returns the words of the struct of an expert that lies at address `start`."""
    ffn = library.Ffn()
    for name, part in projections.items():
        places = [start + at for at in part.places]
        kind = int(part.bits) if part.form is None else KINDS[part.form]
        group = {None: part.group_size, "MXFP4": MX_GROUP}.get(part.form, part.shape[1])
        if part.code is not None:
            kind, group = -part.code.step, part.shape[1]
        bias = None if part.bias_place is None else start + part.bias_place
        parts, (rows, cols) = (*places, *[None] * (3 - len(places))), part.shape
        setattr(ffn, name, Matrix(*parts, bias, kind, rows, cols, min(group, cols), power=part.power))
    assert ctypes.sizeof(ffn) % 8 == 0
    return np.frombuffer(bytes(ffn), np.int64)


def _norm(of: NormWeights) -> library.Norm:
    weight, bias = (None if each is None else _at(each) for each in (of.weight, of.bias))
    return library.Norm(weight, bias, of.eps)


def _heads(weights: AttentionWeights[NativeMatrix]) -> library.Heads:
    part, sinks = weights.part, weights.sinks
    made = library.Heads(
        None if sinks is None else _at(sinks), part.n, part.kv, part.dim, part.value_dim, causal=weights.causal,
        window=part.window or 0, scale=part.scale,
    )  # fmt: skip
    if isinstance(part, Attention):
        made.chunk, made.softcap = part.chunk or 0, part.softcap or 0.0
    return made


def _fill(struct: _S, weights: AttentionWeights[NativeMatrix], norms: Sequence[str], matrices: Sequence[str]) -> _S:
    """Fills in the norms and matrices of these names that the weights have; returns the struct."""
    for name in norms:
        if name in weights.norms:
            setattr(struct, name if name == "after" else f"{name}_norm", _norm(weights.norms[name]))
    for name in matrices:
        if name in weights.matrices:
            setattr(struct, name, weights.matrices[name].struct)
    return struct


def _attention(weights: AttentionWeights[NativeMatrix], with_keys: bool) -> library.Attention:
    """Returns the struct of an attention, without the matrices of keys and values where these are there already."""
    part = weights.part
    assert isinstance(part, Attention)
    block = library.Attention(
        heads=_heads(weights), norm=_norm(weights.norms["before"]), rope_dims=weights.rope_dims,
        norm_each=part.qk_norm == "head", norm_turned=part.norm_turned,
        clip=math.inf if part.clip is None else part.clip, add=weights.add,
    )  # fmt: skip
    matrices = ("q", "k", "v", "o", "gate") if with_keys else ("q", "o", "gate")
    return _fill(block, weights, ("q", "k", "v", "after"), matrices)


_OF_LATENT = ("q_a", "q", "q_turn", "kv_a", "k_turn", "keys", "values", "o", "gate")


def _latent(weights: AttentionWeights[NativeMatrix]) -> library.Latent:
    block = library.Latent(
        heads=_heads(weights), norm=_norm(weights.norms["before"]), rope_dims=weights.part.turning, add=weights.add
    )
    return _fill(block, weights, ("q", "kv", "after"), _OF_LATENT)


class _Attending(NamedTuple):
    """The struct of an attention for the function of the library with this name, and the products that it makes of a
    token: with each key, and with all matrices for each of its features."""

    struct: library.Attention | library.Latent
    place: int
    function: str
    of_key: int
    of_feature: int


def _attending(weights: AttentionWeights[NativeMatrix]) -> _Attending:
    part, latent = weights.part, isinstance(weights.part, Latent)
    struct = _latent(weights) if latent else _attention(weights, weights.own)
    return _Attending(
        struct, addressof(struct), "moert_attend_latent" if latent else "moert_attend",
        part.n * (part.dim + part.value_dim), 2 * (part.q_features + part.kv_features),
    )  # fmt: skip


def _router(weights: RouterWeights[NativeMatrix]) -> library.Router:
    part, groups = weights.part, weights.part.groups
    optional = {"choice_bias": weights.choice_bias, "expert_scale": weights.expert_scale}
    made = library.Router(
        norm=_norm(weights.norm), matrix=weights.matrix.struct, score=SCORES[part.score], top_k=part.top_k,
        renormalise=part.renormalise, factor=part.factor * weights.factor, jitter=part.jitter,
        **{name: _at(values) for name, values in optional.items() if values is not None},
    )  # fmt: skip
    if weights.own is not None:
        made.own = _norm(weights.own)
    if groups is not None:
        made.groups, made.best_groups, made.group_top = groups.n, groups.best, groups.top
    return made


def _act(of: Ffn) -> library.Act:
    act = of.act
    limit, bound = (math.inf if each is None else each for each in (act.limit, act.bound))
    return library.Act(ACTIVATIONS[act.name], limit, act.slope, act.plus, bound)


def _neurons(layout: NeuronLayout) -> library.Neurons:
    places = {name: _place(each, layout.d_model) for name, each in layout.rows.items()}
    return library.Neurons(
        down=_place(layout.columns, layout.d_model), d_model=layout.d_model, d_ff=layout.d_ff,
        block_rows=layout.per_block, **places,
    )  # fmt: skip


def _place(matrix: MatrixPlace, cols: int) -> library.Place:
    assert matrix.form16 != "MXFP4" or matrix.bits < 16
    data, scale, minimum = matrix.places if matrix.bits < 16 else (matrix.places[0], 0, 0)
    kind = KINDS[matrix.form16] if matrix.bits == 16 else matrix.bits
    group, bias = cols if matrix.bits == 16 else group_of(cols, matrix.group_size), matrix.bias_place
    return library.Place(data, scale, minimum, -1 if bias is None else bias, kind, group, matrix.power)


def keys_of(kept: KeptKeys) -> tuple[int, object]:
    """Returns the address of the struct with the pages' addresses, which `kept` has until its pages change, and the
    objects that it points to but for the pages."""
    _, *others, head = kept.layout.places
    table = (c_void_p * len(kept.pages))(*[page.address for page in kept.pages])
    struct = library.Keys(addressof(table), head, *others, kept.layout.bits == 8)
    made = kept.place = addressof(struct), (struct, table)
    return made


_W = TypeVar("_W")
_V = TypeVar("_V")


class _Made(dict[_W, _V]):
    """The results of `make` for weights, each made at the first use of the weights, and kept with them."""

    def __init__(self, make: Callable[[_W], _V]) -> None:
        self._make = make

    def __missing__(self, weights: _W) -> _V:
        made = self[weights] = self._make(weights)
        return made


def _placed(make: Callable[[_W], Structure]) -> _Made[_W, tuple[int, Structure]]:
    """Returns the addresses of structs for weights, and the structs."""

    def made(weights: _W) -> tuple[int, Structure]:
        struct = make(weights)
        return addressof(struct), struct

    return _Made(made)


class _Network(NamedTuple):
    """The address of an activation's struct, and the products that a network makes of a feature of a token; `alive`
    holds the struct and the part that it was made for."""

    act: int
    products: int
    alive: object


_LONG_S = 0.05  # a call that takes longer is another thread's
_MANY = 1 << 24  # products: a call of fewer takes less than _LONG_S
_SLOW = 1e9  # products a second, of a function that was not called with as many yet
_ADDRESS = attrgetter("address")


class NativeBackend:
    """The backend of the native kernels, see `moert.kernels.backend.Backend`. `isa` is a number of Library.choose."""

    widens = False

    def __init__(self, loaded: Library, isa: int, threads: int) -> None:
        self.name, self.threads = loaded.instruction_sets[isa].name, threads
        self._call: Any = loaded.functions
        self._pool = self._call.moert_pool_open(isa, threads)
        if not self._pool:
            raise NativeFailed(f"no memory for {threads} threads")
        self._speeds: dict[str, float] = {}  # products a second, by function: about the fewest of its last long calls
        self._arena = Arena()
        self._staying: set[int] = set()  # addresses in it that were given away, to be filled
        self._kinds: dict[int, _Kind] = {}  # of experts, by their projections; used by several threads at once
        self._norms, self._routers = _placed(_norm), _placed(_router)
        self._attending = _Made(_attending)
        self._keeping = _placed(partial(_attention, with_keys=True))
        self._networks: dict[int, _Network] = {}
        self._layouts: dict[tuple[object, ...], library.Neurons] = {}
        self._positions = Positions(), library.Positions()  # of the last call

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
        """Calls a function of the library that makes `products` products, and returns its result; Ctrl-C is handled
        meanwhile where the call takes long. Raises NativeFailed where the result is below 0."""
        call = getattr(self._call, name)
        result = call(self._pool, *arguments) if products < _MANY else self._compute_long(products, name, arguments)
        if result and result < 0:
            check(result)
        return result

    def _compute_long(self, products: int, name: str, arguments: Sequence[Any]) -> Any:
        call = getattr(self._call, name)
        speed, started = self._speeds.get(name, _SLOW), time.perf_counter()
        if products < _LONG_S * speed:
            result = call(self._pool, *arguments)
        else:
            try:
                result = heard(lambda: call(self._pool, *arguments), lambda: self._call.moert_pool_stop(self._pool, 1))
            finally:
                self._call.moert_pool_stop(self._pool, 0)
        self._speeds[name] = min(products / (time.perf_counter() - started), 1.25 * speed)
        return result

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
        if isinstance(stored, TrellisMatrix):
            coded = replace(stored, stream=self._kept(stored.stream), scale=self._kept(stored.scale))
            rows, cols, kind = len(coded.scale), coded.in_features, -CODES[coded.bits].step
            places = _at(coded.stream), _at(coded.scale), None, place
            return NativeMatrix(coded, bias, Matrix(*places, kind, rows, cols, cols, power=coded.power))
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
        self._compute(out.size, "moert_rows", matrix.struct, len(ids), (c_int64 * len(ids))(*ids), out)
        return out

    def linear(self, x: F32, matrix: NativeMatrix) -> F32:
        return self.linears(x, (matrix,))[0]

    def linears(self, x: F32, matrices: Sequence[NativeMatrix]) -> list[F32]:
        made, count = [np.empty((len(x), matrix.rows), np.float32) for matrix in matrices], len(matrices)
        structs_at = (c_void_p * count)(*[addressof(matrix.struct) for matrix in matrices])
        outputs = (c_void_p * count)(*map(_at, made))
        products = len(x) * sum(matrix.rows * matrix.cols for matrix in matrices)
        self._compute(products, "moert_linear", count, structs_at, x, len(x), outputs)
        return made

    def norm(self, x: F32, norm: NormWeights) -> F32:
        out = np.empty(x.shape, np.float32)
        self._compute(2 * x.size, "moert_normalise", self._norms[norm][0], *x.shape, x, out)
        return out

    def pages(self, layout: PageLayout, count: int) -> list[KeptPage]:
        return layout.pages(count)

    def attend(
        self, weights: AttentionWeights[NativeMatrix], x: F32, kept: KeptKeys, start: int, positions: Positions
    ) -> None:
        to, (tokens, features), keys = self._attending[weights], x.shape, kept.place or keys_of(kept)
        if positions is not self._positions[0]:
            turns, bias, scale = positions.turns, positions.bias, positions.query_scale
            struct = library.Positions(
                None if turns is None else _at(turns),
                None if bias is None else _at(bias) + bias.itemsize * positions.zero,
                0 if bias is None else bias.shape[1],
                None if scale is None else _at(scale),
            )
            self._positions = positions, struct
        products = tokens * (kept.length * to.of_key + features * to.of_feature)
        at = addressof(self._positions[1])
        self._compute(products, to.function, to.place, tokens, x, keys[0], start, kept.length, at)

    def keep(self, weights: AttentionWeights[NativeMatrix], encoded: F32, kept: KeptKeys, start: int) -> None:
        keys, products = kept.place or keys_of(kept), encoded.size * weights.part.kv_features
        self._compute(products, "moert_keep", self._keeping[weights][0], len(encoded), encoded, start, keys[0])

    def scores(self, x: F32, router: RouterWeights[NativeMatrix]) -> tuple[F32, F32]:
        tokens, experts = len(x), router.matrix.rows
        hidden, scores = np.empty(x.shape, np.float32), np.empty((tokens, experts), np.float32)
        self._compute(x.size * experts, "moert_scores", self._routers[router][0], tokens, x, hidden, scores)
        return hidden, scores

    def choose(self, scores: F32, router: RouterWeights[NativeMatrix]) -> tuple[I64, F32]:
        tokens, top_k = len(scores), router.part.top_k
        chosen, weights = np.empty((tokens, top_k), np.int64), np.empty((tokens, top_k), np.float32)
        self._compute(scores.size * top_k, "moert_choose", self._routers[router][0], scores, tokens, chosen, weights)
        return chosen, weights

    def prefer(
        self, scores: F32, router: RouterWeights[NativeMatrix], bonus: float, sure: int, recent: I32
    ) -> tuple[I64, F32]:
        chosen, weights = np.empty((1, router.part.top_k), np.int64), np.empty((1, router.part.top_k), np.float32)
        place = self._routers[router][0]
        check(self._call.moert_prefer(place, scores, bonus, sure, len(recent), recent, chosen, weights))
        return chosen, weights

    def gate(self, hidden: F32, matrix: NativeMatrix, factor: float) -> F32:
        out = np.empty(len(hidden), np.float32)
        self._compute(hidden.size, "moert_gate", matrix.struct, len(hidden), hidden, factor, out)
        return out

    def head(self, x: F32, norm: NormWeights, factor: float, softcap: float | None, matrix: NativeMatrix) -> F32:
        out, products = np.empty((len(x), matrix.rows), np.float32), len(x) * matrix.rows * matrix.cols
        place = self._norms[norm][0]
        self._compute(products, "moert_head", place, factor, softcap or 0.0, matrix.struct, len(x), x, out)
        return out

    def expert(self, view: ExpertView) -> NativeExpert:
        kind = self._kinds.get(id(view.projections)) or self._kind(view.projections)
        words = kind.places * _at(view.buffer)
        words += kind.words
        return NativeExpert(words, _at(words), view.buffer)

    def dense(self, gate: NativeMatrix | None, up: NativeMatrix, down: NativeMatrix) -> NativeExpert:
        ffn = library.Ffn(up=up.struct, down=down.struct)
        if gate is not None:
            ffn.gate = gate.struct
        return NativeExpert(ffn, addressof(ffn), (gate, up, down))

    def mixture(
        self, experts: Sequence[NativeExpert], counts: Sequence[int], tokens: npt.NDArray[np.int32], weights: F32,
        x: F32, out: F32, spec: Ffn,
    ) -> None:  # fmt: skip
        network, count = self._networks.get(id(spec)) or self._network(spec), len(experts)
        addresses = (c_void_p * count)(*map(_ADDRESS, experts))
        starts = (c_int32 * (count + 1))(*accumulate(counts, initial=0))
        self._compute(
            sum(counts) * network.products * x.shape[1], "moert_mixture", network.act, count, addresses, starts, tokens,
            weights, x, len(x), out,
        )  # fmt: skip

    def parts(self, experts: Sequence[NativeExpert], x: F32, out: F32, spec: Ffn) -> None:
        network, count = self._networks.get(id(spec)) or self._network(spec), len(experts)
        addresses, first = (c_void_p * count)(*map(_ADDRESS, experts)), np.zeros(count, np.int32)
        starts = np.arange(count + 1, dtype=np.int32)
        products = count * network.products * x.shape[1]
        self._compute(products, "moert_parts", network.act, count, addresses, starts, first, x, 1, out)

    def add_parts(self, parts: F32, weights: F32, out: F32, tokens: npt.NDArray[np.int32] | None = None) -> None:
        rows = np.zeros(len(parts), np.int32) if tokens is None else tokens
        self._compute(parts.size, "moert_add_parts", parts, weights, rows, *parts.shape, out)

    def fire(self, layout: NeuronLayout, base: U8, offsets: I64, x: F32, spec: Ffn) -> F32:
        x, offsets = np.ascontiguousarray(x), np.ascontiguousarray(offsets)
        hidden, network = (
            np.empty((len(x), layout.d_ff), np.float32),
            self._networks.get(id(spec)) or self._network(spec),
        )
        assert len(offsets) == layout.n_blocks
        assert x.shape[1] == layout.d_model
        self._compute(
            2 * x.size * layout.d_ff, "moert_fire", self._neurons(layout), network.act, _at(base), _at(offsets), _at(x),
            len(x), hidden,
        )  # fmt: skip
        return hidden

    def project(self, layout: NeuronLayout, base: U8, offsets: I64, hidden: F32, bias: F32 | None) -> F32:
        hidden, offsets = np.ascontiguousarray(hidden), np.ascontiguousarray(offsets)
        out, biases = np.empty((len(hidden), layout.d_model), np.float32), None if bias is None else _at(bias)
        assert len(offsets) == layout.n_blocks
        assert hidden.shape[1] == layout.d_ff
        missing = self._compute(
            hidden.size * layout.d_model, "moert_project", self._neurons(layout), _at(base), _at(offsets), _at(hidden),
            len(hidden), biases, out,
        )  # fmt: skip
        if missing:
            raise ValueError("a neuron that fired is not there")
        return out

    def conv(self, x: F32, taps: F32, bias: F32 | None, state: F32, silu: bool) -> F32:
        x, taps = np.ascontiguousarray(x), np.ascontiguousarray(taps)
        out, (k, channels) = np.empty(x.shape, np.float32), taps.shape
        struct = library.Taps(_at(taps), None if bias is None else _at(bias), channels, k, silu)
        self._compute(x.size * (k + 2), "moert_convolve", addressof(struct), len(x), _at(x), _at(state), out)
        return out

    def delta(self, q: F32, k: F32, v: F32, decay: F32, beta: F32, state: F32) -> F32:
        given = [np.ascontiguousarray(each) for each in (q, k, v, decay, beta)]
        out, (tokens, heads, dv), (_, key_heads, dk) = np.empty(v.shape, np.float32), v.shape, k.shape
        each = 1 if decay.ndim == 2 else dk
        struct = library.Delta(*map(_at, given), _at(state), _at(out), tokens, key_heads, heads, dk, dv, each)
        self._compute(3 * v.size * dk, "moert_delta_rule", addressof(struct))
        return out

    def scan(self, x: F32, dt: F32, a: F32, b: F32, c: F32, d: F32, state: F32) -> F32:
        given = [np.ascontiguousarray(each) for each in (x, dt, a, b, c, d)]
        out, (tokens, heads, p), (_, groups, n) = np.empty(x.shape, np.float32), x.shape, b.shape
        struct = library.Scan(*map(_at, given), _at(state), _at(out), tokens, heads, groups, p, n, a.shape[1])
        self._compute(2 * x.size * n, "moert_scan_tokens", addressof(struct))
        return out

    def lstm(self, inputs: F32, recurrent: F32, state: F32, counts: Sequence[int], backward: bool = False) -> F32:
        given, lengths = [np.ascontiguousarray(each) for each in (inputs, recurrent)], (c_int32 * len(counts))(*counts)
        out, sizes = np.empty((len(inputs), len(recurrent)), np.float32), (len(counts), len(recurrent), backward)
        assert (len(inputs), *state.shape) == (sum(counts), len(counts), 2, len(recurrent))
        struct = library.Lstm(*map(_at, given), addressof(lengths), _at(state), _at(out), *sizes)
        self._compute(inputs.size * len(recurrent), "moert_lstm_tokens", addressof(struct))
        return out

    def attend_sparsely(self, queries: F32, keys: F32, values: F32, spans: I32) -> F32:
        given = [np.ascontiguousarray(each) for each in (queries, keys, values, spans)]
        out = np.empty(queries.shape, np.float32)
        struct = library.Sparse(*map(_at, given), _at(out), *queries.shape)
        products = 2 * queries.shape[1] * int(np.diff(given[3]).sum(dtype=np.int64))
        self._compute(products, "moert_attend_sparsely", addressof(struct))
        return out

    def softplus(self, x: F32, bias: F32) -> F32:
        x, out = np.ascontiguousarray(x), np.empty(x.shape, np.float32)
        self._compute(8 * x.size, "moert_softplus", *x.shape, _at(x), _at(bias), out)
        return out

    def sigmoid(self, x: F32) -> F32:
        x, out = np.ascontiguousarray(x), np.empty(x.shape, np.float32)
        self._compute(4 * x.size, "moert_sigmoid", x.size, _at(x), out)
        return out

    def balance(self, matrices: F32, rounds: int, floor: float) -> None:
        tokens, n, _ = matrices.shape
        self._compute(2 * matrices.size * rounds, "moert_balance", tokens, n, rounds, floor, matrices)

    def gated(self, x: F32, gate: F32, norm: NormWeights | None = None, groups: int = 1, last: bool = False) -> F32:
        x, gate, out = np.ascontiguousarray(x), np.ascontiguousarray(gate), np.empty(x.shape, np.float32)
        place = None if norm is None else self._norms[norm][0]
        self._compute(4 * x.size, "moert_gated", place, groups, last, *x.shape, _at(x), _at(gate), out)
        return out

    def _kind(self, projections: Mapping[str, ProjectionView]) -> _Kind:
        near, far = (_words(projections, start) for start in (1 << 12, 1 << 13))
        places = (far - near) >> 12
        if len(self._kinds) >= _MOST:
            self._kinds.clear()
        kind = self._kinds[id(projections)] = _Kind(near - (places << 12), places, projections)
        return kind

    def _network(self, spec: Ffn) -> _Network:
        act = _act(spec)
        made = self._networks[id(spec)] = _Network(addressof(act), len(spec.projections) * spec.d_ff, (act, spec))
        return made

    def _neurons(self, layout: NeuronLayout) -> int:
        key = layout.d_model, layout.d_ff, layout.per_block, layout.columns, *layout.rows.items()
        if key not in self._layouts:
            self._layouts[key] = _neurons(layout)
        return addressof(self._layouts[key])

    def _kept(self, array: npt.NDArray[_Item]) -> npt.NDArray[_Item]:
        """Returns the array in large pages: a copy, or the array itself where it lies in memory from `stay`."""
        place = array.ctypes.data
        if place in self._staying:
            self._staying.discard(place)
            return array
        room = self._arena.allocate(array.nbytes).view(array.dtype).reshape(array.shape)
        np.copyto(room, array)
        return room
