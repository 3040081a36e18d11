"""Who computes which expert: beside every other way, the same in C and Python, and what follows from the costs."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moert.beside.gpu.placement import (
    ALWAYS_COPIED,
    CHEAPEST,
    COPIED,
    HELD,
    HOST,
    IDLE,
    IN_MEMORY,
    ON_DEVICE,
    ONLY_HELD,
    RULES,
    Busy,
    Kind,
    Placement,
)
from moert.beside.gpu.simulated import PROFILES
from moert.kernels import library

WIDTH, D_FF = 2048, 4096
NEAR = 1.05


def kind(bits: int) -> Kind:
    weights = WIDTH * D_FF
    return Kind(((bits, weights),) * 3, 3 * weights * bits // 8)


KINDS = [kind(2), kind(4), kind(8), Kind(((2, WIDTH * D_FF), (8, WIDTH * D_FF)), WIDTH * D_FF * 10 // 8)]
Layer = tuple[list[int], list[int], list[int]]


def made(card: str = "rtx3060", rule: str = CHEAPEST, native: bool = True, by_caller: bool = False) -> Placement:
    profile = PROFILES[card]
    return Placement(KINDS, WIDTH, replace(profile.device(), by_caller=by_caller), profile.host(), rule, native)


def layers(most: int) -> st.SearchStrategy[Layer]:
    """Tokens of each expert, its kind, and where it lies."""
    one = st.tuples(
        st.integers(1, 300), st.integers(0, len(KINDS) - 1), st.sampled_from([0, IN_MEMORY, ON_DEVICE, 3, IN_MEMORY])
    )
    return st.lists(one, min_size=1, max_size=most).map(lambda each: tuple(map(list, zip(*each, strict=True))))


def best_s(placement: Placement, layer: Layer, busy: Busy = IDLE) -> float:
    """Of all ways there are."""
    costs = [placement.costs(*each) for each in zip(*layer, strict=True)]
    ways = [((HELD,) if at == ON_DEVICE else (HOST, HELD) if at & ON_DEVICE else (HOST, COPIED)) for at in layer[2]]
    return min(placement.seconds(costs, layer[2], who, busy) for who in product(*ways))


@settings(max_examples=60, deadline=None)
@given(layer=layers(6), card=st.sampled_from(sorted(PROFILES)), late=st.floats(0, 0.01), by_caller=st.booleans())
def test_small_layers_are_near_the_best_of_all_ways(layer: Layer, card: str, late: float, by_caller: bool) -> None:
    placement, busy = made(card, by_caller=by_caller), Busy(0.0, late, 0.0)
    assert placement.decide(*layer, busy).seconds <= NEAR * best_s(placement, layer, busy)


@settings(max_examples=25, deadline=None)
@given(layer=layers(11), card=st.sampled_from(sorted(PROFILES)), by_caller=st.booleans())
def test_larger_ones_too(layer: Layer, card: str, by_caller: bool) -> None:
    placement = made(card, by_caller=by_caller)
    assert placement.decide(*layer).seconds <= NEAR * best_s(placement, layer)


@settings(max_examples=60, deadline=None)
@given(
    layer=layers(40), card=st.sampled_from(sorted(PROFILES)), rule=st.sampled_from(RULES), by_caller=st.booleans()
)  # fmt: skip
def test_c_decides_as_python_does(layer: Layer, card: str, rule: str, by_caller: bool) -> None:
    if library.load() is None:
        pytest.skip("no compiler")
    busy = Busy(0.001, 0.002, 0.0005)
    native, plain = made(card, rule, True, by_caller), made(card, rule, False, by_caller)
    assert native.decide(*layer, busy) == plain.decide(*layer, busy)


@settings(max_examples=60, deadline=None)
@given(layer=layers(20))
def test_what_lies_on_the_device_alone_runs_there(layer: Layer) -> None:
    placed = made().decide(*layer)
    for at, by in zip(layer[2], placed.who, strict=True):
        assert by in (HOST, HELD) if at & ON_DEVICE else by in (HOST, COPIED)
        assert by == HELD or at != ON_DEVICE


def test_rules() -> None:
    layer = [1, 1, 1], [1, 1, 1], [IN_MEMORY, ON_DEVICE, 0]
    assert made(rule=ALWAYS_COPIED).decide(*layer).who == bytes([COPIED, HELD, COPIED])
    assert made(rule=ONLY_HELD).decide(*layer).who == bytes([HOST, HELD, HOST])


def test_one_token_goes_to_the_processor_and_many_to_the_device() -> None:
    """Fiddler's observation: what the processor takes grows with tokens, a copy does not."""
    placement = made()
    assert placement.decide([1], [1], [IN_MEMORY]).who == bytes([HOST])
    assert placement.decide([500], [1], [IN_MEMORY]).who == bytes([COPIED])


def test_launches_and_copies_of_the_processors_thread_are_its_own_time() -> None:
    where, counts = [IN_MEMORY] * 12, [60] * 12
    placement, device = made(by_caller=True), PROFILES["rtx3060"].device()
    costs = [placement.costs(count, 1, IN_MEMORY) for count in counts]
    half = [COPIED] * 6 + [HOST] * 6
    begun = 6 * (device.launch_s + costs[0].copy)
    assert made().seconds(costs, where, half) < placement.seconds(costs, where, half)
    assert placement.seconds(costs, where, half) == pytest.approx(begun + 6 * costs[0].host)


def test_both_sides_work_at_the_same_time() -> None:
    placement = made()
    counts, kinds, where = [8] * 6, [1] * 6, [IN_MEMORY] * 6
    placed = placement.decide(counts, kinds, where)
    assert {*placed.who} == {HOST, COPIED}
    costs = [placement.costs(*each) for each in zip(counts, kinds, where, strict=True)]
    for alone in (HOST, COPIED):
        assert placed.seconds < placement.seconds(costs, where, [alone] * 6)


def test_a_busy_stream_of_copies_leaves_more_to_the_processor() -> None:
    layer = [8] * 6, [1] * 6, [IN_MEMORY] * 6
    free, busy = (made().decide(*layer, each).who.count(COPIED) for each in (IDLE, Busy(copy_s=1.0)))
    assert busy < free


def test_a_pattern_is_decided_once() -> None:
    placement = made()
    first = placement.decide([1, 2], [0, 1], [IN_MEMORY, ON_DEVICE])
    assert placement.decide([1, 2], [0, 1], [IN_MEMORY, ON_DEVICE]) is first
    assert placement.decide([1, 2], [0, 1], [IN_MEMORY, ON_DEVICE], Busy(copy_s=1e-9)) is not first


def test_nothing_takes_no_time() -> None:
    assert made().decide([], [], []) == (b"", 0.0)
    assert made(native=False).decide([], [], []) == (b"", 0.0)
