"""What is in memory, what leaves, and what is counted; test_loading.py has the threads."""

from __future__ import annotations

import threading
import time

import pytest
from memory_store import ORDER, PATIENCE_S, Model, begin, key, make, mark, use, wait_until

from moert.experts import cache as cache_module
from moert.experts.cache import ExpertCache
from moert.experts.policy import EVICTION, Demand
from moert.kernels.backend import Expert
from moert.pack.codec import U8
from moert.pack.errors import HashMismatch
from moert.pack.model_spec import ExpertKey, LayerKey

TOGETHER = pytest.mark.parametrize("asked", [([0, 1, 2], []), ([0], [1, 2])], ids=["together", "one by one"])


def test_bytes_are_counted_not_slots() -> None:
    cache, store, counters = make(60)
    use(cache, 0, [0, 1, 2])  # 10 + 20 + 30
    assert (cache.used_bytes, counters.evictions) == (60, 0)
    use(cache, 1, [2])  # 30 more: the two least recently used have 10 + 20
    assert cache.resident() == [key(0, 2), key(1, 2)]
    use(cache, 0, [2])
    assert (counters.requests, counters.hits, counters.evictions) == (5, 1, 2)
    assert store.reads == [key(0, 0), key(0, 1), key(0, 2), key(1, 2)]


def test_a_hit_that_is_still_being_read_when_it_is_demanded_is_counted_as_such_once() -> None:
    cache, store, counters = make(60)
    store.hold(key(0, 0))
    cache.predict([key(0, 0)])
    assert store.entered[key(0, 0)].wait(PATIENCE_S)
    begin(cache, 0, [0, 1])
    with cache.lease([key(0, 0), key(0, 1)]) as lease:
        store.gates[key(0, 0)].set()
        lease.all()
    assert (counters.requests, counters.hits, counters.hits_in_flight) == (2, 1, 1)
    use(cache, 0, [0, 1])
    assert (counters.requests, counters.hits, counters.hits_in_flight) == (4, 3, 1)
    cache.close()


def test_what_was_read_ahead_in_time_is_no_hit_in_flight() -> None:
    cache, _, counters = make(60)
    begin(cache, 0, [])
    cache.predict([key(1, 0)])
    wait_until(lambda: cache.resident() == [key(1, 0)])
    use(cache, 1, [0])
    assert (counters.hits, counters.hits_in_flight, counters.prefetch_used) == (1, 0, 1)
    cache.close()


def test_a_leased_expert_stays_even_when_the_policy_would_evict_it() -> None:
    cache, store, _ = make(40)
    begin(cache, 0, [0])
    with cache.lease([key(0, 0)]) as first:
        buffer = first.expert(0)
        begin(cache, 1, [1])
        with cache.lease([key(1, 1)]) as second:
            second.all()
            cache.predict([key(2, 2)])  # 30 bytes would need both
            with pytest.raises(RuntimeError, match="can't hold"), cache.lease([key(2, 2)]):
                pass
            assert cache.resident() == [key(0, 0), key(1, 1)]
            assert (buffer == mark(key(0, 0))).all()
    cache.close()
    assert store.reads == [key(0, 0), key(1, 1)]


def test_what_was_there_already_stays_while_it_is_lent() -> None:
    cache, _, _ = make(40)
    use(cache, 0, [0, 2])
    begin(cache, 0, [0])
    with cache.lease([key(0, 0)]) as first:
        begin(cache, 1, [3])
        with pytest.raises(RuntimeError, match="can't hold"), cache.lease([key(1, 3)]):
            pass
        assert (first.expert(0) == mark(key(0, 0))).all()
        assert key(0, 0) in cache.resident()
    use(cache, 1, [3])
    assert cache.resident() == [key(1, 3)]


