"""The reference codec: integer codes of 2, 3, 4 or 8 bits to bytes and back, in numpy. SPEC.md says the same in words.

A quantized matrix is w[i, j] = scale[i, g] * code[i, j] + minimum[i, g] with g = j // group_size. A row of codes is
stored as planes: widths 2, 4 and 8 are one plane of that width; width 3 is a plane of the two low bits followed by a
plane of the high bit. Inside a plane, code j takes the bits [j*b, (j+1)*b) of the row, least significant bit first;
the last byte of a plane is filled with zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

INT_WIDTHS = (2, 3, 4, 8)
WIDTHS = (*INT_WIDTHS, 16)
_PLANES = {2: (2,), 3: (2, 1), 4: (4,), 8: (8,)}

Width = float
"""Bits of a weight: a whole number but in trellis codes."""
Codes = Literal["plain", "trellis"]
"""The codes of experts' projections below 16 bits: all plain, or trellis codes below 8 (moert.pack.trellis)."""

Form16 = Literal["F16", "BF16", "MXFP4"]
"""The form in which a projection of 16 bits is stored: two bytes a weight, or the four bits that its source has it
in."""

U8 = npt.NDArray[np.uint8]
F16 = npt.NDArray[np.float16]
F32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class QuantizedMatrix:
    """One quantized projection.

    Codes are packed in `qweight` [out, row_bytes]; `scale` and `minimum` are [out, n_groups] in float16. `group_size`
    counts inputs; the last group of a row may be shorter. All weights are times 2**power: see `power_of`.
    """

    bits: int
    in_features: int
    group_size: int
    qweight: U8
    scale: F16
    minimum: F16
    power: int = 0


LEAST_POWER, MOST_POWER = -126, 127
_LEAST, _MOST = 2.0**-8, 65504.0  # of a matrix's largest magnitude, whose scales float16 holds


def power_of(weights: F32) -> int:
    """Returns the power of two (its exponent) that a matrix is divided by before its scales become float16: 0 for most
    matrices, else the one that leaves a largest magnitude from 2**14 on and below 2**15."""
    largest = float(np.abs(weights).max(initial=0.0))
    if largest == 0 or _LEAST <= largest < _MOST or not np.isfinite(largest):
        return 0
    return max(LEAST_POWER, int(np.frexp(largest)[1]) - 15)


def power_of_halves(weights: F32) -> int:
    """Returns the same exponent for a matrix that is stored in float16: 0 where float16 holds it exactly."""
    power = power_of(weights)
    with np.errstate(over="ignore"):
        return power if power and not np.array_equal(weights.astype(np.float16), weights) else 0


def times_two(weights: F32, power: int) -> F32:
    """Returns the weights times 2**power; the weights themselves for 0."""
    return np.ldexp(weights, power) if power else weights


def row_bytes(in_features: int, bits: int) -> int:
    """Returns the bytes of one packed row of `in_features` codes."""
    return sum((in_features * width + 7) // 8 for width in _PLANES[bits])


def n_groups(in_features: int, group_size: int) -> int:
    return (in_features + group_size - 1) // group_size


def _pack_plane(codes: U8, width: int) -> U8:
    """Returns bytes [out, ceil(in * width / 8)] for codes [out, in] below 2**width."""
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
    """Returns bytes [out, row_bytes(in, bits)] for codes [out, in]. Raises ValueError for a code of 2**bits or more."""
    if codes.size and int(codes.max()) >> bits:
        raise ValueError(f"a code of {int(codes.max())} does not fit in {bits} bits")
    planes, shift = [], 0
    for width in _PLANES[bits]:
        planes.append(_pack_plane((codes >> shift) & np.uint8((1 << width) - 1), width))
        shift += width
    return np.concatenate(planes, axis=1)


def unpack_codes(packed: U8, bits: int, in_features: int) -> U8:
    """Returns codes [out, in] for bytes [out, row_bytes]: the inverse of pack_codes."""
    codes = np.zeros((packed.shape[0], in_features), dtype=np.uint8)
    start, shift = 0, 0
    for width in _PLANES[bits]:
        stop = start + (in_features * width + 7) // 8
        codes |= _unpack_plane(packed[:, start:stop], width, in_features) << np.uint8(shift)
        start, shift = stop, shift + width
    return codes


def dequantize(matrix: QuantizedMatrix) -> F32:
    """Returns the weights [out, in] in float32, computed in float32 from the float16 scale and minimum."""
    codes = unpack_codes(matrix.qweight, matrix.bits, matrix.in_features).astype(np.float32)
    scale = _per_input(matrix.scale, matrix.group_size, matrix.in_features)
    minimum = _per_input(matrix.minimum, matrix.group_size, matrix.in_features)
    weights: F32 = codes * scale + minimum
    return times_two(weights, matrix.power)


def _per_input(per_group: F16, group_size: int, in_features: int) -> F32:
    wide: F32 = np.repeat(per_group.astype(np.float32), group_size, axis=1)[:, :in_features]
    return wide


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)
"""The magnitudes of MXFP4's codes (OCP Microscaling Formats 1.0); codes from 8 on are the same numbers below zero."""
MX_GROUP, _MX_BIAS = 32, 127


