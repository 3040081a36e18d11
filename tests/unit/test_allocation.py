"""Problems, chains of plans and budgets over made-up costs: pure functions, so every case can be written down."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import heavy_tailed, make_problem, small_problems

from moeconv.artifacts import CurvePoint, Probe, SensitivityTable, Summary
from moeconv.command.present import curve_table
from moeconv.errors import SettingsError, TargetMissed, WeightsUnusable
from moeconv.plan import ALLOCATORS, plan_within
from moeconv.plan.knapsack import greedy, hulls, uniform
from moeconv.plan.problem import (
    Frontier,
    LossMap,
    Option,
    Plan,
    Problem,
    Storage,
    Unit,
    falling,
    layout_bytes,
    options,
    problem,
    rising,
)
from moeconv.plan.search import Found, MeasuredPlan, curve, search
from moert.pack.layout import Coding, expert_layout
from moert.pack.model_spec import ExpertKey, ModelSpec
from tests.pairs import thinned
from tests.refusing import one_line
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
    whole = expert_layout(model, KEYS[0], bits, Coding(group_size, "F16"), 4096).tensor_bytes
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
    each = uniform(heavy_tailed(6, 2, seed=0))
    assert [set(each[i].assignment.values()) for i in range(len(each))] == [{(b, b)} for b in (2, 3, 4, 8)]
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


# The search on a frontier, with simulated judges: steep, flat, biased, noisy and hopeless ones

TARGET = 0.05
Judge = Callable[[Plan], MeasuredPlan]


def judge_by(
    frontier: Frontier, loss_of: Callable[[float], float], margin: float = 0.0, deviation: float = 0.0
) -> Judge:
    """`loss_of` takes the predicted cost above that of the largest plan. The bound is above the loss by `margin`, and
    by `deviation` times the root of the loss."""

    def judge(plan: Plan) -> MeasuredPlan:
        loss = loss_of(max(plan.cost - float(frontier.costs[-1]), 0.0))
        return MeasuredPlan.of(plan, loss, loss + margin + deviation * math.sqrt(max(loss, 0.0)))

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
    found = search(frontier, judge, TARGET, known=[replace(judge(uniform(frontier.problem)[2]), cost=0.0)])
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


def test_bounds_that_grow_with_the_root_of_the_loss_are_foreseen() -> None:
    """The bound of a small plan, far above the target, does not send the search to the largest one."""
    taken = []
    for seed in range(30):
        frontier = hulls(heavy_tailed(64, 3, seed, noise=0.02))
        random = np.random.default_rng(seed)
        scale, deviation = random.uniform(0.1, 1), random.uniform(0.02, 0.2)
        judge = judge_by(frontier, lambda cost, s=scale: s * cost, deviation=deviation)  # type: ignore[misc]
        found = search(frontier, judge, TARGET, known=[judge(frontier[0])])
        check(frontier, found)
        taken.append(len(found.judged))
    assert np.mean(taken) <= 2.5


def test_a_right_prediction_needs_two_measurements() -> None:
    frontier = hulls(heavy_tailed(64, 3, seed=0, noise=0.02))
    found = search(
        frontier,
        judge_by(frontier, lambda cost: 0.3 * cost),
        0.05,
        known=[MeasuredPlan.of(frontier[0], 0.3 * float(np.ptp(frontier.costs)))],
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


@pytest.mark.parametrize("factor", [0.2, 5.0], ids=["too small", "too large"])
def test_steps_grow_where_guesses_are_all_on_one_side(factor: float) -> None:
    """Known losses that are far off lead the first guesses astray; later ones neither creep nor jump to an end."""
    frontier = hulls(heavy_tailed(64, 3, seed=0, noise=0.02))
    judge = judge_by(frontier, lambda cost: 0.3 * cost)
    target = 1.01 * judge(frontier[len(frontier) // 2]).loss
    known = [MeasuredPlan.of(frontier[at], factor * judge(frontier[at]).loss) for at in range(0, len(frontier), 9)]
    found = search(frontier, judge, target, known=known)
    check(frontier, found, target)
    first, second, *_ = found.judged
    assert (first.decisive > target) == (second.decisive > target) == (factor < 1)
    assert len(found.judged) <= 7
    assert max(one.nbytes for one in found.judged) < frontier.sizes[-1]


def test_what_was_judged_before_is_not_asked_again() -> None:
    frontier = hulls(heavy_tailed(64, 3, seed=0, noise=0.02))
    judge, tried, judged = judge_by(frontier, lambda cost: 0.3 * cost), [], list[tuple[Plan, MeasuredPlan]]()

    def asked(plan: Plan) -> MeasuredPlan:
        tried.append(plan.nbytes)
        judged.append((plan, judge(plan)))
        return judge(plan)

    coarse = search(frontier, asked, TARGET, resolution=0.1)
    stranger = replace(frontier[3], nbytes=7)  # of no plan of this frontier
    before, above = len(tried), frontier[coarse.index + 9]
    noisy = [(stranger, MeasuredPlan.of(stranger, 0.0)), (above, MeasuredPlan.of(above, 1.0))]
    fine = search(frontier, asked, TARGET, judged=[*noisy, *judged])
    assert fine.plan == search(frontier, judge, TARGET).plan
    assert len(tried) - before <= 3
    assert len(tried) == len(set(tried))
    assert all(fine.plan.nbytes * 0.8 < nbytes <= coarse.plan.nbytes for nbytes in tried[before:])
    again = search(frontier, asked, TARGET, judged=judged)
    assert (again.plan, len(tried)) == (fine.plan, len(set(tried)))
    largest = frontier[len(frontier) - 1]
    with pytest.raises(TargetMissed):
        search(frontier, asked, TARGET, judged=[*judged, (largest, MeasuredPlan.of(largest, 1.0))][-1:])
    assert len(tried) == len(set(tried)), "the largest failed, which is known"


@settings(deadline=None)
@given(small_problems(), st.randoms(use_true_random=False), st.sampled_from([0.5, 0.1, 0.0]))
def test_a_search_that_goes_on_accepts_only_what_the_judge_accepts(
    problem: Problem, random: np.random.Generator, resolution: float
) -> None:
    """Also where plans have the bytes and the cost of others, and figures are no numbers."""
    for allocate in ALLOCATORS.values():
        frontier, said = allocate(problem), dict[str, MeasuredPlan]()

        def judge(plan: Plan, said: dict[str, MeasuredPlan] = said) -> MeasuredPlan:
            one = MeasuredPlan.of(plan, random.random(), random.choice([0.0, TARGET, 1.0, math.nan, math.inf, None]))
            return said.setdefault(repr(plan), one)

        tried = [frontier[index] for index in range(len(frontier)) if random.random() < 0.5]
        judged = [(plan, judge(plan)) for plan in tried]
        random.shuffle(judged)
        try:
            found = search(frontier, judge, TARGET, judged=judged, resolution=resolution)
        except TargetMissed:
            assert not judge(frontier[len(frontier) - 1]).decisive <= TARGET
            continue
        assert judge(found.plan).decisive <= TARGET
        smaller = [plan.nbytes for plan, one in judged if one.decisive <= TARGET]
        assert found.plan.nbytes <= min(smaller, default=found.plan.nbytes)


def test_a_guess_beside_a_plan_that_just_holds_is_near_it() -> None:
    """The sum of a plan's costs may differ from the frontier's by rounding."""
    rounded = (hulls(heavy_tailed(64, 3, seed, noise=0.02)) for seed in range(40))
    frontier = next(one for one in rounded if one.costs[-1] > one[len(one) - 1].cost)
    ends, tried = [frontier[0], frontier[len(frontier) - 1]], list[int]()
    judged = [(plan, MeasuredPlan.of(plan, loss)) for plan, loss in zip(ends, (1.0, TARGET), strict=True)]

    def judge(plan: Plan) -> MeasuredPlan:
        tried.append(plan.nbytes)
        return MeasuredPlan.of(plan, 1.0)

    search(frontier, judge, TARGET, judged=judged)
    assert tried[0] > 0.9 * frontier.sizes[-1]


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


def test_the_smallest_plan_may_do_or_only_the_largest() -> None:
    frontier = greedy(heavy_tailed(16, 1, seed=0))
    found = search(frontier, lambda plan: MeasuredPlan.of(plan, -0.01, -0.01), TARGET)
    assert found.index == 0
    assert len(found.judged) <= 10
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

    with one_line(TargetMissed, r"loss of 7\.00% \(upper bound 8\.00%\), above the target of 5\.00%: allow"):
        search(frontier, judge, TARGET)
    assert len(asked) <= 5
    assert asked[-1].nbytes == frontier.sizes[-1]


def test_one_plan_only() -> None:
    frontier = uniform(make_problem([[(4, 40, 0.0)]]))
    assert search(frontier, lambda plan: MeasuredPlan.of(plan, 0.01, 0.01), TARGET).index == 0
    with pytest.raises(TargetMissed, match=r"0\.00 MB"):
        search(frontier, lambda plan: MeasuredPlan.of(plan, math.nan, math.nan), TARGET)


def test_the_map_from_cost_to_loss() -> None:
    points = [(1.0, 0.1), (2.0, 0.4), (3.0, 0.3), (4.0, math.nan)]
    found = LossMap(points, origin=0.0)
    assert found([0.0, 0.5, 1.0, 2.0, 3.0]) == pytest.approx([0.0, 0.05, 0.1, 0.35, 0.35])
    assert found(5.0) == pytest.approx(0.35 + 2 * 0.35 / 3)
    assert LossMap([], origin=-1.0)([-1.0, 2.0]) == pytest.approx([0.0, 3.0])
    assert LossMap([(0.0, 0.02)], origin=0.0)([0.0, 1.0]) == pytest.approx([0.02, 1.02])
    of_one_cost = [(0.0, 0.0), (1.0, 0.2), (1.0, 0.4), (1.0, 0.6)]
    assert LossMap(of_one_cost, 0.0)(1.0) == pytest.approx(0.4), "their mean"


# The curve of sizes and losses


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
    known = [MeasuredPlan(0, 0.0, 0.02, None)]
    assert [p.predicted_loss for p in curve(frontier, [], frontier[1], known)] == [1.02, 0.02]


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