def test_experts_lent_together_stay_until_all_are_given_back() -> None:
    cache, store, counters = make(60)
    use(cache, 1, [0, 1])
    begin(cache, 0, [0, 1, 2])  # 10 + 20 + 30: nothing else can stay
    with cache.lease([key(0, 0), key(0, 1), key(0, 2)]) as lease:
        assert lease.ready() == []
        assert [len(buffer) for buffer in lease.all()] == [10, 20, 30]
        assert lease.ready() == [0, 1, 2]
        assert cache.resident() == [key(0, 0), key(0, 1), key(0, 2)]
        begin(cache, 2, [0])
        with pytest.raises(RuntimeError, match="can't hold"), cache.lease([key(2, 0)]):
            pass
    use(cache, 2, [0])
    assert (counters.requests, counters.hits) == (6, 0)
    assert store.reads.count(key(0, 1)) == 1


def test_what_is_there_is_ready_before_what_is_missing_was_read() -> None:
    cache, store, counters = make(100)
    use(cache, 0, [1])
    begin(cache, 0, [0, 1, 2])
    with cache.lease([key(0, 0), key(0, 1), key(0, 2)]) as lease:
        assert lease.ready() == [1]
        assert (lease.expert(1) == mark(key(0, 1))).all()
        assert store.reads == [key(0, 1)]
        assert (lease.expert(2) == mark(key(0, 2))).all()
    assert (counters.requests, counters.hits) == (4, 1)


def test_experts_lent_together_are_given_back_when_one_cannot_be_read() -> None:
    cache, store, counters = make(60)
    store.damage(key(0, 2))
    begin(cache, 0, [0, 1, 2])
    with pytest.raises(HashMismatch), cache.lease([key(0, 0), key(0, 1), key(0, 2)]) as lease:
        lease.all()
    assert cache.resident() == [key(0, 0), key(0, 1)]
    assert (cache.used_bytes, counters.requests, counters.hits) == (30, 2, 0)
    use(cache, 1, [0, 1, 2])  # needs all of the room
    assert cache.resident() == [key(1, 0), key(1, 1), key(1, 2)]


@TOGETHER
def test_what_a_failed_layer_left_unread_takes_no_room_and_blocks_nothing(asked, monkeypatch) -> None:
    monkeypatch.setattr(cache_module, "HANDED_OVER_BYTES", 0)  # or all would be read together
    cache, store, counters = make(60, loaders=0)
    store.damage(key(0, 0))
    now, later = ([key(0, expert) for expert in experts] for experts in asked)
    begin(cache, 0, [0, 1, 2])
    with pytest.raises(HashMismatch), cache.lease(now, later) as lease:
        lease.expert(0)
    Model(lambda: cache.resize(60)).end()
    assert (cache.used_bytes, cache.resident()) == (0, [])
    with pytest.raises(HashMismatch):
        use(cache, 0, [0, 1, 2])
    Model(lambda: use(cache, 1, [0, 1, 2])).end()
    cache.loaders.most = 1
    cache.predict([key(2, 0)])  # waits for nothing that was given up
    wait_until(lambda: key(2, 0) in cache.resident())
    cache.close()
    assert (counters.requests, counters.hits) == (3, 0)


@TOGETHER
def test_small_experts_come_together_and_one_that_can_not_be_read_keeps_none_back(asked) -> None:
    cache, store, counters = make(60)
    store.damage(key(0, 0))
    now, later = ([key(0, expert) for expert in experts] for experts in asked)
    begin(cache, 0, [0, 1, 2])
    with pytest.raises(HashMismatch), cache.lease(now, later) as lease:
        lease.expert(0)
    assert store.calls == [[key(0, expert) for expert in range(3)]]
    assert (cache.used_bytes, cache.resident()) == (50, [key(0, 1), key(0, 2)])
    store.broken.clear()
    use(cache, 0, [0, 1, 2])
    assert store.calls[1:] == [[key(0, 0)]]
    assert counters.requests == 3 + len(now) - 1


def test_ctrl_c_in_a_read_ends_the_run_and_not_the_cache() -> None:
    cache, store, _ = make(60)
    store.broken[key(0, 0)] = KeyboardInterrupt()
    begin(cache, 0, [0, 1])
    with pytest.raises(KeyboardInterrupt), cache.lease([key(0, 0), key(0, 1)]) as lease:
        lease.expert(1)  # whichever is asked for: the first is read first
    assert store.reads == [key(0, 0)]
    store.broken.clear()
    Model(lambda: cache.resize(50)).end()
    Model(lambda: use(cache, 0, [0, 1])).end()
    assert (cache.used_bytes, cache.resident()) == (30, [key(0, 0), key(0, 1)])


