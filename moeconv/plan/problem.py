"""The problem of allocation: options of each expert with monotone costs, and frontiers of plans."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moeconv.artifacts import Assignment, Bits, DenseUnit, Probe, SensitivityTable
from moeconv.errors import SettingsError, WeightsUnusable
from moert.pack.codec import Codes, Width
from moert.pack.layout import Coding, Neurons, expert_layout
from moert.pack.manifest import WIDTHS_OF
from moert.pack.model_spec import ExpertKey, ModelSpec

# Isotonic regression: the monotone sequence nearest to a noisy one.


def falling(values: Sequence[float]) -> list[float]:
    """Returns the never-rising sequence with the least squared distance to `values` (pool adjacent violators)."""
    blocks: list[tuple[float, int]] = []  # mean, count
    for value in values:
        mean, count = value, 1
        while blocks and blocks[-1][0] < mean:
            before, size = blocks.pop()
            mean = (before * size + mean * count) / (size + count)
            count += size
        blocks.append((mean, count))
    return [mean for mean, count in blocks for _ in range(count)]


def rising(values: Sequence[float]) -> list[float]:
    """Returns the never-falling sequence with the least squared distance to `values`."""
    return falling(list(values)[::-1])[::-1]


# Costs with the noise taken out: the measured costs of one unit, drawn towards those of all units.
# An optimiser that can choose from several widths picks those that noise made look cheap. In simulation a knapsack on
# bare costs then ends behind the greedy chain as soon as the noise is a third of a usual unit's effect.

Costs = npt.NDArray[np.float64]

OWN_SHAPE = 0.5
"""How far the ratios between a unit's widths stray from those of all units: the prior's standard deviation."""


def shrunk(costs: Costs) -> Costs:
    """Returns `costs` [units, widths] shrunk; narrow widths come first, all costs are beside the same base.

    Each unit's costs are a scale times the profile of all units, plus a shape of its own. The profile (the mean of
    all units) is hardly noisy. The scale is fitted by least squares over the widths and replaced by its posterior
    mean, given that a true scale is never negative: scales below zero show how large the noise is. Of its own shape a
    unit keeps the part that stands out from that noise (a Wiener filter). So large costs stay as they were measured,
    and no unit gets a cost of 0. Without negative scales nothing changes; rows that are not finite stay as they are.
    """
    sound = np.isfinite(costs).all(axis=1)
    if not sound.any():
        return costs
    found = costs[sound]
    profile = np.array(falling(found.mean(axis=0).tolist()))
    power = float(profile @ profile)
    if power == 0:
        return costs
    scales = found @ profile / power
    below = scales[scales < 0]
    if not len(below):
        return costs
    noise = math.sqrt(float(np.mean(below**2)))  # of a scale; of a cost it is noise * sqrt(power)
    fitted = _nonnegative_mean(scales, noise)[:, None] * profile
    own = (OWN_SHAPE * fitted) ** 2
    result: Costs = costs.copy()
    result[sound] = fitted + own / (own + noise**2 * power) * (found - fitted)
    return result


def _nonnegative_mean(measured: Costs, noise: float) -> Costs:
    """Returns E[x | x >= 0] for x ~ Normal(measured, noise²): the mean of a truncated normal distribution."""
    z = np.maximum(measured / noise, -30.0)
    below = np.array([0.5 * math.erfc(-one / math.sqrt(2)) for one in z])
    return np.asarray(noise * (z + np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi) / below))


# The problem of allocation: its units, and the options of each with their costs. Pure.


class Unit(NamedTuple):
    """Projections of one expert that share a width of their own, by their places in `spec.moe.ffn.projections`; or
    matrices outside the experts, without places."""

    key: ExpertKey | DenseUnit
    projections: tuple[int, ...]


@dataclass(frozen=True)
class Option:
    """All projections of a unit at `bits`: the bytes of its tensors, and its cost above the sweep's base."""

    bits: Width
    nbytes: int
    cost: float


