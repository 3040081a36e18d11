"""Quantisers of others, as `make build/peers/.built` installs them: hqq, and llama.cpp's K-quants by its own C code.

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
K_QUANTS = {"Q2_K": (10, 84), "Q3_K": (11, 110), "Q4_K": (12, 144)}  # ggml's number, bytes of a block
_BLOCK = 256  # weights


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


class Ggml:
    """llama.cpp's quantisers (ggml-base), called as its own tool `quantize` does."""

    def __init__(self) -> None:
        (library,) = (FOLDER / "ggml").rglob("libggml-base.so")
        self._quantize = ctypes.CDLL(str(library)).ggml_quantize_chunk
        floats = ctypes.POINTER(ctypes.c_float)
        self._quantize.argtypes = [
            ctypes.c_int, floats, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, floats,
        ]  # fmt: skip
        self._quantize.restype = ctypes.c_size_t

    def encode(self, weights: F32, name: str, importance: F32 | None) -> np.ndarray:
        """weights [n, out, in] and, as imatrix, the mean square of each input [n, in] → blocks [n, bytes].

        Where a row is no multiple of a block, as many rows as make one are handed over as a single row, and the
        importance is repeated for each of them.
        """
        number, block_bytes = K_QUANTS[name]
        n, in_features = len(weights), weights.shape[2]
        joined = math.lcm(in_features, _BLOCK)
        size = weights[0].size
        if size % joined:
            raise ValueError(f"{size} weights in rows of {in_features} don't fill blocks of {_BLOCK}")
        out = np.empty((n, size // _BLOCK * block_bytes), np.uint8)
        floats = ctypes.POINTER(ctypes.c_float)
        for i in range(n):
            matrix = np.ascontiguousarray(weights[i])
            row = None if importance is None else np.tile(importance[i], joined // in_features).astype(np.float32)
            pointer = None if row is None else row.ctypes.data_as(floats)
            source = matrix.ctypes.data_as(floats)
            self._quantize(number, source, out[i].ctypes.data, 0, size // joined, joined, pointer)
        return out

    def code(self, weights: F32, name: str, importance: F32 | None) -> Coded:
        """The weights as the package gguf dequantises them."""
        from gguf import GGMLQuantizationType, dequantize

        blocks = self.encode(weights, name, importance)
        back = dequantize(blocks, GGMLQuantizationType[name])
        return Coded(back.reshape(weights.shape).astype(np.float32), blocks.shape[1])
