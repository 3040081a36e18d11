"""Room that layers give each other: to those that read much, never more than there is, never all of it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moert.beside.flash.keeping import EVERY, Balance, Move


def held(*nbytes: int) -> np.ndarray:
    return np.array(nbytes, np.int64)


def test_it_is_time_after_so_many_fetches() -> None:
    balance = Balance(2)
    assert [balance.is_due() for _ in range(2 * EVERY)] == 2 * [*(EVERY - 1) * [False], True]


def test_layers_that_read_nothing_give_to_those_that_read_most() -> None:
    balance, most = Balance(4), held(9000, 9000, 9000, 9000)
    balance.begin(3200)
    balance.read(2, 500)
    balance.read(3, 100)
    assert balance.moves(held(800, 800, 800, 800), most) == [Move(0, 2, 100), Move(1, 3, 100)]


def test_nothing_moves_between_layers_that_need_as_much() -> None:
    balance = Balance(2)
    balance.begin(1200)
    balance.read(0, 700)
    balance.read(1, 350)
    assert balance.moves(held(800, 400), held(900, 900)) == []


def test_what_was_read_long_ago_does_not_count() -> None:
    balance, most = Balance(2), held(9000, 9000)
    balance.begin(1600)
    balance.read(0, 10_000)
    for _ in range(600):
        balance.moves(held(9000, 9000), most)
    balance.read(1, 100)
    assert balance.moves(held(800, 800), most) == [Move(0, 1, 100)]


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5000)), max_size=60), st.integers(0, 4000))
def test_no_layer_is_left_without_room_or_gets_more_than_it_can_hold(reads: list[tuple[int, int]], each: int) -> None:
    balance, most = Balance(5), held(*5 * [10_000])
    now = held(*5 * [each])
    balance.begin(5 * each)
    for layer, nbytes in reads:
        balance.read(layer, nbytes)
        for move in balance.moves(now.copy(), most):
            assert move.nbytes >= 0
            now[move.giver] -= move.nbytes
            now[move.taker] += move.nbytes
        assert (now >= each // 8).all()
        assert (now <= most).all()
