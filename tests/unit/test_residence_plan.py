"""Which part of a loss widths get and which part routing, and what a plan of routing is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import make_problem

from moeconv.plan.search import Step, ladder, read_more, split, steps_of
from moert.pack.model_spec import ExpertKey, LayerKey

FIRST, SECOND = LayerKey("decoder", 0), LayerKey("decoder", 3)


def test_layers_climb_by_what_a_step_saves_for_its_cost() -> None:
    frontier = ladder(
        {
            FIRST: [Step(0, 1000, 0.0), Step(1, 600, 0.1), Step(2, 500, 0.5)],
            SECOND: [Step(0, 2000, 0.0), Step(1, 900, 0.1), Step(2, 890, 0.9)],
        }
    )
    plans = [frontier[at] for at in range(len(frontier))]
    assert [steps_of(plan.assignment) for plan in plans] == [
        {FIRST: 2, SECOND: 2}, {FIRST: 2, SECOND: 1}, {FIRST: 1, SECOND: 1}, {FIRST: 0, SECOND: 1},
        {FIRST: 0, SECOND: 0},
    ]  # fmt: skip
    assert [plan.nbytes for plan in plans] == [1390, 1400, 1500, 1900, 3000]
    assert plans[-1].cost == 0


def test_a_step_that_reads_more_for_a_cost_is_never_taken() -> None:
    frontier = ladder({FIRST: [Step(0, 1000, 0.0), Step(1, 1100, 0.2), Step(2, 500, 0.1)]})
    numbers = [steps_of(frontier[at].assignment)[FIRST] for at in range(len(frontier))]
    assert numbers == [2, 0]
    assert [(frontier[at].nbytes, frontier[at].cost) for at in range(2)] == [(500, 0.1), (1000, 0.0)]


def test_widths_count_as_often_as_their_expert_is_read() -> None:
    problem = make_problem([[(2, 100, 1.0), (4, 200, 0.0)]] * 3)
    keys = [unit.key for unit in problem.units]
    missed = dict(zip(keys, (60, 30, 0), strict=True))
    found = read_more(problem, missed).units
    sizes = [[option.nbytes for option in options] for options in found.values()]
    assert sizes == [[200, 400], [100, 200], [10, 20]]
    assert [[option.cost for option in options] for options in found.values()] == [[1.0, 0.0]] * 3


def test_experts_that_nobody_counted_count_once() -> None:
    problem = make_problem([[(2, 100, 1.0)]] * 2)
    first, second = (unit.key for unit in problem.units)
    found = {unit.key: options[0].nbytes for unit, options in read_more(problem, {first: 8}).units.items()}
    assert found == {first: 100, second: 100}
    assert isinstance(first, ExpertKey)


falls = st.lists(st.tuples(st.integers(1, 1000), st.floats(0, 1)), min_size=1, max_size=12)


@given(widths=falls, routing=falls, target=st.floats(0, 1.5), memory_is_fixed=st.booleans())
def test_the_pair_that_holds_with_the_least_product(
    widths: list[tuple[int, float]], routing: list[tuple[int, float]], target: float, memory_is_fixed: bool
) -> None:
    sizes, reads = (np.array(sorted(size for size, _ in found), np.int64) for found in (widths, routing))
    losses, costs = (np.array(sorted((loss for _, loss in found), reverse=True)) for found in (widths, routing))

    def product(one: int, two: int) -> float:
        return float(sizes[one]) ** (2 if memory_is_fixed else 1) * float(reads[two])

    pairs = [
        product(one, two)
        for one in range(len(sizes))
        for two in range(len(reads))
        if losses[one] + costs[two] <= target
    ]
    found = split(sizes, losses, reads, costs, target, memory_is_fixed)
    if found is None:
        assert not pairs
    else:
        one, two = found
        assert losses[one] + costs[two] <= target
        assert product(one, two) == pytest.approx(min(pairs))
