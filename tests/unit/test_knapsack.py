"""The knapsack against an exact solver, against greedy, and inside its budget."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import heavy_tailed, make_problem, small_problems
from scipy.optimize import Bounds, LinearConstraint, milp

from moeconv.plan import plan_within
from moeconv.plan.knapsack import fill, greedy, hulls
from moeconv.plan.problem import Plan, Problem


def optimum(problem: Problem, budget_bytes: int) -> Plan | None:
    """Returns the true optimum of a small problem by a mixed-integer program, solved by HiGHS: one option for each
    unit, the least cost in `budget_bytes`. None where nothing fits."""
    units = list(problem.units.values())
    flat = [option for options in units for option in options]
    costs = np.array([option.cost for option in flat])
    step = math.gcd(budget_bytes, *(option.nbytes for option in flat))  # small numbers keep the solver exact
    sizes = np.array([option.nbytes // step for option in flat], float)
    owner = np.repeat(np.arange(len(units)), [len(options) for options in units])
    one_each = (owner[None, :] == np.arange(len(units))[:, None]).astype(float)
    spread = float(np.ptp(costs)) or 1.0
    found = milp(
        (costs - costs.min()) / spread * 1e3,
        integrality=np.ones(len(flat)),
        bounds=Bounds(0, 1),
        constraints=[LinearConstraint(one_each, 1, 1), LinearConstraint(sizes[None, :], 0, budget_bytes // step)],
        options={"mip_rel_gap": 0.0},
    )
    if found.x is None:
        return None
    starts = np.cumsum([0, *(len(options) for options in units)])
    return problem.plan([int(np.argmax(found.x[a:b])) for a, b in itertools.pairwise(starts)])


def brute_force(problem: Problem, budget: int) -> float:
    """The least cost, by trying everything."""
    plans = itertools.product(*problem.units.values())
    return min(sum(one.cost for one in plan) for plan in plans if sum(one.nbytes for one in plan) <= budget)


def a_budget(problem: Problem, share: float) -> int:
    units = problem.units.values()
    low, high = (sum(options[place].nbytes for options in units) for place in (0, -1))
    return low + int(share * (high - low))


@settings(deadline=None)
@given(small_problems(max_units=5), st.floats(0, 1))
def test_the_oracle_is_right(problem: Problem, share: float) -> None:
    budget = a_budget(problem, share)
    plan = optimum(problem, budget)
    assert plan.nbytes <= budget
    assert plan.cost == pytest.approx(brute_force(problem, budget), abs=1e-6)


def test_the_oracle_says_when_nothing_fits() -> None:
    assert optimum(make_problem([[(2, 20, 1.0)]]), 19) is None
    assert fill(make_problem([[(2, 20, 1.0)]]), 19) is None


@settings(deadline=None, max_examples=200)
@given(small_problems(), st.floats(0, 1))
def test_filling_is_exact(problem: Problem, share: float) -> None:
    budget = a_budget(problem, share)
    plan, best = fill(problem, budget), optimum(problem, budget)
    assert plan.nbytes <= budget
    assert plan.cost == pytest.approx(best.cost, abs=1e-6)


def test_a_unit_may_take_more_than_fits_until_another_gives_way() -> None:
    sizes = [(14, 21, 26), (16, 17, 46), (8, 14)]
    costs = [(9.6, 8.5, -0.3), (8.7, 0.9, 0.5), (7.4, -0.5)]
    rows = [list(zip((2, 3, 4), *pair, strict=False)) for pair in zip(sizes, costs, strict=True)]
    plan = fill(make_problem(rows), 52)
    assert plan.cost == pytest.approx(brute_force(make_problem(rows), 52))


@settings(deadline=None)
@given(small_problems(), st.floats(0, 1))
def test_the_relaxation_is_within_one_segment_of_the_optimum(problem: Problem, share: float) -> None:
    budget = a_budget(problem, share)
    frontier = hulls(problem)
    index = frontier.largest_within(budget)
    best = optimum(problem, budget)
    assert index is not None
    assert frontier.costs[index] >= best.cost - 1e-6
    beyond = min(index + 1, len(frontier) - 1)
    assert best.cost >= frontier.costs[beyond] - 1e-6


@settings(deadline=None)
@given(small_problems())
def test_every_plan_of_the_relaxation_is_optimal_for_its_size(problem: Problem) -> None:
    frontier = hulls(problem)
    for index in range(len(frontier)):
        assert frontier.costs[index] == pytest.approx(brute_force(problem, int(frontier.sizes[index])), abs=1e-9)


@settings(deadline=None)
@given(small_problems())
def test_never_worse_than_greedy_at_the_same_size(problem: Problem) -> None:
    chain = greedy(problem)
    for index in range(len(chain)):
        plan = plan_within(problem, "knapsack", int(chain.sizes[index]))
        assert plan.nbytes <= chain.sizes[index]
        assert plan.cost <= chain.costs[index] + 1e-9


@pytest.mark.parametrize("seed", range(4))
def test_realistic_costs_against_the_oracle(seed: int) -> None:
    problem = heavy_tailed(10, 2, seed)
    for share in (0.1, 0.35, 0.6):
        budget = a_budget(problem, share)
        plan, best = fill(problem, budget), optimum(problem, budget)
        assert plan.cost == pytest.approx(best.cost, rel=1e-5, abs=1e-8)


def test_limits_on_the_search_keep_the_budget_and_never_lose_to_the_relaxation() -> None:
    random = np.random.default_rng(0)
    rows = []
    for _ in range(60):
        sizes, costs = np.sort(random.integers(1, 10**9, 4)), np.sort(random.exponential(1.0, 4))[::-1]
        rows.append([(b, int(s), float(c)) for b, s, c in zip((2, 3, 4, 8), sizes, costs, strict=True)])
    problem = make_problem(rows)
    frontier = hulls(problem)
    for share in (0.2, 0.5, 0.8):
        budget = a_budget(problem, share)
        index = frontier.largest_within(budget)
        assert index is not None
        exact = fill(problem, budget)
        limited = fill(problem, budget, states=8, core=5)
        assert max(exact.nbytes, limited.nbytes) <= budget
        assert exact.cost <= limited.cost + 1e-9
        assert limited.cost <= frontier.costs[index] + 1e-9


def test_no_bytes_are_spent_on_nothing() -> None:
    problem = make_problem([[(2, 20, 0.0), (4, 40, 0.0)], [(2, 20, 1.0), (4, 40, 0.0)]])
    frontier = hulls(problem)
    assert list(frontier.sizes) == [40, 60, 80]
    assert [bits[0] for bits in frontier[1].assignment.values()] == [2, 4]
    assert list(frontier.costs) == [1.0, 0.0, 0.0]