@dataclass(frozen=True)
class Plan:
    """Widths for all experts. `cost` is predicted: the sum over units, as if their effects added up. `nbytes` counts
    what the plan saves. `dense`: widths of the matrices outside the experts, where the problem has them."""

    assignment: Assignment
    nbytes: int
    cost: float
    dense: Mapping[DenseUnit, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Problem:
    """The options of each unit, as `options` makes them: by rising bytes, with costs that never rise."""

    units: Mapping[Unit, tuple[Option, ...]]

    def plan(self, choices: Sequence[int]) -> Plan:
        """Returns the plan with these choices [units], places among each unit's options."""
        widths: dict[ExpertKey, dict[int, Width]] = {}
        dense: dict[DenseUnit, int] = {}
        chosen = [options[choice] for options, choice in zip(self.units.values(), choices, strict=True)]
        for unit, option in zip(self.units, chosen, strict=True):
            if isinstance(unit.key, DenseUnit):
                dense[unit.key] = int(option.bits)
            else:
                widths.setdefault(unit.key, {}).update(dict.fromkeys(unit.projections, option.bits))
        assignment = {key: tuple(bits for _, bits in sorted(found.items())) for key, found in widths.items()}
        return Plan(assignment, sum(option.nbytes for option in chosen), sum(option.cost for option in chosen), dense)

    def priced(self, assignment: Assignment, dense: Mapping[DenseUnit, int] | None = None) -> Plan:
        """Returns any assignment of all experts as a plan; without `dense` the other matrices have their widest width.
        Raises KeyError for a width that is no option."""
        choices = []
        for unit, found in self.units.items():
            if isinstance(unit.key, DenseUnit):
                bits = {dense[unit.key] if dense else found[-1].bits}
            else:
                bits = {assignment[unit.key][place] for place in unit.projections}
            fitting = [place for place, option in enumerate(found) if {option.bits} == bits]
            if not fitting:
                raise KeyError(f"{unit.key} has no option of {sorted(bits)} bits")
            choices.append(fitting[0])
        return self.plan(choices)

    def with_dense(self, dense: Mapping[DenseUnit, int]) -> Problem:
        """Returns the problem of the experts alone, beside other matrices with these widths, whose bytes count no
        more."""
        units = {
            unit: tuple(
                Option(one.bits, 0, one.cost) for one in found if one.bits == dense[unit.key]
            ) if isinstance(unit.key, DenseUnit) else found
            for unit, found in self.units.items()
        }  # fmt: skip
        return Problem(units)


def options(measured: Iterable[Option]) -> tuple[Option, ...]:
    """Returns options by rising bytes, with costs smoothed so that more bytes never cost more.

    Costs are measured and noisy: a narrow width may seem better than a wide one, and better than the base. Isotonic
    regression pools these widths; where the narrow one is as good as the wide one, no allocator then pays for bytes.
    Widths without a finite cost break the model and are left out.
    """
    ordered = sorted((one for one in measured if math.isfinite(one.cost)), key=lambda one: (one.nbytes, one.bits))
    smooth = falling([one.cost for one in ordered])
    return tuple(Option(one.bits, one.nbytes, cost) for one, cost in zip(ordered, smooth, strict=True))


def problem(
    spec: ModelSpec,
    table: SensitivityTable,
    signal: str,
    widths: Iterable[Width],
    projection_bytes: Callable[[str, Width], int],
) -> Problem:
    """Returns the problem that a sweep's `table` poses, with the noise taken out of its costs (see `shrunk`). An expert
    that hardly a token reached costs no less than the median of its layer, so that none gets few bits by luck.

    Units are single projections where the table probed them one at a time, else whole experts.
    `projection_bytes(projection, bits)` are the bytes of one projection with its scales. Raises SettingsError for a
    width that was not measured, WeightsUnusable for an expert that no width leaves with a finite cost.
    """
    n_projections, allowed = len(spec.moe.ffn.projections), sorted(set(widths))
    single = any(len(set(probe.bits)) > 1 for probe in table.costs)
    parts = [(place,) for place in range(n_projections)] if single else [tuple(range(n_projections))]
    keys = spec.expert_keys()
    units: dict[Unit, tuple[Option, ...]] = {Unit(key, part): () for key in keys for part in parts}
    for part in parts:
        probes = [[Probe(key, _bits(n_projections, part, bits, table.base_bits)) for bits in allowed] for key in keys]
        measured = shrunk(np.array([[_cost(table, probe, signal) for probe in row] for row in probes]))
        costs = _as_the_layer(measured, keys, set(table.barely_seen()))
        sizes = [sum(projection_bytes(spec.moe.ffn.projections[place], bits) for place in part) for bits in allowed]
        for key, row in zip(keys, costs.tolist(), strict=True):
            found = options(Option(*one) for one in zip(allowed, sizes, row, strict=True))
            if not found:
                raise WeightsUnusable(
                    f"{key}: at {allowed} bits every measured cost is infinite or no number: check its weights"
                )
            units[Unit(key, part)] = found
    return Problem(units)


class Storage(NamedTuple):
    """How a pack stores experts; see moert.pack.manifest.Quantization."""

    group_size: int = 0
    mxfp4: bool = False
    neurons: Neurons | None = None
    codes: Codes = "plain"

    @property
    def coding(self) -> Coding:
        return Coding(self.group_size, "MXFP4" if self.mxfp4 else "F16", self.codes == "trellis")

    @property
    def narrowest(self) -> Width:
        """The least width that there is."""
        return min(WIDTHS_OF[self.codes])


def layout_bytes(spec: ModelSpec, storage: Storage) -> Callable[[str, Width], int]:
    """Returns a function from (projection, bits) to the bytes of that projection's tensors in an expert file, scales
    and minima counted."""
    key = spec.expert_keys()[0]
    sizes: dict[tuple[str, Width], int] = {}

    def nbytes(projection: str, bits: Width) -> int:
        if (projection, bits) not in sizes:
            widths = dict.fromkeys(spec.moe.ffn.projections, bits)
            layout = expert_layout(spec, key, widths, storage.coding, 4096, storage.neurons)
            own = [slot for slot in layout.slots if slot.name.startswith(f"{projection}.")]
            placed = layout.neurons
            sizes[projection, bits] = (
                sum(slot.stop - slot.start for slot in own) if placed is None else placed.matrix_bytes(projection)
            )
        return sizes[projection, bits]

    return nbytes


def _as_the_layer(costs: Costs, keys: Sequence[ExpertKey], barely_seen: Set[ExpertKey]) -> Costs:
    """Returns costs [experts, widths] of which those of barely seen experts are at least their layer's median."""
    found: Costs = costs.copy()
    seen = np.array([key not in barely_seen for key in keys])
    for at in {key.at for key in barely_seen}:
        here = np.array([key.at == at for key in keys])
        if (here & seen).any():
            found[here & ~seen] = np.maximum(costs[here & ~seen], np.median(costs[here & seen], axis=0))
    return found


def _bits(n_projections: int, part: tuple[int, ...], bits: Width, base: Width) -> Bits:
    return tuple(bits if place in part else base for place in range(n_projections))


def _cost(table: SensitivityTable, probe: Probe, signal: str) -> float:
    try:
        return table.cost(probe, signal)
    except KeyError:
        raise SettingsError(
            f"{probe} was not measured: sweep with these --bits first, or leave the width out"
        ) from None


# A chain of plans from the smallest to the largest, each a few wider units away from the one before.

Move = tuple[int, int]
"""(place of a unit, place of the option that it takes)."""


class Frontier:
    """A chain of plans: plan i is the start with the first i steps made; a step is one move or several at once.

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
        """Returns the place of the option that each unit has in plan `index` [units]. Raises IndexError."""
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
        """Returns the index of the last plan of at most `nbytes`; None when all are larger."""
        count = int(np.searchsorted(self.sizes, nbytes, side="right"))
        return count - 1 if count else None


# From predicted cost to loss: effects of experts do not add up, so the sum of them needs a scale.


class LossMap:
    """The loss by predicted cost: piecewise linear and never falling, through measured points.

    `points` are (cost, loss). `origin` is the least possible cost; without a point there, its loss is taken for 0. Past
    the last point the loss goes on as steeply as from the first to the last on average; until two points are known, a
    unit of cost is taken for a unit of loss.
    """

    def __init__(self, points: Iterable[tuple[float, float]], origin: float) -> None:
        seen: dict[float, list[float]] = {}
        for cost, loss in points:
            if math.isfinite(loss):
                seen.setdefault(cost, []).append(loss)
        if not any(cost <= origin for cost in seen):
            seen[origin] = [0.0]
        costs = sorted(seen)
        self._costs = np.array(costs)
        self._losses = np.array(rising([sum(seen[cost]) / len(seen[cost]) for cost in costs]))
        run, rise = self._costs[-1] - self._costs[0], self._losses[-1] - self._losses[0]
        self._slope = float(rise / run) if run > 0 and rise > 0 else 1.0

    def __call__(self, costs: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Returns the losses at these costs, in the same shape."""
        at = np.asarray(costs, np.float64)
        beyond = np.maximum(at - self._costs[-1], 0) * self._slope
        return np.asarray(np.interp(at, self._costs, self._losses) + beyond)
