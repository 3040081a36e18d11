"""Quantisers of others, as `make build/peers/.built` installs them: hqq, and llama.cpp's by its own C code.

Each takes float32 matrices [n, out, in] of one shape and returns them dequantised, with the bytes that they store.
"""

from __future__ import annotations

import ctypes
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from moert.pack.codec import F32

FOLDER = Path("build/peers")
K_QUANTS = {"Q2_K": 10, "Q3_K": 11, "Q4_K": 12}  # ggml's numbers
I_QUANTS = {"IQ2_XXS": 16, "IQ2_XS": 17, "IQ2_S": 22, "IQ3_XXS": 18, "IQ3_S": 21, "IQ4_XS": 23}
BLOCK = 256  # weights


@dataclass(frozen=True)
class Coded:
    """weights [n, out, in] as they come back, and the bytes of one of the n matrices, scales counted."""

    weights: F32
    nbytes: float


def import_peers() -> None:
    """Makes the peers' packages importable, after all others."""
    if not (FOLDER / "site").is_dir():
        raise SystemExit("the peers are not installed: run `make bench-quant`")
    sys.path.append(str(FOLDER / "site"))


def hqq(weights: F32, bits: int, group_size: int, axis: int) -> Coded:
    """hqq with its default optimiser on the CPU. Scale and zero point count, and are rounded, as float16; codes count
    `bits` each, though hqq stores ten 3-bit codes in 32 bits."""
    from hqq.core.quantize import Quantizer

    out = np.empty_like(weights)
    for i, weight in enumerate(weights):
        codes, meta = Quantizer.quantize(
            torch.from_numpy(weight), nbits=bits, group_size=group_size, axis=axis, bitpack=False, device="cpu"
        )
        scale, zero = (meta[name].half().float() for name in ("scale", "zero"))
        out[i] = ((codes - zero) * scale).view(weight.shape).numpy()
    return Coded(out, weights[0].size * (bits / 8 + 4 / group_size))


def hqq_group_size(numbers: set[int], bits: int, limit: float) -> int:
    """The smallest group that divides all `numbers` of weights and keeps to `limit` bits a weight."""
    fitting = (size for size in range(math.ceil(32 / (limit - bits)), 1025) if all(n % size == 0 for n in numbers))
    return next(fitting)


class _Traits(ctypes.Structure):
    """ggml_type_traits, as far as it is read here."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("block", ctypes.c_int64),
        ("interleave", ctypes.c_int64),
        ("block_bytes", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
    )


class Ggml:
    """One of llama.cpp's formats by its own functions (ggml-base), called as its tool `quantize` does.

    Raises RuntimeError where the library's numbers of formats are not those of this file.
    """

    def __init__(self, name: str) -> None:
        self.name, self._number = name, (K_QUANTS | I_QUANTS)[name]
        (path,) = (FOLDER / "ggml").rglob("libggml-base.so")
        library = ctypes.CDLL(str(path))
        pointer, count = ctypes.c_void_p, ctypes.c_int64
        library.ggml_get_type_traits.restype = ctypes.POINTER(_Traits)
        self._traits = library.ggml_get_type_traits(self._number).contents
        if (self._traits.name.decode().upper(), self._traits.block) != (name.upper(), BLOCK):
            raise RuntimeError(f"ggml's format {self._number} is {self._traits.name.decode()}, not {name}")
        library.ggml_quantize_init(self._number)  # grids of the i-quants: up to some seconds
        self._quantize = library.ggml_quantize_chunk
        self._quantize.argtypes = [ctypes.c_int, pointer, pointer, count, count, count, pointer]
        self._quantize.restype = ctypes.c_size_t

    def encode(self, weights: F32, importance: F32 | None) -> np.ndarray:
        """weights [n, out, in] and, as imatrix, the mean square of each input [n, in] → blocks [n, bytes].

        Where a row is no multiple of a block, as many rows as make one are handed over as a single row, and the
        importance is repeated for each of them. An expert that saw no token has importance 1 throughout, as in
        llama.cpp.
        """
        n, in_features = len(weights), weights.shape[2]
        joined = math.lcm(in_features, BLOCK)
        size = weights[0].size
        if size % joined:
            raise ValueError(f"{size} weights in rows of {in_features} don't fill blocks of {BLOCK}")
        out = np.empty((n, size // BLOCK * self._traits.block_bytes), np.uint8)
        for i in range(n):
            matrix, row = np.ascontiguousarray(weights[i]), None
            if importance is not None:
                known = importance[i] if importance[i].any() else np.ones_like(importance[i])
                row = np.tile(known, joined // in_features).astype(np.float32)
            pointer = None if row is None else row.ctypes.data
            self._quantize(self._number, matrix.ctypes.data, out[i].ctypes.data, 0, size // joined, joined, pointer)
        return out

    def decode(self, blocks: np.ndarray) -> F32:
        """blocks [n, bytes] → weights [n, size], by ggml's own to_float."""
        out = np.empty((len(blocks), blocks.shape[1] // self._traits.block_bytes * BLOCK), np.float32)
        for row, values in zip(np.ascontiguousarray(blocks), out, strict=True):
            self._traits.to_float(row.ctypes.data, values.ctypes.data, values.size)
        return out


def gguf(weights: F32, name: str, importance: F32 | None) -> Coded:
    """Raises RuntimeError where ggml's dequantised weights of the first matrix are not those of the package gguf."""
    from gguf import GGMLQuantizationType, dequantize

    ggml = Ggml(name)
    blocks = ggml.encode(weights, importance)
    back = ggml.decode(blocks)
    if not np.allclose(back[:1], dequantize(blocks[:1], GGMLQuantizationType[name]), rtol=1e-5, atol=1e-7):
        raise RuntimeError(f"{name}: ggml and the package gguf read the same blocks differently")
    return Coded(back.reshape(weights.shape), blocks.shape[1])
