"""The blocks of neurons that stay in memory, and the room of each layer. Pure."""

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
    """A rule for the blocks that stay. `used`: scores [n] of blocks before the visit of this number uses them → after.
    `by_visits`: blocks that were last used at the same visit leave together."""

    used: Callable[[F64, int], F64]
    by_visits: bool = False


def _lately(score: F64, visit: int) -> F64:
    return np.full_like(score, visit)


def _often(score: F64, visit: int) -> F64:
    return np.maximum(score, 0) + 1


def _recent(score: F64, visit: int) -> F64:
    """Returns the logarithm of the sum of 2^(visit / HALVES_AFTER) over all uses: time alone does not change the
    order."""
    added: F64 = np.logaddexp2(score, visit / HALVES_AFTER)
    return added


KEEPING: Mapping[str, Keeping] = {
    "lru": Keeping(_lately),
    "lfu": Keeping(_often),
    "recent": Keeping(_recent),
    "window": Keeping(_lately, by_visits=True),
}
"""Name → rule. lru: the blocks used last stay; lfu: those used most; recent: the same, where a use counts half eight
visits later (Lee et al. 2001, LRFU); window: the blocks of as many of the last tokens as fit (Alizadeh et al. 2023)."""
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
        """Changes the number of slots; blocks in slots that are removed leave."""
        leaving = self._block_in[n_slots:]
        self.slot_of[leaving[leaving >= 0]] = -1
        kept = self._block_in[:n_slots]
        self._block_in = np.concatenate([kept, np.full(n_slots - len(kept), -1, np.int64)])
        self.n_slots = n_slots

    def want(self, blocks: I64) -> Taken:
        """Gives slots to the blocks [n] that a visit uses, ascending, each once, no more than there are slots. Returns
        the blocks that had none: the caller reads their contents."""
        missing = blocks[self.slot_of[blocks] < 0]
        slots = self._room(blocks, len(missing)) if len(missing) else missing
        self.slot_of[missing], self._block_in[slots] = slots, missing
        self.use(blocks)
        return Taken(missing, slots)

    def use(self, blocks: I64) -> None:
        """Records a visit that uses blocks [n], each once, which all have slots."""
        self._visit += 1
        self._score[blocks] = self._keeping.used(self._score[blocks], self._visit)

    def forget(self, blocks: I64) -> None:
        """Takes slots away from blocks that could not be read."""
        self._block_in[self.slot_of[blocks]] = -1
        self.slot_of[blocks] = -1

    def _room(self, wanted: I64, count: int) -> I64:
        """Returns `count` empty slots; evicts other blocks than the `wanted` ones for them."""
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
    """Blocks that visits use, each counted once a visit, and those of them that were in memory."""

    asked: int
    hits: int

    @property
    def rate(self) -> float:
        return self.hits / self.asked if self.asked else 0.0


def replay(visits: Sequence[I64], n_blocks: int, n_slots: int, keeping: Keeping) -> Hits:
    """Returns the hits of a recorded trace of a layer, the blocks [n] of each visit ascending, with `n_slots` slots, at
    first empty."""
    blocks, asked, missed = Blocks(n_blocks, keeping), 0, 0
    blocks.resize(n_slots)
    for wanted in visits:
        missed += len(blocks.want(wanted).blocks)
        asked += len(wanted)
    return Hits(asked, asked - missed)


EVERY = 16
"""Fetches between two moves of room."""
_PART = 0.125
"""The part of its room that a layer gives at once; and the part of an equal share that it keeps."""
_TIMES = 3.0
"""A layer that gets room reads more than this many times as much, for its size, as the one that gives it."""
_HALVES_AFTER = 200
"""Fetches of each layer after which its reads count half."""


class Move(NamedTuple):
    giver: int
    taker: int
    nbytes: int


class Balance:
    """The balance of layers' room: bytes that were lately read of each layer, by its number, for lack of room."""

    def __init__(self, n_layers: int) -> None:
        self._read: F64 = np.zeros(n_layers)
        self._least = 0.0
        self._fetches, self._n_layers = 0, n_layers
        self._fades = 0.5 ** (EVERY / (_HALVES_AFTER * n_layers))

    def begin(self, nbytes: int) -> None:
        """Sets the bytes that all layers have together."""
        self._least = _PART * nbytes / self._n_layers

    def read(self, layer: int, nbytes: int) -> None:
        self._read[layer] += nbytes

    def is_due(self) -> bool:
        """Counts a fetch; returns whether it is time to move room."""
        self._fetches += 1
        return self._fetches % EVERY == 0

    def moves(self, held: I64, most: I64) -> list[Move]:
        """Returns moves of room between layers that have `held` of at most `most` bytes [n_layers]: the layers that
        read least for their size give to those that read most, if that is much more. Each is named once."""
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
"""The part of the room that columns get at least where a token goes to few of the experts: an expert's rows are needed
at each demand, its columns only where they fire; but those of a frequent expert more often than a rare one's rows."""


class Shares(NamedTuple):
    """The room of the cache of rows (experts' gate and up), and of the cache of blocks (columns, or rows and columns
    where whole blocks are read)."""

    rows_bytes: int
    blocks_bytes: int


def all_to_blocks(room_bytes: int, blocks_bytes: int, one_bytes: int) -> Shares:
    """Returns the shares where whole blocks are read. `blocks_bytes`: of all experts; `one_bytes`: see `shares`."""
    return Shares(0, blocks_bytes if room_bytes >= blocks_bytes else max(0, room_bytes - one_bytes))


def shares(
    room_bytes: int, rows_bytes: int, least_rows_bytes: int, columns_bytes: int, one_bytes: int, asked: float = 0.0
) -> Shares:  # fmt: skip
    """Returns the shares of `room_bytes`. `rows_bytes`, `columns_bytes`: of all experts; `least_rows_bytes`: of the
    rows that a token can demand of a layer; `one_bytes`: of all columns of one expert, which get room beside the shares
    unless everything fits; `asked`: the share of a layer's experts that each token demands."""
    if room_bytes >= rows_bytes + columns_bytes:
        return Shares(rows_bytes, columns_bytes)
    left = max(0, room_bytes - one_bytes)
    columns = min(columns_bytes, max(left - rows_bytes, int((1 - asked) * COLUMNS * left)))
    rows = min(rows_bytes, max(left - columns, least_rows_bytes))
    return Shares(rows, max(0, min(columns, left - rows)))


def room_for(rows_bytes: int, one_bytes: int, asked: float) -> int:
    """Returns the room in which `shares` leaves `rows_bytes` to rows, however many columns there are."""
    return one_bytes + math.ceil(rows_bytes / (1 - (1 - asked) * COLUMNS))
