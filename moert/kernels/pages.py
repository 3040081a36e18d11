"""Pages: the keys and values of KEYS tokens that follow one another, in 16 or 8 bits, laid out as csrc/moert.h says."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from moert.pack.codec import U8
from moert.pack.parts import Attention, Latent

KvBits = Literal[8, 16]

KEYS = 64
"""The tokens of a page (MOERT_KEYS)."""
STEP_BYTES = 4
"""The bytes of the step that a token's key is counted in, in one head; and of its value's step."""
_ALIGNED = 64  # bytes; the arrays in a page are whole multiples of it


@dataclass(frozen=True)
class PageLayout:
    """The layout of a page with `kv` heads."""

    kv: int
    dim: int
    value_dim: int
    bits: KvBits

    @classmethod
    def of(cls, part: Attention | Latent, bits: KvBits) -> PageLayout:
        return cls(part.kv, part.dim, part.value_dim, bits)

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Returns the places in a head's share of a page where its keys, values, and the steps of both begin, and the
        share's end."""
        number = self.bits // 8
        sizes = (self.dim * number, self.value_dim * number, STEP_BYTES, STEP_BYTES)
        return tuple(accumulate((KEYS * size for size in sizes), initial=0))

    @property
    def nbytes(self) -> int:
        """Returns the bytes of a page."""
        return self.kv * self.places[-1]

    def pages(self, count: int) -> list[KeptPage]:
        """Returns `count` new pages, all zeros: numbers behind the last key are multiplied too, and must be finite.
        Each has memory of its own, so that none holds others in memory that nobody needs."""
        return [Page(self, _aligned(self.nbytes)) for _ in range(count)]


class KeptPage(Protocol):
    """A page wherever a backend keeps it; `buffer` has its bytes in memory."""

    buffer: U8

    @property
    def nbytes(self) -> int: ...

    def copy(self) -> KeptPage:
        """Returns another page with the same keys and values."""
        ...


class Page:
    """A page in memory, all in `buffer`: `keys` [kv, dim, KEYS] and `values` [kv, KEYS, value_dim], float16 or of 8
    bits, times the steps of their tokens, `key_steps` and `value_steps` [kv, KEYS]. The arrays of a head lie
    together."""

    __slots__ = ("address", "buffer", "layout")

    def __init__(self, layout: PageLayout, buffer: U8) -> None:
        self.layout, self.buffer = layout, buffer
        self.address = int(buffer.ctypes.data)

    @property
    def keys(self) -> npt.NDArray[Any]:
        return self._part(0, self._number, self.layout.dim, KEYS)

    @property
    def values(self) -> npt.NDArray[Any]:
        return self._part(1, self._number, KEYS, self.layout.value_dim)

    @property
    def key_steps(self) -> npt.NDArray[Any]:
        return self._part(2, np.float32, KEYS)

    @property
    def value_steps(self) -> npt.NDArray[Any]:
        return self._part(3, np.float32, KEYS)

    @property
    def _number(self) -> type[np.generic]:
        return np.int8 if self.layout.bits == 8 else np.float16

    def copy(self) -> Page:
        twin = Page(self.layout, _aligned(self.layout.nbytes))
        np.copyto(twin.buffer, self.buffer)
        return twin

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes

    def _part(self, at: int, number: Any, *shape: int) -> npt.NDArray[Any]:
        of_heads = self.buffer.reshape(self.layout.kv, -1)[:, slice(*self.layout.places[at : at + 2])]
        part: npt.NDArray[Any] = of_heads.view(number).reshape(self.layout.kv, *shape)
        return part


def _aligned(nbytes: int) -> U8:
    """Returns zeros [nbytes] at an aligned address."""
    room = np.zeros(nbytes + _ALIGNED, np.uint8)
    return room[-room.ctypes.data % _ALIGNED :][:nbytes]


def pages_of(tokens: int) -> int:
    """Returns the number of pages that `tokens` tokens take."""
    return -(-tokens // KEYS)
