"""Noise in measured costs: what is taken out of them, and that plans are better for it."""

from __future__ import annotations

import numpy as np
import pytest
from problems import make_problem

from moeconv.plan import plan_within
from moeconv.plan.problem import Plan, Problem, shrunk

WIDTHS = (2, 3, 4, 8)


def truth_and_measured(seed: int, noise: float, n: int = 300) -> tuple[np.ndarray, np.ndarray]:
    """Costs [units, widths] beside 4 bits: log-normal scales of median 1, each width's error a few times the next."""
    random = np.random.default_rng(seed)
    scale = np.exp(random.normal(0, 1.6, (n, 1)))
    error = scale * random.uniform(2.5, 5, (n, 1)) ** (2.0 - np.array(WIDTHS))
    truth = error - error[:, 2:3]
    return truth, truth + random.normal(0, noise, truth.shape) * (np.array(WIDTHS) != 4)


def as_problem(costs: np.ndarray) -> Problem:
    return make_problem([[(w, 100 * w + 6, float(c)) for w, c in zip(WIDTHS, row, strict=True)] for row in costs])


def true_cost(plan: Plan, truth: np.ndarray) -> float:
    """Above that of all units at 8 bits."""
    chosen = [WIDTHS.index(bits[0]) for bits in plan.assignment.values()]
    return float(truth[np.arange(len(truth)), chosen].sum() - truth[:, -1].sum())


def test_costs_without_noise_stay() -> None:
    truth, _ = truth_and_measured(0, 0)
    assert np.array_equal(shrunk(truth), truth)
    assert np.array_equal(shrunk(np.zeros((3, 2))), np.zeros((3, 2)))


def test_costs_that_are_not_finite_stay() -> None:
    _, measured = truth_and_measured(0, 1.0)
    measured[4, 0] = np.inf
    measured[7, :2] = np.nan
    found = shrunk(measured)
    assert np.array_equal(found[[4, 7]], measured[[4, 7]], equal_nan=True)
    others = [row for row in range(len(measured)) if row not in (4, 7)]
    assert np.array_equal(found[others], shrunk(measured[others]))
    assert np.isnan(shrunk(np.full((2, 2), np.nan))).all()


def test_nothing_is_taken_to_be_free_and_large_costs_stay() -> None:
    truth, measured = truth_and_measured(1, 1.0)
    found = shrunk(measured)
    assert (measured[:, 0] < 0).sum() > 20, "the noise shows nowhere: nothing was tested"
    assert (found[:, 0] > found[:, 2]).all()
    large = truth[:, 0] > 10
    assert found[large, 0] == pytest.approx(measured[large, 0], rel=0.05, abs=0.5)


@pytest.mark.parametrize("noise", [0.3, 1.0, 3.0])
def test_shrunk_costs_are_nearer_to_the_truth(noise: float) -> None:
    truth, measured = truth_and_measured(2, noise)
    assert np.abs(shrunk(measured) - truth).mean() < 0.8 * np.abs(measured - truth).mean()


@pytest.mark.parametrize("share", [0.15, 0.3, 0.5])
def test_plans_are_truly_better(share: float) -> None:
    bare, better, chain = [], [], []
    for seed in range(4):
        truth, measured = truth_and_measured(seed, 1.0)
        budget = int(len(truth) * (206 + share * 600))
        best = true_cost(plan_within(as_problem(truth), "knapsack", budget), truth)
        bare.append(true_cost(plan_within(as_problem(measured), "knapsack", budget), truth) / best)
        better.append(true_cost(plan_within(as_problem(shrunk(measured)), "knapsack", budget), truth) / best)
        chain.append(true_cost(plan_within(as_problem(measured), "greedy", budget), truth) / best)
    assert np.mean(better) < np.mean(bare)
    assert np.mean(better) < 1.1 * np.mean(chain)
