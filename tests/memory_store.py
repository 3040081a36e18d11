"""An expert store without a disk, whose reads can be held, counted and made to fail; and what waits for threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from moert.experts.cache import ExpertCache
from moert.experts.policy import EVICTION, Arrivals, Demand
from moert.pack.errors import HashMismatch, PackError
from moert.pack.model_spec import ExpertKey, LayerKey
from moert.stats import ExpertCounters

ORDER = [LayerKey("decoder", layer) for layer in range(3)]
PATIENCE_S = 600


def key(layer: int, expert: int) -> ExpertKey:
    return ExpertKey("decoder", layer, expert)


def mark(wanted: ExpertKey) -> int:
    """The byte that fills this expert."""
    return 1 + 16 * wanted.layer + wanted.expert


class MemoryStore:
    """Experts of expert id + 1 tens of bytes. Reads of keys in `gates` wait, reads of keys in `broken` raise; with
    `elsewhere` experts lie in other memory than the cache's."""

    def __init__(self) -> None:
        self.reads: list[ExpertKey] = []
        self.calls: list[list[ExpertKey]] = []  # what was to be read together
        self.twice: list[ExpertKey] = []  # read while the same expert was being read
        self.gates: dict[ExpertKey, threading.Event] = {}
        self.entered: dict[ExpertKey, threading.Event] = {}
        self.broken: dict[ExpertKey, BaseException] = {}
        self.elsewhere = False
        self.during: Callable[[ExpertKey], None] = lambda wanted: None
        self._under_way: set[ExpertKey] = set()

    def hold(self, held: ExpertKey) -> None:
        self.gates[held], self.entered[held] = threading.Event(), threading.Event()

    def damage(self, damaged: ExpertKey) -> None:
        self.broken[damaged] = HashMismatch(f"{damaged} is damaged")

    def nbytes(self, wanted: ExpertKey) -> int:
        return 10 * (wanted.expert + 1)

    def read(self, wanted: ExpertKey, into: np.ndarray) -> np.ndarray:
        if wanted in self._under_way:
            self.twice.append(wanted)
        self._under_way.add(wanted)
        self.reads.append(wanted)
        half = len(into) // 2
        into[:half] = mark(wanted)
        try:
            if wanted in self.gates:
                self.entered[wanted].set()
                assert self.gates[wanted].wait(PATIENCE_S)
            self.during(wanted)
            if wanted in self.broken:
                raise self.broken[wanted]
        finally:
            self._under_way.discard(wanted)
        into[half:] = mark(wanted)
        if not self.elsewhere:
            return into
        into[:] = 0
        return np.full_like(into, mark(wanted))

    def read_all(self, wanted: Sequence[tuple[ExpertKey, np.ndarray]]) -> list[Any]:
        self.calls.append([each for each, _ in wanted])
        return [self._tried(each, into) for each, into in wanted]

    def _tried(self, wanted: ExpertKey, into: np.ndarray) -> Any:
        try:
            return self.read(wanted, into)
        except PackError as error:
            return error

    def close(self) -> None:
        pass

    def expert(self, wanted: ExpertKey, buffer: np.ndarray) -> np.ndarray:
        assert len(buffer) == self.nbytes(wanted)
        return buffer


Made = tuple[ExpertCache, MemoryStore, ExpertCounters]


def make(capacity: int, policy: str = "lru", loaders: int = 1) -> Made:
    store, counters = MemoryStore(), ExpertCounters()
    return ExpertCache(store, EVICTION[policy](ORDER), capacity, counters, loaders), store, counters


def begin(cache: ExpertCache, layer: int, experts: Iterable[int]) -> Arrivals:
    """A layer of the decoder demands experts."""
    return cache.begin(Demand(LayerKey("decoder", layer), tuple(experts)))


def use(cache: ExpertCache, layer: int, experts: list[int]) -> None:
    """A layer of a prompt: one expert after the other, those that follow named."""
    begin(cache, layer, experts)
    keys = [key(layer, expert) for expert in experts]
    for place, wanted in enumerate(keys):
        with cache.lease([wanted], keys[place + 1 :]) as lease:
            assert (lease.expert(0) == mark(wanted)).all()
            assert cache.used_bytes <= cache.capacity_bytes


def reading_ahead(cache: ExpertCache, store: MemoryStore, *predicted: ExpertKey) -> None:
    """Predicts these, of which the first is held while it is read."""
    store.hold(predicted[0])
    cache.predict(predicted)
    assert store.entered[predicted[0]].wait(PATIENCE_S)


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until, "it does not happen"
        time.sleep(0.002)


class Model(threading.Thread):
    """Runs something as the model's thread would; `end` waits for it and raises what it raised."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._work, self._error = work, list[BaseException]()
        self.start()

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._error.append(error)

    def end(self) -> None:
        self.join(PATIENCE_S)
        assert not self.is_alive(), "it hangs"
        if self._error:
            raise self._error[0]


def read_ahead_at_once(cache: ExpertCache) -> None:
    """Whoever leases reads the first of what is predicted, where it may, at the latest when it gives back: so something
    is read ahead even if the system gives the loaders no time."""

    def then_read(call: Callable[..., None]) -> Callable[..., None]:
        def both(*what: Any) -> None:
            call(*what)
            with cache._lock:
                if (slot := cache._next_predicted()) is not None:
                    cache._reading += 1
                    cache._read((slot,))
                    cache._reading -= 1

        return both

    cache.predict, cache.give_back = then_read(cache.predict), then_read(cache.give_back)  # type: ignore[method-assign]
