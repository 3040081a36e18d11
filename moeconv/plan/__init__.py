"""Bits for each expert: sensitivities become a family of plans, and one of them is chosen. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from moeconv.errors import TargetMissed
from moeconv.plan.knapsack import fill, greedy, hulls, uniform
from moeconv.plan.problem import Frontier, Plan, Problem

ALLOCATORS: Mapping[str, Callable[[Problem], Frontier]] = {"greedy": greedy, "knapsack": hulls, "uniform": uniform}


def plan_within(problem: Problem, allocator: str, budget_bytes: int) -> Plan:
    """Returns the plan with the least predicted cost that `allocator` makes in `budget_bytes`. Raises TargetMissed."""
    if allocator == "knapsack":
        plan = fill(problem, budget_bytes)
    else:
        frontier = ALLOCATORS[allocator](problem)
        index = frontier.largest_within(budget_bytes)
        plan = None if index is None else frontier[index]
    if plan is None:
        smallest = sum(options[0].nbytes for options in problem.units.values())
        raise TargetMissed(
            f"the smallest plan has {smallest:,} bytes, {smallest - budget_bytes:,} more than the {budget_bytes:,} "
            "asked for: allow narrower experts with --bits, or a larger size"
        )
    return plan
