"""ggml, the library of llama.cpp: its formats, and its products, a peer of `make bench-kernels`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_bool, c_int, c_int64, c_size_t, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from recipes.bench.kernel_cases import Case, Shape, vector

FOLDER = Path("build/peers/kernels/ggml")
K_QUANTS = {"Q2_K": 10, "Q3_K": 11, "Q4_K": 12}  # ggml's numbers
I_QUANTS = {
    "IQ1_S": 19, "IQ1_M": 29, "IQ2_XXS": 16, "IQ2_XS": 17, "IQ2_S": 22, "IQ3_XXS": 18, "IQ3_S": 21, "IQ4_XS": 23,
}  # fmt: skip
BLOCK = 256  # weights
_GRAPH_NODES, _WORK_BYTES, _TENSOR_BYTES, _F32 = 8192, 64 << 20, 1024, 0


class Traits(ctypes.Structure):
    """ggml_type_traits, as far as it is read here."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("block", ctypes.c_int64),
        ("interleave", ctypes.c_int64),
        ("block_bytes", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
    )


class _Memory(ctypes.Structure):
    """ggml_init_params"""

    _fields_ = (("size", c_size_t), ("buffer", c_void_p), ("no_alloc", c_bool))


@cache
def _library() -> Any:
    """Returns the functions of ggml. Raises FileNotFoundError where it was not built."""
    (base,), (cpu,) = (sorted(FOLDER.rglob(f"libggml-{part}.so")) or [None] for part in ("base", "cpu"))
    if base is None or cpu is None:
        raise FileNotFoundError(f"{FOLDER} has no ggml (`make bench-kernels` builds it)")
    found, computing = ctypes.CDLL(str(base), ctypes.RTLD_GLOBAL), ctypes.CDLL(str(cpu))
    for name, given in {
        "ggml_init": [_Memory], "ggml_new_tensor_2d": [c_void_p, c_int, c_int64, c_int64],
        "ggml_mul_mat": [c_void_p] * 3, "ggml_new_graph_custom": [c_void_p, c_size_t, c_bool],
        "ggml_get_data": [c_void_p],
    }.items():  # fmt: skip
        function = getattr(found, name)
        function.argtypes, function.restype = given, c_void_p
    found.ggml_free.argtypes, found.ggml_free.restype = [c_void_p], None
    found.ggml_build_forward_expand.argtypes, found.ggml_build_forward_expand.restype = [c_void_p] * 2, None
    found.ggml_get_type_traits.restype = POINTER(Traits)
    found.compute = computing.ggml_graph_compute_with_ctx
    found.compute.argtypes = [c_void_p, c_void_p, c_int]
    computing.ggml_cpu_init()
    return found


class _Products:
    """A graph of products of x and many matrices of one format, in memory of its own."""

    def __init__(self, number: int, shape: Shape, tokens: int, codes: Sequence[np.ndarray], threads: int) -> None:
        self._ggml, self._threads, (rows, cols) = _library(), threads, shape
        outputs = len(codes) * (4 * rows * tokens + 2 * _TENSOR_BYTES)
        whole = sum(each.nbytes for each in codes) + outputs + 4 * cols * tokens + _WORK_BYTES
        self._context = self._ggml.ggml_init(_Memory(whole, None, False))
        if not self._context:
            raise MemoryError("ggml has no memory for its matrices")
        x = self._ggml.ggml_new_tensor_2d(self._context, _F32, cols, tokens)
        given = vector(tokens, cols)
        ctypes.memmove(self._ggml.ggml_get_data(x), given.ctypes.data, given.nbytes)
        self._graph = self._ggml.ggml_new_graph_custom(self._context, _GRAPH_NODES, False)
        for each in codes:
            matrix = self._ggml.ggml_new_tensor_2d(self._context, number, cols, rows)
            ctypes.memmove(self._ggml.ggml_get_data(matrix), each.ctypes.data, each.nbytes)
            product = self._ggml.ggml_mul_mat(self._context, matrix, x)
            self._ggml.ggml_build_forward_expand(self._graph, product)

    def __call__(self) -> None:
        if self._ggml.compute(self._context, self._graph, self._threads):
            raise RuntimeError("ggml could not compute its products")

    def __del__(self) -> None:
        self._ggml.ggml_free(self._context)


def ggml(name: str, shape: Shape, tokens: int, count: int, threads: int) -> Case:
    """Returns `count` products of one of llama.cpp's formats, with activations of 8 bits. Raises FileNotFoundError."""
    number, (rows, cols) = (K_QUANTS | I_QUANTS)[name], shape
    traits = _library().ggml_get_type_traits(number).contents
    nbytes = rows * cols // BLOCK * traits.block_bytes
    small = np.random.default_rng(0).integers(0x3000, 0x3800, (count, nbytes // 2), dtype=np.uint16)
    run = _Products(number, shape, tokens, list(small), threads)
    return Case(f"llama.cpp {name}", run, count, count * nbytes, tokens * count * rows * cols)
