"""Keys and values in pages, as moert.kernels.pages lays them out."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moert.kernels.backend import KeptKeys
from moert.kernels.pages import KEYS, Page
from moert.pack.codec import F32

_MOST_HALF = 65504.0


def write(kept: KeptKeys, start: int, key: F32, value: F32) -> None:
    """key [tokens, kv, dim], value [tokens, kv, value_dim]"""
    first = 0
    while first < len(key):
        at, within = divmod(start + first, KEYS)
        last = min(len(key), first + KEYS - within)
        _write(kept.pages[at], slice(within, within + last - first), key[first:last], value[first:last])
        first = last


def _write(page: Page, places: slice, key: F32, value: F32) -> None:
    if page.key_steps is None or page.value_steps is None:
        page.keys[:, :, places] = _halves(key).transpose(1, 2, 0)
        page.values[:, places] = _halves(value).swapaxes(0, 1)
        return
    (keys, key_steps), (values, value_steps) = _small(key), _small(value)
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
    keys: F32 = page.keys.swapaxes(1, 2).astype(np.float32, order="C")
    values: F32 = page.values.astype(np.float32)
    if page.key_steps is not None and page.value_steps is not None:
        keys, values = keys * page.key_steps[:, :, None], values * page.value_steps[:, :, None]
    return keys, values


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
