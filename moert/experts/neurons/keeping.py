"""Which blocks of neurons stay in memory: by a score of each that a use raises, or by a window over tokens. Pure.

Blocks of one layer, of all its experts, are numbered from 0. A *visit* is one pass through the layer: a token, or
several at once. Whoever has the lowest score leaves first, so that a choice costs one look at the scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

HALVES_AFTER = 8.0
"""Visits after which a use counts half, in `recent`."""


class Keeping(NamedTuple):
    """`used`: scores [n] of blocks before the visit of this number uses them → after. `by_visits`: what was last used
    at the same visit leaves together."""

    used: Callable[[F64, int], F64]
    by_visits: bool = False


def _lately(score: F64, visit: int) -> F64:
    return np.full_like(score, visit)


def _often(score: F64, visit: int) -> F64:
    return np.maximum(score, 0) + 1


def _recent(score: F64, visit: int) -> F64:
    """The logarithm of the sum over all uses of 2^(visit / HALVES_AFTER), whose order time does not change."""
    added: F64 = np.logaddexp2(score, visit / HALVES_AFTER)
    return added


KEEPING: Mapping[str, Keeping] = {
    "lru": Keeping(_lately),
    "lfu": Keeping(_often),
    "recent": Keeping(_recent),
    "window": Keeping(_lately, by_visits=True),
}
"""lru: who was used last stays; lfu: who was used most; recent: the same, where a use counts half eight visits later
(Lee et al. 2001, LRFU); window: what fired for the last tokens, as many of these as fit (Alizadeh et al. 2023)."""
DEFAULT_KEEPING = "recent"


class Taken(NamedTuple):
    """Blocks that had not been in memory [n], ascending, and the slots [n] that they get."""

    blocks: I64
    slots: I64


class Blocks:
    """The blocks of a layer, of which some are in slots. There are no slots at first."""

    def __init__(self, n_blocks: int, keeping: Keeping) -> None:
        self.slot_of: I64 = np.full(n_blocks, -1, np.int64)
        """[n_blocks]: the slot of each; -1: not in memory."""
        self.n_slots = self.evictions = 0
        self._keeping = keeping
        self._score: F64 = np.full(n_blocks, -np.inf)
        self._block_in: I64 = np.full(0, -1, np.int64)  # [n_slots]; -1: empty
        self._visit = 0

    @property
    def n_resident(self) -> int:
        return int(np.count_nonzero(self._block_in >= 0))

    def resize(self, n_slots: int) -> None:
        """What lies in slots that are no more leaves."""
        leaving = self._block_in[n_slots:]
        self.slot_of[leaving[leaving >= 0]] = -1
        kept = self._block_in[:n_slots]
        self._block_in = np.concatenate([kept, np.full(n_slots - len(kept), -1, np.int64)])
        self.n_slots = n_slots

    def want(self, blocks: I64) -> Taken:
        """A visit asks for `blocks` [n], ascending, each once, no more than there are slots: all have one then. Of
        those that had none the caller reads the contents."""
        missing = blocks[self.slot_of[blocks] < 0]
        slots = self._room(blocks, len(missing)) if len(missing) else missing
        self.slot_of[missing], self._block_in[slots] = slots, missing
        self.use(blocks)
        return Taken(missing, slots)

    def use(self, blocks: I64) -> None:
        """A visit asks for blocks [n], each once, that all have slots."""
        self._visit += 1
        self._score[blocks] = self._keeping.used(self._score[blocks], self._visit)

    def forget(self, blocks: I64) -> None:
        """They could not be read after all."""
        self._block_in[self.slot_of[blocks]] = -1
        self.slot_of[blocks] = -1

    def _room(self, wanted: I64, count: int) -> I64:
        """So many empty slots."""
        empty = (self._block_in < 0).nonzero()[0]
        if len(empty) < count:
            self._evict(wanted, count - len(empty))
            empty = (self._block_in < 0).nonzero()[0]
        return empty[:count]

    def _evict(self, wanted: I64, count: int) -> None:
        scores = np.where(self._block_in < 0, np.inf, self._score[self._block_in])
        scores[self.slot_of[wanted][self.slot_of[wanted] >= 0]] = np.inf
        leaving = np.argpartition(scores, count - 1)[:count]
        if self._keeping.by_visits:
            leaving = (scores <= scores[leaving].max()).nonzero()[0]
        self.slot_of[self._block_in[leaving]] = -1
        self._block_in[leaving] = -1
        self.evictions += len(leaving)


class Hits(NamedTuple):
    """Blocks that were asked for, each once a visit, and those of them that were in memory."""

    asked: int
    hits: int

    @property
    def rate(self) -> float:
        return self.hits / self.asked if self.asked else 0.0


def replay(visits: Sequence[I64], n_blocks: int, n_slots: int, keeping: Keeping) -> Hits:
    """A recorded trace of a layer, the blocks [n] of each visit ascending, with so many slots, at first empty."""
    blocks, asked, missed = Blocks(n_blocks, keeping), 0, 0
    blocks.resize(n_slots)
    for wanted in visits:
        missed += len(blocks.want(wanted).blocks)
        asked += len(wanted)
    return Hits(asked, asked - missed)
