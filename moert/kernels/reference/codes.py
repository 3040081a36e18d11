"""Matrices as they are stored → float32."""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from moert.kernels.backend import Stored
from moert.pack.codec import F32, Mxfp4Matrix, QuantizedMatrix, times_two


def weights(stored: Stored | Mxfp4Matrix) -> F32:
    """A matrix as float32 [out, in], bit for bit what `moert.pack.codec.dequantize` gives."""
    return times_two(_dequantize(stored), stored.power) if isinstance(stored, QuantizedMatrix) else stored.widened()


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
