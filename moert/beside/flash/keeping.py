"""Which blocks of neurons stay in memory, and the room of each layer. Pure."""

from __future__ import annotations

import math
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


EVERY = 16
"""Fetches, after which room moves."""
_PART = 0.125
"""Of what a layer has, how much it gives at once; and of an equal share, how much it keeps."""
_TIMES = 3.0
"""As much as the other, for its size, is read by a layer that gets some."""
_HALVES_AFTER = 200
"""Fetches of each layer, after which what was read counts half."""


class Move(NamedTuple):
    giver: int
    taker: int
    nbytes: int


class Balance:
    """What has lately been read of each layer, since it had no room to stay, by its number."""

    def __init__(self, n_layers: int) -> None:
        self._read: F64 = np.zeros(n_layers)
        self._least = 0.0
        self._fetches, self._n_layers = 0, n_layers
        self._fades = 0.5 ** (EVERY / (_HALVES_AFTER * n_layers))

    def begin(self, nbytes: int) -> None:
        """Layers have so many together."""
        self._least = _PART * nbytes / self._n_layers

    def read(self, layer: int, nbytes: int) -> None:
        self._read[layer] += nbytes

    def is_due(self) -> bool:
        """Counts a fetch; is it time to move some room?"""
        self._fetches += 1
        return self._fetches % EVERY == 0

    def moves(self, held: I64, most: I64) -> list[Move]:
        """Of layers that have so many bytes of `most` each [n_layers], who is to give some to whom: those for whose
        size least is read to those for whose size most is, if that is much more. Each is named once."""
        need = self._read / np.maximum(held, 1)
        self._read *= self._fades
        order = need.argsort(kind="stable").tolist()
        givers = [each for each in order if held[each] > self._least]
        takers = [each for each in reversed(order) if held[each] < most[each]]
        found, used = [], set[int]()
        for giver, taker in zip(givers, takers, strict=False):
            if need[taker] <= _TIMES * need[giver] or used & {giver, taker}:
                break
            nbytes = min(_PART * held[giver], held[giver] - self._least, most[taker] - held[taker])
            found.append(Move(giver, taker, int(nbytes)))
            used |= {giver, taker}
        return found


COLUMNS = 0.25
"""Of the room, what columns get at least where a token goes to few of the experts: an expert's rows are asked for
whenever it is, its columns only where they fire; but those of a frequent expert more often than a rare one's rows."""


class Shares(NamedTuple):
    """Of the cache of experts' gate and up, and of that of blocks: of columns, or where whole blocks are read of
    both."""

    rows_bytes: int
    blocks_bytes: int


def all_to_blocks(room_bytes: int, blocks_bytes: int, one_bytes: int) -> Shares:
    """Where whole blocks are read. `blocks_bytes`: of all experts; `one_bytes`: see `shares`."""
    return Shares(0, blocks_bytes if room_bytes >= blocks_bytes else max(0, room_bytes - one_bytes))


def shares(
    room_bytes: int, rows_bytes: int, least_rows_bytes: int, columns_bytes: int, one_bytes: int, asked: float = 0.0
) -> Shares:  # fmt: skip
    """Of so much room. `rows_bytes`, `columns_bytes`: of all experts; `least_rows_bytes`: what a token can ask for of a
    layer; `one_bytes`: all columns of one expert, for which there is room beside unless all of all have some; `asked`:
    the share of its experts that a layer asks for at each token."""
    if room_bytes >= rows_bytes + columns_bytes:
        return Shares(rows_bytes, columns_bytes)
    left = max(0, room_bytes - one_bytes)
    columns = min(columns_bytes, max(left - rows_bytes, int((1 - asked) * COLUMNS * left)))
    rows = min(rows_bytes, max(left - columns, least_rows_bytes))
    return Shares(rows, max(0, min(columns, left - rows)))


def room_for(rows_bytes: int, one_bytes: int, asked: float) -> int:
    """Room in which `shares` leaves so many bytes to rows, however many columns there are."""
    return one_bytes + math.ceil(rows_bytes / (1 - (1 - asked) * COLUMNS))
