from __future__ import annotations

import threading

import numpy as np
import pytest

from moert.experts.cache import ExpertCache
from moert.experts.eviction import EVICTION
from moert.pack.errors import HashMismatch
from moert.pack.model_spec import ExpertKey, Stack
from moert.stats import ExpertCounters

ORDER: list[tuple[Stack, int]] = [("decoder", layer) for layer in range(3)]


def key(layer: int, expert: int) -> ExpertKey:
    return ExpertKey("decoder", layer, expert)


class MemoryStore:
    """Experts of expert id + 1 tens of bytes; reads of keys in `gates` wait, reads of keys in `broken` fail."""

    def __init__(self) -> None:
        self.reads: list[ExpertKey] = []
        self.gates: dict[ExpertKey, threading.Event] = {}
        self.entered: dict[ExpertKey, threading.Event] = {}
        self.broken: set[ExpertKey] = set()

    def hold(self, held: ExpertKey) -> None:
        self.gates[held], self.entered[held] = threading.Event(), threading.Event()

    def nbytes(self, wanted: ExpertKey) -> int:
        return 10 * (wanted.expert + 1)

    def read(self, wanted: ExpertKey) -> np.ndarray:
        self.reads.append(wanted)
        if wanted in self.gates:
            self.entered[wanted].set()
            assert self.gates[wanted].wait(10)
        if wanted in self.broken:
            raise HashMismatch(f"{wanted} is damaged")
        return np.zeros(self.nbytes(wanted), dtype=np.uint8)


def make(capacity: int, policy: str = "lru") -> tuple[ExpertCache, MemoryStore, ExpertCounters]:
    store, counters = MemoryStore(), ExpertCounters()
    return ExpertCache(store, EVICTION[policy](ORDER), capacity, counters), store, counters


def use(cache: ExpertCache, layer: int, experts: list[int]) -> None:
    cache.begin_layer("decoder", layer, experts)
    for expert in experts:
        with cache.lease([key(layer, expert)]) as (buffer,):
            assert len(buffer) == 10 * (expert + 1)
            assert cache.used_bytes <= cache.capacity_bytes


def test_bytes_are_counted_not_slots() -> None:
    cache, store, counters = make(60)
    use(cache, 0, [0, 1, 2])  # 10 + 20 + 30
    assert (cache.used_bytes, counters.evictions) == (60, 0)
    use(cache, 1, [2])  # 30 more: the two least recently used have 10 + 20
    assert cache.resident() == [key(0, 2), key(1, 2)]
    use(cache, 0, [2])
    assert (counters.requests, counters.hits, counters.evictions) == (5, 1, 2)
    assert store.reads == [key(0, 0), key(0, 1), key(0, 2), key(1, 2)]


def test_a_leased_expert_stays_even_when_the_policy_would_evict_it() -> None:
    cache, _, _ = make(40)
    cache.begin_layer("decoder", 0, [0])
    with cache.lease([key(0, 0)]):
        cache.begin_layer("decoder", 1, [1])
        with cache.lease([key(1, 1)]):
            cache.predict([key(2, 2)])
            assert not cache.prefetch(key(2, 2))  # 30 bytes would need both
            assert cache.resident() == [key(0, 0), key(1, 1)]


def test_experts_lent_together_stay_until_all_are_given_back() -> None:
    cache, store, counters = make(60)
    use(cache, 1, [0, 1])
    cache.begin_layer("decoder", 0, [0, 1, 2])  # 10 + 20 + 30: nothing else can stay
    with cache.lease([key(0, 0), key(0, 1), key(0, 2)]) as held:
        assert [len(buffer) for buffer in held] == [10, 20, 30]
        assert cache.resident() == [key(0, 0), key(0, 1), key(0, 2)]
        cache.begin_layer("decoder", 2, [0])
        cache.predict([key(2, 0)])
        with pytest.raises(RuntimeError, match="can't hold"), cache.lease([key(2, 0)]):
            pass
    use(cache, 2, [0])
    assert (counters.requests, counters.hits) == (7, 0)
    assert store.reads.count(key(0, 1)) == 1


def test_experts_lent_together_are_given_back_when_one_cannot_be_read() -> None:
    cache, store, _ = make(60)
    store.broken.add(key(0, 2))
    cache.begin_layer("decoder", 0, [0, 1, 2])
    with pytest.raises(HashMismatch), cache.lease([key(0, 0), key(0, 1), key(0, 2)]):
        pass
    assert cache.resident() == [key(0, 0), key(0, 1)]
    use(cache, 1, [0, 1, 2])  # needs all of the room
    assert cache.resident() == [key(1, 0), key(1, 1), key(1, 2)]


