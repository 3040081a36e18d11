"""The expert cache: what is in memory, counted in bytes, shared by the model's thread and the prefetcher's."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from moert.experts.eviction import EvictionPolicy
from moert.experts.residency import Residency
from moert.kernels.backend import Expert
from moert.pack.model_spec import ExpertKey, Stack
from moert.stats import ExpertCounters


class Store(Protocol):
    """Where experts come from (moert.experts.store.ExpertStore)."""

    def nbytes(self, key: ExpertKey) -> int: ...

    def read(self, key: ExpertKey) -> Expert: ...


class ExpertCache:
    """Experts in memory, never more than `capacity_bytes` of them, those being read included.

    One thread leases (the model), one other may prefetch. A lease keeps its expert in memory; a lease of an expert
    that is being prefetched waits for that read instead of reading again.
    """

    def __init__(self, store: Store, policy: EvictionPolicy, capacity_bytes: int, counters: ExpertCounters) -> None:
        self._store = store
        self._residency = Residency(capacity_bytes, policy)
        self._counters = counters
        self._buffers: dict[ExpertKey, Expert] = {}  # present once read; a key without buffer is being read
        self._leased: dict[ExpertKey, int] = {}
        self._predicted: Sequence[ExpertKey] = ()
        self._unused: set[ExpertKey] = set()  # prefetched, not asked for yet
        self._changed = threading.Condition()
        self._demand_waits = False

    @property
    def capacity_bytes(self) -> int:
        return self._residency.capacity_bytes

    @property
    def used_bytes(self) -> int:
        return self._residency.used_bytes

    @property
    def n_resident(self) -> int:
        return len(self._buffers)

    def resident(self) -> list[ExpertKey]:
        with self._changed:
            return sorted(self._buffers)

    def resize(self, capacity_bytes: int) -> None:
        """Changes the limit, between requests; what no longer fits leaves at once."""
        with self._changed:
            self._predicted = ()
            while self._in_flight():
                self._changed.wait()
            self._residency.capacity_bytes = capacity_bytes
            self._evict(self._residency.victims(0, force=True) or [])

    def begin_layer(self, stack: Stack, layer: int, experts: Collection[int]) -> None:
        """The router of `layer` has decided on `experts`: predictions for it are over."""
        with self._changed:
            self._predicted = ()
            self._residency.begin_layer(stack, layer, experts)
            self._changed.notify_all()

    def predict(self, keys: Sequence[ExpertKey]) -> None:
        """What the next layer is likely to need, most probable first: only `demand` may evict these."""
        with self._changed:
            self._predicted = tuple(keys)
            self._changed.notify_all()

    @contextmanager
    def lease(self, keys: Sequence[ExpertKey]) -> Iterator[list[Expert]]:
        """Lends some experts at once, reading those that are missing. Raises PackError.

        They must fit together; one token's demand of a layer does.
        """
        lent: list[ExpertKey] = []
        try:
            with self._changed:
                held = [self._lend(key, lent) for key in keys]
            yield held
        finally:
            with self._changed:
                for key in lent:
                    self._leased[key] -= 1
                    if not self._leased[key]:
                        del self._leased[key]
                    self._residency.done(key)
                self._changed.notify_all()

    def prefetch(self, key: ExpertKey) -> bool:
        """Reads a predicted expert if that costs nothing more probable; True if it is in memory afterwards.

        Waits while the present layer has experts still to read: those come first. Raises PackError.
        """
        with self._changed:
            while key in self._predicted and (self._demand_waits or self._residency.owes()):
                self._changed.wait()
            if key not in self._predicted:
                return False  # the router has decided in the meantime
            if key in self._residency:
                return True
            more_probable = self._predicted[: self._predicted.index(key)]
            if not self._reserve(key, more_probable):
                return False
            self._counters.prefetch_issued += 1
            self._counters.prefetch_issued_bytes += self._store.nbytes(key)
            self._unused.add(key)
        self._fill(key)
        return True

    def _lend(self, key: ExpertKey, lent: list[ExpertKey]) -> Expert:
        """Holding the lock: takes a lease, after reading what is missing."""
        self._counters.requests += 1
        if key in self._buffers:
            self._counters.hits += 1
        else:
            self._fetch(key)
        lent.append(key)
        self._leased[key] = self._leased.get(key, 0) + 1
        self._residency.demand(key)
        if key in self._unused:
            self._unused.discard(key)
            self._counters.prefetch_used += 1
            self._counters.prefetch_used_bytes += self._store.nbytes(key)
        return self._buffers[key]

    def _fetch(self, key: ExpertKey) -> None:
        """Holding the lock, which is let go while reading: brings a missing expert in."""
        started = time.perf_counter()
        self._demand_waits = True
        try:
            if self._arrives(key):
                self._counters.hits += 1
            else:
                self._reserve_for_demand(key)
                self._changed.release()
                try:
                    self._fill(key)
                finally:
                    self._changed.acquire()
        finally:
            self._demand_waits = False
            self._counters.stall_s += time.perf_counter() - started
            self._changed.notify_all()

    def _arrives(self, key: ExpertKey) -> bool:
        """Waits for a prefetch of `key` that is under way; False if there is none or it failed."""
        while key in self._residency and key not in self._buffers:
            self._changed.wait()
        return key in self._buffers

    def _reserve_for_demand(self, key: ExpertKey) -> None:
        """Makes room, if nothing else helps by taking it from what was predicted or is needed later in this layer."""
        while not self._reserve(key, self._predicted) and not self._reserve(key, self._predicted, force=True):
            if not self._in_flight():
                raise RuntimeError(f"the expert cache of {self.capacity_bytes} bytes can't hold {key}")
            self._changed.wait()

    def _reserve(self, key: ExpertKey, predicted: Sequence[ExpertKey], force: bool = False) -> bool:
        nbytes = self._store.nbytes(key)
        victims = self._residency.victims(nbytes, {*self._leased, *self._in_flight()}, predicted, force)
        if victims is None:
            return False
        self._evict(victims)
        self._residency.add(key, nbytes)
        return True

    def _fill(self, key: ExpertKey) -> None:
        """Reads a reserved expert without holding the lock."""
        try:
            buffer = self._store.read(key)
        except BaseException:
            with self._changed:
                self._residency.remove(key)
                self._unused.discard(key)
                self._changed.notify_all()
            raise
        with self._changed:
            self._buffers[key] = buffer
            self._changed.notify_all()

    def _evict(self, victims: list[ExpertKey]) -> None:
        for victim in victims:
            self._residency.remove(victim)
            del self._buffers[victim]
            self._unused.discard(victim)
            self._counters.evictions += 1

    def _in_flight(self) -> list[ExpertKey]:
        return [key for key in self._residency if key not in self._buffers]
