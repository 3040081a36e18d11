"""The speed at which the native kernels multiply one token with weights that no cache holds: the time of a decoded
token follows from it.

Bytes of weights a second, scales among them. `make bench-kernels` measures the same at length, beside peers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from ctypes import addressof, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np

from moert.kernels.library import KINDS, Library, Matrix, NativeFailed, check
from moert.kernels.memory import Arena
from moert.pack.codec import CODES, U8, Width, n_groups, row_bytes, stream_bytes

WIDTHS = (2, 3, 4, 8, 16)
MOST_BYTES = 256 << 20
"""The bytes of all weights: more than the caches of most processors hold."""
PASSES = 4
_ROWS, _COLS, _GROUP = 2048, 2048, 64
_FILL = 1 << 20


@dataclass(frozen=True, eq=False)
class Weights:
    """Matrices of one width, one after the other in the same bytes as the matrices of all other widths; `nbytes` of
    each."""

    bits: Width
    matrices: Sequence[Matrix]
    nbytes: int

    @classmethod
    def laid_out(cls, data: U8, bits: Width, trellis: bool = False) -> Weights:
        """Returns as many matrices as `data` has room for. At 16 bits they are bfloat16, else codes in groups of 64
        inputs, or trellis codes."""
        base = data.ctypes.data
        if trellis:
            stream, step = stream_bytes(bits, _ROWS, _COLS), CODES[bits].step
            nbytes = stream + 2 * _ROWS
            places = range(base, base + len(data) - nbytes + 1, nbytes)
            made = [Matrix(at, at + stream, None, None, -step, _ROWS, _COLS, _COLS) for at in places]
            return cls(bits, made, nbytes)
        bits = int(bits)
        codes = 2 * _ROWS * _COLS if bits == 16 else _ROWS * row_bytes(_COLS, bits)
        scales = 0 if bits == 16 else 2 * _ROWS * n_groups(_COLS, _GROUP)
        nbytes = codes + 2 * scales
        kind = KINDS["BF16"] if bits == 16 else bits

        def matrix(at: int) -> Matrix:
            if bits == 16:
                return Matrix(at, None, None, None, kind, _ROWS, _COLS, _COLS)
            return Matrix(at, at + codes, at + codes + scales, None, kind, _ROWS, _COLS, _GROUP)

        return cls(bits, [matrix(base + place * nbytes) for place in range(len(data) // nbytes)], nbytes)


def kernel_speeds(
    library: Library, threads: int, most_bytes: int = MOST_BYTES, clock: Callable[[], float] = time.perf_counter,
    trellis: bool = False,
) -> dict[Width, float]:  # fmt: skip
    """Returns for each width, of plain codes or else of trellis codes, the speed [bytes/s] of the best instruction set
    on `threads` threads, in half a second or so; takes `most_bytes`.

    Raises NativeFailed and MemoryError where there is no memory for it.
    """
    data = _small_numbers(max(most_bytes, 2 * _ROWS * _COLS))
    functions: Any = library.functions
    pool = functions.moert_pool_open(library.choose(), threads)
    if not pool:
        raise NativeFailed(f"no memory for {threads} threads")
    try:
        widths: Collection[Width] = CODES if trellis else WIDTHS
        return {bits: _speed(functions, pool, Weights.laid_out(data, bits, trellis), clock) for bits in widths}
    finally:
        functions.moert_pool_close(pool)


def _speed(functions: Any, pool: object, weights: Weights, clock: Callable[[], float]) -> float:
    """Returns the speed [bytes/s] of the fastest of PASSES over all matrices, each against one vector."""
    x, y = np.full((1, _COLS), 0.5, np.float32), np.empty((1, _ROWS), np.float32)
    table = (c_void_p * len(weights.matrices))(*map(addressof, weights.matrices))
    output = (c_void_p * 1)(y.ctypes.data)
    places = [addressof(table) + 8 * place for place in range(len(table))]

    def one_pass() -> float:
        started = clock()
        for at in places:
            check(functions.moert_linear(pool, 1, at, x, 1, output))
        return clock() - started

    return len(places) * weights.nbytes / min(one_pass() for _ in range(PASSES))


def _small_numbers(nbytes: int) -> U8:
    """Returns uint8 [nbytes]. Any two of these bytes are a small float16 and a small bfloat16, so they are scales as
    well as codes."""
    some = np.random.default_rng(0).integers(0x3000, 0x3800, _FILL // 2, dtype=np.uint16).view(np.uint8)
    data = Arena().allocate(nbytes)
    for start in range(0, nbytes, _FILL):
        data[start : start + _FILL] = some[: nbytes - start]
    return data
