"""Experts of one layer, lent by the expert cache for the length of a with block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from moert.kernels.backend import Expert
from moert.pack.codec import U8
from moert.pack.model_spec import ExpertKey
from moert.stats import ExpertCounters


@dataclass(eq=False, slots=True)
class Slot:
    """Room for one expert, which is None until it has been read."""

    key: ExpertKey
    buffer: U8
    missed: bool  # read because a router asked, and not counted as that yet
    awaited: bool  # somebody asks for it and it is not read yet
    in_flight: bool = False  # read ahead, and still being read when a router asked; not counted as that yet
    expert: Expert | None = None
    error: BaseException | None = None
    leases: int = 0

    def count(self, counters: ExpertCounters, unused: set[ExpertKey]) -> None:
        """It was used; `unused` are those that were read ahead and not asked for yet."""
        counters.requests += 1
        if self.missed:
            self.missed = False
        else:
            counters.hits += 1
            counters.hits_in_flight += self.in_flight
        self.in_flight = False
        if self.key in unused:
            unused.discard(self.key)
            counters.prefetch_used += 1
            counters.prefetch_used_bytes += self.buffer.nbytes


class Lender(Protocol):
    """What a lease asks of the cache (moert.experts.cache.cache.ExpertCache)."""

    def take(self, keys: Sequence[ExpertKey], following: Sequence[ExpertKey]) -> list[Slot]: ...

    def give_back(self, slots: Sequence[Slot]) -> None: ...

    def wait_for(self, slot: Slot) -> Expert: ...


class Lease:
    """Experts of one layer, lent until the end of a with block; those that were missing arrive meanwhile."""

    def __init__(self, cache: Lender, keys: Sequence[ExpertKey], following: Sequence[ExpertKey]) -> None:
        self._cache, self._keys, self._following = cache, keys, following
        self._slots: Sequence[Slot] = ()

    def __enter__(self) -> Lease:
        self._slots = self._cache.take(self._keys, self._following)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cache.give_back(self._slots)

    def ready(self) -> list[int]:
        """Which of the experts are in memory, by their place in the list that was asked for."""
        return [place for place, slot in enumerate(self._slots) if slot.expert is not None]

    def expert(self, place: int) -> Expert:
        """Waits for it where it is missing. Raises PackError if it can't be read."""
        slot = self._slots[place]
        return slot.expert if slot.expert is not None else self._cache.wait_for(slot)

    def all(self) -> list[Expert]:
        """In the order asked for, waiting for those that are missing."""
        return [slot.expert if slot.expert is not None else self._cache.wait_for(slot) for slot in self._slots]
