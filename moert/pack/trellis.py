"""The reference codec of trellis codes, in numpy: windows of a stream of bits name pairs of weights. SPEC.md says the
same in words.

A matrix [out, in] is coded with its inputs turned (see `turned`). Its rows lie in blocks of ROWS, each with a stream of
bits of its own. A block's steps go over its pairs of inputs 2p and 2p + 1 and, for each of these, over its rows: step
p * rows + row, each of so many bits. A step's window is the WINDOW bits of the stream that begin with the step's own,
the first one least significant. Its product with a multiplier, modulo 2^16, names two of the numbers of a table: by its
highest bits and by those below them. The row's scale times these numbers are the turned weights.

The normalised transform is its own inverse: the matrix times inputs is the turned matrix times the inputs with their
`signs`, `turned`, over the root of `turned_together`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from moert.pack.codec import F16, F32, U8, Width, times_two

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
