"""The prefix cache: the states of many conversations, each found again by the tokens that it has read."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from moert.engine.archive import Archive
from moert.engine.session import common_beginning
from moert.models.kv import State, written_bytes


@dataclass(eq=False)
class _Entry:
    ids: array[int]
    state: State
    used: int = field(default=0)


class Prefixes:
    """The states of decoders by the tokens that they have read, the latest used first; many requests share it.

    A request takes a copy of the state with the longest common beginning. Copies share the pages of the KV cache, so a
    beginning that many conversations have is in memory once. A recurrent state can be cut to few lengths: of models
    that have one, a copy is kept where each prompt ends. `most_bytes` bounds the memory; None: nothing does. `archive`
    gets the states that leave memory.
    """

    def __init__(self, most_bytes: int | None = None, archive: Archive | None = None) -> None:
        self.most_bytes, self._archive = most_bytes, archive
        self._entries: list[_Entry] = []
        self._clock = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def held_bytes(self) -> int:
        """Bytes of memory of all states, a shared page once."""
        return written_bytes([entry.state for entry in self._entries])

    def take(self, prompt_ids: Sequence[int], expected: int) -> tuple[State | None, int]:
        """Returns a state after the longest beginning of the prompt that one can go back to, and the length of that
        beginning: at least one token is left to be read. None and 0 where no state has such a beginning. The state is
        to hold `expected` tokens in the end."""
        best, length = self._longest(prompt_ids)
        if self._archive is not None:
            found = self._archive.take(prompt_ids, length, self.most_bytes)
            if found is not None:
                self.give(*found)
                best, length = self._longest(prompt_ids)
        if best is None:
            return None, 0
        self._use(best)
        state = best.state.copy()
        if not state.cut(length, expected):
            return None, 0
        state.exact_until(len(prompt_ids))
        return state, length

    def mark(self, state: State, ids: Sequence[int]) -> None:
        """Keeps a copy of a state that has just read a whole prompt, where that is the only way back to this place."""
        if state.reach(len(ids) - 1) < len(ids) - 1:
            self.give(state.copy(), ids)

    def give(self, state: State | None, ids: Sequence[int]) -> None:
        """Takes a state that has read these ids, and perhaps tokens that an interruption left half read."""
        length = 0 if state is None else state.reach(len(ids))
        if state is None or not length or not state.cut(length):
            return
        entry = _Entry(array("i", ids[:length]), state)
        entry = next((each for each in self._entries if _covers(each, entry)), entry)
        self._entries = [each for each in self._entries if not _covers(entry, each)]
        self._entries.append(entry)
        self._use(entry)
        self.bound(self.most_bytes)

    def bound(self, most_bytes: int | None) -> None:
        """Bounds the memory of the states, and forgets those that do not fit."""
        self.most_bytes = most_bytes
        while most_bytes is not None and self.held_bytes > most_bytes:
            self.drop()

    def drop(self) -> bool:
        """Forgets the state that was used longest ago, but for the archive; returns False where there is none."""
        if not self._entries:
            return False
        entry = min(self._entries, key=lambda entry: entry.used)
        self._entries.remove(entry)
        if self._archive is not None:
            self._archive.put(entry.ids, entry.state)
        return True

    def close(self) -> None:
        """Forgets all states, the one that was used longest ago first."""
        while self.drop():
            pass

    def _longest(self, prompt_ids: Sequence[int]) -> tuple[_Entry | None, int]:
        """Returns the entry with the longest beginning of the prompt that one can go back to, and its length."""
        best, length, asked = None, 0, array("i", prompt_ids)
        for entry in self._entries:
            alike = min(common_beginning(entry.ids, asked), len(prompt_ids) - 1)
            if alike > length and (reach := entry.state.reach(alike)) > length:
                best, length = entry, reach
        return best, length

    def _use(self, entry: _Entry) -> None:
        self._clock += 1
        entry.used = self._clock


def _covers(one: _Entry, other: _Entry) -> bool:
    """Returns whether all that the other state has can be had of the one."""
    length = len(other.ids)
    return length <= len(one.ids) and one.ids[:length] == other.ids and one.state.reach(length) == length
