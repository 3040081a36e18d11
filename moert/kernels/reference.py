"""The readable torch version of all arithmetic with weights. Faster kernels are tested against it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from moert.kernels.backend import StoredWeights
from moert.pack.codec import F32, U8, QuantizedMatrix
from moert.pack.model_spec import ExpertKey, MoeSpec
from moert.pack.reader import Pack, Projection


def weights(projection: Projection) -> Tensor:
    """One projection as float32 [out, in], bit for bit what `moert.pack.codec.dequantize` gives."""
    if isinstance(projection, QuantizedMatrix):
        return torch.from_numpy(_dequantize(projection))
    return torch.from_numpy(projection)


def rows(stored: StoredWeights, ids: Sequence[int]) -> Tensor:
    """Rows of a matrix [out, in] as float32 [len(ids), in]."""
    if isinstance(stored, Tensor):
        return F.embedding(torch.tensor(ids), stored).float()
    at = np.asarray(ids)
    picked = QuantizedMatrix(
        stored.bits, stored.in_features, stored.group_size, stored.qweight[at], stored.scale[at], stored.minimum[at]
    )
    return weights(picked)


def ffn(matrices: Mapping[str, Tensor], x: Tensor, moe: MoeSpec) -> Tensor:
    """x [rows, d_model] → [rows, d_model]: down(act(up x)), or down(act(gate x) * up x) if there is a gate.

    With `moe.activation_limit` the gate is clamped to at most the limit and up to ± the limit; without a gate, up to
    at most the limit.
    """
    act, limit = ACTIVATIONS[moe.activation], moe.activation_limit
    up = F.linear(x, matrices["up"])
    if "gate" not in matrices:
        return F.linear(act(up if limit is None else up.clamp(max=limit)), matrices["down"])
    gate = F.linear(x, matrices["gate"])
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return F.linear(act(gate) * up, matrices["down"])


class ReferenceBackend:
    """See `moert.kernels.backend.Backend`. Dense matrices are held in float32, experts unpacked at each use."""

    name = "reference"
    widens = True
    steps = None

    def matrix(self, stored: StoredWeights) -> Tensor:
        if isinstance(stored, Tensor):
            return stored.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        return weights(stored)

    def rows(self, matrix: Tensor, ids: Sequence[int]) -> Tensor:
        return rows(matrix, ids)

    def linear(self, x: Tensor, matrices: Sequence[Tensor]) -> Tensor:
        outputs = [F.linear(x, matrix) for matrix in matrices]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)

    def expert(self, pack: Pack, key: ExpertKey, buffer: U8) -> Callable[[], Mapping[str, Tensor]]:
        def unpacked() -> dict[str, Tensor]:
            return {name: weights(projection) for name, projection in pack.projections(key, buffer).items()}

        return unpacked

    def dense(self, gate: Tensor | None, up: Tensor, down: Tensor) -> Callable[[], Mapping[str, Tensor]]:
        matrices = {"up": up, "down": down} | ({} if gate is None else {"gate": gate})
        return lambda: matrices

    def mix(
        self, experts: Sequence[Callable[[], Mapping[str, Tensor]]], weights: Tensor, x: Tensor, out: Tensor,
        moe: MoeSpec,
    ) -> None:  # fmt: skip
        for expert, weight in zip(experts, weights.tolist(), strict=True):
            out += ffn(expert(), x, moe) * weight

    def parts(
        self, experts: Sequence[Callable[[], Mapping[str, Tensor]]], x: Tensor, moe: MoeSpec, out: Tensor
    ) -> None:
        for expert, part in zip(experts, out, strict=True):
            part.copy_(ffn(expert(), x, moe)[0])

    def add_parts(self, parts: Tensor, weights: Tensor, out: Tensor) -> None:
        for part, weight in zip(parts, weights.tolist(), strict=True):
            out += part * weight

    def run_all(
        self, experts: Sequence[Callable[[], Mapping[str, Tensor]]], counts: Sequence[int], tokens: Tensor,
        weights: Tensor, x: Tensor, out: Tensor, moe: MoeSpec,
    ) -> None:  # fmt: skip
        parts = torch.split(tokens, list(counts)), torch.split(weights, list(counts))
        for expert, rows, factors in zip(experts, *parts, strict=True):
            out.index_add_(0, rows, ffn(expert(), x[rows], moe) * factors[:, None])

    def close(self) -> None:
        pass


def _gelu_tanh(x: Tensor) -> Tensor:
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
    return 0.5 * x * (1.0 + torch.tanh(inner))


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
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
