"""Problems, chains of plans and budgets over made-up costs: pure functions, so every case can be written down."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import heavy_tailed, make_problem, small_problems

from moeconv.artifacts import Probe, SensitivityTable, Summary
from moeconv.errors import SettingsError, TargetMissed, WeightsUnusable
from moeconv.plan import ALLOCATORS, plan_within
from moeconv.plan.knapsack import greedy, uniform
from moeconv.plan.problem import Option, Problem, Storage, Unit, falling, layout_bytes, options, problem, rising
from moert.pack.layout import expert_layout
from moert.pack.model_spec import ExpertKey, ModelSpec
from tests.shapes import Shape

KEYS = [ExpertKey("decoder", 0, expert) for expert in range(4)]
BASE = Summary(1.0, 0.02, 0.5, 0.01)


def spec(gated: bool = True) -> ModelSpec:
    return Shape(
        8, d_model=24, n_heads=1, n_kv_heads=1, head_dim=4, decoder=(True,), d_ff=40, gated=gated, tied=True
    ).spec


def table(costs: dict[Probe, float]) -> SensitivityTable:
    """Costs of the metric; nll has ten times as much, kl a hundred times."""
    return SensitivityTable(4, BASE, {probe: (c, 10 * c, 100 * c) for probe, c in costs.items()}, {})


def whole_experts() -> SensitivityTable:
    return table({Probe(key, (2, 2, 2)): 0.1 * (place + 1) for place, key in enumerate(KEYS)})


@given(st.lists(st.floats(-10, 10), max_size=12))
def test_isotonic_regression(values: list[float]) -> None:
    found = falling(values)
    assert all(a >= b for a, b in pairwise(found))
    assert math.isclose(sum(found), sum(values), abs_tol=1e-9)
    assert rising(values[::-1]) == found[::-1]
    assert falling(found) == pytest.approx(found)


def test_isotonic_regression_is_the_nearest() -> None:
    assert falling([3.0, 1.0, 2.0, 0.0]) == [3.0, 1.5, 1.5, 0.0]
    assert falling([1.0, 2.0, 3.0]) == [2.0, 2.0, 2.0]


def test_costs_that_rise_with_bytes_are_pooled_and_broken_widths_left_out() -> None:
    found = options([Option(4, 40, 0.0), Option(2, 20, -0.2), Option(3, 30, math.nan), Option(8, 80, -1.0)])
    assert found == (Option(2, 20, -0.1), Option(4, 40, -0.1), Option(8, 80, -1.0))


def test_whole_experts_are_units() -> None:
    found = problem(spec(), whole_experts(), "nll", (4, 2), lambda projection, bits: 10 * bits)
    assert list(found.units) == [Unit(key, (0, 1, 2)) for key in KEYS]
    assert found.units[Unit(KEYS[2], (0, 1, 2))] == (Option(2, 60, pytest.approx(3.0)), Option(4, 120, 0.0))
    assert found.plan([0, 1, 1, 1]).assignment == {key: (2,) * 3 if key == KEYS[0] else (4,) * 3 for key in KEYS}


def test_single_projections_are_units_where_they_were_probed() -> None:
    costs = {}
    for place in range(3):
        bits = tuple(2 if at == place else 4 for at in range(3))
        costs |= {Probe(key, bits): 0.1 * (place + 1) for key in KEYS}
    found = problem(spec(), table(costs), "metric", (2, 4), lambda projection, bits: bits * len(projection))
    assert len(found.units) == 12
    assert found.units[Unit(KEYS[1], (1,))] == (Option(2, 4, 0.2), Option(4, 8, 0.0))
    plan = found.plan([0, 1, 1, *[1] * 6, 1, 1, 0])
    assert plan.assignment[KEYS[0]] == (2, 4, 4)
    assert plan.assignment[KEYS[3]] == (4, 4, 2)
    assert plan.cost == pytest.approx(0.1 + 0.3)
    assert plan.nbytes == 4 * 4 * (4 + 2 + 4) - 2 * (4 + 4)


def test_an_expert_that_hardly_a_token_reached_costs_what_the_middle_one_of_its_layer_does() -> None:
    seen = replace(whole_experts(), coverage=dict(zip(KEYS, (7, 8, 500, 500), strict=True)))
    found = problem(spec(), seen, "metric", (2, 4), lambda projection, bits: bits)
    costs = [options[0].cost for options in found.units.values()]
    assert costs == pytest.approx([0.3, 0.2, 0.3, 0.4])
    dear = replace(seen, coverage=dict(zip(KEYS, (500, 500, 500, 0), strict=True)))
    costs = [options[0].cost for options in problem(spec(), dear, "metric", (2, 4), lambda *_: 1).units.values()]
    assert costs == pytest.approx([0.1, 0.2, 0.3, 0.4]), "what it was seen to cost counts where that is more"
    none = replace(seen, coverage=dict.fromkeys(KEYS, 0))
    costs = [options[0].cost for options in problem(spec(), none, "metric", (2, 4), lambda *_: 1).units.values()]
    assert costs == pytest.approx([0.1, 0.2, 0.3, 0.4]), "there is nothing to compare with"


def test_a_width_that_was_not_measured_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"D00/E000 at 3/3/3 was not measured"):
        problem(spec(), whole_experts(), "metric", (2, 3, 4), lambda projection, bits: bits)


def test_an_expert_that_no_width_can_hold_is_refused() -> None:
    broken = table({Probe(key, (2, 2, 2)): math.inf for key in KEYS})
    with pytest.raises(WeightsUnusable, match="D00/E000"):
        problem(spec(), broken, "metric", (2,), lambda projection, bits: bits)
    kept = problem(spec(), broken, "metric", (2, 4), lambda projection, bits: bits)
    assert {one.bits for found in kept.units.values() for one in found} == {4}


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("group_size", [0, 32])
def test_bytes_of_projections_add_up_to_the_layout(gated: bool, group_size: int) -> None:
    model = spec(gated)
    nbytes = layout_bytes(model, Storage(group_size))
    bits = dict(zip(model.moe.ffn.projections, (2, 16, 3), strict=False))
    whole = expert_layout(model, KEYS[0], bits, group_size, "F16", 4096).tensor_bytes
    assert sum(nbytes(name, width) for name, width in bits.items()) == whole


def test_greedy_leaves_the_least_important_at_the_lower_width() -> None:
    costs = [0.3, 0.1, 0.4, 0.2]
    frontier = greedy(make_problem([[(2, 20, c), (3, 30, c / 4), (4, 40, 0.0)] for c in costs]))
    assert len(frontier) == 9
    least_important = [1, 3, 0, 2]
    for low, high, first in ((2, 3, 0), (3, 4, 4)):
        for count in range(5):
            widths = [bits[0] for bits in frontier[first + 4 - count].assignment.values()]
            assert [e for e in least_important if widths[e] == low] == least_important[:count]
            assert set(widths) <= {low, high}


def test_uniform_has_one_plan_for_each_width() -> None:
    frontier = uniform(heavy_tailed(6, 2, seed=0))
    assert [set(frontier[i].assignment.values()) for i in range(len(frontier))] == [{(b, b)} for b in (2, 3, 4, 8)]


@pytest.mark.parametrize("name", sorted(ALLOCATORS))
@given(found=small_problems())
def test_frontiers_grow_and_their_costs_fall(name: str, found: Problem) -> None:
    frontier = ALLOCATORS[name](found)
    assert np.all(np.diff(frontier.sizes) >= 0)
    assert np.all(np.diff(frontier.costs) <= 0)
    units = found.units.values()
    assert frontier.sizes[0] == sum(one[0].nbytes for one in units)
    assert frontier.sizes[-1] == sum(one[-1].nbytes for one in units)
    for index in range(len(frontier)):
        plan = frontier[index]
        assert (plan.nbytes, plan.cost) == (frontier.sizes[index], pytest.approx(frontier.costs[index], abs=1e-9))


def test_places_on_a_frontier() -> None:
    frontier = uniform(make_problem([[(2, 20, 1.0), (4, 40, 0.0)]] * 2))
    assert [frontier.largest_within(nbytes) for nbytes in (39, 40, 79, 80, 999)] == [None, 0, 0, 1, 1]
    with pytest.raises(IndexError, match="plan 2 of 2"):
        frontier[2]
    with pytest.raises(IndexError):
        frontier[-1]


@pytest.mark.parametrize("name", sorted(ALLOCATORS))
def test_a_budget_is_kept_or_refused(name: str) -> None:
    found = heavy_tailed(8, 3, seed=1)
    smallest, largest = (ALLOCATORS[name](found).sizes[place] for place in (0, -1))
    for budget in np.linspace(smallest, largest, 9).astype(int).tolist():
        assert plan_within(found, name, budget).nbytes <= budget
    assert plan_within(found, name, int(largest)).nbytes == largest
    with pytest.raises(TargetMissed, match=f"{smallest:,} bytes, 1 more than"):
        plan_within(found, name, int(smallest) - 1)


def test_any_assignment_has_its_price() -> None:
    found = heavy_tailed(4, 2, seed=0)
    frontier = ALLOCATORS["knapsack"](found)
    assert found.priced(frontier[5].assignment) == frontier[5]
    with pytest.raises(KeyError, match="no option of"):
        found.priced(dict.fromkeys((unit.key for unit in found.units), (16, 16)))
