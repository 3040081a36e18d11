"""Keys and values in memory, as moert.models.kv.Kept lays them out."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moert.kernels.backend import KeptKeys
from moert.pack.codec import F32

_MOST_HALF = 65504.0


def write(kept: KeptKeys, start: int, key: F32, value: F32) -> None:
    """key [tokens, kv, dim], value [tokens, kv, value_dim]"""
    places = np.arange(start, start + len(key))
    size = kept.keys.shape[3]
    if kept.key_steps is None or kept.value_steps is None:
        kept.keys[:, places // size, :, places % size] = _halves(key)
        kept.values[:, places] = _halves(value).swapaxes(0, 1)
        return
    (keys, key_steps), (values, value_steps) = _small(key), _small(value)
    kept.keys[:, places // size, :, places % size] = keys
    kept.values[:, places] = values.swapaxes(0, 1)
    kept.key_steps[:, places // size, places % size] = key_steps.T
    kept.value_steps[:, places] = value_steps.T


def read(kept: KeptKeys) -> tuple[F32, F32]:
    """Keys and values so far, [kv, tokens, dim] and [kv, tokens, value_dim]."""
    values: F32 = kept.values[:, : kept.length].astype(np.float32)
    if kept.value_steps is not None:
        values *= kept.value_steps[:, : kept.length, None]
    return all_keys(kept), values


def all_keys(kept: KeptKeys) -> F32:
    """[kv, tokens, dim] of what lies in blocks."""
    heads, blocks, dim, size = kept.keys.shape
    whole = kept.keys.transpose(0, 1, 3, 2).reshape(heads, blocks * size, dim)
    keys: F32 = whole[:, : kept.length].astype(np.float32)
    if kept.key_steps is not None:
        keys *= kept.key_steps.reshape(heads, blocks * size)[:, : kept.length, None]
    return keys


def _halves(x: F32) -> npt.NDArray[np.float16]:
    """float16, the largest finite one where a number is larger."""
    return np.clip(x, -_MOST_HALF, _MOST_HALF).astype(np.float16)


def _small(x: F32) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float16]]:
    """x [tokens, kv, dim] → whole numbers, and what they count [tokens, kv]: 1/127 of the largest magnitude."""
    largest = np.abs(x).max(-1, keepdims=True)
    steps = np.where(np.isfinite(largest), np.minimum(largest / np.float32(127), _MOST_HALF), largest)
    halves = steps.astype(np.float16)
    each = halves.astype(np.float32)
    whole = np.divide(x, each, out=np.zeros_like(x), where=each > 0)
    return np.clip(np.nan_to_num(np.rint(whole)), -127, 127).astype(np.int8), halves[..., 0]
