"""One question to the allocators, and the bytes that its target comes to. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from moeconv.artifacts import SensitivityTable, Target
from moeconv.errors import TargetMissed
from moeconv.plan import ALLOCATORS, plan_within
from moeconv.plan.frontier import Frontier
from moeconv.plan.problem import Plan, Problem, Storage, layout_bytes, problem
from moert.pack.codec import WIDTHS
from moert.pack.model_spec import ModelSpec

_CHANNELS = Storage()


class Question:
    """One problem of allocation, made from a sweep's table: `widths` are what experts may get, `signal` is what they
    are ranked by."""

    def __init__(
        self, spec: ModelSpec, table: SensitivityTable, storage: Storage, signal: str, widths: Sequence[int]
    ) -> None:
        self.spec = spec
        self.problem: Problem = problem(spec, table, signal, widths, layout_bytes(spec, storage))

    def frontier(self, allocation: str) -> Frontier:
        return ALLOCATORS[allocation](self.problem)

    def within(self, allocation: str, target: Target) -> Plan:
        """The plan for a "size" or "bits" target. Raises TargetMissed."""
        budget = budget_bytes(target, self.spec)
        assert budget is not None, "a loss is searched for"
        largest = sum(options[-1].nbytes for options in self.problem.units.values())
        return plan_within(self.problem, allocation, min(budget, largest))  # no number of bytes is too large to count


def budget_bytes(target: Target, spec: ModelSpec) -> int | None:
    """What the tensors of all experts may take together; None for a loss target."""
    if target.kind == "loss":
        return None
    return int(target.value if target.kind == "size" else target.value * weights_of(spec) / 8)


def check_budget(target: Target, spec: ModelSpec, narrowest: int, storage: Storage) -> None:
    """Raises TargetMissed for a size that even all experts at the `narrowest` width exceed."""
    budget, least = budget_bytes(target, spec), uniform_bytes(spec, narrowest, storage)
    if budget is None or least <= budget:
        return
    if narrowest > min(WIDTHS):
        smallest = uniform_bytes(spec, min(WIDTHS), storage)
        advice = f"allow narrower experts with --bits (all at {min(WIDTHS)} have {smallest:,} bytes), or a larger size"
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
    """Number of weights in all experts."""
    return len(spec.expert_keys()) * spec.weights_per_expert()


def uniform_bytes(spec: ModelSpec, bits: int, storage: Storage = _CHANNELS) -> int:
    """Bytes of all experts at one width, scales counted; by default with one scale for each channel."""
    layout = layout_bytes(spec, storage)
    return len(spec.expert_keys()) * sum(layout(name, bits) for name in spec.moe.ffn.projections)
