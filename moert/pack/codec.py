"""The reference codec: integer codes of 2, 3, 4 or 8 bits to bytes and back, in numpy. SPEC.md says the same in words.

A quantised matrix is w[i, j] = scale[i, g] * code[i, j] + minimum[i, g] with g = j // group_size. A row of codes is
stored as planes: widths 2, 4 and 8 are one plane of that width; width 3 is a plane of the two low bits followed by a
plane of the high bit. Inside a plane, code j takes the bits [j*b, (j+1)*b) of the row, least significant bit first;
the last byte of a plane is filled with zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

INT_WIDTHS = (2, 3, 4, 8)
WIDTHS = (*INT_WIDTHS, 16)
_PLANES = {2: (2,), 3: (2, 1), 4: (4,), 8: (8,)}

U8 = npt.NDArray[np.uint8]
F16 = npt.NDArray[np.float16]
F32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class QuantizedMatrix:
    """One quantised projection.

    codes are packed in `qweight` [out, row_bytes]; `scale` and `minimum` are [out, n_groups] in float16.
    `group_size` counts inputs; the last group of a row may be shorter.
    """

    bits: int
    in_features: int
    group_size: int
    qweight: U8
    scale: F16
    minimum: F16


def row_bytes(in_features: int, bits: int) -> int:
    """Bytes of one packed row of `in_features` codes."""
    return sum((in_features * width + 7) // 8 for width in _PLANES[bits])


def n_groups(in_features: int, group_size: int) -> int:
    return (in_features + group_size - 1) // group_size


def _pack_plane(codes: U8, width: int) -> U8:
    """codes [out, in] below 2**width → bytes [out, ceil(in * width / 8)]."""
    per_byte = 8 // width
    out, n = codes.shape
    padded = np.zeros((out, (n + per_byte - 1) // per_byte * per_byte), dtype=np.uint8)
    padded[:, :n] = codes
    packed: U8 = padded[:, ::per_byte].copy()
    for place in range(1, per_byte):
        packed |= padded[:, place::per_byte] << np.uint8(place * width)
    return packed


def _unpack_plane(packed: U8, width: int, n: int) -> U8:
    per_byte = 8 // width
    shifts = (np.arange(per_byte, dtype=np.uint8) * width).astype(np.uint8)
    codes = (packed[:, :, None] >> shifts) & np.uint8((1 << width) - 1)
    flat: U8 = codes.reshape(packed.shape[0], -1)[:, :n]
    return flat


def pack_codes(codes: U8, bits: int) -> U8:
    """codes [out, in], each below 2**bits → bytes [out, row_bytes(in, bits)]."""
    if codes.size and int(codes.max()) >> bits:
        raise ValueError(f"a code of {int(codes.max())} does not fit in {bits} bits")
    planes, shift = [], 0
    for width in _PLANES[bits]:
        planes.append(_pack_plane((codes >> shift) & np.uint8((1 << width) - 1), width))
        shift += width
    return np.concatenate(planes, axis=1)


def unpack_codes(packed: U8, bits: int, in_features: int) -> U8:
    """Inverse of pack_codes: bytes [out, row_bytes] → codes [out, in]."""
    codes = np.zeros((packed.shape[0], in_features), dtype=np.uint8)
    start, shift = 0, 0
    for width in _PLANES[bits]:
        stop = start + (in_features * width + 7) // 8
        codes |= _unpack_plane(packed[:, start:stop], width, in_features) << np.uint8(shift)
        start, shift = stop, shift + width
    return codes


def dequantize(matrix: QuantizedMatrix) -> F32:
    """The weights [out, in] in float32, computed in float32 from the float16 scale and minimum."""
    codes = unpack_codes(matrix.qweight, matrix.bits, matrix.in_features).astype(np.float32)
    scale = _per_input(matrix.scale, matrix.group_size, matrix.in_features)
    minimum = _per_input(matrix.minimum, matrix.group_size, matrix.in_features)
    weights: F32 = codes * scale + minimum
    return weights


def _per_input(per_group: F16, group_size: int, in_features: int) -> F32:
    wide: F32 = np.repeat(per_group.astype(np.float32), group_size, axis=1)[:, :in_features]
    return wide


def to_bfloat16(values: F32) -> npt.NDArray[np.uint16]:
    """float32 → bfloat16 bit patterns, rounded to nearest even (NaN stays NaN)."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    out = np.where(np.isnan(values), np.uint32(0x7FC00000), rounded) >> np.uint32(16)
    patterns: npt.NDArray[np.uint16] = out.astype(np.uint16)
    return patterns


def from_bfloat16(patterns: npt.NDArray[np.uint16]) -> F32:
    """bfloat16 bit patterns → float32, exact."""
    wide: F32 = (patterns.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return wide
