"""What `make bench-kernels` times: calls of the native kernels over more weights than any cache holds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import addressof, byref, c_int32, c_void_p
from dataclasses import dataclass
from itertools import cycle
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from moert.kernels.library import (
    ACTIVATIONS,
    KINDS,
    SCORES,
    Act,
    Attention,
    Ffn,
    Heads,
    Library,
    Matrix,
    NativeFailed,
    Norm,
    Positions,
    Router,
    check,
)
from moert.kernels.memory import Arena
from moert.kernels.native import keys_of
from moert.models.kv import Kept
from moert.pack.codec import CODES, F32, n_groups, row_bytes, stream_bytes
from moert.pack.parts import Attention as Parts
from recipes.bench.sized import sized

# How fast this machine reads memory: what a decoded token is measured against.

NBYTES = sized(512 << 20, 32 << 20)  # far more than any cache holds
RUNS = sized(9, 1)


def buffer() -> npt.NDArray[np.uint8]:
    """Memory of numpy's, which asks for large pages."""
    return np.ones(NBYTES, np.uint8)


def reader(data: npt.NDArray[np.uint8], threads: int) -> Callable[[], Any]:
    """Reads `data` at each call: every thread sums its part."""
    parts, pool = np.array_split(data.view(np.int64), threads), ThreadPoolExecutor(threads)
    return lambda: list(pool.map(np.sum, parts))


def read_bandwidth(threads: int, runs: int = RUNS) -> float:
    """Bytes per second, the best of `runs`."""
    read, seconds = reader(buffer(), threads), []
    for _ in range(runs):
        started = time.perf_counter()
        read()
        seconds.append(time.perf_counter() - started)
    return NBYTES / min(seconds)


# The weights of `make bench-kernels`: far more than any cache holds, laid out as in a pack.

WORKING_SET = sized(448 << 20, 224 << 20)  # bytes: room for two heads of 16 bits
FLOATS = {16: KINDS["BF16"], 32: KINDS["F32"]}  # bits → kind

