"""The readable arithmetic with keys and values kept otherwise than in 16 bits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moert.kernels.backend import KeptKeys
from moert.kernels.pages import KEYS, KeptPage, PageLayout
from moert.kernels.reference import ReferenceBackend
from moert.pack.codec import F32

STEPS = np.float32(127)


@dataclass
class WidePage:
    """`keys` [kv, KEYS, dim], `values` [kv, KEYS, value_dim]."""

    keys: F32
    values: F32

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def copy(self) -> WidePage:
        return WidePage(self.keys.copy(), self.values.copy())


class WideKeys(ReferenceBackend):
    """In float32, as transformers has them."""

    def stored(self, numbers: F32) -> F32:
        """Keys or values [tokens, heads, dim] as they are read again."""
        return numbers

    def pages(self, layout: PageLayout, count: int) -> list[KeptPage]:
        shapes = [(layout.kv, KEYS, layout.dim), (layout.kv, KEYS, layout.value_dim)]
        return [WidePage(*(np.zeros(shape, np.float32) for shape in shapes)) for _ in range(count)]

    def _write(self, kept: KeptKeys, start: int, key: F32, value: F32) -> None:
        for at, (one, other) in enumerate(zip(self.stored(key), self.stored(value), strict=True), start):
            page = kept.pages[at // KEYS]
            page.keys[:, at % KEYS], page.values[:, at % KEYS] = one, other

    def _kept(self, kept: KeptKeys) -> tuple[F32, F32]:
        parts = [[page.keys for page in kept.pages], [page.values for page in kept.pages]]
        keys, values = (np.concatenate(each, axis=1)[:, : kept.length] for each in parts)
        return keys, values


class NarrowKeys(WideKeys):
    """In 8 bits: whole numbers from -127 to 127, and a float16 step for each head of each token."""

    def stored(self, numbers: F32) -> F32:
        steps = (np.abs(numbers).max(-1, keepdims=True) / STEPS).astype(np.float16).astype(np.float32)
        whole = np.divide(numbers, steps, out=np.zeros_like(numbers), where=steps > 0)
        return np.clip(np.rint(whole), -STEPS, STEPS) * steps