def test_what_the_layer_needs_later_outlives_everything_else() -> None:
    cache, store, _ = make(40)
    use(cache, 0, [1])
    use(cache, 1, [0])
    cache.begin_layer("decoder", 0, [0, 1])  # 0 is missing; the least recently used is 1, which is needed next
    with cache.lease([key(0, 0)]):
        assert key(0, 1) in cache.resident()
    with cache.lease([key(0, 1)]):
        pass
    assert store.reads.count(key(0, 1)) == 1


def test_a_layer_larger_than_the_cache_reads_each_expert_once() -> None:
    cache, store, counters = make(50)
    use(cache, 0, [3])
    store.reads.clear()
    use(cache, 0, [0, 1, 2, 3])
    assert store.reads == [key(0, 0), key(0, 1), key(0, 2), key(0, 3)]
    assert counters.evictions == 4


def test_if_something_needed_must_leave_it_is_what_is_needed_last() -> None:
    cache, store, counters = make(70)
    use(cache, 0, [2, 3])
    store.reads.clear()
    use(cache, 0, [0, 1, 2, 3])
    assert store.reads == [key(0, 0), key(0, 1), key(0, 3)]
    assert counters.hits == 1


def test_an_expert_larger_than_the_cache_is_our_own_mistake() -> None:
    cache, _, _ = make(20)
    cache.begin_layer("decoder", 0, [3])
    with pytest.raises(RuntimeError, match="can't hold"), cache.lease([key(0, 3)]):
        pass


def test_a_demand_waits_for_the_prefetch_of_the_same_expert() -> None:
    cache, store, counters = make(100)
    store.hold(key(1, 0))
    use(cache, 0, [0])
    cache.predict([key(1, 0)])
    thread = threading.Thread(target=cache.prefetch, args=(key(1, 0),))
    thread.start()
    assert store.entered[key(1, 0)].wait(10)
    threading.Timer(0.05, store.gates[key(1, 0)].set).start()
    use(cache, 1, [0])
    thread.join(10)
    assert store.reads == [key(0, 0), key(1, 0)]
    assert (counters.hits, counters.prefetch_used, counters.prefetch_used_bytes) == (1, 1, 10)
    assert counters.stall_s > 0


def test_a_failed_prefetch_leaves_room_and_the_demand_gets_its_own_error() -> None:
    cache, store, _ = make(30)
    store.broken.add(key(1, 2))
    use(cache, 0, [0])
    cache.predict([key(1, 2)])
    with pytest.raises(HashMismatch):
        cache.prefetch(key(1, 2))
    assert cache.used_bytes == 0
    cache.begin_layer("decoder", 1, [2])
    with pytest.raises(HashMismatch), cache.lease([key(1, 2)]):
        pass
    use(cache, 1, [0])
    assert cache.resident() == [key(1, 0)]


def test_prefetch_never_evicts_what_is_more_probable_but_may_evict_what_is_less() -> None:
    cache, _, _ = make(50)
    use(cache, 0, [0])
    cache.predict([key(1, 1), key(1, 2), key(1, 0)])
    assert cache.prefetch(key(1, 1))
    assert cache.prefetch(key(1, 2))  # evicts 0/0
    assert not cache.prefetch(key(1, 0))
    assert cache.resident() == [key(1, 1), key(1, 2)]
    cache.predict([key(2, 0), key(2, 3)])
    assert cache.prefetch(key(2, 0))
    assert cache.resident() == [key(1, 2), key(2, 0)]


def test_prefetch_after_the_router_has_decided_does_nothing() -> None:
    cache, store, _ = make(50)
    use(cache, 0, [0])
    cache.predict([key(1, 1)])
    use(cache, 1, [2])
    assert not cache.prefetch(key(1, 1))
    assert key(1, 1) not in store.reads


def test_prefetch_waits_until_the_present_layer_has_read_its_own() -> None:
    cache, store, _ = make(100)
    cache.begin_layer("decoder", 0, [0, 1])
    cache.predict([key(1, 0)])
    thread = threading.Thread(target=cache.prefetch, args=(key(1, 0),))
    thread.start()
    for expert in (0, 1):
        with cache.lease([key(0, expert)]):
            pass
    thread.join(10)
    assert store.reads == [key(0, 0), key(0, 1), key(1, 0)]


def test_demand_takes_back_what_predictions_fill_least_probable_first() -> None:
    cache, _, _ = make(30)
    use(cache, 0, [0])
    cache.predict([key(1, 0), key(1, 1)])
    assert cache.prefetch(key(1, 0))
    assert cache.prefetch(key(1, 1))
    cache._residency.begin_layer("decoder", 0, [0])  # predictions still stand
    with cache.lease([key(0, 0)]):
        assert cache.resident() == [key(0, 0), key(1, 0)]


def test_shrinking_evicts_and_growing_does_not() -> None:
    cache, _, counters = make(60)
    use(cache, 0, [0, 1, 2])
    cache.resize(30)
    assert cache.resident() == [key(0, 2)]
    cache.resize(90)
    assert (cache.resident(), counters.evictions) == ([key(0, 2)], 2)
