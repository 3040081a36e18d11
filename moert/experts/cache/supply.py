"""Where experts come from, and those that lie elsewhere than in the buffers that they were given."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from moert.experts.cache.lease import Slot
from moert.kernels.backend import Expert
from moert.pack.codec import U8
from moert.pack.errors import PackError
from moert.pack.model_spec import ExpertKey


class Store(Protocol):
    """What reads experts (moert.experts.drive.store.ExpertStore)."""

    def nbytes(self, key: ExpertKey) -> int: ...

    def read_all(self, wanted: Sequence[tuple[ExpertKey, U8]]) -> list[U8 | PackError]: ...

    def expert(self, key: ExpertKey, buffer: U8) -> Expert: ...

    def close(self) -> None: ...


Arrived = tuple[Expert, U8]
"""An expert, and where it lies."""


def fetch(store: Store, slots: Sequence[Slot]) -> list[Arrived | PackError]:
    """Reads experts into their slots' buffers: each, or why it can't be read."""
    places = store.read_all([(slot.key, slot.buffer) for slot in slots])
    return [
        place if isinstance(place, PackError) else (store.expert(slot.key, place), place)
        for slot, place in zip(slots, places, strict=True)
    ]


class Moves:
    """Experts that are to move into their buffers, in the order in which they came; none before that has `begun`."""

    def __init__(self, store: Store) -> None:
        self.begun = False
        self._store = store
        self._waiting: deque[tuple[Slot, U8]] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, slot: Slot, place: U8) -> None:
        """The expert lies at `place`, which may be its buffer."""
        if place is not slot.buffer:
            self._waiting.append((slot, place))

    def next(self, slots: Mapping[ExpertKey, Slot]) -> tuple[Slot, U8] | None:
        """One that is still among `slots`, and where it lies; None if there is none, or nothing has begun."""
        while self.begun and self._waiting:
            slot, place = self._waiting.popleft()
            if slots.get(slot.key) is slot:
                return slot, place
        return None

    def moved(self, slot: Slot, place: U8) -> Expert:
        """The expert in its buffer."""
        np.copyto(slot.buffer, place)
        return self._store.expert(slot.key, slot.buffer)

    def clear(self) -> None:
        self._waiting.clear()
