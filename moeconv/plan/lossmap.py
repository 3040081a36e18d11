"""From predicted cost to loss: effects of experts do not add up, so the sum of them needs a scale."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from moeconv.plan.isotonic import rising


class LossMap:
    """Piecewise linear and never falling, through what was measured.

    `points` are (cost, loss). `origin` is the least cost there is; unless something was measured there, the loss is
    taken for 0. Past the last point it goes on as steeply as from the first to the last on average; until two points
    are known, a unit of cost is taken for a unit of loss.
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
        """Losses at these costs, in the same shape."""
        at = np.asarray(costs, np.float64)
        beyond = np.maximum(at - self._costs[-1], 0) * self._slope
        return np.asarray(np.interp(at, self._costs, self._losses) + beyond)