TRELLIS = -1
"""A group that stands for trellis codes."""

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

    def trellis(self, shape: Shape, bits: float) -> Matrix | None:
        """The next one of trellis codes, a stream and the rows' scales."""
        rows, cols = shape
        stream, start = stream_bytes(bits, rows, cols), self._at
        if start + stream + 2 * rows > len(self.data):
            return None
        self._at += -(-(stream + 2 * rows) // 64) * 64
        data = self.data.ctypes.data + start
        return Matrix(data, data + stream, None, None, -CODES[bits].step, rows, cols, cols)

    def matrices(self, shapes: Sequence[Shape], bits: float, group: int, most: int | None = None) -> list[Matrix]:
        """As many as there is room for, at most `most`, the shapes in turn."""
        self.restart()
        found: list[Matrix] = []
        for shape in cycle(shapes):
            matrix = None
            if len(found) != most:
                matrix = self.trellis(shape, bits) if group == TRELLIS else self.matrix(shape, int(bits), group)
            if matrix is None:
                return found
            found.append(matrix)
        raise AssertionError("cycle ended")


def nbytes_of(matrix: Matrix) -> int:
    """What a product reads of a matrix."""
    if matrix.kind < 0:
        return int(stream_bytes(-matrix.kind / 2, matrix.rows, matrix.cols) + 2 * matrix.rows)
    if matrix.scale is None:
        return int(matrix.rows * matrix.cols * (4 if matrix.kind == KINDS["F32"] else 2))
    return int(matrix.rows * (row_bytes(matrix.cols, matrix.kind) + 4 * n_groups(matrix.cols, matrix.group)))


@dataclass(frozen=True, eq=False)
class Case:
    """One pass: `run` makes `calls` calls that read `nbytes` of weights and multiply `macs` times."""

    name: str
    run: Callable[[], object]
    calls: int
    nbytes: int
    macs: int = 0
    alive: object = None  # what `run` refers to by address alone


@dataclass(frozen=True)
class Olmoe:
    """The sizes of OLMoE-1B-7B that matter here."""

    d_model: int = 2048
    d_ff: int = 1024
    heads: int = 16
    experts: int = 64
    top_k: int = 8
    vocab: int = 50304
    context: int = 128
    eps: float = 1e-5


@dataclass(frozen=True)
class Widths:
    """Bits of an expert's projections."""

    gate: int
    up: int
    down: int


def vector(*shape: int) -> F32:
    return np.random.default_rng(1).standard_normal(shape, np.float32)


def kept_of(part: Parts, tokens: int) -> Kept:
    """Keys and values of so many tokens: small numbers."""
    kept = Kept(part, tokens)
    kept.extend(tokens)
    for page in kept.pages:
        page.keys[...] = page.values[...] = 0.01  # type: ignore[attr-defined]
    return kept


class Kernels:
    """The kernels of one instruction set (by default the best) on some threads; each method makes a case."""

    def __init__(self, library: Library, material: Material, threads: int, isa: str | None = None) -> None:
        self._call, self._material = library.functions, material
        self._pool = self._call.moert_pool_open(library.choose(isa), threads)
        if not self._pool:
            raise NativeFailed(f"no memory for {threads} threads")

    def __enter__(self) -> Kernels:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._call.moert_pool_close(self._pool)

    def linear(
        self, name: str, shapes: Sequence[Shape], bits: float, group: int, tokens: int = 1, most: int | None = None
    ) -> Case:
        """A matrix a call."""
        matrices = self._material.matrices(shapes, bits, group, most)
        x, y = vector(tokens, max(cols for _, cols in shapes)), vector(tokens, max(rows for rows, _ in shapes))
        pointers = (c_void_p * len(matrices))(*map(addressof, matrices))
        output, linear, pool = (c_void_p * 1)(y.ctypes.data), self._call.moert_linear, self._pool
        calls = [addressof(pointers) + 8 * i for i in range(len(matrices))]
        y_at = addressof(output)

        def run() -> None:
            for at in calls:
                check(linear(pool, 1, at, x, tokens, y_at))

        macs = sum(matrix.rows * matrix.cols for matrix in matrices) * tokens
        alive = x, y, output, pointers, matrices
        return Case(name, run, len(matrices), sum(map(nbytes_of, matrices)), macs, alive)

    def mixture(self, name: str, size: Olmoe, widths: Sequence[Widths], group: int) -> Case:
        """One token through `top_k` experts a call; the experts have the widths in turn."""
        experts, nbytes = self._experts(size, widths, group)
        calls = len(experts) // size.top_k
        table = (c_void_p * len(experts))(*map(addressof, experts))
        starts, token = (c_int32 * (size.top_k + 1))(*range(size.top_k + 1)), (c_int32 * size.top_k)()
        weights, x, out = np.full(size.top_k, 1 / size.top_k, np.float32), vector(size.d_model), vector(size.d_model)
        mixture, pool, act = self._call.moert_mixture, self._pool, Act(ACTIVATIONS["silu"], math.inf, 1)
        places = [starts, token, weights, x, 1, out]

        def run() -> None:
            for call in range(calls):
                at = addressof(table) + 8 * call * size.top_k
                check(mixture(pool, byref(act), size.top_k, at, *places))

        alive = experts, starts, token, weights, x, out
        return Case(name, run, calls, sum(nbytes[: calls * size.top_k]), alive=alive)

    def attend(self, name: str, size: Olmoe, bits: int, group: int) -> Case:
        """One token through an attention block of its own a call, each with its own keys and values."""
        width, dim = size.d_model, size.d_model // size.heads
        matrices = self._material.matrices([(width, width)], bits, group)
        ones, turn, x = np.ones(width, np.float32), vector(2, dim // 2), vector(width)
        heads = Heads(n=size.heads, kv=size.heads, dim=dim, value_dim=dim, causal=1, scale=dim**-0.5)
        blocks, norm = [], Norm(ones.ctypes.data, None, size.eps)
        for first in range(0, len(matrices) - 3, 4):
            block = Attention(heads=heads, norm=norm, q_norm=norm, k_norm=norm, rope_dims=dim, clip=math.inf, add=1)
            block.q, block.k, block.v, block.o = matrices[first : first + 4]
            blocks.append(block)
        part = Parts(size.heads, size.heads, dim, dim**-0.5, "whole", None, rope=None, buckets=None)
        cache = [kept_of(part, size.context) for _ in blocks]
        each = [(byref(block), keys_of(kept)[0]) for block, kept in zip(blocks, cache, strict=True)]
        attend, pool, last = self._call.moert_attend, self._pool, size.context - 1
        place = Positions(turns=turn.ctypes.data)

        def run() -> None:
            hidden = x.copy()
            where = byref(place)
            for block, kept in each:
                check(attend(pool, block, 1, hidden, kept, last, size.context, where))

        nbytes = sum(map(nbytes_of, matrices[: 4 * len(blocks)])) + len(blocks) * 4 * width * size.context
        return Case(name, run, len(blocks), nbytes, alive=(ones, turn, *cache))

    def route(self, name: str, size: Olmoe, bits: int, group: int) -> Case:
        """One token and another router a call: probabilities, and the largest of them."""
        matrices = self._material.matrices([(size.experts, size.d_model)], bits, group)
        ones, x, hidden = np.ones(size.d_model, np.float32), vector(size.d_model), vector(size.d_model)
        probabilities, weights = vector(size.experts), vector(size.top_k)
        chosen = np.empty(size.top_k, np.int64)
        scores, choose, pool = self._call.moert_scores, self._call.moert_choose, self._pool
        norm, softmax = Norm(ones.ctypes.data, None, size.eps), SCORES["softmax"]
        routers = [Router(norm=norm, matrix=each, score=softmax, top_k=size.top_k, factor=1) for each in matrices]
        places = x, hidden, probabilities
        choice = probabilities, 1, chosen, weights

        def run() -> None:
            for router in routers:
                check(scores(pool, byref(router), 1, *places))
                check(choose(pool, byref(router), *choice))

        alive = ones, x, hidden, probabilities, weights, chosen
        return Case(name, run, len(routers), sum(map(nbytes_of, matrices)), alive=alive)

    def head(self, name: str, size: Olmoe, bits: int, group: int) -> Case:
        """One token and another head a call."""
        heads = self._material.matrices([(size.vocab, size.d_model)], bits, group)
        ones, x, y = np.ones(size.d_model, np.float32), vector(size.d_model), vector(size.vocab)
        head, pool, norm = self._call.moert_head, self._pool, Norm(ones.ctypes.data, None, size.eps)

        def run() -> None:
            for matrix in heads:
                check(head(pool, byref(norm), 1.0, 0.0, byref(matrix), 1, x, y))

        return Case(name, run, len(heads), sum(map(nbytes_of, heads)), alive=(ones, x, y))

    def _experts(self, size: Olmoe, widths: Sequence[Widths], group: int) -> tuple[list[Ffn], list[int]]:
        """As many experts as there is room for, and what each reads."""
        self._material.restart()
        inward, outward = (size.d_ff, size.d_model), (size.d_model, size.d_ff)
        experts, nbytes = [], []
        for each in cycle(widths):
            shaped = ((inward, each.gate), (inward, each.up), (outward, each.down))
            parts = [self._material.matrix(shape, bits, group) for shape, bits in shaped]
            if None in parts:
                break
            experts.append(Ffn(*parts))
            nbytes.append(sum(map(nbytes_of, filter(None, parts))))
        return experts, nbytes
