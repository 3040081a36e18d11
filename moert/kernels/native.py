"""The native kernels as a backend: hands the bytes of a pack, and the addresses of arrays, to the C in csrc."""

from __future__ import annotations

import math
from collections.abc import Sequence
from ctypes import addressof, byref, c_char, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from moert.kernels.arena import Arena
from moert.kernels.backend import I64, AttentionWeights, ExpertView, Floats, KeptKeys, Positions, Stored
from moert.kernels.library import ACTIVATIONS, KINDS, Attention, Ffn, Keys, Library, Matrix, NativeFailed, check
from moert.pack.codec import F32, QuantizedMatrix
from moert.pack.parts import Ffn as FfnSpec

_Item = TypeVar("_Item", bound=np.generic)


@dataclass(frozen=True)
class NativeMatrix:
    """A dense matrix; `stored` lies where `struct` points to."""

    stored: Stored
    struct: Matrix

    @property
    def rows(self) -> int:
        return int(self.struct.rows)

    @property
    def cols(self) -> int:
        return int(self.struct.cols)


class NativeExpert:
    """A feed-forward part; `alive` is what holds its bytes."""

    def __init__(self, ffn: Ffn, alive: object) -> None:
        self.ffn, self.address, self._alive = ffn, addressof(ffn), alive


