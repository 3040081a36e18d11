"""One plan for a target: the search among measured plans, the curve of them, and plans with residents."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from moeconv.artifacts import Assignment, CurvePoint, DenseUnit, SensitivityTable, Target
from moeconv.errors import TargetMissed
from moeconv.plan import ALLOCATORS, plan_within
from moeconv.plan.dense import ONLY_EXPERTS, Beside
from moeconv.plan.knapsack import hulls
from moeconv.plan.problem import Frontier, LossMap, Option, Plan, Problem, Storage, Unit, layout_bytes, options, problem
from moert.pack.codec import Width
from moert.pack.model_spec import ExpertKey, LayerKey, ModelSpec

# The problem of allocation for one model, and the bytes of its target. Pure.

_CHANNELS = Storage()


class Question:
    """One problem of allocation, made from a sweep's table: `widths` are those that experts may get, `signal` is the
    cost that ranks them, `beside` the matrices outside the experts."""

    def __init__(
        self, spec: ModelSpec, table: SensitivityTable, storage: Storage, signal: str, widths: Sequence[Width],
        beside: Beside = ONLY_EXPERTS,
    ) -> None:  # fmt: skip
        self.spec = spec
        experts = problem(spec, table, signal, widths, layout_bytes(spec, storage))
        self.problem: Problem = beside.joined(experts, spec, table, signal)

    @property
    def has_units(self) -> bool:
        """Whether plans have widths for matrices outside the experts."""
        return any(isinstance(unit.key, DenseUnit) for unit in self.problem.units)

    def frontier(self, allocation: str) -> Frontier:
        return ALLOCATORS[allocation](self.problem)

    def within(self, allocation: str, target: Target) -> Plan:
        """Returns the plan for a "size" or "bits" target. Raises TargetMissed."""
        budget = budget_bytes(target, self.spec)
        assert budget is not None, "a loss is searched for"
        largest = sum(options[-1].nbytes for options in self.problem.units.values())
        return plan_within(self.problem, allocation, min(budget, largest))  # no number of bytes is too large to count


def budget_bytes(target: Target, spec: ModelSpec) -> int | None:
    """Returns the most bytes that the tensors of all experts may take together; None for a loss target."""
    if target.kind == "loss":
        return None
    return int(target.value if target.kind == "size" else target.value * weights_of(spec) / 8)


def check_budget(target: Target, spec: ModelSpec, narrowest: Width, storage: Storage) -> None:
    """Raises TargetMissed for a size that even all experts at the `narrowest` width exceed."""
    budget, least = budget_bytes(target, spec), uniform_bytes(spec, narrowest, storage)
    if budget is None or least <= budget:
        return
    if narrowest > storage.narrowest:
        width, smallest = storage.narrowest, uniform_bytes(spec, storage.narrowest, storage)
        advice = f"allow narrower experts with --bits (all at {width} have {smallest:,} bytes), or a larger size"
    else:
        advice = (
            f"there is no narrower width; the smallest that can be asked for is --size {least}B or --bits-per-weight "
            f"{math.ceil(800 * least / weights_of(spec)) / 100:.2f}"
        )
    raise TargetMissed(
        f"all experts at {narrowest} bits have {least:,} bytes, {least - budget:,} more than the {budget:,} asked "
        f"for: {advice}"
    )


def weights_of(spec: ModelSpec) -> int:
    """Returns the number of weights in all experts."""
    return len(spec.expert_keys()) * spec.weights_per_expert()


def uniform_bytes(spec: ModelSpec, bits: Width, storage: Storage = _CHANNELS) -> int:
    """Returns the bytes of all experts at one width, scales counted; by default with one scale for each channel."""
    layout = layout_bytes(spec, storage)
    return len(spec.expert_keys()) * sum(layout(name, bits) for name in spec.moe.ffn.projections)


def assigned_bytes(spec: ModelSpec, widths: Assignment, storage: Storage) -> int:
    """Returns the bytes of all experts' tensors at these widths, scales counted."""
    nbytes, names = layout_bytes(spec, storage), spec.moe.ffn.projections
    return sum(nbytes(name, width) for bits in widths.values() for name, width in zip(names, bits, strict=True))


# The search for the smallest plan of a frontier with a measured loss that holds. Measuring is costly and noisy.


