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
"""Tokens of a page (MOERT_KEYS)."""
STEP_BYTES = 4
"""Of what the key of a token counts in a head, and of what its value does."""
_ALIGNED = 64  # bytes; what lies in a page is whole multiples of it


@dataclass(frozen=True)
class PageLayout:
    """What a page has of `kv` heads."""

    kv: int
    dim: int
    value_dim: int
    bits: KvBits

    @classmethod
    def of(cls, part: Attention | Latent, bits: KvBits) -> PageLayout:
        return cls(part.kv, part.dim, part.value_dim, bits)

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Where in what a page has of a head its keys, values, and the steps of both begin, and where it ends."""
        number = self.bits // 8
        sizes = (self.dim * number, self.value_dim * number, STEP_BYTES, STEP_BYTES)
        return tuple(accumulate((KEYS * size for size in sizes), initial=0))

    @property
    def nbytes(self) -> int:
        """Of a page."""
        return self.kv * self.places[-1]

    def pages(self, count: int) -> list[KeptPage]:
        """So many new ones that follow one another in memory, all zeros: what lies behind the last key is multiplied,
        and must be a number."""
        room, size = _aligned(count * self.nbytes), self.nbytes
        return [Page(self, room[at * size :][:size]) for at in range(count)]


class KeptPage(Protocol):
    """A page wherever a backend keeps it."""

    @property
    def nbytes(self) -> int: ...

    def copy(self) -> KeptPage:
        """Another one with the same keys and values."""
        ...


class Page:
    """In memory, all in `buffer`: `keys` [kv, dim, KEYS] and `values` [kv, KEYS, value_dim], float16 or of 8 bits,
    times the steps of their tokens, `key_steps` and `value_steps` [kv, KEYS]. What is a head's lies together."""

    def __init__(self, layout: PageLayout, buffer: U8) -> None:
        self.layout, self.buffer = layout, buffer
        self.address = int(buffer.ctypes.data)
        number = np.int8 if layout.bits == 8 else np.float16
        self.keys = self._part(0, number, layout.dim, KEYS)
        self.values = self._part(1, number, KEYS, layout.value_dim)
        self.key_steps, self.value_steps = (self._part(at, np.float32, KEYS) for at in (2, 3))

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
    """Zeros."""
    room = np.zeros(nbytes + _ALIGNED, np.uint8)
    return room[-room.ctypes.data % _ALIGNED :][:nbytes]


def pages_of(tokens: int) -> int:
    """How many pages so many tokens take."""
    return -(-tokens // KEYS)
