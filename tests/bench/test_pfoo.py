"""PFOO-L: never above what the best of all possible choices reads, nor above any policy or Belady's rule."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moert.bench.bound import furthest_first
from moert.bench.pfoo import least_bytes
from moert.experts.policy import EVICTION, Demand
from moert.experts.replay import replay
from moert.pack.model_spec import ExpertKey, LayerKey

EXPERTS = 5
KEYS = [ExpertKey("decoder", 0, expert) for expert in range(EXPERTS)]
WALKS = st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=9)
SIZES = st.lists(st.integers(1, 7), min_size=EXPERTS, max_size=EXPERTS)
LONG = st.lists(st.sets(st.integers(0, EXPERTS - 1), min_size=1, max_size=3), min_size=1, max_size=60)


def steps(walk: Sequence[int]) -> list[Demand]:
    return [Demand(LayerKey("decoder", 0), (expert,)) for expert in walk]


def optimum(walk: Sequence[int], sizes: Sequence[int], capacity: int, held: frozenset[int]) -> int:
    """The least bytes of all ways to choose who leaves."""

    @cache
    def least(at: int, held: frozenset[int]) -> int:
        if at == len(walk):
            return 0
        wanted = walk[at]
        if wanted in held:
            return least(at + 1, held)
        kept = [frozenset(some) for count in range(len(held) + 1) for some in combinations(sorted(held), count)]
        fits = [some for some in kept if sum(sizes[expert] for expert in some) + sizes[wanted] <= capacity]
        return sizes[wanted] + min(least(at + 1, some | {wanted}) for some in fits)

    return least(0, held)


@settings(max_examples=300, deadline=None)
@given(WALKS, SIZES, st.integers(7, 20), st.sets(st.integers(0, EXPERTS - 1)))
def test_the_bound_is_never_above_the_best_of_all_choices(walk, sizes, capacity, wanted) -> None:
    held: set[int] = set()
    for expert in sorted(wanted):
        if sum(sizes[each] for each in held) + sizes[expert] <= capacity:
            held.add(expert)
    nbytes = dict(zip(KEYS, sizes, strict=True))
    found = least_bytes(steps(walk), nbytes, capacity, [KEYS[expert] for expert in held])
    assert found <= optimum(walk, sizes, capacity, frozenset(held))
    assert found >= sum(sizes[expert] for expert in {*walk} - held), "what was never there is read at least once"


@settings(max_examples=100, deadline=None)
@given(LONG, st.integers(3, 5))
def test_with_equal_sizes_it_is_beladys_rule_or_less(layers, slots) -> None:
    trace = [Demand(LayerKey("decoder", 0), tuple(sorted(experts))) for experts in layers]
    nbytes = dict.fromkeys(KEYS, 7)
    assert least_bytes(trace, nbytes, 7 * slots) <= furthest_first(trace, nbytes, 7 * slots).bytes_read


@settings(max_examples=150, deadline=None)
@given(LONG, SIZES, st.integers(21, 40), st.sampled_from(sorted(EVICTION)))
def test_no_policy_reads_less(layers, sizes, capacity, name) -> None:
    trace = [Demand(LayerKey("decoder", 0), tuple(sorted(experts))) for experts in layers]
    nbytes = dict(zip(KEYS, sizes, strict=True))
    least = least_bytes(trace, nbytes, capacity)
    assert least <= replay(trace, nbytes, capacity, EVICTION[name]([LayerKey("decoder", 0)], None)).bytes_read
    assert least <= furthest_first(trace, nbytes, capacity).bytes_read


def test_it_is_below_beladys_rule_where_sizes_make_that_rule_wrong() -> None:
    """Expert 2 is needed again first, but the next one that is missing pushes it out or the larger 0."""
    sizes, walk = [4, 1, 3, 2, 3], (0, 1, 2, 2, 0, 1)
    nbytes = dict(zip(KEYS, sizes, strict=True))
    best = optimum(walk, sizes, 5, frozenset())
    assert least_bytes(steps(walk), nbytes, 5) <= best < furthest_first(steps(walk), nbytes, 5).bytes_read


def test_with_room_for_all_only_first_demands_are_read_and_only_of_what_was_not_held() -> None:
    nbytes = dict(zip(KEYS, (5, 4, 3, 2, 1), strict=True))
    walk = (0, 1, 0, 2, 1, 0)
    assert least_bytes(steps(walk), nbytes, 12) == 12
    assert least_bytes(steps(walk), nbytes, 12, KEYS[:2]) == 3
    assert least_bytes([], nbytes, 12) == 0


def test_the_last_hit_is_counted_in_part() -> None:
    """Two experts of 10 in turn, with room for one and a half: of each expert a half could stay."""
    nbytes = dict.fromkeys(KEYS, 10)
    assert least_bytes(steps((0, 1, 0, 1)), nbytes, 15) == 20
    assert least_bytes(steps((0, 1, 0, 1)), nbytes, 10) == 40
    assert least_bytes(steps((0, 1, 2, 0, 1, 2)), nbytes, 15) == 60 - 60 // 4


def test_an_expert_larger_than_the_cache_is_refused() -> None:
    with pytest.raises(ValueError, match="more than the budget of 9"):
        least_bytes(steps((0,)), dict.fromkeys(KEYS, 10), 9)