@dataclass(frozen=True)
class MeasuredPlan:
    """A measured plan: its bytes, its predicted cost, its measured `loss`, and `upper`, the confidence bound of that
    loss (None without a promise)."""

    nbytes: int
    cost: float
    loss: float
    upper: float | None

    @classmethod
    def of(cls, plan: Plan, loss: float, upper: float | None = None) -> MeasuredPlan:
        return cls(plan.nbytes, plan.cost, loss, upper)

    def scaled(self, ratio: float) -> MeasuredPlan:
        """Returns the same plan with so many times the loss and bound."""
        return replace(self, loss=self.loss * ratio, upper=None if self.upper is None else self.upper * ratio)

    @property
    def decisive(self) -> float:
        """The figure that must not pass the target: the bound, or without one the loss itself."""
        return self.loss if self.upper is None else self.upper


@dataclass(frozen=True)
class Found:
    """The chosen plan and its place on the frontier, with all judged plans, in the order of their measurement."""

    index: int
    plan: Plan
    judged: tuple[MeasuredPlan, ...]


FINE = 0.005
"""Share of a plan's bytes that a search leaves open."""


def search(
    frontier: Frontier,
    judge: Callable[[Plan], MeasuredPlan],
    target: float,
    known: Iterable[MeasuredPlan] = (),
    resolution: float = FINE,
    judged: Iterable[tuple[Plan, MeasuredPlan]] = (),
) -> Found:
    """Returns the smallest plan whose decisive figure is at most `target`; the next smaller one tried (within
    `resolution` of its bytes) fails.

    `judged` are measurements of plans of this frontier, which are not judged again. `known` were measured before, like
    all experts at one width; they only serve the guesses. Each guess is the smallest plan that should hold by the
    measurements so far. As long as all judged hold, or none, the steps grow; later, after a guess that did not halve
    the range of sizes, the next goes beyond, and after two the middle is tried. So the search ends whatever the judge
    returns, and its plan was accepted. Where the measured loss is not monotone in size, it ends at one of several
    places where acceptance begins. Raises TargetMissed when the largest plan fails.
    """
    bracket = _Bracket(frontier, target, tuple(known), resolution)
    bracket.begin(judged)
    while not bracket.closed():
        if bracket.low == len(frontier) - 1:
            raise TargetMissed(_missed(frontier, bracket.judged[bracket.low], target))
        index = bracket.guess()
        bracket.add(index, judge(frontier[index]))
    return Found(bracket.high, frontier[bracket.high], tuple(bracket.judged.values()))


