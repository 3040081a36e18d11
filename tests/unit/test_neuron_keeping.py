"""Which blocks of neurons stay: whatever was asked for is there, and who leaves is who should."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moert.beside.flash.keeping import KEEPING, Blocks, replay

N_BLOCKS = 12

visits = st.lists(st.sets(st.integers(0, N_BLOCKS - 1), max_size=5), max_size=30)


def want(blocks: Blocks, wanted: Sequence[int]) -> list[int]:
    """What had to be read."""
    return blocks.want(np.array(sorted(wanted), np.int64)).blocks.tolist()


def resident(blocks: Blocks) -> set[int]:
    return set((blocks.slot_of >= 0).nonzero()[0].tolist())


@pytest.mark.parametrize("name", KEEPING)
@given(asked=visits, n_slots=st.integers(5, N_BLOCKS))
def test_what_is_asked_for_has_a_slot_of_its_own(name: str, asked: list[set[int]], n_slots: int) -> None:
    blocks = Blocks(N_BLOCKS, KEEPING[name])
    blocks.resize(n_slots)
    for wanted in asked:
        before = resident(blocks)
        missing = want(blocks, sorted(wanted))
        assert set(missing) == wanted - before
        assert wanted <= resident(blocks) <= before | wanted
        slots = blocks.slot_of[blocks.slot_of >= 0].tolist()
        assert len(set(slots)) == len(slots) == blocks.n_resident <= n_slots
        assert all(0 <= slot < n_slots for slot in slots)


@given(asked=visits, n_slots=st.integers(5, N_BLOCKS))
def test_lru_keeps_what_was_used_last(asked: list[set[int]], n_slots: int) -> None:
    blocks = Blocks(N_BLOCKS, KEEPING["lru"])
    blocks.resize(n_slots)
    last: dict[int, int] = {}
    for visit, wanted in enumerate(asked):
        want(blocks, sorted(wanted))
        last |= dict.fromkeys(wanted, visit)
        here = resident(blocks)
        gone = [last[block] for block in last if block not in here]
        assert not gone or max(gone) <= min(last[block] for block in here - wanted) if here - wanted else True


def test_a_window_lets_whole_tokens_go() -> None:
    blocks = Blocks(N_BLOCKS, KEEPING["window"])
    blocks.resize(5)
    want(blocks, [0, 1])
    want(blocks, [2, 3])
    want(blocks, [4, 5])
    assert resident(blocks) == {2, 3, 4, 5}, "0 and 1 fired for the same token"


def test_what_was_used_often_outlasts_what_was_used_last() -> None:
    for name, stays in (("lfu", 0), ("recent", 0), ("lru", 1)):
        blocks = Blocks(N_BLOCKS, KEEPING[name])
        blocks.resize(2)
        for wanted in ([0], [0], [0], [1], [2]):
            want(blocks, wanted)
        assert resident(blocks) == {stays, 2}, name


def test_a_use_long_ago_counts_less_than_one_just_now() -> None:
    blocks = Blocks(N_BLOCKS, KEEPING["recent"])
    blocks.resize(2)
    for wanted in ([0], [0], [0], *[[1]] * 40, [2], [3]):
        want(blocks, wanted)
    assert resident(blocks) == {1, 3}


@given(asked=visits)
def test_fewer_slots_keep_what_lies_in_them(asked: list[set[int]]) -> None:
    blocks = Blocks(N_BLOCKS, KEEPING["lru"])
    blocks.resize(N_BLOCKS)
    for wanted in asked:
        want(blocks, sorted(wanted))
    stays = {block for block in resident(blocks) if blocks.slot_of[block] < 4}
    blocks.resize(4)
    assert resident(blocks) == stays
    blocks.resize(6)
    assert resident(blocks) == stays


def test_what_could_not_be_read_is_not_there() -> None:
    blocks = Blocks(N_BLOCKS, KEEPING["recent"])
    blocks.resize(3)
    want(blocks, [0])
    blocks.forget(blocks.want(np.array([0, 1])).blocks)
    assert resident(blocks) == {0}


def test_a_replay_counts_what_was_there() -> None:
    trace = [np.array([0, 1]), np.array([1, 2]), np.array([0, 2])]
    found = replay(trace, N_BLOCKS, 3, KEEPING["lru"])
    assert (found.asked, found.hits) == (6, 3)
    assert replay(trace, N_BLOCKS, 2, KEEPING["lru"]).hits == 2