@dataclass(frozen=True)
class Mxfp4Matrix:
    """A matrix in MXFP4: w[i, j] = value of code[i, j] * 2**(exponent[i, j // 32] - 127). Codes are packed as codes of
    4 bits are, in `qweight` [out, ceil(in / 2)]; `exponent` is uint8 [out, ceil(in / 32)]."""

    in_features: int
    qweight: U8
    exponent: U8

    def widened(self) -> F32:
        """Returns the weights [out, in] in float32, exact."""
        codes = unpack_codes(self.qweight, 4, self.in_features)
        values = np.concatenate([E2M1, -E2M1])[codes]
        exponent = np.repeat(self.exponent.astype(np.int32) - _MX_BIAS, MX_GROUP, axis=1)[:, : self.in_features]
        wide: F32 = np.ldexp(values, exponent)
        return wide


def to_mxfp4(weights: F32) -> Mxfp4Matrix | None:
    """Returns the matrix [out, in] as MXFP4, or None if MXFP4 does not hold it exactly. A group gets the smallest power
    of two that reaches its largest magnitude: a group that a larger power holds lies on this grid too."""
    out_features, in_features = weights.shape
    padded = np.zeros((out_features, n_groups(in_features, MX_GROUP) * MX_GROUP), dtype=np.float32)
    padded[:, :in_features] = weights
    groups = padded.reshape(out_features, -1, MX_GROUP)
    largest = np.abs(groups).max(axis=2)
    fraction, power = np.frexp(largest)  # largest = fraction * 2**power, fraction from 0.5 on and below 1
    exponent = np.where(largest > 0, power - np.where(fraction <= 0.75, 3, 2), 0)
    if not np.isfinite(largest).all() or exponent.min(initial=0) <= -_MX_BIAS or exponent.max(initial=0) > _MX_BIAS:
        return None
    scaled = np.ldexp(groups, -exponent[:, :, None])
    magnitude = np.searchsorted(E2M1, np.abs(scaled)).astype(np.uint8)
    if not np.array_equal(E2M1[np.minimum(magnitude, 7)], np.abs(scaled)):
        return None
    codes = (magnitude | np.where(np.signbit(scaled), 8, 0).astype(np.uint8)).reshape(out_features, -1)
    packed = pack_codes(np.ascontiguousarray(codes[:, :in_features]), 4)
    return Mxfp4Matrix(in_features, packed, (exponent + _MX_BIAS).astype(np.uint8))


def to_bfloat16(values: F32) -> npt.NDArray[np.uint16]:
    """Returns float32 numbers as bfloat16 bit patterns, rounded to nearest even (NaN stays NaN)."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    out = np.where(np.isnan(values), np.uint32(0x7FC00000), rounded) >> np.uint32(16)
    patterns: npt.NDArray[np.uint16] = out.astype(np.uint16)
    return patterns


def from_bfloat16(patterns: npt.NDArray[np.uint16]) -> F32:
    """Returns bfloat16 bit patterns as float32, exact."""
    wide: F32 = (patterns.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return wide
