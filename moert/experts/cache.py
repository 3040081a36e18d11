"""The expert cache: experts in memory, counted in bytes, and the threads that bring in those that are missing.

From top to bottom: buffers that experts are read into, leases of a layer's experts, the store that reads, the threads
beside the model's, and ExpertCache.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from types import TracebackType
from typing import Protocol

import numpy as np

from moert.experts.policy import Arrivals, Demand, EvictionPolicy, Residency
from moert.kernels.backend import Expert
from moert.kernels.memory import PAGE_BYTES, Arena, forget
from moert.pack.codec import U8
from moert.pack.errors import PackError
from moert.pack.model_spec import ExpertKey
from moert.stats import ExpertCounters


class Buffers:
    """Pieces of memory, by size. A piece that comes back keeps its pages for the next expert of the same size; where
    another size needs the memory, the pages go back to the system and only the address is kept."""

    def __init__(self) -> None:
        self._arena = Arena(align=PAGE_BYTES)
        self._warm: dict[int, list[U8]] = defaultdict(list)  # with pages
        self._cold: dict[int, list[U8]] = defaultdict(list)  # without
        self.warm_bytes = 0
        """Bytes that are held beside the lent pieces."""

    def take(self, nbytes: int, room_bytes: int) -> U8:
        """Returns a piece, uint8 [nbytes], that begins on a page and has undefined contents. Afterwards the bytes held
        beside lent pieces fit into `room_bytes`. Raises MemoryError."""
        if self._warm[nbytes]:
            self.warm_bytes -= nbytes
            piece = self._warm[nbytes].pop()
        else:
            piece = self._cold[nbytes].pop() if self._cold[nbytes] else self._arena.allocate(nbytes)
        self.release(room_bytes)
        return piece

    def give(self, piece: U8) -> None:
        """Takes back a piece that is not in use any more."""
        self._warm[len(piece)].append(piece)
        self.warm_bytes += len(piece)

    def release(self, room_bytes: int) -> None:
        """Gives pages back to the system until the bytes held beside lent pieces fit into `room_bytes`."""
        while self.warm_bytes > room_bytes:
            nbytes = max(filter(self._warm.get, self._warm))
            self.warm_bytes -= nbytes  # first: cut short here, it must not count pages that are gone
            piece = self._warm[nbytes].pop()
            forget(piece)
            self._cold[nbytes].append(piece)

    def recount(self) -> None:
        """Counts the warm bytes again, after Ctrl-C has cut a call short."""
        self.warm_bytes = sum(size * len(pieces) for size, pieces in self._warm.items())


@dataclass(eq=False, slots=True)
class Slot:
    """Room for one expert, which is None until it has been read."""

    key: ExpertKey
    buffer: U8
    missed: bool  # read on demand, and not counted as a miss yet
    awaited: bool  # demanded, and not read yet
    in_flight: bool = False  # read ahead, and still being read when demanded; not counted as that yet
    expert: Expert | None = None
    error: BaseException | None = None
    leases: int = 0


@dataclass(frozen=True, slots=True)
class Lease:
    """Experts of one layer, lent until the end of a with block; missing ones arrive meanwhile."""

    cache: ExpertCache
    slots: Sequence[Slot]

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cache.give_back(self.slots)

    def ready(self) -> list[int]:
        """Returns the places, in the list of leased experts, of those that are in memory."""
        return [place for place, slot in enumerate(self.slots) if slot.expert is not None]

    def expert(self, place: int) -> Expert:
        """Returns the expert at this place of the list, and waits for it where it is missing. Raises PackError if it
        can't be read."""
        slot = self.slots[place]
        return slot.expert if slot.expert is not None else self.cache.wait_for(slot)

    def all(self) -> list[Expert]:
        """Returns all experts in the order of the list, and waits for missing ones. Raises PackError."""
        return [slot.expert if slot.expert is not None else self.cache.wait_for(slot) for slot in self.slots]


class Store(Protocol):
    """A reader of experts (moert.experts.store.ExpertStore)."""

    def nbytes(self, key: ExpertKey) -> int: ...

    def read_all(self, wanted: Sequence[tuple[ExpertKey, U8]]) -> list[U8 | PackError]: ...

    def expert(self, key: ExpertKey, buffer: U8) -> Expert: ...

    def close(self) -> None: ...


