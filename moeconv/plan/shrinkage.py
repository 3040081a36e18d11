"""Costs with the noise taken out: what one unit seems to cost, told apart from what such units cost.

An optimiser that has several widths to choose from picks what noise made look cheap. In simulation a knapsack on bare
costs then ends behind the greedy chain as soon as the noise is a third of a usual unit's effect.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from moeconv.plan.isotonic import falling

Costs = npt.NDArray[np.float64]

OWN_SHAPE = 0.5
"""How far the ratios between a unit's widths stray from those of all units: the prior's standard deviation."""


def shrunk(costs: Costs) -> Costs:
    """`costs` [units, widths], narrow widths first, all beside the same base → the same, shrunk.

    Each unit's costs are a scale times the profile of all units, plus a shape of its own. The profile (the mean of
    all units) is hardly noisy. The scale is fitted by least squares over the widths and replaced by its posterior
    mean, given that a true scale is never negative: scales below zero show how large the noise is. Of its own shape a
    unit keeps what stands out from that noise (a Wiener filter). So large costs stay as they were measured, and no
    unit is taken to cost nothing. Without negative scales nothing changes; rows that are not finite stay as they are.
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
    """E[x | x >= 0] for x ~ Normal(measured, noise²): the mean of a truncated normal distribution."""
    z = np.maximum(measured / noise, -30.0)
    below = np.array([0.5 * math.erfc(-one / math.sqrt(2)) for one in z])
    return np.asarray(noise * (z + np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi) / below))
