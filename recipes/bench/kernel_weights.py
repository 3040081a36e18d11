"""The weights of `make bench-kernels`: far more than any cache holds, laid out as in a pack."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

import numpy as np

from moert.kernels.memory import Arena
from moert.kernels.structs import KINDS, Matrix
from moert.pack.codec import n_groups, row_bytes
from recipes.bench.sized import sized

WORKING_SET = sized(448 << 20, 224 << 20)  # bytes: room for two heads of 16 bits
FLOATS = {16: KINDS["BF16"], 32: KINDS["F32"]}  # bits → kind

Shape = tuple[int, int]
"""Rows, cols."""


class Material:
    """Bytes that all cases take their matrices from, since what a kernel takes does not depend on the values.

    Any two bytes are a small float16 and a small bfloat16 as well, so they can be scales as well as codes.
    """

    def __init__(self, nbytes: int = WORKING_SET) -> None:
        some = np.random.default_rng(0).integers(0x3000, 0x3800, 1 << 20, dtype=np.uint16).view(np.uint8)
        self.data = Arena().allocate(nbytes)
        for start in range(0, nbytes, len(some)):
            self.data[start : start + len(some)] = some[: nbytes - start]
        self._at = 0

    def restart(self) -> None:
        self._at = 0

    def matrix(self, shape: Shape, bits: int, group: int) -> Matrix | None:
        """The next one: codes, scales and minima one after the other; None where the bytes are at an end. group 0: one
        scale a row."""
        rows, cols = shape
        group = group or cols
        of_codes = rows * (cols * bits // 8 if bits in FLOATS else row_bytes(cols, bits))
        of_scales = 0 if bits in FLOATS else 2 * rows * n_groups(cols, group)
        start = self._at
        if start + of_codes + 2 * of_scales > len(self.data):
            return None
        self._at += -(-(of_codes + 2 * of_scales) // 64) * 64
        data = self.data.ctypes.data + start
        if bits in FLOATS:
            return Matrix(data, None, None, None, FLOATS[bits], rows, cols, cols)
        return Matrix(data, data + of_codes, data + of_codes + of_scales, None, bits, rows, cols, group)

    def matrices(self, shapes: Sequence[Shape], bits: int, group: int, most: int | None = None) -> list[Matrix]:
        """As many as there is room for, at most `most`, the shapes in turn."""
        self.restart()
        found: list[Matrix] = []
        for shape in cycle(shapes):
            matrix = None if len(found) == most else self.matrix(shape, bits, group)
            if matrix is None:
                return found
            found.append(matrix)
        raise AssertionError("cycle ended")


def nbytes_of(matrix: Matrix) -> int:
    """What a product reads of a matrix."""
    if matrix.scale is None:
        return int(matrix.rows * matrix.cols * (4 if matrix.kind == KINDS["F32"] else 2))
    return int(matrix.rows * (row_bytes(matrix.cols, matrix.kind) + 4 * n_groups(matrix.cols, matrix.group)))
