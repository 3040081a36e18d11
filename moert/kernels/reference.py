"""The readable torch version of everything that is done with expert weights. Faster kernels are tested against it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from moert.pack.codec import F32, QuantizedMatrix
from moert.pack.reader import Projection

Lease = Callable[[int], AbstractContextManager[Mapping[str, Projection]]]
"""lease(expert) lends the projections of one expert of the layer at hand for the length of a with block."""


def weights(projection: Projection) -> Tensor:
    """One projection as float32 [out, in], bit for bit what `moert.pack.codec.dequantize` gives."""
    if isinstance(projection, QuantizedMatrix):
        return torch.from_numpy(_dequantize(projection))
    return torch.from_numpy(projection)


def expert_ffn(projections: Mapping[str, Projection], x: Tensor, activation: str) -> Tensor:
    """x [rows, d_model] → [rows, d_model]: down(act(up(x))), or down(act(gate(x)) * up(x)) if there is a gate."""
    act = ACTIVATIONS[activation]
    up = F.linear(x, weights(projections["up"]))
    if "gate" in projections:
        hidden = act(F.linear(x, weights(projections["gate"]))) * up
    else:
        hidden = act(up)
    return F.linear(hidden, weights(projections["down"]))


def demanded(experts: Tensor) -> list[int]:
    """experts [tokens, top_k] → the ids that are needed, ascending, each once; -1 (dropped) is left out."""
    return sorted(set(experts.flatten().tolist()) - {-1})


def grouped_ffn(hidden: Tensor, experts: Tensor, weights: Tensor, activation: str, lease: Lease) -> Tensor:
    """The mixture of one layer: each needed expert is leased once, in ascending order, and runs all of its rows.

    hidden [tokens, d_model] float32; experts [tokens, top_k] int64, -1 where the expert was full; weights
    [tokens, top_k]. Returns [tokens, d_model]; tokens without any expert get zeros.
    """
    out = torch.zeros_like(hidden)
    if hidden.shape[0] == 1:
        chosen = sorted(zip(experts[0].tolist(), weights[0].tolist(), strict=True))
        for expert, weight in chosen:
            if expert >= 0:
                with lease(expert) as projections:
                    out += expert_ffn(projections, hidden, activation) * weight
        return out
    for expert in demanded(experts):
        rows, place = torch.where(experts == expert)
        with lease(expert) as projections:
            result = expert_ffn(projections, hidden[rows], activation)
        out.index_add_(0, rows, result * weights[rows, place, None])
    return out


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