def test_what_was_queued_when_a_call_was_cut_short_is_read_no_more() -> None:
    cache, store, _ = make(60, loaders=0)
    begin(cache, 0, [0])
    cache.lease([key(0, 0)]).__enter__()  # and never left
    cache.resize(60)
    assert (list(cache._queue), cache.used_bytes, store.reads) == ([], 0, [])
    use(cache, 0, [0, 1])


def test_what_the_layer_needs_later_outlives_everything_else() -> None:
    cache, store, _ = make(40)
    use(cache, 0, [1])
    use(cache, 1, [0])
    begin(cache, 0, [0, 1])  # 0 is missing; the least recently used is 1, which is needed next
    for expert in (0, 1):
        with cache.lease([key(0, expert)]) as lease:
            lease.all()
            assert key(0, 1) in cache.resident()
    assert store.reads.count(key(0, 1)) == 1


@pytest.mark.parametrize(
    ("room", "there", "missing"),
    [(50, [3], [0, 1, 2, 3]), (70, [2, 3], [0, 1, 3])],  # what is needed last leaves, if something needed must
)
def test_a_layer_larger_than_the_cache_reads_each_expert_at_most_once(room, there, missing) -> None:
    cache, store, counters = make(room)
    use(cache, 0, there)
    store.reads.clear()
    use(cache, 0, [0, 1, 2, 3])
    assert store.reads == [key(0, expert) for expert in missing]
    assert counters.hits == 4 - len(missing)
    requests = counters.requests
    begin(cache, 0, [])
    with cache.lease([]) as lease:
        assert lease.all() == lease.ready() == []
    assert counters.requests == requests


def test_where_the_system_gives_no_memory_nothing_is_lost(monkeypatch) -> None:
    cache, _, _ = make(60)
    use(cache, 0, [0])
    take = cache._buffers.take

    def refuse(nbytes: int, room_bytes: int) -> None:
        raise MemoryError

    monkeypatch.setattr(cache._buffers, "take", refuse)
    with pytest.raises(MemoryError):
        use(cache, 1, [0])
    assert (cache.used_bytes, cache.resident()) == (10, [key(0, 0)])
    monkeypatch.setattr(cache._buffers, "take", take)
    use(cache, 1, [0, 1, 2])


def test_demand_takes_back_what_predictions_fill_least_probable_first() -> None:
    cache, _, _ = make(40)
    use(cache, 0, [3])
    cache.predict([key(1, 0), key(1, 1)])
    wait_until(lambda: cache.resident() == [key(1, 0), key(1, 1)])
    cache._residency.begin(Demand(LayerKey("decoder", 0), (1,)))  # predictions still stand
    with cache.lease([key(0, 1)]) as lease:
        lease.all()
        assert cache.resident() == [key(0, 1), key(1, 0)]
    cache.close()


def test_a_layer_that_begins_says_how_far_reading_ahead_had_come() -> None:
    cache, _, _ = make(100)
    use(cache, 0, [0])
    cache.predict([key(1, 0), key(1, 1)])
    wait_until(lambda: len(cache.resident()) == 3)
    assert cache.absent([key(1, 0), key(1, 2), key(0, 0)]) == [False, True, False]
    assert cache.n_resident == 3
    assert begin(cache, 1, [0, 2, 3]) == ([key(1, 0), key(1, 1)], 2)
    assert begin(cache, 1, [0]) == ([], 0), "each once"
    cache.close()


@pytest.mark.parametrize(("policy", "left"), [("lru", key(0, 0)), ("lfu", key(1, 0))])
def test_another_policy_evicts_from_then_on(policy: str, left: ExpertKey) -> None:
    cache, _, _ = make(20)
    for layer in (0, 0, 1):
        use(cache, layer, [0])
    cache.use(EVICTION[policy](ORDER))
    use(cache, 2, [0])
    assert set(cache.resident()) == {key(0, 0), key(1, 0), key(2, 0)} - {left}


