"""One width after the other: all units at once, or the most important first (EdgeMoE §3.2)."""

from __future__ import annotations

from itertools import pairwise

from moeconv.plan.frontier import Frontier
from moeconv.plan.problem import Option, Problem


def uniform(problem: Problem) -> Frontier:
    """One plan for each width. A unit that lacks the width has the next wider one."""
    levels = _levels(problem)
    units = range(len(problem.units))
    return Frontier(problem, levels[0], [[(unit, level[unit]) for unit in units] for level in levels[1:]])


def greedy(problem: Problem) -> Frontier:
    """All at the narrowest width; the most important rise to the next until all are there; and so on.

    Important is what costs much at the narrowest width. Between two widths, the plan with K units still at the lower
    one has there the K least important: the search of the paper, bracket and all, is a search on this chain.
    """
    levels = _levels(problem)
    importance = [options[0].cost for options in problem.units.values()]
    ranking = sorted(range(len(importance)), key=lambda unit: -importance[unit])
    steps = [
        [(unit, after[unit])] for before, after in pairwise(levels) for unit in ranking if after[unit] != before[unit]
    ]
    return Frontier(problem, levels[0], steps)


def _levels(problem: Problem) -> list[list[int]]:
    """[widths][units]: the option of each unit when all are at one width."""
    widths = sorted({option.bits for options in problem.units.values() for option in options})
    return [[_at(options, bits) for options in problem.units.values()] for bits in widths]


def _at(options: tuple[Option, ...], bits: int) -> int:
    enough = (place for place, option in enumerate(options) if option.bits >= bits)
    return next(enough, len(options) - 1)
