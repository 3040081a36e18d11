"""A chain of plans from the smallest to the largest, each a few wider units away from the one before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from moeconv.plan.problem import Plan, Problem

Move = tuple[int, int]
"""The unit at this place takes the option at that place."""


class Frontier:
    """Plan i is the start with the first i steps made; a step is one move or several at once.

    `sizes` [plans] are bytes and never fall, `costs` [plans] are predicted and never rise.
    """

    def __init__(self, problem: Problem, start: Sequence[int], steps: Iterable[Sequence[Move]]) -> None:
        self.problem = problem
        self._start = tuple(start)
        self._steps = tuple(tuple(step) for step in steps)
        units = list(problem.units.values())
        at = list(self._start)
        sizes = [sum(options[choice].nbytes for options, choice in zip(units, at, strict=True))]
        costs = [sum(options[choice].cost for options, choice in zip(units, at, strict=True))]
        for step in self._steps:
            nbytes, cost = sizes[-1], costs[-1]
            for unit, choice in step:
                before, after = units[unit][at[unit]], units[unit][choice]
                nbytes += after.nbytes - before.nbytes
                cost += after.cost - before.cost
                at[unit] = choice
            sizes.append(nbytes)
            costs.append(cost)
        self.sizes: npt.NDArray[np.int64] = np.array(sizes, np.int64)
        self.costs: npt.NDArray[np.float64] = np.array(costs, np.float64)

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> Plan:
        return self.problem.plan(self.choices(index))

    def choices(self, index: int) -> list[int]:
        """[units]: which of its options each unit has in plan `index`. Raises IndexError."""
        if not 0 <= index < len(self):
            raise IndexError(f"plan {index} of {len(self)}")
        at = list(self._start)
        for step in self._steps[:index]:
            for unit, choice in step:
                at[unit] = choice
        return at

    def moves_after(self, index: int) -> list[Move]:
        return [move for step in self._steps[index:] for move in step]

    def largest_within(self, nbytes: int) -> int | None:
        """The last plan of at most `nbytes`; None when all are larger."""
        count = int(np.searchsorted(self.sizes, nbytes, side="right"))
        return count - 1 if count else None
