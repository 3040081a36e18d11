"""The threads of the expert cache: what they read, when, what cancels it, and how they end."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator

import memory_store
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_store import Made, Model, begin, key, mark, reading_ahead, use, wait_until

from moert.experts import cache as cache_module
from moert.experts.cache import ExpertCache
from moert.experts.policy import EVICTION
from moert.pack.errors import HashMismatch

Make = Callable[..., Made]
SHORT_S = 0.05  # for what must not happen


@pytest.fixture(params=[128 << 10, 0], ids=["small", "handed over"])
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """As for experts that are too small for other threads, and for larger ones."""
    monkeypatch.setattr(cache_module, "HANDED_OVER_BYTES", request.param)
    made: list[ExpertCache] = []

    def factory(*arguments: object) -> Made:
        cache, store, counters = memory_store.make(*arguments)  # type: ignore[arg-type]
        made.append(cache)
        return cache, store, counters

    yield factory
    for cache in made:
        Model(cache.close).end()
        assert not any(thread.is_alive() for thread in cache.loaders.threads)


@pytest.fixture
def handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "HANDED_OVER_BYTES", 0)


def test_predicted_experts_are_read_in_order_of_their_worth(make: Make) -> None:
    cache, store, counters = make(100)
    use(cache, 0, [0])
    cache.predict([key(1, 2), key(1, 0), key(1, 1)])
    wait_until(lambda: len(cache.resident()) == 4)
    assert store.reads[1:] == [key(1, 2), key(1, 0), key(1, 1)]
    use(cache, 1, [1, 2])
    assert (counters.requests, counters.hits) == (3, 2)
    assert (counters.prefetch_issued, counters.prefetch_issued_bytes) == (3, 60)
    assert (counters.prefetch_used, counters.prefetch_used_bytes) == (2, 50)
    use(cache, 1, [1])
    assert counters.prefetch_used == 2  # once


def test_nothing_is_read_ahead_while_something_is_waited_for(make: Make) -> None:
    cache, store, _ = make(100, "lru", 2)
    store.hold(key(0, 0))
    model = Model(lambda: use(cache, 0, [0]))
    assert store.entered[key(0, 0)].wait(memory_store.PATIENCE_S)
    cache.predict([key(1, 0)])
    time.sleep(SHORT_S)
    assert store.reads == [key(0, 0)]
    store.gates[key(0, 0)].set()
    model.end()
    wait_until(lambda: cache.resident() == [key(0, 0), key(1, 0)])


def test_nothing_is_read_ahead_before_the_layer_has_asked_for_all_it_needs(make: Make) -> None:
    cache, store, _ = make(100)
    begin(cache, 0, [0, 1])
    cache.predict([key(1, 0)])
    with cache.lease([key(0, 0)]) as lease:
        lease.all()
    time.sleep(SHORT_S)
    assert store.reads == [key(0, 0)]
    with cache.lease([key(0, 1)]) as lease:
        lease.all()
    wait_until(lambda: key(1, 0) in cache.resident())
    assert store.reads == [key(0, 0), key(0, 1), key(1, 0)]


def test_the_decision_of_the_router_cancels_the_rest(make: Make) -> None:
    cache, store, counters = make(100)
    use(cache, 0, [0])
    reading_ahead(cache, store, key(1, 0), key(1, 1), key(1, 2))
    begin(cache, 1, [0])
    store.gates[key(1, 0)].set()
    with cache.lease([key(1, 0)]) as lease:
        lease.all()
    cache.predict([key(2, 0)])
    wait_until(lambda: key(2, 0) in cache.resident())
    assert store.reads == [key(0, 0), key(1, 0), key(2, 0)]
    assert (counters.prefetch_issued, counters.prefetch_used) == (2, 1)


def test_a_new_prediction_replaces_the_last(make: Make) -> None:
    cache, store, _ = make(100)
    use(cache, 0, [0])
    reading_ahead(cache, store, key(1, 0), key(1, 1))
    cache.predict([key(1, 2)])
    store.gates[key(1, 0)].set()
    wait_until(lambda: key(1, 2) in cache.resident())
    cache.predict(())
    assert store.reads == [key(0, 0), key(1, 0), key(1, 2)]


def test_a_demand_waits_for_the_prefetch_of_the_same_expert(make: Make) -> None:
    cache, store, counters = make(100)
    use(cache, 0, [0])
    reading_ahead(cache, store, key(1, 0))
    model = Model(lambda: use(cache, 1, [0]))
    wait_until(lambda: cache._waited_for == 1)
    store.gates[key(1, 0)].set()
    model.end()
    assert store.reads == [key(0, 0), key(1, 0)]
    assert (counters.requests, counters.hits) == (2, 1)
    assert (counters.prefetch_used, counters.prefetch_used_bytes) == (1, 10)
    assert counters.stall_s > 0


def test_a_demand_does_not_wait_for_the_prefetch_of_another(make: Make) -> None:
    cache, store, counters = make(100)
    use(cache, 0, [0])
    reading_ahead(cache, store, key(1, 0))
    Model(lambda: use(cache, 1, [1, 2])).end()
    assert cache.resident() == [key(0, 0), key(1, 1), key(1, 2)]
    store.gates[key(1, 0)].set()
    wait_until(lambda: key(1, 0) in cache.resident())
    assert counters.prefetch_used == 0


def test_a_failed_prefetch_that_nobody_asks_for_is_forgotten(make: Make) -> None:
    cache, store, counters = make(40)
    store.damage(key(1, 2))
    use(cache, 0, [0])
    cache.predict([key(1, 2), key(1, 1)])
    wait_until(lambda: key(1, 1) in cache.resident())
    assert (cache.used_bytes, cache._unused) == (30, {key(1, 1)})
    use(cache, 1, [1])
    with pytest.raises(HashMismatch, match="is damaged"):  # asked for, it is read once more
        use(cache, 1, [2])
    assert store.reads.count(key(1, 2)) == 2
    use(cache, 1, [0, 1])
    assert (counters.prefetch_issued, counters.prefetch_used) == (2, 1)


def test_a_failed_prefetch_that_is_asked_for_meanwhile_raises_its_error_and_takes_no_room(make: Make) -> None:
    cache, store, _ = make(40)
    store.damage(key(1, 2))
    use(cache, 0, [0])
    reading_ahead(cache, store, key(1, 2))
    model = Model(lambda: use(cache, 1, [2]))
    wait_until(lambda: cache._waited_for == 1)
    store.gates[key(1, 2)].set()
    with pytest.raises(HashMismatch, match="is damaged"):
        model.end()
    assert store.reads.count(key(1, 2)) == 1
    assert (cache.used_bytes, cache._locked, cache._waited_for) == (10, set(), 0)
    Model(lambda: use(cache, 2, [3])).end()  # all of the room


def test_a_prediction_never_evicts_what_is_more_probable_but_may_evict_what_is_less(make: Make) -> None:
    cache, store, _ = make(50)
    use(cache, 0, [0])
    cache.predict([key(1, 1), key(1, 2), key(1, 0)])  # 20 + 30, for which 0/0 leaves
    wait_until(lambda: cache.resident() == [key(1, 1), key(1, 2)])
    time.sleep(SHORT_S)
    assert key(1, 0) not in store.reads
    cache.predict([key(2, 0), key(2, 3)])
    wait_until(lambda: key(2, 0) in cache.resident())


def test_a_prediction_waits_for_room_until_a_lease_ends(make: Make) -> None:
    cache, store, _ = make(30)
    begin(cache, 0, [2])
    with cache.lease([key(0, 2)]) as lease:
        lease.all()
        cache.predict([key(1, 1), key(1, 0)])
        time.sleep(SHORT_S)
        assert store.reads == [key(0, 2)]
    wait_until(lambda: cache.resident() == [key(1, 0), key(1, 1)])
    assert store.reads == [key(0, 2), key(1, 1), key(1, 0)]


def test_no_memory_for_a_prediction_is_no_error(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, _, _ = make(60)
    use(cache, 0, [0])
    refused, take = threading.Event(), cache._buffers.take

    def refuse(nbytes: int, room_bytes: int) -> None:
        refused.set()
        raise MemoryError

    monkeypatch.setattr(cache._buffers, "take", refuse)
    cache.predict([key(1, 0)])
    assert refused.wait(memory_store.PATIENCE_S)
    begin(cache, 0, [0])
    monkeypatch.setattr(cache._buffers, "take", take)
    assert cache.used_bytes == 10
    cache.predict([key(1, 0)])
    wait_until(lambda: key(1, 0) in cache.resident())


def test_what_is_missing_is_read_by_all_threads_at_once(make: Make, handed_over: None) -> None:
    cache, store, counters = make(100, "lru", 2)
    all_there = threading.Barrier(3, timeout=memory_store.PATIENCE_S)
    store.during = lambda wanted: all_there.wait() and None
    begin(cache, 0, [0, 1, 2])
    keys = [key(0, expert) for expert in range(3)]

    def layer() -> None:
        with cache.lease(keys) as lease:
            assert [int(buffer[-1]) for buffer in lease.all()] == [mark(each) for each in keys]

    Model(layer).end()
    assert (counters.requests, counters.hits) == (3, 0)
    assert sorted(store.reads) == keys


def test_experts_that_follow_are_read_while_the_first_is_used(make: Make, handed_over: None) -> None:
    cache, store, counters = make(200)
    keys = [key(0, expert) for expert in range(4)]
    begin(cache, 0, [0, 1, 2, 3])
    with cache.lease(keys[:1], keys[1:]) as lease:
        lease.all()
        wait_until(lambda: cache.resident() == keys[:3])
        time.sleep(SHORT_S)
        assert sorted(store.reads) == keys[:3]  # one more than there are loaders
    use(cache, 0, [0, 1, 2, 3])
    assert (counters.requests, counters.hits, len(store.reads)) == (5, 1, 4)


def test_an_expert_that_follows_and_fails_is_an_error_once_it_is_its_turn(make: Make) -> None:
    cache, store, _ = make(100)
    store.damage(key(0, 1))
    with pytest.raises(HashMismatch):
        use(cache, 0, [0, 1, 2])
    assert cache.resident()[0] == key(0, 0)
    Model(lambda: use(cache, 1, [0, 1, 2, 3])).end()


def test_resizing_waits_for_reads_under_way_and_cancels_the_others(make: Make) -> None:
    cache, store, _ = make(100)
    use(cache, 0, [0])
    reading_ahead(cache, store, key(1, 2), key(1, 1))
    model = Model(lambda: cache.resize(10))
    wait_until(lambda: not cache._predicted)
    assert cache.capacity_bytes == 100
    store.gates[key(1, 2)].set()
    model.end()
    assert cache.used_bytes <= cache.held_bytes <= cache.capacity_bytes == 10
    assert key(1, 1) not in store.reads


def test_close_waits_for_reads_under_way_and_may_be_called_again(make: Make) -> None:
    cache, store, _ = make(100)
    begin(cache, 0, [])
    reading_ahead(cache, store, key(1, 0), key(1, 1))
    closing = Model(cache.close)
    time.sleep(SHORT_S)
    assert closing.is_alive()
    store.gates[key(1, 0)].set()
    closing.end()
    cache.close()
    assert store.reads == [key(1, 0)]


def test_close_does_not_wait_for_a_dead_disk_for_ever(monkeypatch: pytest.MonkeyPatch, make: Make) -> None:
    monkeypatch.setattr(cache_module, "_CLOSE_S", SHORT_S)
    cache, store, _ = make(100, "lru", 3)
    for expert in range(3):
        store.hold(key(1, expert))
    begin(cache, 0, [])
    cache.predict([key(1, expert) for expert in range(3)])
    assert store.entered[key(1, 0)].wait(memory_store.PATIENCE_S)
    Model(cache.close).end()
    assert any(thread.is_alive() and thread.daemon for thread in cache.loaders.threads)
    monkeypatch.setattr(cache_module, "_CLOSE_S", memory_store.PATIENCE_S)
    for gate in store.gates.values():
        gate.set()


def test_a_cache_that_nobody_predicts_for_starts_no_thread() -> None:
    cache, _, _ = memory_store.make(100, loaders=4)
    for layer in range(3):
        use(cache, layer, [0, 1, 2])
    cache.close()
    assert cache.loaders.threads == []


def test_where_the_system_allows_no_more_threads_the_model_reads(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    cache, store, counters = make(60, "lru", 4)
    with monkeypatch.context() as patch:
        patch.setattr(cache_module.threading, "Thread", Refused)
        patch.setattr(cache_module, "HANDED_OVER_BYTES", 0)
        for layer in (0, 1, 2):
            use(cache, layer, [0, 1, 2])
            cache.predict([key((layer + 1) % 3, 0)])
    assert cache.loaders.threads == []
    assert (counters.requests, len(store.reads), counters.prefetch_issued) == (9, 9, 0)


def trace_of(rng: random.Random, cache: ExpertCache, store: memory_store.MemoryStore, fails: bool) -> None:
    """120 layers with random demands and predictions; sometimes a read fails or the room changes."""
    for step in range(120):
        layer = step % 3
        needed = sorted(rng.sample(range(4), rng.randint(0, 3)))
        keys = [key(layer, expert) for expert in needed]
        store.broken.clear()
        if fails and rng.random() < 0.15:
            store.damage(key(rng.randrange(3), rng.randrange(4)))
        if rng.random() < 0.05:
            cache.resize(rng.choice([90, 110, 170]))
        begin(cache, layer, needed)
        groups = [keys] if rng.random() < 0.5 else [[each] for each in keys]
        try:
            for at, group in enumerate(groups):
                with cache.lease(group, [each for later in groups[at + 1 :] for each in later]) as lease:
                    if at + 1 == len(groups):
                        cache.predict([key((layer + 1) % 3, expert) for expert in rng.sample(range(4), 3)])
                    places = list(range(len(group)))
                    rng.shuffle(places)
                    for place in places:
                        assert (lease.expert(place) == mark(group[place])).all()
                    if rng.random() < 0.5:
                        time.sleep(rng.random() * 0.001)  # it computes
                    assert all((buffer == mark(each)).all() for each, buffer in zip(group, lease.all(), strict=True))
        except HashMismatch:
            assert fails  # of this step's damage, or of a prediction that was under way before it was mended
        with cache._lock:
            assert all(slot.leases == 0 for slot in cache._slots.values())
        if rng.random() < 0.3:
            time.sleep(rng.random() * 0.002)


@settings(max_examples=15)
@given(
    seed=st.integers(0, 1 << 30), loaders=st.integers(1, 5), policy=st.sampled_from(sorted(EVICTION)),
    handed=st.booleans(), fails=st.booleans(), capacity=st.sampled_from([90, 100, 150, 300]),
)  # fmt: skip
def test_many_layers_at_random_bring_the_right_bytes_into_the_room_there_is(
    seed: int, loaders: int, policy: str, handed: bool, fails: bool, capacity: int
) -> None:
    cache, store, counters = memory_store.make(capacity, policy, loaders)
    chance, over = random.Random(seed + 1), list[int]()

    def during(wanted: object) -> None:
        time.sleep(chance.random() * 0.0005)
        with cache._lock:
            if not cache.used_bytes <= cache.held_bytes <= cache.capacity_bytes:
                over.append(cache.held_bytes)

    store.during = during
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_module, "HANDED_OVER_BYTES", 0 if handed else 1 << 20)
        Model(lambda: trace_of(random.Random(seed), cache, store, fails)).end()
        Model(cache.close).end()
    assert (over, store.twice) == ([], [])
    assert (cache._waited_for, list(cache._queue), cache._locked) == (0, [], set())
    assert sum(map(store.nbytes, cache.resident())) == cache.used_bytes
    assert set(cache.resident()) == set(cache._residency)
    assert counters.requests >= counters.hits > 0
    assert counters.prefetch_issued >= counters.prefetch_used > 0
    if not fails:
        assert len(store.reads) == counters.requests - counters.hits + counters.prefetch_issued
