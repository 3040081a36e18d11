"""Widths and routing in one budget of loss: which part of it each should get, so that a token reads least. Pure.

What a token reads is, summed over experts, how often one is asked for that is not in memory times its bytes. Routing
that prefers what is in memory lowers the first, widths the second, and both cost. A layer's bonus is chosen like an
expert's width: each step of it was measured, and `hulls` takes steps by what they save for what they cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moeconv.plan.frontier import Frontier
from moeconv.plan.knapsack import hulls
from moeconv.plan.problem import Option, Problem, Unit, options
from moert.pack.model_spec import ExpertKey, LayerKey


@dataclass(frozen=True)
class Step:
    """A layer with its `number`-th bonus: bytes that all tokens read of it then, and the divergence it costs."""

    number: int
    read_bytes: int
    cost: float


def ladder(layers: Mapping[LayerKey, Sequence[Step]]) -> Frontier:
    """From each layer at the bonus that reads least to all with none, as `hulls` has it. Of each layer the first step
    is that without a bonus; others that read more are left out. A plan's `nbytes` are those read, and its assignment
    has for each layer, as its expert 0, the number of its step."""
    units = {
        Unit(at.expert(0), (0,)): options(
            Option(step.number, step.read_bytes, step.cost)
            for step in (none, *(step for step in others if step.read_bytes < none.read_bytes))
        )
        for at, (none, *others) in layers.items()
    }
    return hulls(Problem(units))


def steps_of(assignment: Mapping[ExpertKey, Sequence[int]]) -> dict[LayerKey, int]:
    """Of a plan of `ladder`: the step of each layer."""
    return {key.at: number for key, (number,) in assignment.items()}


def read_more(problem: Problem, missed: Mapping[ExpertKey, int]) -> Problem:
    """The same question of widths, where bytes count as often as they are read: by how often each expert was missed,
    on the mean once. What was never missed still counts a little, as it takes memory."""
    mean = max(1.0, sum(missed.values()) / len(missed))
    shares = {key: max(count / mean, _LEAST) for key, count in missed.items()}

    def weighted(key: ExpertKey, option: Option) -> Option:
        return Option(option.bits, max(1, round(option.nbytes * shares.get(key, 1.0))), option.cost)

    return Problem({unit: tuple(weighted(unit.key, one) for one in found) for unit, found in problem.units.items()})


_LEAST = 0.1


def split(
    sizes: npt.NDArray[np.int64], width_losses: npt.NDArray[np.float64], reads: npt.NDArray[np.int64],
    routing_losses: npt.NDArray[np.float64], target: float, memory_is_fixed: bool = False,
) -> tuple[int, int] | None:  # fmt: skip
    """Places on both frontiers, sizes [plans] of widths and reads [plans] of routing, whose losses add up to no more
    than the target, with the least product; None where no two do. Of equal ones the smaller loss of routing.

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
