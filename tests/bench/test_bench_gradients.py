"""The bench of the sweep by gradients: its rows, from costs that are known."""

from __future__ import annotations

import pytest

from moeconv.artifacts import Probe, SweepCost
from moert.pack.manifest import LossEstimate
from moert.pack.model_spec import ExpertKey
from recipes.bench.gradients import effort_rows, plan_rows, rank_rows


def probe(layer: int, expert: int, bits: int = 3) -> Probe:
    return Probe(ExpertKey("decoder", layer, expert), (bits,) * 3)


def test_ranks_are_compared_at_each_width_over_all_experts_and_inside_layers() -> None:
    exact = {probe(layer, expert): 10.0 * layer + expert for layer in (0, 1) for expert in range(3)}
    found = {one: -cost if one.key.layer == 0 else cost for one, cost in exact.items()}
    whole, within = rank_rows("wiki", exact, {**found, probe(0, 0, 2): 1.0})
    assert whole.name == "wiki, 3 bits: exact and gradients"
    assert within.value == pytest.approx(0.0)  # -1 and 1
    assert whole.value == pytest.approx(0.771, abs=1e-3)
    assert not whole.met
    assert rank_rows("wiki", exact, exact)[0].met


class Report:
    """What the rows take of a ConversionReport."""

    def __init__(self, cost: SweepCost, loss: float, nbytes: int) -> None:
        self.sweep_cost = cost
        self.calibration = self.heldout = LossEstimate(10.0, 10.5, loss, loss - 0.01, loss + 0.01, 8)
        self.expert_bytes = {"pack": nbytes}


def test_effort_and_plans_are_beside_the_exact_ones() -> None:
    exact = Report(SweepCost(10, 0, 1.0, 400, 1000, 20.0, 0), 0.04, 1_000_000)
    gradients = Report(SweepCost(10, 0, 1.0, 40, 900, 3.0, 0), 0.05, 1_000_000)
    flops, time, _ = effort_rows("wiki", exact, gradients)  # type: ignore[arg-type]
    assert (flops.value, flops.met, time.value, time.met) == (0.04, True, 0.15, False)
    rows = {row.name: row for row in plan_rows("wiki", exact, gradients)}  # type: ignore[arg-type]
    mine = rows["wiki, heldout: loss of the plan by gradients"]
    assert (mine.value, mine.aim, mine.met) == (5.0, "≤ 4", False)
    assert (mine.low, mine.high) == (pytest.approx(4.0), pytest.approx(6.0))
