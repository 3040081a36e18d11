"""Made-up allocation problems: no model, no measuring, only numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from moeconv.plan.problem import Option, Problem, Unit, options
from moert.pack.model_spec import ExpertKey


def make_problem(rows: Sequence[Sequence[tuple[int, int, float]]]) -> Problem:
    """One whole expert for each row of (bits, bytes, cost)."""
    return Problem(
        {
            Unit(ExpertKey("decoder", 0, expert), (0, 1)): options(Option(*one) for one in row)
            for expert, row in enumerate(rows)
        }
    )


def heavy_tailed(
    n_experts: int,
    n_projections: int,
    seed: int,
    widths: tuple[int, ...] = (2, 3, 4, 8),
    nbytes_per_bit: int = 8192,
    noise: float = 0.1,
) -> Problem:
    """Single projections whose error falls like 4^-bits, steeper or less so, on top of log-normal importance.

    Costs are beside 4 bits, in the order of what a sweep finds: few units matter, most hardly do, all are noisy.
    """
    random = np.random.default_rng(seed)
    expert_scale = np.exp(random.normal(0, 1.5, n_experts))
    units = {}
    for expert in range(n_experts):
        for projection in range(n_projections):
            scale = expert_scale[expert] * np.exp(random.normal(0, 0.6)) * 1e-3
            base = random.uniform(2.5, 5.0)
            errors = {bits: scale * base ** (2 - bits) for bits in (*widths, 4)}
            jitter = {bits: 0.0 if bits == 4 else random.normal(0, noise * 1e-3) for bits in widths}
            units[Unit(ExpertKey("decoder", expert // 16, expert % 16), (projection,))] = options(
                Option(bits, nbytes_per_bit * bits + 512, errors[bits] - errors[4] + jitter[bits]) for bits in widths
            )
    return Problem(units)


@st.composite
def small_problems(draw: st.DrawFn, max_units: int = 7) -> Problem:
    """A few units of one to four options, with equal bytes, equal costs and negative costs among them."""
    rows = []
    for _ in range(draw(st.integers(1, max_units))):
        widths = draw(st.lists(st.sampled_from((2, 3, 4, 8)), min_size=1, max_size=4, unique=True))
        sizes = sorted(draw(st.lists(st.integers(1, 60), min_size=len(widths), max_size=len(widths))))
        costs = draw(st.lists(st.integers(-20, 100), min_size=len(widths), max_size=len(widths)))
        if draw(st.booleans()):
            costs.sort(reverse=True)
        rows.append([(w, s, c / 10) for w, s, c in zip(sorted(widths), sizes, costs, strict=True)])
    return make_problem(rows)
