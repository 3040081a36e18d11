"""Ctrl-C at every instant at which it can come while the expert cache works: the next request finds a sound cache."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
from memory_store import Model, begin, key, make, mark

from moert.experts import cache as cache_module
from moert.experts.cache import ExpertCache

ROOM = str(Path(cache_module.__file__).parent)


class CtrlC:
    """A profiler that interrupts in the code of moert.experts, after so many of the places where Python looks for
    signals: the beginning of a function, the end of a call into C."""

    def __init__(self, left: int) -> None:
        self.left = left

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(ROOM):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt


def request(cache: ExpertCache) -> None:
    """Layers that hit, miss, evict, read ahead and follow each other expert by expert, in room that changes."""
    for room in (60, 20, 60):
        cache.resize(room)
    for layer, experts in ((0, [0, 1]), (1, [1, 2]), (2, [2]), (0, [3])):
        begin(cache, layer, experts)
        keys = [key(layer, expert) for expert in experts]
        for first, stop in ((0, 1), (1, len(keys))) if layer == 1 else ((0, len(keys)),):
            with cache.lease(keys[first:stop], keys[stop:]) as lease:
                cache.predict([key((layer + 1) % 3, 0)])
                for wanted, buffer in zip(keys[first:stop], lease.all(), strict=True):
                    assert (buffer == mark(wanted)).all()


def interrupted(cache: ExpertCache, at: int) -> bool:
    """True if there was an instant of that number; the request ends at it."""
    interrupt = CtrlC(at)

    def run() -> None:
        sys.setprofile(interrupt)
        try:
            request(cache)
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)

    Model(run).end()
    return interrupt.left <= 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # inside a generator that is dropped
@pytest.mark.parametrize("handed_over", [True, False])
def test_whenever_ctrl_c_comes_the_next_request_runs(monkeypatch: pytest.MonkeyPatch, handed_over: bool) -> None:
    monkeypatch.setattr(cache_module, "HANDED_OVER_BYTES", 0 if handed_over else 1 << 20)
    cache, store, _ = make(60)
    at = 1
    while interrupted(cache, at):
        interrupted(cache, at % 90)  # often while it begins anew
        Model(lambda: request(cache)).end()
        cache.resize(60)  # and nothing is read after that
        assert (cache._locked, list(cache._queue), cache._waited_for, cache._under_way) == (set(), [], 0, 0), at
        assert all(slot.leases == 0 and (slot.buffer == mark(slot.key)).all() for slot in cache._slots.values()), at
        assert set(cache.resident()) == set(cache._residency), at
        assert sum(map(store.nbytes, cache.resident())) == cache.used_bytes <= cache.held_bytes <= 60, at
        at += 1
    cache.close()
    assert at > 300


def test_a_second_ctrl_c_while_it_begins_anew_gives_no_buffer_back_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, _, _ = make(60)
    request(cache)
    cache._under_way = 1  # as the first one leaves it
    give = cache._buffers.give

    def cut_short(piece: np.ndarray) -> None:
        give(piece)
        raise KeyboardInterrupt

    monkeypatch.setattr(cache._buffers, "give", cut_short)
    with pytest.raises(KeyboardInterrupt):
        cache.resize(60)
    monkeypatch.undo()
    cache.resize(60)
    lists = [*cache._buffers._warm.values(), *cache._buffers._cold.values()]
    places = [piece.ctypes.data for pieces in lists for piece in pieces]
    assert len(set(places)) == len(places) > 0
    cache.close()
