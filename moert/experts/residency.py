"""Who is in memory, in bytes, and who must leave: pure bookkeeping that the cache and the replays share."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from moert.experts.eviction import EvictionPolicy, Moment, Resident
from moert.pack.model_spec import ExpertKey, Stack


class Residency:
    """The set of resident experts under a limit of bytes.

    The layer being executed needs some experts: those are never evicted before they were used, unless everything
    else has left already (a long prompt can need more of one layer than fits; what it needs last goes first then).
    """

    def __init__(self, capacity_bytes: int, policy: EvictionPolicy) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.policy = policy
        self.clock = 0
        self._present: tuple[Stack, int] | None = None
        self._needed: set[ExpertKey] = set()
        self._frequency: dict[ExpertKey, int] = {}
        self._residents: dict[ExpertKey, Resident] = {}

    def __contains__(self, key: ExpertKey) -> bool:
        return key in self._residents

    def __iter__(self) -> Iterator[ExpertKey]:
        return iter(self._residents)

    def __len__(self) -> int:
        return len(self._residents)

    def begin_layer(self, stack: Stack, layer: int, experts: Collection[int]) -> None:
        """The router has decided: `experts` are what this layer needs."""
        self._present = (stack, layer)
        self._needed = {ExpertKey(stack, layer, expert) for expert in experts}

    def owes(self) -> bool:
        """True while something that the present layer has still to use is not resident."""
        return any(key not in self._residents for key in self._needed)

    def demand(self, key: ExpertKey) -> None:
        """Counts a demand for `key`, which is resident."""
        resident = self._residents[key]
        resident.frequency = self._frequency[key] = self._frequency.get(key, 0) + 1
        resident.last_used = self.clock
        self.clock += 1

    def done(self, key: ExpertKey) -> None:
        """The present layer has used `key`: it may be evicted again."""
        self._needed.discard(key)

    def add(self, key: ExpertKey, nbytes: int) -> None:
        """Takes `key` in; there must be room. Raises ValueError if there is not."""
        if key in self._residents or self.used_bytes + nbytes > self.capacity_bytes:
            raise ValueError(f"no room for {key}: {self.used_bytes} + {nbytes} of {self.capacity_bytes} bytes")
        self.used_bytes += nbytes
        self._residents[key] = Resident(key, nbytes, self._frequency.get(key, 0), -1, self.clock)

    def remove(self, key: ExpertKey) -> None:
        self.used_bytes -= self._residents.pop(key).nbytes

    def victims(
        self,
        nbytes: int,
        locked: Collection[ExpertKey] = (),
        predicted: Sequence[ExpertKey] = (),
        force: bool = False,
    ) -> list[ExpertKey] | None:
        """Who must leave, in order, so that `nbytes` more fit; None if that can't be done.

        `locked` never leave. `predicted` (most probable first) and what the present layer needs leave only with
        `force`, in that order and last in first out.
        """
        missing = self.used_bytes + nbytes - self.capacity_bytes
        if missing <= 0:
            return []
        if self._present is None:
            return None
        guarded = {*locked, *predicted, *self._needed}
        free = [one for one in self._residents.values() if one.key not in guarded]
        now = Moment(*self._present, self.clock)
        chosen: list[ExpertKey] = []
        while missing > 0 and free:
            key = self.policy.victim(free, now)
            missing -= self._residents[key].nbytes
            free = [one for one in free if one.key != key]
            chosen.append(key)
        if missing > 0 and force:
            for key in self._last_resort(locked, predicted):
                if missing > 0:
                    missing -= self._residents[key].nbytes
                    chosen.append(key)
        return chosen if missing <= 0 else None

    def _last_resort(self, locked: Collection[ExpertKey], predicted: Sequence[ExpertKey]) -> list[ExpertKey]:
        unlikely_first = [key for key in reversed(predicted) if key not in self._needed]
        needed_last_first = sorted(self._needed, reverse=True)
        return [key for key in (*unlikely_first, *needed_last_first) if key in self and key not in locked]
