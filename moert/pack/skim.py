"""The small parts of a large JSON text, found without making values of the large ones."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_PART = 1 << 20
_QUOTE, _BACKSLASH = 0x22, 0x5C
_OPENS = np.isin(np.arange(256), [ord("{"), ord("[")])
_BRACKETS = _OPENS | np.isin(np.arange(256), [ord("}"), ord("]")])
_LIKE, _BRACKET = 0b11011001, 0b01011001  # the bits that all four have, and four other letters
_SHALLOW = 2  # how many containers are open around what is left out

I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]


class Skimmed(NamedTuple):
    """`text` is the JSON text without what is in the lists and objects of one field. `long`: of each string in those
    that was longer than asked for, its bytes as they stand there."""

    text: bytes
    long: list[int]


def skim(body: bytes, field: str, long: int) -> Skimmed:
    """Leaves out what is in the lists and objects that the outermost object's `field` holds.

    Never raises: what is no JSON text may come out as another that is none.
    """
    reader = _Reader(long)
    for at in range(0, len(body), _PART):
        reader.read(np.frombuffer(body, np.uint8, min(_PART, len(body) - at), at), at)
    cuts = _inside(body, field, reader.events())
    starts, stops = [0, *(stop for _, stop in cuts)], [*(start for start, _ in cuts), len(body)]
    text = b"".join(body[start:stop] for start, stop in zip(starts, stops, strict=True))
    return Skimmed(text, [n for at, n in reader.long if any(start <= at < stop for start, stop in cuts)])


class _Reader:
    """Reads the text in parts, and remembers where containers of the first levels open and close."""

    def __init__(self, long: int) -> None:
        self.long, self._longer = list[tuple[int, int]](), long
        self._opened_at: int | None = None  # where the string began that is still open
        self._backslashes = 0  # at the end of the part before
        self._depth = 0
        self._events: list[tuple[I64, I64]] = []

    def events(self) -> list[tuple[int, int]]:
        """Places of brackets that open inside of at most two containers, or close and leave at most two open; and how
        many these are, negative where one closes."""
        return [
            (int(at), int(depth)) for places, depths in self._events for at, depth in zip(places, depths, strict=True)
        ]

    def read(self, part: U8, at: int) -> None:
        quotes, inside = self._quotes(part), self._opened_at is not None
        brackets = np.flatnonzero(part & _LIKE == _BRACKET)
        brackets = brackets[_BRACKETS[part[brackets]]]
        outside = ((np.searchsorted(quotes, brackets) + inside) & 1) == 0
        self._strings(quotes + at)
        brackets = brackets[outside]
        opens = _OPENS[part[brackets]]
        after = self._depth + np.cumsum(np.where(opens, 1, -1))
        around = np.where(opens, after - 1, after)
        near = (around <= _SHALLOW) & (around >= 0)
        self._events.append((brackets[near] + at, np.where(opens, around, ~around)[near]))
        if len(after):
            self._depth = int(after[-1])

    def _quotes(self, part: U8) -> I64:
        """Places of quotation marks that no backslash stands for."""
        quotes, slashes, before = np.flatnonzero(part == _QUOTE), np.flatnonzero(part == _BACKSLASH), self._backslashes
        self._backslashes = 0
        if not len(slashes) and not before:
            return quotes
        escaped = np.zeros(len(part) + 1, bool)
        escaped[0] = before & 1
        if len(slashes):
            first = np.flatnonzero(np.diff(slashes, prepend=-2) > 1)
            runs = np.diff(first, append=len(slashes))
            behind = slashes[first] + runs
            if slashes[0] == 0:
                escaped[0] = False
                runs[0] += before
            escaped[behind[(runs & 1) == 1]] = True
            if behind[-1] == len(part):
                self._backslashes = int(runs[-1])
        return quotes[~escaped[quotes]]

    def _strings(self, quotes: I64) -> None:
        """Remembers the long ones."""
        ends = quotes if self._opened_at is None else np.append(self._opened_at, quotes)
        self._opened_at = int(ends[-1]) if len(ends) & 1 else None
        starts, stops = ends[0 : len(ends) & ~1 : 2], ends[1::2]
        lengths = stops - starts - 1
        for place in np.flatnonzero(lengths > self._longer):
            self.long.append((int(starts[place]), int(lengths[place])))


def _inside(body: bytes, field: str, events: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """First and last byte (exclusive) of what is inside of each container in the field."""
    named = re.compile(rb'(?<!\\)"' + field.encode() + rb'"\s*:\s*\Z')
    found, here, start = list[tuple[int, int]](), False, -1
    for at, depth in events:
        if depth == 1:
            here, start = named.search(body, max(0, at - 64), at) is not None, -1
        elif depth == 2 and here:
            start = at + 1
        elif depth == ~2 and here and start >= 0:
            found.append((start, at))
            start = -1
        elif depth == ~1:
            here = False
    return found
