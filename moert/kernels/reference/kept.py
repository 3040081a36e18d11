"""Keys and values in pages, as moert.kernels.pages lays them out."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from moert.kernels.backend import KeptKeys
from moert.kernels.pages import KEYS, Page
from moert.pack.codec import F32

_LEAST, _MOST_HALF = 2.0**-10, 65504.0


def write(kept: KeptKeys, start: int, key: F32, value: F32) -> None:
    """key [tokens, kv, dim], value [tokens, kv, value_dim]"""
    first = 0
    while first < len(key):
        at, within = divmod(start + first, KEYS)
        last = min(len(key), first + KEYS - within)
        _write(kept.pages[at], slice(within, within + last - first), key[first:last], value[first:last])
        first = last


def _write(page: Page, places: slice, key: F32, value: F32) -> None:
    (keys, key_steps), (values, value_steps) = (kept_as(page.keys.dtype, each) for each in (key, value))
    page.keys[:, :, places] = keys.transpose(1, 2, 0)
    page.values[:, places] = values.swapaxes(0, 1)
    page.key_steps[:, places] = key_steps.T
    page.value_steps[:, places] = value_steps.T


def read(kept: KeptKeys) -> tuple[F32, F32]:
    """Keys and values so far, [kv, tokens, dim] and [kv, tokens, value_dim]."""
    parts = zip(*map(_read, kept.pages), strict=True)
    keys, values = (np.concatenate(part, axis=1)[:, : kept.length] for part in parts)
    return keys, values


def _read(page: Page) -> tuple[F32, F32]:
    """[kv, KEYS, dim] and [kv, KEYS, value_dim]"""
    keys: F32 = page.keys.swapaxes(1, 2) * page.key_steps[:, :, None]
    values: F32 = page.values * page.value_steps[:, :, None]
    return np.ascontiguousarray(keys), values


def kept_as(dtype: npt.DTypeLike, x: F32) -> tuple[npt.NDArray[Any], F32]:
    """x [tokens, kv, dim] → float16 or whole numbers of 8 bits, and what they count [tokens, kv]: a power of two that
    brings the largest magnitude to where float16 is exact, 1 for most; of 8 bits times a float16, 1/127 of it. Where a
    number is not finite, the step is none, and all numbers are 0."""
    largest = np.abs(x).max(-1, keepdims=True)
    fits = (largest == 0) | ((largest >= _LEAST) & (largest <= _MOST_HALF))
    power = np.where(fits | ~np.isfinite(largest), 0, np.maximum(np.frexp(largest)[1] - 15, -126))
    numbers = np.ldexp(np.where(np.isfinite(largest), x, np.float32(0)), -power)
    steps = np.where(np.isfinite(largest), np.ldexp(np.float32(1), power), np.float32(np.nan))
    if dtype == np.float16:
        return numbers.astype(np.float16), steps[..., 0]
    each = (np.abs(numbers).max(-1, keepdims=True) / np.float32(127)).astype(np.float16).astype(np.float32)
    whole = np.divide(numbers, each, out=np.zeros_like(x), where=each > 0)
    return np.clip(np.rint(whole), -127, 127).astype(np.int8), (steps * each)[..., 0]