class NativeBackend:
    """See `moert.kernels.backend.Backend`. `isa` is a number of Library.choose."""

    widens = False

    def __init__(self, library: Library, isa: int, threads: int) -> None:
        self.name, self.threads = library.instruction_sets[isa].name, threads
        self._call: Any = library.functions
        self._pool = self._call.moert_pool_open(isa, threads)
        if not self._pool:
            raise NativeFailed(f"no memory for {threads} threads")
        self._arena = Arena()
        self._blocks: dict[int, tuple[Attention, object]] = {}  # by id of the AttentionWeights, which is kept alive

    def close(self) -> None:
        """Ends the threads. Nothing may be computed after that."""
        if self._pool:
            self._call.moert_pool_close(self._pool)
            self._pool, self._call = None, None

    def matrix(self, stored: Stored) -> NativeMatrix:
        if isinstance(stored, QuantizedMatrix):
            qweight, scale, minimum = self._kept(stored.qweight), self._kept(stored.scale), self._kept(stored.minimum)
            kept = QuantizedMatrix(stored.bits, stored.in_features, stored.group_size, qweight, scale, minimum)
            struct = Matrix(
                _at(qweight), _at(scale), _at(minimum), stored.bits, len(qweight),
                stored.in_features, stored.group_size,
            )  # fmt: skip
            return NativeMatrix(kept, struct)
        data = self._kept(np.ascontiguousarray(stored.data))
        rows, cols = data.shape
        return NativeMatrix(
            Floats(stored.dtype, data), Matrix(_at(data), None, None, KINDS[stored.dtype], rows, cols, cols)
        )

    def rows(self, matrix: NativeMatrix, ids: Sequence[int]) -> F32:
        out = np.empty((len(ids), matrix.cols), np.float32)
        places = (c_int64 * len(ids))(*ids)
        check(self._call.moert_rows(self._pool, matrix.struct, len(ids), places, _at(out)))
        return out

    def linear(self, x: F32, matrix: NativeMatrix) -> F32:
        out = np.empty((len(x), matrix.rows), np.float32)
        matrices, outputs = (c_void_p * 1)(addressof(matrix.struct)), (c_void_p * 1)(_at(out))
        check(self._call.moert_linear(self._pool, 1, matrices, _at(x), len(x), outputs))
        return out

    def norm(self, x: F32, weight: F32, eps: float) -> F32:
        out = np.empty_like(x)
        self._call.moert_norm(self._pool, _at(weight), eps, *x.shape, _at(x), _at(out))
        return out

    def attend(
        self, weights: AttentionWeights[NativeMatrix], x: F32, kept: KeptKeys, start: int, positions: Positions
    ) -> None:
        block = self._block(weights, weights.own)
        turns, bias = positions.turns, positions.bias
        check(
            self._call.moert_attend(
                self._pool, byref(block), len(x), _at(x), byref(keys_of(kept)), start, kept.length,
                None if turns is None else _at(turns),
                None if bias is None else _at(bias) + bias.itemsize * positions.zero,
                0 if bias is None else bias.shape[1],
            )
        )  # fmt: skip

    def keep(self, weights: AttentionWeights[NativeMatrix], encoded: F32, kept: KeptKeys, start: int) -> None:
        block = self._block(weights, True)
        keys = keys_of(kept)
        check(self._call.moert_keep(self._pool, byref(block), len(encoded), _at(encoded), start, byref(keys)))

    def scores(self, x: F32, norm: F32, eps: float, router: NativeMatrix) -> tuple[F32, F32]:
        hidden, probabilities = np.empty_like(x), np.empty((len(x), router.rows), np.float32)
        check(
            self._call.moert_scores(
                self._pool, _at(norm), eps, router.struct, len(x), _at(x), _at(hidden),
                _at(probabilities),
            )
        )  # fmt: skip
        return hidden, probabilities

    def choose(self, probabilities: F32, top_k: int, renormalise: bool) -> tuple[I64, F32]:
        tokens = len(probabilities)
        chosen, weights = np.empty((tokens, top_k), np.int64), np.empty((tokens, top_k), np.float32)
        self._call.moert_choose(_at(probabilities), *probabilities.shape, top_k, renormalise, _at(chosen), _at(weights))
        return chosen, weights

    def head(self, x: F32, norm: F32, eps: float, factor: float, matrix: NativeMatrix) -> F32:
        out = np.empty((len(x), matrix.rows), np.float32)
        check(self._call.moert_head(self._pool, _at(norm), eps, factor, matrix.struct, len(x), _at(x), _at(out)))
        return out

    def expert(self, view: ExpertView) -> NativeExpert:
        start, ffn = _at(view.buffer), Ffn()
        for name, part in view.projections.items():
            places = [start + at for at in part.places]
            kind = KINDS[part.dtype16] if part.bits == 16 else part.bits
            group = part.shape[1] if part.bits == 16 else part.group_size
            setattr(ffn, name, Matrix(*places, *[None] * (3 - len(places)), kind, *part.shape, group))
        return NativeExpert(ffn, view.buffer)

    def dense(self, gate: NativeMatrix | None, up: NativeMatrix, down: NativeMatrix) -> NativeExpert:
        ffn = Ffn(up=up.struct, down=down.struct)
        if gate is not None:
            ffn.gate = gate.struct
        return NativeExpert(ffn, (gate, up, down))

    def mixture(
        self, experts: Sequence[NativeExpert], counts: Sequence[int], tokens: npt.NDArray[np.int32], weights: F32,
        x: F32, out: F32, spec: FfnSpec,
    ) -> None:  # fmt: skip
        addresses, starts = _addresses(experts), (c_int32 * (len(counts) + 1))(*accumulate(counts, initial=0))
        check(
            self._call.moert_mixture(
                self._pool, ACTIVATIONS[spec.act.name], _limit(spec), len(experts), addresses, starts,
                _at(tokens), _at(weights), _at(x), len(x), _at(out),
            )
        )  # fmt: skip

    def parts(self, experts: Sequence[NativeExpert], x: F32, out: F32, spec: FfnSpec) -> None:
        count = len(experts)
        starts, first = np.arange(count + 1, dtype=np.int32), np.zeros(count, np.int32)
        check(
            self._call.moert_parts(
                self._pool, ACTIVATIONS[spec.act.name], _limit(spec), count, _addresses(experts), _at(starts),
                _at(first), _at(x), 1, _at(out),
            )
        )  # fmt: skip

    def add_parts(self, parts: F32, weights: F32, out: F32) -> None:
        first = np.zeros(len(parts), np.int32)
        self._call.moert_add_parts(self._pool, _at(parts), _at(weights), _at(first), *parts.shape, _at(out))

    def _block(self, weights: AttentionWeights[NativeMatrix], with_keys: bool) -> Attention:
        """The struct, made once; without the matrices of keys and values where these are there already."""
        key = 2 * id(weights) + with_keys
        if key not in self._blocks:
            part = weights.part
            block = Attention(
                norm=_at(weights.norm), heads=part.n, kv_heads=part.kv, head_dim=part.dim,
                rope_dims=weights.rope_dims, norm_each=part.qk_norm == "head", causal=weights.causal,
                window=part.window or 0, eps=weights.eps, scale=part.scale,
                clip=math.inf if part.clip is None else part.clip, softcap=part.softcap or 0.0, q=weights.q.struct,
                o=weights.o.struct,
            )  # fmt: skip
            if with_keys:
                block.k, block.v = weights.k.struct, weights.v.struct
            if weights.q_norm is not None and weights.k_norm is not None:
                block.q_norm, block.k_norm = _at(weights.q_norm), _at(weights.k_norm)
            if weights.sinks is not None:
                block.sinks = _at(weights.sinks)
            self._blocks[key] = block, weights
        return self._blocks[key][0]

    def _kept(self, array: npt.NDArray[_Item]) -> npt.NDArray[_Item]:
        """A copy in large pages."""
        room = self._arena.allocate(array.nbytes).view(array.dtype).reshape(array.shape)
        np.copyto(room, array)
        return room


def keys_of(kept: KeptKeys) -> Keys:
    """Where these lie, until there is more room; they have to outlive it."""
    if kept.place is None:
        parts = (kept.keys, kept.values, kept.key_steps, kept.value_steps)
        strides = [0 if part is None else part.strides[0] // part.itemsize for part in parts]
        kept.place = Keys(*(None if part is None else _at(part) for part in parts), *strides)
    place: Keys = kept.place
    return place


def _at(array: npt.NDArray[Any]) -> int:
    """The address of its first number: `array.ctypes` takes three times as long, and every token asks for many."""
    try:
        return addressof(c_char.from_buffer(array))  # type: ignore[arg-type]
    except (TypeError, ValueError):  # what is empty, or not to be written
        return int(array.ctypes.data)


def _addresses(experts: Sequence[NativeExpert]) -> Any:
    return (c_void_p * len(experts))(*[expert.address for expert in experts])


def _limit(spec: FfnSpec) -> float:
    return math.inf if spec.act.limit is None else spec.act.limit
