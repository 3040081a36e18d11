"""Bounds and greedy search over made-up losses: pure functions, so every case can be written down."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeconv.allocation import greedy, widths_at
from moeconv.artifacts import BitBounds, Measurement, SensitivityTable
from moeconv.bounds import bracket
from moeconv.errors import TargetMissed
from moert.pack.model_spec import ExpertKey

KEYS = [ExpertKey("decoder", 0, expert) for expert in range(16)]


def test_bracket_takes_the_narrowest_width_that_meets_the_target() -> None:
    found = bracket({2: 0.4, 3: 0.06, 4: 0.01, 8: 0.0}, 0.05)
    assert (found.high, found.low) == (4, 3)
    assert bracket({2: 0.01, 4: 0.0}, 0.05).low is None


def test_bracket_does_not_trust_a_lucky_narrow_width() -> None:
    found = bracket({2: 0.04, 3: 0.09, 4: 0.01}, 0.05)
    assert (found.high, found.low) == (4, 3)


def test_a_loss_that_could_not_be_measured_meets_nothing() -> None:
    assert bracket({2: float("nan"), 4: 0.01, 8: 0.0}, 0.05).high == 4


def test_no_width_meets_the_target() -> None:
    with pytest.raises(TargetMissed, match=r"all experts at 4 bits the loss is 9\.00%"):
        bracket({2: 0.4, 4: 0.09}, 0.05)


@given(st.lists(st.floats(0, 1), min_size=16, max_size=16), st.floats(0.001, 3))
def test_greedy_finds_the_largest_count_of_a_growing_loss(costs: list[float], target: float) -> None:
    costs = sorted(costs)
    asked: list[int] = []

    def loss_of(count: int) -> float:
        asked.append(count)
        return sum(costs[:count])

    total = sum(costs)
    if total <= target:
        return  # then bracket() had chosen the lower width for all
    plan = greedy(KEYS, BitBounds(target, 4, 2, {4: 0.0, 2: total}), loss_of)
    best = max(count for count in range(17) if sum(costs[:count]) <= target)
    assert plan.low_count == best
    assert len(asked) <= 5
    assert sorted(plan.widths.values()).count(2) == best
    assert [key for key in KEYS if plan.widths[key] == 2] == KEYS[:best]


def test_greedy_never_returns_a_count_that_was_not_measured_to_meet_the_target() -> None:
    losses = {8: 0.06, 4: 0.04, 6: 0.055, 5: 0.051}
    plan = greedy(KEYS, BitBounds(0.05, 4, 2, {4: 0.01, 2: 0.3}), lambda count: losses[count])
    assert plan.low_count == 4
    assert dict(plan.steps)[4] <= 0.05


def test_all_at_the_narrowest_width() -> None:
    plan = greedy(KEYS, BitBounds(0.05, 2, None, {2: 0.01}), lambda count: pytest.fail("nothing to search"))
    assert set(plan.widths.values()) == {2}
    assert widths_at(KEYS, BitBounds(0.05, 8, 4, {}), 3)[KEYS[3]] == 8


def test_ranking_breaks_ties_by_likelihood() -> None:
    base = Measurement("base", 1, 0, 0, 0)
    rises = {KEYS[0]: 0.0, KEYS[1]: 2.0, KEYS[2]: 1.0}
    table = SensitivityTable(4, 2, base, {KEYS[0]: 0.1, KEYS[1]: 0.0, KEYS[2]: 0.0}, rises)
    assert table.ranking() == [KEYS[2], KEYS[1], KEYS[0]]
