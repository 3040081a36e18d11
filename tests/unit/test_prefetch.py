from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
from test_cache import key, make, use

from moert.pack.errors import HashMismatch
from moert.prefetch import Prefetcher


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("nothing happened within 10 s")


def test_predicted_experts_are_read_in_order_of_probability() -> None:
    cache, store, counters = make(100)
    use(cache, 0, [0])
    prefetcher = Prefetcher(cache)
    prefetcher.submit([key(1, 2), key(1, 0), key(1, 1)])
    wait_until(lambda: cache.n_resident == 4)
    prefetcher.close()
    assert store.reads[1:] == [key(1, 2), key(1, 0), key(1, 1)]
    use(cache, 1, [2, 1])
    assert (counters.prefetch_issued, counters.prefetch_issued_bytes) == (3, 60)
    assert (counters.prefetch_used, counters.prefetch_used_bytes) == (2, 50)


def test_the_decision_of_the_router_cancels_the_rest() -> None:
    cache, store, _ = make(100)
    store.hold(key(1, 0))
    use(cache, 0, [0])
    prefetcher = Prefetcher(cache)
    prefetcher.submit([key(1, 0), key(1, 1), key(1, 2)])
    assert store.entered[key(1, 0)].wait(10)
    prefetcher.cancel()
    cache.begin_layer("decoder", 1, [0])
    store.gates[key(1, 0)].set()
    with cache.lease([key(1, 0)]):
        pass
    prefetcher.submit([key(2, 0)])
    wait_until(lambda: key(2, 0) in cache.resident())
    prefetcher.close()
    assert store.reads == [key(0, 0), key(1, 0), key(2, 0)]


def test_an_error_in_the_thread_comes_out_on_the_models_thread_once() -> None:
    cache, store, _ = make(100)
    store.broken.add(key(1, 0))
    use(cache, 0, [0])
    prefetcher = Prefetcher(cache)
    prefetcher.submit([key(1, 0)])
    wait_until(lambda: prefetcher._error is not None)
    with pytest.raises(HashMismatch, match="is damaged"):
        prefetcher.cancel()
    prefetcher.cancel()
    prefetcher.close()


def test_close_ends_the_thread_even_while_it_waits_for_the_present_layer() -> None:
    cache, _, _ = make(100)
    prefetcher = Prefetcher(cache)
    cache.begin_layer("decoder", 0, [0])  # never read
    prefetcher.submit([key(1, 0)])
    wait_until(lambda: not prefetcher._work)  # the thread has taken it
    prefetcher.close()
    prefetcher.close()
    assert not prefetcher._thread.is_alive()


def test_no_room_for_one_prediction_gives_up_on_the_less_probable() -> None:
    cache, store, _ = make(30)
    use(cache, 0, [0])
    cache.begin_layer("decoder", 0, [0])
    with cache.lease([key(0, 0)]):
        prefetcher = Prefetcher(cache)
        prefetcher.submit([key(1, 2), key(1, 0)])
        wait_until(lambda: not prefetcher._work)
        prefetcher.close()
    assert store.reads == [key(0, 0)]


@pytest.mark.parametrize("seed", range(6))
def test_many_layers_with_random_predictions_keep_the_budget_and_never_read_twice_at_once(seed: int) -> None:
    rng = random.Random(seed)
    cache, store, counters = make(rng.choice([70, 90, 150]), rng.choice(["lru", "paper", "fifo", "lfu"]))
    under_way: set = set()
    read = store.read

    def slow_read(wanted):
        assert wanted not in under_way
        under_way.add(wanted)
        time.sleep(rng.random() * 0.001)
        under_way.discard(wanted)
        return read(wanted)

    store.read = slow_read
    prefetcher = Prefetcher(cache)
    for step in range(200):
        layer = step % 3
        prefetcher.cancel()
        needed = sorted(rng.sample(range(4), rng.randint(1, 3)))
        cache.begin_layer("decoder", layer, needed)
        prefetcher.submit([key((layer + 1) % 3, expert) for expert in rng.sample(range(4), 3)])
        for expert in needed:
            with cache.lease([key(layer, expert)]) as (buffer,):
                assert len(buffer) == store.nbytes(key(layer, expert))
                assert sum(map(store.nbytes, cache.resident())) <= cache.used_bytes <= cache.capacity_bytes
        time.sleep(rng.choice([0.0, 0.001, 0.003]))  # attention of the next layer
    prefetcher.close()
    assert counters.requests >= counters.hits > 0
    assert counters.prefetch_issued >= counters.prefetch_used > 0
    assert len(store.reads) == counters.requests - counters.hits + counters.prefetch_issued
    assert sum(map(store.nbytes, cache.resident())) == cache.used_bytes
