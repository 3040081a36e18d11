"""The readable arithmetic with keys and values kept otherwise than in 16 bits."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np

from moert.kernels.backend import KeptKeys
from moert.kernels.reference import ReferenceBackend
from moert.pack.codec import F32

STEPS = np.float32(127)


class WideKeys(ReferenceBackend):
    """In float32, as transformers has them."""

    def __init__(self) -> None:
        self._wide: WeakKeyDictionary[KeptKeys, list[tuple[F32, F32]]] = WeakKeyDictionary()

    def stored(self, numbers: F32) -> F32:
        """Keys or values [tokens, heads, dim] as they are read again."""
        return numbers

    def _write(self, kept: KeptKeys, start: int, key: F32, value: F32) -> None:
        self._wide.setdefault(kept, []).append((self.stored(key), self.stored(value)))

    def _kept(self, kept: KeptKeys) -> tuple[F32, F32]:
        keys, values = (np.concatenate(parts).swapaxes(0, 1) for parts in zip(*self._wide[kept], strict=True))
        return keys, values


class NarrowKeys(WideKeys):
    """In 8 bits: whole numbers from -127 to 127, and a float16 step for each head of each token."""

    def stored(self, numbers: F32) -> F32:
        steps = (np.abs(numbers).max(-1, keepdims=True) / STEPS).astype(np.float16).astype(np.float32)
        whole = np.divide(numbers, steps, out=np.zeros_like(numbers), where=steps > 0)
        return np.clip(np.rint(whole), -STEPS, STEPS) * steps
