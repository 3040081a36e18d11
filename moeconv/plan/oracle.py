"""The true optimum of a small problem, to see how far from it the allocators are. Needs scipy."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from moeconv.plan.problem import Plan, Problem


def optimum(problem: Problem, budget_bytes: int) -> Plan | None:
    """Mixed-integer program, solved by HiGHS: one option for each unit, the least cost in `budget_bytes`.

    None when nothing fits. Time grows steeply with the number of units: meant for some tens of them.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    units = list(problem.units.values())
    flat = [option for options in units for option in options]
    costs = np.array([option.cost for option in flat])
    step = math.gcd(budget_bytes, *(option.nbytes for option in flat))  # small numbers keep the solver exact
    sizes = np.array([option.nbytes // step for option in flat], float)
    owner = np.repeat(np.arange(len(units)), [len(options) for options in units])
    one_each = (owner[None, :] == np.arange(len(units))[:, None]).astype(float)
    spread = float(np.ptp(costs)) or 1.0
    found = milp(
        (costs - costs.min()) / spread * 1e3,
        integrality=np.ones(len(flat)),
        bounds=Bounds(0, 1),
        constraints=[LinearConstraint(one_each, 1, 1), LinearConstraint(sizes[None, :], 0, budget_bytes // step)],
        options={"mip_rel_gap": 0.0},
    )
    if found.x is None:
        return None
    starts = np.cumsum([0, *(len(options) for options in units)])
    return problem.plan([int(np.argmax(found.x[a:b])) for a, b in pairwise(starts)])
