"""What a conversation has read, kept from one request to the next, so that only what is new is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moert.generation.generation import TextSource
from moert.models.kv import State


class Prefix:
    """Token ids, and the state of a decoder that has read them. A request takes it when it is added, and gives it back,
    longer, when it has ended."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self._state: State | None = None

    @property
    def held_bytes(self) -> int:
        """Of memory, while no request has it."""
        return 0 if self._state is None else self._state.written_bytes

    def take(self, prompt_ids: Sequence[int], expected: int) -> tuple[State | None, int]:
        """The state after the longest beginning of the prompt that it can go back to, and how many tokens that is: at
        least one is left to be read. None where there is none. `expected` tokens will be there in the end."""
        state, self._state = self._state, None
        if state is None:
            return None, 0
        length = state.reach(min(_alike(self.ids, prompt_ids), len(prompt_ids) - 1))
        if not length or not state.cut(length, expected):
            return None, 0
        state.exact_until(len(prompt_ids))
        return state, length

    def give(self, state: State | None, ids: Sequence[int]) -> None:
        """A state that has read these ids, and perhaps something that an interruption left half read."""
        self.ids, self._state = [], None
        length = 0 if state is None else state.reach(len(ids))
        if state is not None and length and state.cut(length):
            self.ids, self._state = list(ids[:length]), state

    def clear(self) -> None:
        self.give(None, ())


@dataclass(frozen=True)
class Continued:
    """A prompt in token ids that is answered in text, and goes on from what `prefix` has read. `ends`: tokens that end
    the answer as the model's own do."""

    ids: Sequence[int]
    text: TextSource
    prefix: Prefix
    ends: frozenset[int] = frozenset()


def _alike(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of their common beginning."""
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length
    return next(place for place in range(length) if one[place] != other[place])