class _Bracket:
    """The range that holds the searched plan: plan `low` failed (-1: none did), plan `high` > `low` was accepted (the
    number of plans: none was)."""

    def __init__(self, frontier: Frontier, target: float, known: tuple[MeasuredPlan, ...], resolution: float) -> None:
        self.frontier, self.sizes, self.costs = frontier, frontier.sizes, frontier.costs
        self.target, self.known, self.resolution = target, known, resolution
        self.low, self.high = -1, len(frontier)
        self.judged: dict[int, MeasuredPlan] = {}
        self.last = -1
        self.stuck = 0  # guesses in a row that did not halve the range

    def begin(self, judged: Iterable[tuple[Plan, MeasuredPlan]]) -> None:
        """Begins between the smallest of these plans that holds and the largest smaller one that fails."""
        places = dict[int, MeasuredPlan]()
        for plan, one in judged:  # other plans may have the same bytes and cost
            near = map(int, np.flatnonzero((self.sizes == plan.nbytes) & np.isclose(self.costs, plan.cost)))
            places.update((at, one) for at in near if self.frontier[at] == plan)
        holds = [index for index, one in places.items() if one.decisive <= self.target]
        fails = [index for index in places if index not in holds and index < min(holds, default=len(self.sizes))]
        for index in sorted(fails)[-1:] + sorted(holds)[:1]:
            self.add(index, places[index])
        self.stuck = 0

    def closed(self) -> bool:
        if self.high == len(self.sizes):
            return False
        return self.high - self.low == 1 or (self.low >= 0 and self._range() <= self.resolution * self._upper_size())

    def add(self, index: int, measured: MeasuredPlan) -> None:
        before = self._range()
        self.judged[index] = measured
        if measured.decisive <= self.target:
            self.high = index
        else:  # also NaN
            self.low = index
        self.stuck = self.stuck + 1 if self._range() > before / 2 else 0
        self.last = index

    def guess(self) -> int:
        """Returns an index between `low` and `high`."""
        if len(self.judged) > 1 and (self.low < 0 or self.high == len(self.sizes)):
            return self._inside(self._further())
        if self.stuck > 1:
            middle = (self._lower_size() + self._upper_size()) / 2
            return self._inside(int(np.searchsorted(self.sizes, middle)))
        index = self._inside(self._predicted())
        if self.stuck:  # guesses approach from one side: go as far beyond, to reach the other side
            beyond = 2 * int(self.sizes[index]) - int(self.sizes[self.last])
            return self._inside(int(np.searchsorted(self.sizes, beyond)))
        return index

    def _predicted(self) -> int:
        """Returns the smallest plan that should hold, but no nearer to an end of the range than needed to close it."""
        index = self._should_hold()
        if self.low >= 0:
            close = self.sizes[self.low] * (1 + self.resolution)
            index = max(index, int(np.searchsorted(self.sizes, close, side="right")) - 1)
        if self.high < len(self.sizes):
            close = self.sizes[self.high] * (1 - self.resolution)
            index = min(index, int(np.searchsorted(self.sizes, close)))
        return index

    def _should_hold(self) -> int:
        """Returns the smallest plan that should hold: between two that were judged by their figures alone."""
        failed, held = self.judged.get(self.low), self.judged.get(self.high)
        if failed and held and math.inf > failed.decisive > held.decisive:
            part = (self.target - held.decisive) / (failed.decisive - held.decisive)
            most, least = self.costs[[self.low, self.high]]
            return int(np.argmax(self.costs <= least + part * (most - least)))
        losses = LossMap([(one.cost, one.loss) for one in self._guides()], float(self.costs[-1]))(self.costs)
        holds = np.flatnonzero(losses + self._margin(losses) <= self.target)
        return int(holds[0]) if len(holds) else len(self.sizes) - 1

    def _margin(self, losses: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Returns the distance [plans] from these losses to their bounds: that of the measured plan with the loss
        nearest to the target, which grows with the root of the loss, as the deviation of a count does."""
        measured = [one for one in self._guides() if np.isfinite(one.decisive - one.loss)]
        if not measured:
            return np.zeros_like(losses)
        nearest = min(measured, key=lambda one: abs(one.loss - self.target))
        growth = np.sqrt(np.maximum(losses, 0) / nearest.loss) if nearest.loss > 0 else np.ones_like(losses)
        return (nearest.decisive - nearest.loss) * growth

    def _guides(self) -> tuple[MeasuredPlan, ...]:
        """Returns the plans that guesses go by: two of the frontier tell more than all that was known before."""
        known = self.known if len(self.judged) < 2 else ()
        return (*known, *self.judged.values())

    def _further(self) -> int:
        """Returns a plan beyond those judged, none of which held or all of which did: by twice the last step, or by a
        twentieth of the bytes where that is more, and no nearer than the predicted one."""
        *_, before, last = self.judged
        from_bytes = int(self.sizes[last])
        step = max(2 * abs(from_bytes - int(self.sizes[before])), from_bytes // 20)
        if self.low >= 0:
            return max(self._predicted(), int(np.searchsorted(self.sizes, from_bytes + step)))
        return min(self._predicted(), int(np.searchsorted(self.sizes, from_bytes - step)))

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


# Size against loss: the frontier thinned for a reader, with all measured plans.

POINTS = 40


def curve(
    frontier: Frontier, judged: Sequence[MeasuredPlan], chosen: Plan | None, known: Iterable[MeasuredPlan] = ()
) -> tuple[CurvePoint, ...]:
    """Returns, by rising bytes, about POINTS plans at even steps of size, all `judged` plans, and the `chosen` one.

    Losses are predicted through all measured plans, also those `known` from elsewhere; None without any.
    """
    measured = {(one.nbytes, one.cost): one for one in judged}
    places = {(int(frontier.sizes[index]), float(frontier.costs[index])) for index in _spread(frontier.sizes)}
    mark = None
    if chosen is not None:
        same = [place for place in measured if place[0] == chosen.nbytes and np.isclose(place[1], chosen.cost)]
        mark = same[0] if same else (chosen.nbytes, chosen.cost)
        places.add(mark)
    points = [(one.cost, one.loss) for one in (*known, *judged)]
    loss_at = LossMap(points, float(frontier.costs[-1])) if points else None
    found = []
    for nbytes, cost in sorted(places | set(measured), key=lambda place: (place[0], -place[1])):
        one = measured.get((nbytes, cost))
        found.append(
            CurvePoint(
                nbytes=nbytes,
                predicted_loss=None if loss_at is None else float(loss_at(cost)),
                loss=None if one is None else one.loss,
                upper=None if one is None else one.upper,
                chosen=(nbytes, cost) == mark,
            )
        )
    return tuple(found)


def _spread(sizes: np.ndarray) -> list[int]:
    """Returns the indices of about POINTS plans, the first and the last among them, at even steps of size."""
    wanted = np.linspace(float(sizes[0]), float(sizes[-1]), POINTS)
    return sorted({0, len(sizes) - 1, *(int(index) for index in np.searchsorted(sizes, wanted, side="right") - 1)})


# Widths and routing in one budget of loss: the part that each should get, so that a token reads least. Pure.
# A token reads, summed over experts, the number of misses of each times its bytes. Routing that prefers experts in
# memory lowers the first factor, widths the second, and both cost. A layer's bonus is chosen like an expert's width:
# each step of it was measured, and `hulls` takes steps by their savings for their cost.


@dataclass(frozen=True)
class Step:
    """A layer with its `number`-th bonus: the bytes that all tokens then read of it, and its cost in divergence."""

    number: int
    read_bytes: int
    cost: float


def ladder(layers: Mapping[LayerKey, Sequence[Step]]) -> Frontier:
    """Returns the frontier from each layer at the bonus that reads least to all layers without one, as `hulls` makes
    it. The first step of each layer is the one without a bonus; others that do not read less are left out. A plan's
    `nbytes` are the bytes read, and its assignment has for each layer, as its expert 0, the number of its step."""
    units = {
        Unit(at.expert(0), (0,)): options(
            Option(step.number, step.read_bytes, step.cost)
            for step in (none, *(step for step in others if step.read_bytes < none.read_bytes))
        )
        for at, (none, *others) in layers.items()
    }
    return hulls(Problem(units))


def steps_of(assignment: Assignment) -> dict[LayerKey, int]:
    """Returns the step of each layer, from the assignment of a plan of `ladder`."""
    return {key.at: int(number) for key, (number,) in assignment.items()}


def read_more(problem: Problem, missed: Mapping[ExpertKey, int]) -> Problem:
    """Returns the problem with bytes weighted by reads: by the misses of each expert over their mean. An expert that
    was never missed still counts a little, as it takes memory."""
    mean = max(1.0, sum(missed.values()) / len(missed))
    shares = {key: max(count / mean, _LEAST) for key, count in missed.items()}

    def weighted(key: ExpertKey | DenseUnit, option: Option) -> Option:
        share = 1.0 if isinstance(key, DenseUnit) else shares.get(key, 1.0)
        return Option(option.bits, max(1, round(option.nbytes * share)), option.cost)

    return Problem({unit: tuple(weighted(unit.key, one) for one in found) for unit, found in problem.units.items()})


_LEAST = 0.1


def split(
    sizes: npt.NDArray[np.int64], width_losses: npt.NDArray[np.float64], reads: npt.NDArray[np.int64],
    routing_losses: npt.NDArray[np.float64], target: float, memory_is_fixed: bool = False,
) -> tuple[int, int] | None:  # fmt: skip
    """Returns the places on both frontiers, sizes [plans] of widths and reads [plans] of routing, with the least
    product among those with losses that add up to no more than the target; None without any. Among equal products the
    smaller loss of routing wins.

    Where memory is fixed, and not the share of the experts in it, wider experts are also missed more often, about as
    often as they are larger: sizes count twice.
    """
    best: tuple[float, float, int, int] | None = None
    for place, loss in enumerate(routing_losses.tolist()):
        holds = np.flatnonzero(width_losses + loss <= target)
        if not len(holds):
            continue
        size = int(holds[0])
        found = (float(sizes[size]) ** (2 if memory_is_fixed else 1) * float(reads[place]), loss, size, place)
        best = found if best is None or found < best else best
    return None if best is None else best[2:]