def test_the_time_of_a_read_that_the_model_waits_for_is_counted() -> None:
    cache, store, counters = make(60)
    store.during = lambda wanted: time.sleep(0.01)
    for turn in (1, 2):
        use(cache, turn, [0])
        assert 0.01 * turn <= counters.stall_s < PATIENCE_S


def test_a_closed_cache_has_closed_its_store_and_starts_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, store, _ = make(60)
    closed: list[int] = []
    monkeypatch.setattr(store, "close", lambda: closed.append(1))
    cache.close()
    assert closed == [1]
    cache.predict([key(0, 0)])
    assert cache.loaders.threads == [], "none is started any more"


def test_shrinking_evicts_and_growing_does_not() -> None:
    cache, _, counters = make(60)
    use(cache, 0, [0, 1, 2])
    cache.resize(30)
    assert (cache.resident(), cache.held_bytes) == ([key(0, 2)], 30)
    cache.resize(90)
    assert (cache.resident(), counters.evictions) == ([key(0, 2)], 2)


def test_an_evicted_experts_memory_serves_the_next_of_its_size() -> None:
    cache, _, _ = make(30)
    places = set()
    for layer in (0, 1, 2):
        begin(cache, layer, [2])
        with cache.lease([key(layer, 2)]) as lease:
            places.add(lease.expert(0).ctypes.data)
            assert cache.held_bytes == 30
    assert len(places) == 1


def in_its_buffer(cache: ExpertCache, wanted: ExpertKey) -> bool:
    slot = cache._slots[wanted]
    return slot.expert is slot.buffer


def test_what_lies_elsewhere_moves_into_its_buffer_once_that_may_begin() -> None:
    cache, store, counters = make(60)
    store.elsewhere = True
    use(cache, 0, [0, 1, 2])
    assert not any(in_its_buffer(cache, key(0, expert)) for expert in range(3))
    begin(cache, 0, [0])
    with cache.lease([key(0, 0)]) as lease:  # of the old place
        held = lease.expert(0)
        cache.settle()
        wait_until(lambda: all(in_its_buffer(cache, key(0, expert)) for expert in range(3)))
        assert (held == mark(key(0, 0))).all()
        assert cache._locked == {key(0, 0)}
    use(cache, 0, [0, 1, 2])
    assert (counters.hits, len(store.reads)) == (4, 3)
    use(cache, 1, [0, 1, 2])  # what comes later moves as well
    cache.settle()
    wait_until(lambda: all(in_its_buffer(cache, key(1, expert)) for expert in range(3)))
    use(cache, 1, [0, 1, 2])
    assert (cache._locked, cache.held_bytes) == (set(), 60)
    cache.close()


def test_what_moves_stays_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is lent and given back in between: its buffer would become another's."""
    cache, store, _ = make(30)
    store.elsewhere = True
    use(cache, 0, [2])
    reached, go_on = threading.Event(), threading.Event()

    def held(key: ExpertKey, buffer: U8) -> Expert:
        reached.set()
        assert go_on.wait(PATIENCE_S)
        return moved(key, buffer)

    moved = store.expert
    monkeypatch.setattr(store, "expert", held)
    cache.settle()
    assert reached.wait(PATIENCE_S)
    use(cache, 0, [2])
    waits, wait = threading.Event(), cache._read_or_wait
    monkeypatch.setattr(cache, "_read_or_wait", lambda queued: (waits.set(), wait(queued)))
    model = Model(lambda: use(cache, 1, [0]))  # for which the other must leave
    assert waits.wait(PATIENCE_S)
    assert cache.resident() == [key(0, 2)]
    go_on.set()
    model.end()
    assert cache.resident() == [key(1, 0)]
    cache.close()


def test_what_has_left_does_not_move() -> None:
    cache, store, _ = make(60)
    store.elsewhere = True
    use(cache, 0, [0, 1, 2])
    cache.resize(30)
    use(cache, 1, [2])  # in the buffer of the one before it
    cache.settle()
    wait_until(lambda: in_its_buffer(cache, key(1, 2)))
    use(cache, 1, [2])
    wait_until(lambda: not cache._to_move)
    assert cache.resident() == [key(1, 2)]
    cache.close()