Arrived = tuple[Expert, U8]
"""An expert, and the bytes that it lies in."""


_CLOSE_S = 10.0  # for reads under way; the threads are daemons, so a dead disk does not keep the process alive


class Loaders:
    """Threads that read, at most `most`, started when there is something to read; each runs `serve`."""

    def __init__(self, most: int, serve: Callable[[], None]) -> None:
        self.most, self.threads = most, list[threading.Thread]()
        self._serve = serve

    def start(self) -> None:
        """Starts the threads that do not run yet, or fewer where the system allows no more."""
        while len(self.threads) < self.most:
            thread = threading.Thread(target=self._serve, name=f"moert-load-{len(self.threads)}", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                self.most = len(self.threads)
            else:
                self.threads.append(thread)

    def end(self) -> None:
        """Waits at most _CLOSE_S until all threads have ended; none is started after that."""
        self.most, self._serve = 0, _nothing
        until = time.monotonic() + _CLOSE_S
        for thread in self.threads:
            thread.join(timeout=max(0.0, until - time.monotonic()))


def _nothing() -> None:
    """Stands for `serve` once the threads have ended, so that they keep no cache in memory."""


HANDED_OVER_BYTES = 128 << 10
"""From this size on other threads read experts while the model computes: handing smaller ones over takes longer than
reading them."""


class ExpertCache:
    """The expert cache: experts in memory, never more than `capacity_bytes`, those being read included.

    One thread leases (the model's), and reads an expert that it waits for unless another thread has begun to. `loaders`
    other threads read at the same time; while no expert is waited for, they read predicted ones.
    """

    def __init__(
        self, store: Store, policy: EvictionPolicy, capacity_bytes: int, counters: ExpertCounters, loaders: int = 1
    ) -> None:
        self._store, self._counters = store, counters
        self._residency = Residency(capacity_bytes, policy)
        self._buffers = Buffers()
        self._slots: dict[ExpertKey, Slot] = {}
        self._locked: set[ExpertKey] = set()  # leased or being read
        self._queue: deque[Slot] = deque()  # demanded, to be read
        self._waited_for = 0  # demanded, not read yet
        self._under_way = 0  # calls of the model's thread that have not ended, leases included
        self._reading = 0  # loaders that read
        self._likely: Sequence[ExpertKey] = ()  # experts predicted for the next layer
        self._predicted: deque[ExpertKey] = deque()  # those of them that may still be read
        self._begun: list[ExpertKey] = []  # predicted, and begun to be read
        self._filling = False  # whether what is predicted fills the cache, before anything is known of the next layer
        self._unused: set[ExpertKey] = set()  # those of them that were not demanded yet
        self._to_move: deque[tuple[Slot, U8]] = deque()  # to their buffers, from where the store has left their bytes
        self._settled = False  # whether experts may move
        self._lock = threading.RLock()  # so that a thread that Ctrl-C hits never releases it for another
        self._work, self._arrived = threading.Condition(self._lock), threading.Condition(self._lock)
        self.loaders = Loaders(loaders, self._serve)
        self._closed = False

    @property
    def capacity_bytes(self) -> int:
        return self._residency.capacity_bytes

    @property
    def used_bytes(self) -> int:
        return self._residency.used_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that are taken, whether experts lie there or not."""
        return self._residency.used_bytes + self._buffers.warm_bytes

    @property
    def n_resident(self) -> int:
        """Number of experts in memory, those being read included."""
        return len(self._slots)

    def resident(self) -> list[ExpertKey]:
        """Returns the experts that have been read, in order."""
        with self._lock:
            return sorted(key for key, slot in self._slots.items() if slot.expert is not None)

    def use(self, policy: EvictionPolicy) -> None:
        """Evicts by this policy from now on."""
        with self._lock:
            self._residency.policy = policy

    def resize(self, capacity_bytes: int) -> None:
        """Changes the capacity while nothing is leased; experts that no longer fit leave at once, and their memory is
        freed.

        If Ctrl-C has cut a call short, no expert stays, since any of them may be half done.
        """
        with self._lock:
            if self._under_way:
                self._begin_anew()
            self._under_way += 1
            self._expect_nothing()
            self._wait_for_loaders()
            self._residency.capacity_bytes = capacity_bytes
            self._evict(self._residency.victims(0, force=True) or [])
            self._buffers.release(capacity_bytes - self._residency.used_bytes)
            self._under_way -= 1

    def begin(self, demand: Demand) -> Arrivals:
        """Begins a layer with its demand: ends the predictions for it, and returns how far they had come."""
        with self._lock:
            self._under_way += 1
            if self._likely or self._queue:
                self._expect_nothing()
            self._residency.begin(demand)
            begun, self._begun = self._begun, []
            missing = len(self._residency.needed - self._slots.keys())
            self._under_way -= 1
        return Arrivals(begun, missing)

    def absent(self, keys: Sequence[ExpertKey]) -> list[bool]:
        """Returns for each expert whether it is neither in memory nor being read."""
        with self._lock:
            return [key not in self._slots for key in keys]

    def predict(self, keys: Sequence[ExpertKey], keep: Sequence[ExpertKey] = ()) -> None:
        """Has experts read ahead, most valuable first, in place of the last call's that are left. Experts to `keep`,
        most valuable first, do not leave for them."""
        with self._lock:
            self._begun, self._filling = [], False
            self._likely = (*keep, *keys)
            self._predicted = deque(key for key in keys if key not in self._slots)
            if self._predicted:
                self._wake(1)

    def fill(self, keys: Sequence[ExpertKey], past: Iterable[Demand]) -> None:
        """Has experts read into an empty cache, the first ones first, as long as no layer begins. `past`: demands that
        eviction is to count."""
        with self._lock:
            self._residency.learn(past)
            self.predict(keys)
            self._filling = True

    def lease(self, keys: Sequence[ExpertKey], following: Sequence[ExpertKey] = ()) -> Lease:
        """Leases experts of the present layer, for a with block, and queues the reads of missing ones.

        The experts must fit into the cache together, as one token's demand of a layer does. The experts `following` are
        leased next, one by one: they are read already as far as there is room. Waiting raises PackError.
        """
        with self._lock:
            self._under_way += 1
            taken = list(map(self._slots.get, keys))
            self._lend(filter(None, taken))
            if None in taken:
                self._bring(keys, taken)
            for key in following[: self.loaders.most + 1]:
                if key not in self._slots and not self._claim(key, missed=True):
                    break
            if self._queue and self._queue[-1].buffer.nbytes >= HANDED_OVER_BYTES:
                self._wake(len(self._queue))
        return Lease(self, list(filter(None, taken)))

    def nbytes(self, key: ExpertKey) -> int:
        return self._store.nbytes(key)

    def settle(self) -> None:
        """Lets experts that the store left in the page cache move into their buffers, while nothing else is to be
        read."""
        with self._lock:
            self._settled = True
            if self._to_move:
                self._wake(1)

    def close(self) -> None:
        """Ends the threads after the reads under way. Nothing may be leased after that."""
        with self._lock:
            self._closed = True
            self._expect_nothing()
            self._work.notify_all()
        self.loaders.end()
        self._store.close()

    # Calls of a lease.

    def give_back(self, slots: Sequence[Slot]) -> None:
        """Ends leases; experts that are in memory by then count as used."""
        with self._lock:
            self._end_leases(slots)
            used, counters = list[ExpertKey](), self._counters
            for slot in slots:
                if slot.expert is None:
                    continue
                used.append(slot.key)
                if slot.missed:
                    slot.missed = False
                else:
                    counters.hits += 1
                    counters.hits_in_flight += slot.in_flight
                slot.in_flight = False
                if slot.key in self._unused:
                    self._unused.discard(slot.key)
                    counters.prefetch_used += 1
                    counters.prefetch_used_bytes += slot.buffer.nbytes
            counters.requests += len(used)
            self._residency.used(used)
            if self._predicted:
                self._wake(1)  # there may be room now
            self._under_way -= 1

    def wait_for(self, slot: Slot) -> Expert:
        """Waits until the expert was read, and returns it; meanwhile this thread reads experts that are leased and
        still queued. Raises the error that stopped its reading."""
        with self._lock:
            self._under_way += 1
            while slot.expert is None and slot.error is None:
                self._read_or_wait(next(filter(attrgetter("leases"), self._queue), None))
            self._under_way -= 1
        if slot.error is not None:
            raise slot.error
        assert slot.expert is not None
        return slot.expert

    # Called with the lock held.

    def _bring(self, keys: Sequence[ExpertKey], taken: list[Slot | None]) -> None:
        """Leases the experts that have no slot in `taken` yet, and queues their reads."""
        # Evicting for all of them at once chooses the same experts as evicting for one after the other, and is faster.
        missing = sum([self._store.nbytes(key) for key, slot in zip(keys, taken, strict=True) if slot is None])
        victims = self._residency.victims(missing, self._locked, self._likely)
        self._evict(victims or [])
        try:
            for place, key in enumerate(keys):
                if taken[place] is None:
                    slot = self._demand(key) if victims is None else self._admit(key, self._store.nbytes(key), True)
                    taken[place] = slot
                    self._lend((slot,))
        except BaseException:
            self._end_leases(list(filter(None, taken)))
            raise

    def _lend(self, slots: Iterable[Slot]) -> None:
        for slot in slots:
            if slot.expert is None and not slot.awaited:
                slot.awaited = True
                slot.in_flight = not slot.missed
                self._waited_for += 1
            slot.leases += 1
            self._locked.add(slot.key)

    def _end_leases(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            slot.leases -= 1
            if not slot.leases and slot.expert is not None:
                self._locked.discard(slot.key)

    def _demand(self, key: ExpertKey) -> Slot:
        """Makes room for a missing expert and queues its read; if nothing else helps, experts leave that were predicted
        or are needed later."""
        while (slot := self._claim(key, True) or self._claim(key, True, force=True)) is None:
            if not self._reading and not any(held.expert is None for held in self._slots.values()):
                raise RuntimeError(f"the expert cache of {self.capacity_bytes} bytes can't hold {key}")
            self._read_or_wait(self._queue[0] if self._queue else None)
        return slot

    def _claim(self, key: ExpertKey, missed: bool, force: bool = False) -> Slot | None:
        """Makes room for an expert and, if it is `missed`, queues its read; returns its slot, or None if no other
        expert may leave for it."""
        nbytes = self._store.nbytes(key)
        victims = self._residency.victims(nbytes, self._locked, self._likely, force)
        if victims is None:
            return None
        self._evict(victims)
        return self._admit(key, nbytes, missed)

    def _admit(self, key: ExpertKey, nbytes: int, missed: bool) -> Slot:
        """Gives an expert a slot where there is room and, if it is `missed`, queues its read."""
        residency = self._residency
        buffer = self._buffers.take(nbytes, residency.capacity_bytes - residency.used_bytes - nbytes)
        residency.add(key, nbytes)
        slot = self._slots[key] = Slot(key, buffer, missed, awaited=missed)
        self._locked.add(key)
        if missed:
            self._waited_for += 1
            self._queue.append(slot)
        return slot

    def _evict(self, victims: Sequence[ExpertKey]) -> None:
        for victim in victims:
            self._drop(self._slots[victim])
            self._counters.evictions += 1

    def _drop(self, slot: Slot) -> None:
        del self._slots[slot.key]
        self._residency.remove(slot.key)
        self._buffers.give(slot.buffer)
        self._unused.discard(slot.key)
        self._locked.discard(slot.key)

    def _expect_nothing(self) -> None:
        """Forgets predicted experts, and queued reads that a failed layer has left behind."""
        self._likely = ()
        self._predicted.clear()
        for slot in list(self._queue):
            if not slot.leases:
                self._queue.remove(slot)
                self._waited_for -= 1
                self._drop(slot)

    def _wait_for_loaders(self) -> None:
        while self._reading:
            self._arrived.wait()

    def _begin_anew(self) -> None:
        """Forgets all experts and keeps their buffers, after Ctrl-C has cut a call short."""
        self._predicted.clear()
        self._queue.clear()
        self._to_move.clear()
        self._wait_for_loaders()
        while self._slots:  # one by one: cut short again, no buffer may be given twice
            self._buffers.give(self._slots.popitem()[1].buffer)
        self._buffers.recount()
        self._locked.clear()
        self._unused.clear()
        self._residency = Residency(self.capacity_bytes, self._residency.policy)
        self._under_way = self._waited_for = 0

    def _read_or_wait(self, queued: Slot | None) -> None:
        """Reads the queued expert, and if it is small all other small ones that are queued; without one, waits until
        some expert has been read."""
        started = time.perf_counter()
        if queued is None:
            self._arrived.wait()
        elif queued.buffer.nbytes >= HANDED_OVER_BYTES:
            self._queue.remove(queued)
            self._read((queued,))
        else:
            together = [slot for slot in self._queue if slot.buffer.nbytes < HANDED_OVER_BYTES]
            for slot in together:
                self._queue.remove(slot)
            self._read(together)
        self._counters.stall_s += time.perf_counter() - started

    def _read(self, slots: Sequence[Slot]) -> None:
        """Fills slots, without holding the lock meanwhile."""
        came: Sequence[Arrived | BaseException]
        try:
            self._lock.release()
            places = self._store.read_all([(slot.key, slot.buffer) for slot in slots])
            came = [
                place if isinstance(place, PackError) else (self._store.expert(slot.key, place), place)
                for slot, place in zip(slots, places, strict=True)
            ]
        except BaseException as caught:
            came = [caught] * len(slots)
        finally:
            self._lock.acquire()
        for slot, what in zip(slots, came, strict=True):
            self._come(slot, what)
        self._arrived.notify_all()
        error = came[-1]
        if isinstance(error, BaseException) and not isinstance(error, Exception):
            raise error  # Ctrl-C is for the thread that runs, not for the one that waits
        if self._predicted and not self._waited_for:
            self._wake(1)

    def _come(self, slot: Slot, what: Arrived | BaseException) -> None:
        """Puts an expert that was read into its slot; an error instead of an expert is kept there, and the slot is
        dropped."""
        if slot.awaited:
            slot.awaited = False
            self._waited_for -= 1
        if isinstance(what, BaseException):
            slot.error = what
            self._drop(slot)
            return
        slot.expert, place = what
        if place is not slot.buffer:
            self._to_move.append((slot, place))
        if not slot.leases:
            self._locked.discard(slot.key)

    def _wake(self, readers: int) -> None:
        self.loaders.start()
        self._work.notify(readers)

    def _serve(self) -> None:
        """Reads and moves experts until the cache is closed: the work of a loader."""
        with self._lock:
            while not self._closed:
                slot = self._queue.popleft() if self._queue else self._next_predicted()
                move = self._next_move() if slot is None else None
                if slot is None and move is None:
                    self._work.wait()
                    continue
                self._reading += 1
                if slot is not None:
                    self._read((slot,))
                elif move is not None:
                    self._move(*move)
                self._reading -= 1

    def _move(self, slot: Slot, place: U8) -> None:
        """Moves an expert to its own buffer, without holding the lock meanwhile. A computation that uses the old place
        goes on using it."""
        self._lend((slot,))  # or its buffer could become another's
        self._lock.release()
        try:
            np.copyto(slot.buffer, place)
            slot.expert = self._store.expert(slot.key, slot.buffer)
        finally:
            self._lock.acquire()
            self._end_leases((slot,))
            self._arrived.notify_all()

    def _next_move(self) -> tuple[Slot, U8] | None:
        """Returns the next expert that is to move and still there; None while no reads are settled, or without one."""
        while self._settled and self._to_move:
            slot, place = self._to_move.popleft()
            if self._slots.get(slot.key) is slot:
                return slot, place
        return None

    def _next_predicted(self) -> Slot | None:
        """Returns a slot for the most valuable predicted expert that is left; None while a demanded one is waited for,
        or without room."""
        while self._predicted and not self._waited_for and not self._residency.owes():
            key = self._predicted.popleft()
            if key in self._slots:
                continue
            try:
                slot = self._claim(key, missed=False)
            except MemoryError:
                slot = None
            if slot is None:
                self._predicted.appendleft(key)  # there may be room when a lease ends
                return None
            if not self._filling:
                self._counters.prefetch_issued += 1
                self._counters.prefetch_issued_bytes += slot.buffer.nbytes
                self._unused.add(key)
                self._begun.append(key)
            return slot
        return None
