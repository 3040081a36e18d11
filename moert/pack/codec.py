"""The reference codec: codes of all widths to bytes and back, in numpy. SPEC.md says the same in words.

A quantized matrix is w[i, j] = scale[i, g] * code[i, j] + minimum[i, g] with g = j // group_size. A row of codes is
stored as planes: widths 2, 4 and 8 are one plane of that width; width 3 is a plane of the two low bits followed by a
plane of the high bit. Inside a plane, code j takes the bits [j*b, (j+1)*b) of the row, least significant bit first;
the last byte of a plane is filled with zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt

INT_WIDTHS = (2, 3, 4, 8)
WIDTHS = (*INT_WIDTHS, 16)
_PLANES = {2: (2,), 3: (2, 1), 4: (4,), 8: (8,)}

Width = float
"""Bits of a weight: a whole number but in trellis codes."""
Codes = Literal["plain", "trellis"]
"""The codes of experts' projections below 16 bits: all plain, or trellis codes below 8."""

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
    return _codes(packed, bits, in_features).astype(np.uint8)


def dequantize(matrix: QuantizedMatrix) -> F32:
    """Returns the weights [out, in] in float32, computed in float32 from the float16 scale and minimum."""
    values, n, group = _codes(matrix.qweight, matrix.bits, matrix.in_features), matrix.in_features, matrix.group_size
    scale, minimum = matrix.scale.astype(np.float32), matrix.minimum.astype(np.float32)
    if n % group == 0:
        grouped = values.reshape(len(values), n // group, group)
        grouped *= scale[:, :, None]
        grouped += minimum[:, :, None]
    else:
        values *= np.repeat(scale, group, axis=1)[:, :n]
        values += np.repeat(minimum, group, axis=1)[:, :n]
    return times_two(values, matrix.power)


_AT_ONCE = 1 << 18
"""Bytes of codes whose numbers are looked up in one call."""


def _codes(packed: U8, bits: int, n: int) -> F32:
    """Returns codes [out, n] as a fresh float32 array, looked up a byte at a time."""
    values, start, shift = None, 0, 0
    for width in _PLANES[bits]:
        stop = start + (n * width + 7) // 8
        plane = _plane(packed[:, start:stop], width, n, float(1 << shift))
        values = plane if values is None else np.add(values, plane, out=values)
        start, shift = stop, shift + width
    assert values is not None
    return values


def _plane(packed: U8, width: int, n: int, unit: float) -> F32:
    """Returns the codes of a packed plane [out, bytes], [out, n] in float32, each times `unit`."""
    if width == 8:
        return packed[:, :n].astype(np.float32)
    table, bytes_each = _table(width, unit), packed.shape[1]
    wide = np.empty((len(packed), bytes_each, 8 // width), np.float32)
    rows = max(1, _AT_ONCE // max(1, bytes_each))
    for first in range(0, len(packed), rows):  # numpy makes an index of 8 bytes of each byte
        taken = slice(first, first + rows)
        np.take(table, packed[taken], axis=0, out=wide[taken], mode="clip")  # six times as fast as table[packed]
    return np.ascontiguousarray(wide.reshape(len(packed), -1)[:, :n])


@cache
def _table(width: int, unit: float) -> F32:
    """Returns [256, 8 // width]: the codes that each byte holds, lowest bits first, times `unit`."""
    shifts = np.arange(8 // width) * width
    codes = (np.arange(256)[:, None] >> shifts) & ((1 << width) - 1)
    table: F32 = codes.astype(np.float32) * np.float32(unit)
    return table


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


# Trellis codes: windows of a stream of bits name pairs of weights.
#
# A matrix [out, in] is coded with its inputs turned (see `turned`). Its rows lie in blocks of ROWS, each with a stream
# of bits of its own. A block's steps go over its pairs of inputs 2p and 2p + 1 and, for each of these, over its rows:
# step p * rows + row, each of so many bits. A step's window is the WINDOW bits of the stream that begin with the step's
# own, the first one least significant. Its product with a multiplier, modulo 2^16, names two of the numbers of a table:
# by its highest bits and by those below them. The row's scale times these numbers are the turned weights.
#
# The normalised transform is its own inverse: the matrix times inputs is the turned matrix times the inputs with their
# `signs`, `turned`, over the root of `turned_together`.

WINDOW, ROWS, TAIL = 12, 128, 2
"""Bits of a window, rows of a block, bytes behind the steps of a block, where the last windows end."""
EVEN_ROWS = 8
"""The rows of a matrix's last block are filled up to a multiple of these."""
TURNED = 64
"""Inputs that are turned together, at most."""

_HALVES = {
    5: (2, 6, 10, 15, 20, 24, 29, 34, 40, 44, 52, 60, 68, 78, 95, 127),
    6: (1, 3, 4, 7, 8, 10, 13, 14, 17, 19, 21, 23, 25, 27, 29, 32, 34, 36, 39, 41, 44, 48, 52, 54, 59, 62, 67, 72, 79,
        88, 102, 127),
}  # fmt: skip


@dataclass(frozen=True)
class TrellisCode:
    """The code of one width: the bits of a step, the bits that name a number of the table, and the multiplier."""

    step: int
    index: int
    multiplier: int

    @property
    def table(self) -> npt.NDArray[np.int8]:
        """The numbers, rising. [2**index]"""
        half = _HALVES[self.index]
        return np.array([*(-each for each in half[::-1]), *half], np.int8)

    def values(self, windows: npt.NDArray[np.uint32]) -> F32:
        """Returns the two numbers that each window [...] names. [..., 2]"""
        product = windows * np.uint32(self.multiplier) & 0xFFFF
        first, second = product >> (16 - self.index), product >> (16 - 2 * self.index)
        found: F32 = self.table[np.stack([first, second & ((1 << self.index) - 1)], -1)].astype(np.float32)
        return found


CODES: Mapping[Width, TrellisCode] = {
    1: TrellisCode(2, 5, 19503),
    1.5: TrellisCode(3, 5, 19503),
    2: TrellisCode(4, 5, 19503),
    2.5: TrellisCode(5, 5, 19503),
    3: TrellisCode(6, 5, 19503),
    4: TrellisCode(8, 6, 20591),
}
"""By bits a weight."""


@dataclass(frozen=True)
class TrellisMatrix:
    """A coded projection: the streams of its blocks, one after the other, and the scale of each row [out, 1]. All
    weights are times 2**power: see moert.pack.codec.power_of."""

    bits: Width
    in_features: int
    stream: U8
    scale: F16
    power: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError for a width that has no code, and for a stream of another size than the matrix's."""
        if self.bits not in CODES:
            raise ValueError(f"there is no trellis code of {self.bits} bits: use {', '.join(map(str, CODES))}")
        expected = stream_bytes(self.bits, len(self.scale), self.in_features)
        if self.stream.shape != (expected,) or self.scale.shape != (len(self.scale), 1):
            raise ValueError(f"{self.stream.shape} bytes of codes and scales {self.scale.shape}, expected {expected}")


def rows_of_blocks(out_features: int) -> list[int]:
    """Returns the rows of each block, with those that fill up the last one."""
    full = -(-out_features // EVEN_ROWS) * EVEN_ROWS
    return [min(ROWS, full - first) for first in range(0, full, ROWS)]


def block_bytes(rows: int, in_features: int, step: int) -> int:
    return -(-in_features // 2) * rows * step // 8 + TAIL


@lru_cache(maxsize=1024)
def stream_bytes(bits: Width, out_features: int, in_features: int) -> int:
    """Returns the bytes of all codes of a matrix."""
    blocks, last = divmod(-(-out_features // EVEN_ROWS) * EVEN_ROWS, ROWS)
    whole = blocks * block_bytes(ROWS, in_features, CODES[bits].step)
    return whole + (block_bytes(last, in_features, CODES[bits].step) if last else 0)


def turned_together(in_features: int) -> int:
    """Returns the inputs that are turned together: the largest power of two that divides their number, at most
    TURNED."""
    return min(TURNED, in_features & -in_features)


def signs(in_features: int) -> F32:
    """Returns the factor of each input before it is turned, 1 or -1. [in]"""
    mixed = np.arange(in_features, dtype=np.uint64) * 0x9E3779B1 & 0xFFFFFFFF
    mixed = (mixed ^ mixed >> 15) * 0x85EBCA77 & 0xFFFFFFFF
    return np.where(mixed >> 31, -1, 1).astype(np.float32)


def turned(values: F32) -> F32:
    """Returns values [..., in] after the Hadamard transform of each `turned_together` of them, not normalised: twice
    gives them times that number."""
    size = turned_together(values.shape[-1])
    found, width = np.ascontiguousarray(values).reshape(-1, size), 1
    while width < size:
        pairs = found.reshape(-1, size // (2 * width), 2, width)
        found = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], 2).reshape(-1, size)
        width *= 2
    return found.reshape(values.shape)


def dequantize_trellis(matrix: TrellisMatrix) -> F32:
    """Returns the weights [out, in] in float32: the turned ones, turned back. The numbers of the table are turned,
    which is exact, and multiplied with the scale over the root of `turned_together`."""
    scale = matrix.scale.astype(np.float32) * np.float32(turned_together(matrix.in_features) ** -0.5)
    weights, sign = np.empty((len(scale), matrix.in_features), np.float32), signs(matrix.in_features)
    for first, numbers in zip(range(0, len(scale), ROWS), _blocks(matrix), strict=True):
        rows = slice(first, first + len(numbers))
        np.multiply(turned(numbers) * sign, scale[rows], out=weights[rows])
    return times_two(weights, matrix.power)


def decoded(matrix: TrellisMatrix) -> F32:
    """Returns the numbers of the table that the codes name. [out, in]"""
    return np.concatenate(list(_blocks(matrix)))


def _blocks(matrix: TrellisMatrix) -> Iterator[F32]:
    """Yields these numbers [rows, in] of each block, without the rows that fill up the last one."""
    code, out, pairs, start = CODES[matrix.bits], len(matrix.scale), -(-matrix.in_features // 2), 0
    for number, rows in enumerate(rows_of_blocks(out)):
        stop = start + block_bytes(rows, matrix.in_features, code.step)
        bits = np.unpackbits(matrix.stream[start:stop], bitorder="little")
        at = np.arange(rows * pairs) * code.step
        windows = np.zeros(len(at), np.uint32)
        for i in range(WINDOW):
            windows |= bits[at + i].astype(np.uint32) << np.uint32(i)
        numbers = code.values(windows).reshape(pairs, rows, 2).transpose(1, 0, 2).reshape(rows, -1)
        yield numbers[: out - number * ROWS, : matrix.in_features]
        start = stop


def pack_windows(windows: npt.NDArray[np.uint32], step: int) -> U8:
    """Returns the stream of a block from its steps' windows [pairs * rows], of which each begins with the upper bits of
    the one before."""
    places = np.arange(WINDOW, dtype=np.uint32)
    own = (windows[:, None] >> places[:step] & 1).astype(np.uint8).reshape(-1)
    last = (windows[-1:] >> places[step:] & 1).astype(np.uint8)
    stream = np.zeros(len(windows) * step + 8 * TAIL, np.uint8)
    stream[: len(own)], stream[len(own) : len(own) + len(last)] = own, last
    return np.packbits(stream, bitorder="little")
