"""The search on a frontier with simulated judges: steep, flat, biased, noisy and hopeless ones."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import heavy_tailed, make_problem, small_problems

from moeconv.errors import TargetMissed
from moeconv.plan import ALLOCATORS
from moeconv.plan.knapsack import greedy, hulls, uniform
from moeconv.plan.problem import Frontier, LossMap, Plan, Problem
from moeconv.plan.search import Found, MeasuredPlan, search
from tests.pairs import thinned

TARGET = 0.05
Judge = Callable[[Plan], MeasuredPlan]


def judge_by(frontier: Frontier, loss_of: Callable[[float], float], margin: float = 0.0) -> Judge:
    """`loss_of` takes the predicted cost above that of the largest plan."""

    def judge(plan: Plan) -> MeasuredPlan:
        loss = loss_of(max(plan.cost - float(frontier.costs[-1]), 0.0))
        return MeasuredPlan.of(plan, loss, loss + margin)

    return judge


def check(frontier: Frontier, found: Found, target: float = TARGET) -> None:
    """The chosen plan was accepted, no smaller one was, and a smaller one was refused unless there is none."""
    accepted = [one.nbytes for one in found.judged if one.decisive <= target]
    assert found.plan.nbytes == frontier.sizes[found.index] == min(accepted)
    refused = [one.nbytes for one in found.judged if not one.decisive <= target and one.nbytes <= found.plan.nbytes]
    before = frontier.sizes[max(found.index - 1, 0)]
    assert found.index == 0 or max(refused) >= min(before, 0.995 * found.plan.nbytes)


@thinned("name, power, seed", sorted(ALLOCATORS), [0.5, 1.0, 2.0], range(3))
def test_finds_the_smallest_plan_of_a_monotone_judge(name: str, power: float, seed: int) -> None:
    frontier = ALLOCATORS[name](heavy_tailed(64, 3, seed, noise=0.02))
    judge = judge_by(frontier, lambda cost: 0.4 * cost**power)
    best = next(i for i in range(len(frontier)) if judge(frontier[i]).upper <= TARGET)
    found = search(frontier, judge, TARGET, known=[(0.0, judge(uniform(frontier.problem)[2]).loss)])
    check(frontier, found)
    assert frontier.sizes[best] <= found.plan.nbytes <= max(frontier.sizes[best] * 1.005, frontier.sizes[best] + 1)
    assert len(found.judged) <= 10


def test_takes_few_measurements() -> None:
    taken = []
    for seed in range(30):
        frontier = hulls(heavy_tailed(64, 3, seed, noise=0.02))
        random = np.random.default_rng(seed)
        scale, power = random.uniform(0.1, 1), random.uniform(0.6, 1.6)
        judge = judge_by(frontier, lambda cost, s=scale, p=power: s * cost**p)  # type: ignore[misc]
        found = search(frontier, judge, TARGET)
        check(frontier, found)
        taken.append(len(found.judged))
    assert np.mean(taken) <= 8


def test_a_right_prediction_needs_two_measurements() -> None:
    frontier = hulls(heavy_tailed(64, 3, seed=0, noise=0.02))
    found = search(
        frontier,
        judge_by(frontier, lambda cost: 0.3 * cost),
        0.05,
        known=[(float(frontier.costs[0]), 0.3 * float(np.ptp(frontier.costs)))],
    )
    assert len(found.judged) == 2
    check(frontier, found)


@settings(deadline=None)
@given(small_problems(), st.randoms(use_true_random=False))
def test_whatever_the_judge_says_the_result_was_accepted(problem: Problem, random: np.random.Generator) -> None:
    for allocate in ALLOCATORS.values():
        frontier = allocate(problem)
        try:
            found = search(
                frontier,
                lambda plan: MeasuredPlan.of(plan, random.random(), random.choice([0.0, 1.0, math.nan])),
                TARGET,
            )
        except TargetMissed:
            continue
        check(frontier, found)


@pytest.mark.parametrize("noise", [0.002, 0.01])
def test_a_noisy_judge(noise: float) -> None:
    for seed in range(20):
        frontier = hulls(heavy_tailed(64, 3, seed, noise=0.02))
        random = np.random.default_rng(seed)
        judge = judge_by(frontier, lambda cost, r=random: 0.3 * cost + r.normal(0, noise), margin=noise)  # type: ignore[misc]
        found = search(frontier, judge, TARGET)
        check(frontier, found)
        assert len(found.judged) <= 2 + 2 * math.log2(4 / 0.005)
        truth = 0.3 * (found.plan.cost - frontier.costs[-1])
        assert truth <= TARGET + 4 * noise


def test_the_upper_bound_decides_and_not_the_loss() -> None:
    frontier = hulls(heavy_tailed(64, 3, seed=2, noise=0.02))
    plain = search(frontier, judge_by(frontier, lambda cost: 0.3 * cost), TARGET)
    careful = search(frontier, judge_by(frontier, lambda cost: 0.3 * cost, margin=0.03), TARGET)
    check(frontier, careful)
    assert careful.plan.nbytes > plain.plan.nbytes
    assert len(careful.judged) <= 6
    chosen = next(one for one in careful.judged if one.nbytes == careful.plan.nbytes)
    assert 0.015 < chosen.loss <= 0.02


def test_a_bound_that_is_the_target_meets_it() -> None:
    frontier = hulls(heavy_tailed(64, 3, seed=0, noise=0.02))
    found = search(frontier, judge_by(frontier, lambda cost: TARGET), TARGET)
    assert found.index == 0
    with pytest.raises(TargetMissed):
        search(frontier, judge_by(frontier, lambda cost: math.nextafter(TARGET, 1)), TARGET)


def test_plans_of_a_frontier_have_places_from_none_to_their_number() -> None:
    frontier = hulls(heavy_tailed(8, 3, seed=0))
    assert frontier.choices(0) != frontier.choices(len(frontier) - 1)
    for outside in (-1, len(frontier)):
        with pytest.raises(IndexError, match=f"plan {outside} of {len(frontier)}"):
            frontier.choices(outside)
    at = frontier.choices(3)
    for unit, choice in frontier.moves_after(3):
        at[unit] = choice
    assert at == frontier.choices(len(frontier) - 1)
    assert len(frontier.moves_after(3)) < len(frontier.moves_after(0))


def test_the_smallest_plan_may_do() -> None:
    frontier = greedy(heavy_tailed(16, 1, seed=0))
    found = search(frontier, lambda plan: MeasuredPlan.of(plan, -0.01, -0.01), TARGET)
    assert found.index == 0
    assert len(found.judged) <= 10


def test_only_the_largest_plan_may_do() -> None:
    frontier = greedy(heavy_tailed(16, 1, seed=0))
    largest = frontier.sizes[-1]
    found = search(frontier, lambda plan: MeasuredPlan.of(plan, 0.0, 0.04 if plan.nbytes == largest else 0.9), TARGET)
    assert found.plan.nbytes == largest
    check(frontier, found)


def test_a_hopeless_target_is_said_in_one_line_after_few_measurements() -> None:
    frontier = hulls(heavy_tailed(64, 3, seed=0))
    asked: list[Plan] = []

    def judge(plan: Plan) -> MeasuredPlan:
        asked.append(plan)
        return MeasuredPlan.of(plan, 0.07, 0.08)

    with pytest.raises(
        TargetMissed, match=r"loss of 7\.00% \(upper bound 8\.00%\), above the target of 5\.00%: allow"
    ) as e:
        search(frontier, judge, TARGET)
    assert "\n" not in str(e.value)
    assert len(asked) <= 3
    assert asked[-1].nbytes == frontier.sizes[-1]


def test_one_plan_only() -> None:
    frontier = uniform(make_problem([[(4, 40, 0.0)]]))
    assert search(frontier, lambda plan: MeasuredPlan.of(plan, 0.01, 0.01), TARGET).index == 0
    with pytest.raises(TargetMissed, match=r"0\.00 MB"):
        search(frontier, lambda plan: MeasuredPlan.of(plan, math.nan, math.nan), TARGET)


def test_losses_of_one_cost_count_by_their_mean() -> None:
    assert LossMap([(0.0, 0.0), (1.0, 0.2), (1.0, 0.4), (1.0, 0.6)], 0.0)(1.0) == pytest.approx(0.4)


def test_the_map_from_cost_to_loss() -> None:
    points = [(1.0, 0.1), (2.0, 0.4), (3.0, 0.3), (4.0, math.nan)]
    found = LossMap(points, origin=0.0)
    assert found([0.0, 0.5, 1.0, 2.0, 3.0]) == pytest.approx([0.0, 0.05, 0.1, 0.35, 0.35])
    assert found(5.0) == pytest.approx(0.35 + 2 * 0.35 / 3)
    assert LossMap([], origin=-1.0)([-1.0, 2.0]) == pytest.approx([0.0, 3.0])
    assert LossMap([(0.0, 0.02)], origin=0.0)([0.0, 1.0]) == pytest.approx([0.02, 1.02])
