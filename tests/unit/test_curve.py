"""The size-loss curve: what is on it, what is marked, and how it reads."""

from __future__ import annotations

import pytest
from problems import heavy_tailed, make_problem

from moeconv.artifacts import CurvePoint
from moeconv.command.present import curve_table
from moeconv.plan import plan_within
from moeconv.plan.knapsack import hulls, uniform
from moeconv.plan.search import MeasuredPlan, curve, search


def test_a_searched_curve() -> None:
    frontier = hulls(heavy_tailed(64, 3, seed=0, noise=0.02))
    found = search(frontier, lambda plan: MeasuredPlan.of(plan, 0.3 * (plan.cost - frontier.costs[-1]), 0.049), 0.05)
    points = curve(frontier, found.judged, found.plan)
    assert 30 <= len(points) <= 40 + len(found.judged)
    assert [p.nbytes for p in points] == sorted(p.nbytes for p in points)
    assert (points[0].nbytes, points[-1].nbytes) == (frontier.sizes[0], frontier.sizes[-1])
    losses = [p.predicted_loss for p in points]
    assert losses == sorted(losses, reverse=True)
    assert sum(p.loss is not None for p in points) == len(found.judged)
    (chosen,) = [p for p in points if p.chosen]
    assert chosen.nbytes == found.plan.nbytes
    assert chosen.loss == pytest.approx(chosen.predicted_loss)
    assert chosen.upper == 0.049


def test_a_plan_beside_the_frontier_has_its_place() -> None:
    problem = heavy_tailed(8, 3, seed=3)
    frontier = hulls(problem)
    plan = plan_within(problem, "knapsack", (int(frontier.sizes[10]) + int(frontier.sizes[11])) // 2 * 2 - 1)
    points = curve(frontier, [MeasuredPlan(plan.nbytes, plan.cost, 0.1, 0.2)], plan)
    (chosen,) = [p for p in points if p.chosen]
    assert (chosen.nbytes, chosen.loss, chosen.upper) == (plan.nbytes, 0.1, 0.2)


def test_the_mark_is_at_the_chosen_plan_and_not_at_another_of_its_cost() -> None:
    """Costs of one plan that were added up in another order are its own; another plan's bytes are not."""
    frontier = hulls(heavy_tailed(8, 3, seed=3))
    plan = frontier[4]
    same, other = (
        MeasuredPlan(plan.nbytes, plan.cost * (1 + 1e-9), 0.1, 0.2), MeasuredPlan(plan.nbytes + 1, plan.cost, 0.3, 0.4)
    )  # fmt: skip
    (chosen,) = [point for point in curve(frontier, [other, same], plan) if point.chosen]
    assert (chosen.nbytes, chosen.loss, chosen.upper) == (plan.nbytes, 0.1, 0.2)


def test_nothing_measured_nothing_predicted() -> None:
    frontier = uniform(make_problem([[(2, 20, 1.0), (4, 40, 0.0)]]))
    assert curve(frontier, [], None) == (
        CurvePoint(20, None, None, None, False),
        CurvePoint(40, None, None, None, False),
    )
    assert [p.predicted_loss for p in curve(frontier, [], frontier[1], known=[(0.0, 0.02)])] == [1.02, 0.02]


def test_the_table() -> None:
    points = (CurvePoint(2_500_000, 0.1, None, None, False), CurvePoint(5_000_000, 0.02, 0.021, 0.034, True))
    text = curve_table(points, weights=10_000_000, int4_bytes=5_000_000)
    assert text.splitlines() == [
        "        size   bits  of INT4  predicted  measured    upper",
        "      2.5 MB   2.00    50.0%     10.00%         –        –",
        "        5 MB   4.00   100.0%      2.00%     2.10%    3.40%  chosen",
    ]


def test_the_table_of_plans_without_a_promise_has_no_column_for_its_bound() -> None:
    frontier = uniform(make_problem([[(2, 20, 1.0), (4, 40, 0.0)]]))
    points = curve(frontier, [MeasuredPlan(40, 0.0, 0.02, None)], frontier[1])
    assert points == (CurvePoint(20, 1.02, None, None, False), CurvePoint(40, 0.02, 0.02, None, True))
    assert curve_table(points, weights=80, int4_bytes=40).splitlines() == [
        "        size   bits  of INT4  predicted  measured",
        "    20 bytes   2.00    50.0%    102.00%         –",
        "    40 bytes   4.00   100.0%      2.00%     2.00%  chosen",
    ]
