"""Finds the smallest plan of a frontier that holds when it is measured. Measuring is costly, and noisy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from moeconv.errors import TargetMissed
from moeconv.plan.frontier import Frontier
from moeconv.plan.lossmap import LossMap
from moeconv.plan.problem import Plan


@dataclass(frozen=True)
class MeasuredPlan:
    """A plan that was measured: its bytes, its predicted cost, the `loss` that came out, and `upper`, the bound of that
    loss that the promise rests on (None without a promise)."""

    nbytes: int
    cost: float
    loss: float
    upper: float | None

    @classmethod
    def of(cls, plan: Plan, loss: float, upper: float | None = None) -> MeasuredPlan:
        return cls(plan.nbytes, plan.cost, loss, upper)

    @property
    def decisive(self) -> float:
        """What must not pass the target: the bound, or without one the loss itself."""
        return self.loss if self.upper is None else self.upper


@dataclass(frozen=True)
class Found:
    """The chosen plan and its place on the frontier, with everything that was judged, in that order."""

    index: int
    plan: Plan
    judged: tuple[MeasuredPlan, ...]


def search(
    frontier: Frontier,
    judge: Callable[[Plan], MeasuredPlan],
    target: float,
    known: Iterable[tuple[float, float]] = (),
    resolution: float = 0.005,
) -> Found:
    """The smallest plan whose decisive figure is at most `target`; the next smaller one tried (within `resolution`
    of its bytes) fails.

    `known` are (cost, loss) from elsewhere, such as the sweep's base at cost 0; they only serve the first guess. Each
    guess is the smallest plan that should do by what was measured so far; after one that did not halve the range of
    sizes, the next goes beyond, and after two the middle is tried. So it ends whatever the judge says, and what it
    returns was accepted. Where the measured loss is not monotone in size, it ends at one of several places where
    acceptance begins. Raises TargetMissed when the largest plan fails.
    """
    bracket = _Bracket(frontier, target, tuple(known), resolution)
    while not bracket.closed():
        index = bracket.guess()
        measured = judge(frontier[index])
        bracket.add(index, measured)
        if bracket.low == len(frontier) - 1:
            raise TargetMissed(_missed(frontier, measured, target))
    return Found(bracket.high, frontier[bracket.high], tuple(bracket.judged.values()))


class _Bracket:
    """Plan `low` failed (-1: none did), plan `high` > `low` was accepted (the number of plans: none was)."""

    def __init__(
        self, frontier: Frontier, target: float, known: tuple[tuple[float, float], ...], resolution: float
    ) -> None:
        self.sizes, self.costs = frontier.sizes, frontier.costs
        self.target, self.known, self.resolution = target, known, resolution
        self.low, self.high = -1, len(frontier)
        self.judged: dict[int, MeasuredPlan] = {}
        self.last = -1
        self.stuck = 0  # guesses in a row that did not halve the range

    def closed(self) -> bool:
        if self.high == len(self.sizes):
            return False
        return self.high - self.low == 1 or (self.low >= 0 and self._range() <= self.resolution * self._upper_size())

    def add(self, index: int, measured: MeasuredPlan) -> None:
        before = self._range()
        self.judged[index] = measured
        if measured.decisive <= self.target:
            self.high = index
        else:  # also what is no number
            self.low = index
        self.stuck = self.stuck + 1 if self._range() > before / 2 else 0
        self.last = index

    def guess(self) -> int:
        """An index between `low` and `high`."""
        nothing_holds = self.high == len(self.sizes)
        if nothing_holds and len(self.judged) > 1:
            return self.high - 1  # is there anything to be had at all?
        if self.stuck > 1:
            middle = (self._lower_size() + self._upper_size()) / 2
            return self._inside(int(np.searchsorted(self.sizes, middle)))
        index = self._inside(self._predicted())
        if self.stuck:  # guesses approach from one side: go as far beyond, to get hold of the other one
            beyond = 2 * int(self.sizes[index]) - int(self.sizes[self.last])
            return self._inside(int(np.searchsorted(self.sizes, beyond)))
        return index

    def _predicted(self) -> int:
        """The smallest plan that should hold, but no nearer to an end than what would close the range."""
        points = [(float(self.costs[index]), one.loss) for index, one in self.judged.items()]
        losses = LossMap([*self.known, *points], float(self.costs[-1]))(self.costs)
        holds = np.flatnonzero(losses + self._margin(losses) <= self.target)
        index = int(holds[0]) if len(holds) else len(self.sizes) - 1
        if self.low >= 0:
            close = self.sizes[self.low] * (1 + self.resolution)
            index = max(index, int(np.searchsorted(self.sizes, close, side="right")) - 1)
        if self.high < len(self.sizes):
            close = self.sizes[self.high] * (1 - self.resolution)
            index = min(index, int(np.searchsorted(self.sizes, close)))
        return index

    def _margin(self, losses: np.ndarray) -> float:
        """What the promise adds to the loss, as at the judged plan whose loss is nearest to the target."""
        finite = [(index, one) for index, one in self.judged.items() if np.isfinite(one.decisive - one.loss)]
        if not finite:
            return 0.0
        _, nearest = min(finite, key=lambda item: abs(float(losses[item[0]]) - self.target))
        return nearest.decisive - nearest.loss

    def _inside(self, index: int) -> int:
        return min(max(index, self.low + 1), self.high - 1)

    def _lower_size(self) -> int:
        return int(self.sizes[max(self.low, 0)])

    def _upper_size(self) -> int:
        return int(self.sizes[min(self.high, len(self.sizes) - 1)])

    def _range(self) -> int:
        return self._upper_size() - self._lower_size()


def _missed(frontier: Frontier, measured: MeasuredPlan, target: float) -> str:
    bound = f" (upper bound {measured.upper:.2%})" if measured.upper is not None else ""
    return (
        f"the largest plan, {frontier.sizes[-1] / 1e6:,.2f} MB, has a loss of {measured.loss:.2%}{bound}, above the "
        f"target of {target:.2%}: allow wider experts with --bits, or a larger --loss"
    )
