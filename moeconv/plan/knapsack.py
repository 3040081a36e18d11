"""Allocators: from a problem to a frontier of plans."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from moeconv.plan.problem import Frontier, Option, Plan, Problem
from moert.pack.codec import Width

# One width after the other: all units at once, or the most important first (EdgeMoE §3.2).


def uniform(problem: Problem) -> Frontier:
    """Returns one plan for each width. A unit that lacks the width has the next wider one."""
    levels = _levels(problem)
    units = range(len(problem.units))
    return Frontier(problem, levels[0], [[(unit, level[unit]) for unit in units] for level in levels[1:]])


def greedy(problem: Problem) -> Frontier:
    """Returns a chain of plans: all units at the narrowest width, then the most important ones rise to the next width
    until all have it, and so on.

    A unit is important if it costs much at the narrowest width. In a plan between two widths, the K units at the lower
    one are the K least important: the paper's search is a search on this chain.
    """
    levels = _levels(problem)
    importance = [options[0].cost for options in problem.units.values()]
    ranking = sorted(range(len(importance)), key=lambda unit: -importance[unit])
    steps = [
        [(unit, after[unit])] for before, after in pairwise(levels) for unit in ranking if after[unit] != before[unit]
    ]
    return Frontier(problem, levels[0], steps)


def _levels(problem: Problem) -> list[list[int]]:
    """Returns the option of each unit when all are at one width [widths][units]."""
    widths = sorted({option.bits for options in problem.units.values() for option in options})
    return [[_at(options, bits) for options in problem.units.values()] for bits in widths]


def _at(options: tuple[Option, ...], bits: Width) -> int:
    enough = (place for place, option in enumerate(options) if option.bits >= bits)
    return next(enough, len(options) - 1)


# A multiple-choice knapsack: one option for each unit, the least cost in a number of bytes.
# `hulls` solves the Lagrangian relaxation for all prices of a byte at once; its plans are optimal for their own
# size. `fill` closes the gap that such a plan leaves below a given size, by dynamic programming over the units that
# can matter (after Pisinger, "A minimal algorithm for the multiple-choice knapsack problem", 1995).

STATES = 4096
CORE = 1000


def hulls(problem: Problem) -> Frontier:
    """Returns the plans from all units at their smallest to all at their largest, by falling gain for each byte.

    Each unit climbs the lower convex hull of its options, so that its gains fall too and the plans are nested. Moves
    without any gain come last, narrow widths first: a search needs them if every predicted optimum fails.
    """
    start, moves = [], []
    for unit, options in enumerate(problem.units.values()):
        hull = _hull(options)
        start.append(hull[0])
        for before, after in pairwise(hull):
            moves.append((-_gain(options[before], options[after]), options[after].bits, unit, after))
    return Frontier(problem, start, [[(unit, choice)] for _, _, unit, choice in sorted(moves)])


def fill(problem: Problem, budget_bytes: int, states: int = STATES, core: int = CORE) -> Plan | None:
    """Returns the plan with the least predicted cost in `budget_bytes`; None when even the smallest plan is larger.

    Exact while at most `core` units and `states` partial sums are in play; beyond that the least promising units
    stay as the relaxation has them, and sums of nearly the same size are merged (each keeps its own exact size, so
    the budget holds).
    """
    frontier = hulls(problem)
    base = frontier.largest_within(budget_bytes)
    if base is None:
        return None
    choices = frontier.choices(base)
    if base + 1 < len(frontier):
        price = float(frontier.costs[base] - frontier.costs[base + 1]) / int(
            frontier.sizes[base + 1] - frontier.sizes[base]
        )
        left = budget_bytes - int(frontier.sizes[base])
        completed = _complete(problem, frontier, base, left)
        gained = problem.plan(completed).cost - problem.plan(choices).cost
        found = _Exchange(problem, choices, price, left, core).best(gained, states)
        choices = completed if found is None else found
    return problem.plan(choices)


def _gain(before: Option, after: Option) -> float:
    return (before.cost - after.cost) / (after.nbytes - before.nbytes)


def _hull(options: tuple[Option, ...]) -> list[int]:
    """Returns places of the options on the lower convex hull of cost over bytes; those on a straight line stay."""
    hull: list[int] = []
    for place, option in enumerate(options):
        while hull and options[hull[-1]].nbytes == option.nbytes:
            hull.pop()
        while len(hull) > 1 and _gain(options[hull[-2]], options[hull[-1]]) < _gain(options[hull[-1]], option):
            hull.pop()
        hull.append(place)
    return hull


def _complete(problem: Problem, frontier: Frontier, base: int, left: int) -> list[int]:
    """Returns the choices of plan `base` with all later moves that still fit, the best first."""
    units = list(problem.units.values())
    choices = frontier.choices(base)
    for unit, choice in frontier.moves_after(base):
        more = units[unit][choice].nbytes - units[unit][choices[unit]].nbytes
        if more <= left:
            left -= more
            choices[unit] = choice
    return choices


class _Exchange:
    """Other options for some units of a plan that is optimal at `price`, within `left` more bytes.

    At that price an option's regret is the rise of cost + price × bytes: never negative, since the plan has the least
    sum. A plan that uses all bytes and has the total regret r gains price × left - r. So only options with less regret
    than the best known plan can help, which leaves few units.
    """

    def __init__(self, problem: Problem, choices: list[int], price: float, left: int, core: int) -> None:
        self.choices, self.price, self.left, self.core = choices, price, left, core
        self.units = list(problem.units.values())

    def best(self, gained: float, states: int) -> list[int] | None:
        """Returns choices of units that cost less than the plan + `gained` (negative: a better one is known); or
        None."""
        bound = gained + self.price * self.left
        active = self._active(bound)
        room = self._room(active)
        sizes, costs = np.zeros(1, np.int64), np.zeros(1)
        layers: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = []
        found: tuple[int, int] | None = None
        for depth, (_, others) in enumerate(active):
            more = np.array([(0, 0.0), *((nbytes, cost) for _, nbytes, cost in others)])
            all_sizes = (sizes[None, :] + more[:, :1].astype(np.int64)).ravel()
            all_costs = (costs[None, :] + more[:, 1:]).ravel()
            kept = np.flatnonzero((all_costs + self.price * all_sizes < bound) & (all_sizes <= room[depth]))
            kept = kept[_undominated(all_sizes[kept], all_costs[kept], states)]
            if not len(kept):
                break
            layers.append((kept % len(sizes), kept // len(sizes)))
            sizes, costs = all_sizes[kept], all_costs[kept]
            fitting = int(np.searchsorted(sizes, self.left, side="right")) - 1
            if fitting >= 0 and costs[fitting] < gained:
                gained, found = float(costs[fitting]), (depth, fitting)
                bound = gained + self.price * self.left
        return None if found is None else self._trace(active, layers, *found)

    def _active(self, bound: float) -> list[tuple[int, list[tuple[int, int, float]]]]:
        """Returns units with other options (place, bytes, cost beside the plan's) of less regret than `bound`, least
        first."""
        found = []
        for unit, options in enumerate(self.units):
            now = options[self.choices[unit]]
            others = [(place, one.nbytes - now.nbytes, one.cost - now.cost) for place, one in enumerate(options)]
            regrets = [cost + self.price * nbytes for _, nbytes, cost in others]
            near = [place for place, regret in enumerate(regrets) if regret < bound and place != self.choices[unit]]
            if near:
                found.append((min(regrets[place] for place in near), unit, [others[place] for place in near]))
        return [(unit, others) for _, unit, others in sorted(found)[: self.core]]

    def _room(self, active: list[tuple[int, list[tuple[int, int, float]]]]) -> list[int]:
        """Returns the most bytes that a sum may have after each unit [active], so that later units can still bring it
        into the budget."""
        saved = [min(0, *(nbytes for _, nbytes, _ in others)) for _, others in active]
        return [self.left - sum(saved[depth + 1 :]) for depth in range(len(active))]

    def _trace(
        self,
        active: list[tuple[int, list[tuple[int, int, float]]]],
        layers: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]],
        depth: int,
        state: int,
    ) -> list[int]:
        choices = list(self.choices)
        for (unit, others), (parents, taken) in zip(active[depth::-1], layers[depth::-1], strict=True):
            if taken[state]:
                choices[unit] = others[int(taken[state]) - 1][0]
            state = int(parents[state])
        return choices


def _undominated(sizes: npt.NDArray[np.int64], costs: npt.NDArray[np.float64], most: int) -> npt.NDArray[np.int64]:
    """Returns the places, by rising size, of the sums that no smaller sum beats in cost; at most about `most` of
    them."""
    order = np.lexsort((costs, sizes))
    if not len(order):
        return order
    before = np.concatenate(([np.inf], np.minimum.accumulate(costs[order])[:-1]))
    order = order[costs[order] < before]
    if len(order) > most:
        place = sizes[order] - sizes[order[0]]
        bucket = place * most // (place[-1] + 1)
        order = order[np.append(bucket[1:] != bucket[:-1], True)]  # the last of a bucket costs least
    return order
