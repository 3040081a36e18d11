"""The thinning of tests: a covering array has every pair, and little more than it must."""

from __future__ import annotations

import random
from itertools import product

import pytest

from tests.pairs import covering, each, pairs, thinned


@pytest.mark.parametrize("sizes", [(1,), (2, 2), (3, 3, 3), (4, 3, 5, 2), (2,) * 7, (6, 1, 4)])
def test_every_pair_is_met(sizes: tuple[int, ...]) -> None:
    cases = list(product(*(range(size) for size in sizes)))
    few = covering(cases)
    assert few == sorted(set(few)) == covering(cases), "the same each time"
    found = {fact for place in few for fact in pairs(cases[place])}
    assert found == {fact for case in cases for fact in pairs(case)}
    largest = sorted(sizes)[-2:]
    least = 1 if len(sizes) == 1 else largest[0] * largest[1]
    assert len(few) <= 2 * least


def test_a_case_that_adds_nothing_is_left_out() -> None:
    cases = [(1,), (1,), (2,), (1,)]
    assert covering(cases, each) == [0, 2]


def test_facts_decide() -> None:
    chance = random.Random(0)
    cases = [tuple(chance.sample(range(30), 5)) for _ in range(60)]
    few = covering(cases, lambda case: case)
    assert set().union(*(cases[place] for place in few)) == set().union(*cases)
    assert len(few) < 15


def test_the_others_are_slow_and_marks_stay() -> None:
    gpu = pytest.param("gpu", marks=pytest.mark.cuda)
    mark = thinned("a, b, c, d", "xy", [(1, "one"), (2, "two")], ["cpu", gpu])
    cases = mark.args[1]
    assert len(cases) == 8
    assert [case.values for case in cases][:3] == [
        ("x", 1, "one", "cpu"),
        ("x", 1, "one", "gpu"),
        ("x", 2, "two", "cpu"),
    ]
    names = [{mark.name for mark in case.marks} for case in cases]
    assert all(("cuda" in found) == (case.values[3] == "gpu") for found, case in zip(names, cases, strict=True))
    assert sum("slow" in found for found in names) == 4
