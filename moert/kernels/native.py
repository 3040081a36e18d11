"""The backend that multiplies the pack's bytes as they are, in C (csrc/), activations rounded to 8 bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from ctypes import addressof, byref, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moert.kernels.arena import Arena
from moert.kernels.backend import AttentionBlock, StoredWeights
from moert.kernels.library import ACTIVATIONS, KINDS, Attention, Ffn, Library, Matrix, NativeFailed, check
from moert.pack.codec import U8, QuantizedMatrix
from moert.pack.layout import group_of
from moert.pack.model_spec import ExpertKey, MoeSpec
from moert.pack.reader import Pack

_KIND_OF = {torch.float16: KINDS["F16"], torch.bfloat16: KINDS["BF16"], torch.float32: KINDS["F32"]}
_Item = TypeVar("_Item", bound=np.generic)
_Plan = tuple[str, tuple[int, ...], tuple[Any, ...]]


@dataclass(frozen=True)
class NativeMatrix:
    """A dense matrix; `stored` lies where `struct` points to."""

    stored: StoredWeights
    struct: Matrix

    @property
    def rows(self) -> int:
        return int(self.struct.rows)


class NativeExpert:
    """A feed-forward part; `alive` is what holds its bytes."""

    def __init__(self, ffn: Ffn, alive: object) -> None:
        self.ffn, self.address, self._alive = ffn, addressof(ffn), alive


class NativeBackend:
    """See `moert.kernels.backend.Backend`. `isa` is a number of Library.choose."""

    widens = False

    def __init__(self, library: Library, isa: int, threads: int) -> None:
        self.name = library.instruction_sets[isa].name
        self._call: Any = library.functions
        self._pool = self._call.moert_pool_open(isa, threads)
        if not self._pool:
            raise NativeFailed(f"no memory for {threads} threads")
        self._arena = Arena()
        self._plans: dict[tuple[Pack, ExpertKey], list[_Plan]] = {}  # experts come again and again, at other addresses
        self._routed: tuple[Tensor, Any, Tensor] | None = None
        self._first_token = torch.zeros(1 << 16, dtype=torch.int32)  # top_k is below 2^16
        self._starts = torch.arange(1 << 16, dtype=torch.int32)

    @property
    def steps(self) -> NativeBackend:
        return self

    def close(self) -> None:
        """Ends the threads. Nothing may be computed after that."""
        if self._pool:
            self._call.moert_pool_close(self._pool)
            self._pool, self._call = None, None

    def matrix(self, stored: StoredWeights) -> NativeMatrix:
        if isinstance(stored, QuantizedMatrix):
            qweight, scale, minimum = self._kept(stored.qweight), self._kept(stored.scale), self._kept(stored.minimum)
            kept: StoredWeights = QuantizedMatrix(
                stored.bits, stored.in_features, stored.group_size, qweight, scale, minimum
            )
            struct = Matrix(
                qweight.ctypes.data, scale.ctypes.data, minimum.ctypes.data, stored.bits, len(qweight),
                stored.in_features, stored.group_size,
            )  # fmt: skip
        else:
            if stored.dtype not in _KIND_OF:
                stored = stored.float()
            plain = stored.contiguous()
            kept = torch.from_numpy(self._kept(plain.view(torch.uint8).numpy())).view(plain.dtype)
            struct = Matrix(kept.data_ptr(), None, None, _KIND_OF[kept.dtype], *kept.shape, kept.shape[1])
        return NativeMatrix(kept, struct)

    def rows(self, matrix: NativeMatrix, ids: Sequence[int]) -> Tensor:
        out = torch.empty(len(ids), matrix.struct.cols)
        places = (c_int64 * len(ids))(*ids)
        check(self._call.moert_rows(self._pool, matrix.struct, len(ids), places, out.data_ptr()))
        return out

    def linear(self, x: Tensor, matrices: Sequence[NativeMatrix]) -> Tensor:
        x = x.contiguous()
        outputs = [torch.empty(x.shape[0], matrix.rows) for matrix in matrices]
        count = len(matrices)
        check(
            self._call.moert_linear(
                self._pool, count, (c_void_p * count)(*(addressof(matrix.struct) for matrix in matrices)),
                x.data_ptr(), x.shape[0], (c_void_p * count)(*(output.data_ptr() for output in outputs)),
            )
        )  # fmt: skip
        return outputs[0] if count == 1 else torch.cat(outputs, 1)

    def expert(self, pack: Pack, key: ExpertKey, buffer: U8) -> NativeExpert:
        plan = self._plans.get((pack, key))
        if plan is None:
            plan = self._plans[pack, key] = [_plan(pack, key, name) for name in pack.entry(key).bits]
        start = buffer.ctypes.data
        ffn = Ffn(**{name: Matrix(*(start + at for at in places), *rest) for name, places, rest in plan})
        return NativeExpert(ffn, buffer)

    def dense(self, gate: NativeMatrix | None, up: NativeMatrix, down: NativeMatrix) -> NativeExpert:
        ffn = Ffn(up=up.struct, down=down.struct)
        if gate is not None:
            ffn.gate = gate.struct
        return NativeExpert(ffn, (gate, up, down))

    def mix(self, experts: Sequence[NativeExpert], weights: Tensor, x: Tensor, out: Tensor, moe: MoeSpec) -> None:
        count = len(experts)
        self._mixture(
            moe, count, (c_void_p * count)(*[expert.address for expert in experts]), self._starts.data_ptr(),
            self._first_token.data_ptr(), weights, x, out,
        )  # fmt: skip

    def run_all(
        self, experts: Sequence[NativeExpert], counts: Sequence[int], tokens: Tensor, weights: Tensor, x: Tensor,
        out: Tensor, moe: MoeSpec,
    ) -> None:  # fmt: skip
        n, rows = len(experts), tokens.to(torch.int32)
        starts = (c_int32 * (n + 1))(0, *accumulate(counts))
        addresses = (c_void_p * n)(*[expert.address for expert in experts])
        self._mixture(moe, n, addresses, addressof(starts), rows.data_ptr(), weights.contiguous(), x, out)

    def parts(self, experts: Sequence[NativeExpert], x: Tensor, moe: MoeSpec, out: Tensor) -> None:
        count = len(experts)
        check(
            self._call.moert_parts(
                self._pool, ACTIVATIONS[moe.activation], _limit(moe), count,
                (c_void_p * count)(*[expert.address for expert in experts]), self._starts.data_ptr(),
                self._first_token.data_ptr(), x.data_ptr(), 1, out.data_ptr(),
            )
        )  # fmt: skip

    def add_parts(self, parts: Tensor, weights: Tensor, out: Tensor) -> None:
        self._call.moert_add_parts(
            self._pool, parts.data_ptr(), weights.data_ptr(), self._first_token.data_ptr(), *parts.shape, out.data_ptr()
        )

    def attention(self, block: AttentionBlock[NativeMatrix]) -> NativeAttention:
        return NativeAttention(self, block)

    def route(
        self, x: Tensor, norm: Tensor, eps: float, router: NativeMatrix, moe: MoeSpec
    ) -> tuple[Tensor, list[int], Tensor]:
        if self._routed is None or self._routed[0].shape != x.shape or len(self._routed[1]) != moe.top_k:
            self._routed = torch.empty_like(x), (c_int64 * moe.top_k)(), torch.empty(moe.top_k)
        hidden, experts, weights = self._routed
        check(
            self._call.moert_route(
                self._pool, norm.data_ptr(), eps, router.struct, x.data_ptr(), moe.top_k, moe.norm_topk,
                hidden.data_ptr(), experts, weights.data_ptr(),
            )
        )  # fmt: skip
        return hidden, experts[:], weights

    def head(self, x: Tensor, norm: Tensor, eps: float, factor: float, matrix: NativeMatrix) -> Tensor:
        y = torch.empty(1, matrix.rows)
        check(
            self._call.moert_head(
                self._pool, norm.data_ptr(), eps, factor, matrix.struct, x.data_ptr(), y.data_ptr()
            )
        )  # fmt: skip
        return y

    def attend(self, struct: Attention, *arguments: Any) -> None:
        check(self._call.moert_attend(self._pool, byref(struct), *arguments))

    def _mixture(
        self, moe: MoeSpec, count: int, experts: Any, starts: int, tokens: int, weights: Tensor, x: Tensor, out: Tensor
    ) -> None:
        check(
            self._call.moert_mixture(
                self._pool, ACTIVATIONS[moe.activation], _limit(moe), count, experts, starts, tokens,
                weights.data_ptr(), x.data_ptr(), x.shape[0], out.data_ptr(),
            )
        )  # fmt: skip

    def _kept(self, array: npt.NDArray[_Item]) -> npt.NDArray[_Item]:
        """A copy in large pages."""
        room = self._arena.allocate(array.nbytes).view(array.dtype).reshape(array.shape)
        np.copyto(room, array)
        return room


def _limit(moe: MoeSpec) -> float:
    return math.inf if moe.activation_limit is None else moe.activation_limit


class NativeAttention:
    """See `moert.kernels.backend.AttentionStep`."""

    def __init__(self, backend: NativeBackend, block: AttentionBlock[NativeMatrix]) -> None:
        self._backend, self._alive = backend, block
        self._struct = Attention(
            norm=block.norm.data_ptr(), heads=block.heads, kv_heads=block.kv_heads, head_dim=block.head_dim,
            eps=block.eps, scale=block.scale, clip=math.inf if block.clip is None else block.clip,
        )  # fmt: skip
        for name, matrix in (("q", block.q), ("k", block.k), ("v", block.v), ("o", block.o)):
            if matrix is not None:
                setattr(self._struct, name, matrix.struct)
        for name, norm in (("q_norm", block.q_norm), ("k_norm", block.k_norm)):
            if norm is not None:
                setattr(self._struct, name, norm.data_ptr())

    def __call__(
        self, x: Tensor, keys: Tensor, values: Tensor, length: int, turn: Tensor | None, bias: Tensor | None
    ) -> None:
        self._backend.attend(
            self._struct, x.data_ptr(), keys.data_ptr(), values.data_ptr(), keys.stride(0), length,
            None if turn is None else turn.data_ptr(), None if bias is None else bias.data_ptr(),
            0 if bias is None else bias.stride(0),
        )  # fmt: skip


def _plan(pack: Pack, key: ExpertKey, name: str) -> _Plan:
    """A projection: its name, where its parts begin in the file, and the rest of its struct."""
    quantization, layout = pack.manifest.quantization, pack.layout(key)
    rows, cols = pack.manifest.model.projection_shape(name)
    width = pack.entry(key).bits[name]
    if width == 16:
        place = layout.data_offset + layout.slot(f"{name}.weight").start
        return name, (place,), (None, None, KINDS[quantization.dtype16], rows, cols, cols)
    places = tuple(layout.data_offset + layout.slot(f"{name}.{part}").start for part in ("qweight", "scale", "min"))
    return name, places, (width, rows, cols, group_of(cols, quantization.group_size))
