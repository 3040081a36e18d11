"""Size against loss: the frontier thinned to what a person can read, with everything that was measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from moeconv.artifacts import CurvePoint
from moeconv.plan.frontier import Frontier
from moeconv.plan.lossmap import LossMap
from moeconv.plan.problem import Plan
from moeconv.plan.search import MeasuredPlan

POINTS = 40


def curve(
    frontier: Frontier, judged: Sequence[MeasuredPlan], chosen: Plan | None, known: Iterable[tuple[float, float]] = ()
) -> tuple[CurvePoint, ...]:
    """By rising bytes: about POINTS plans at even steps of size, all `judged` plans, and the `chosen` one.

    Losses are predicted through everything that was measured, with `known` (cost, loss) from elsewhere; None where
    that is nothing at all.
    """
    measured = {(one.nbytes, one.cost): one for one in judged}
    places = {(int(frontier.sizes[index]), float(frontier.costs[index])) for index in _spread(frontier.sizes)}
    mark = None
    if chosen is not None:
        same = [place for place in measured if place[0] == chosen.nbytes and np.isclose(place[1], chosen.cost)]
        mark = same[0] if same else (chosen.nbytes, chosen.cost)
        places.add(mark)
    points = [*known, *((one.cost, one.loss) for one in judged)]
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
    """Indices of about POINTS plans, the first and the last among them, at even steps of size."""
    wanted = np.linspace(float(sizes[0]), float(sizes[-1]), POINTS)
    return sorted({0, len(sizes) - 1, *(int(index) for index in np.searchsorted(sizes, wanted, side="right") - 1)})
