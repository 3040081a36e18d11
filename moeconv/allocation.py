"""Which experts take the lower width? Step three of EdgeMoE §3.2: the K least important, K by search. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moeconv.artifacts import BitBounds, BitPlan
from moert.pack.model_spec import ExpertKey


def widths_at(ranking: Sequence[ExpertKey], bounds: BitBounds, count: int) -> dict[ExpertKey, int]:
    """The `count` least important experts at the lower width, all others at the higher."""
    low = bounds.high if bounds.low is None else bounds.low
    return {key: low if place < count else bounds.high for place, key in enumerate(ranking)}


def greedy(ranking: Sequence[ExpertKey], bounds: BitBounds, loss_of: Callable[[int], float]) -> BitPlan:
    """Grows and shrinks K until no more experts fit under the target.

    `ranking` has the least important first; `loss_of(count)` measures the loss with that many at the lower width. K
    is bisected between 0, known to meet the target, and all, known to miss it; of what was measured, the largest K
    that meets the target wins.
    """
    if bounds.low is None:
        return BitPlan(widths_at(ranking, bounds, 0), 0, ((0, bounds.losses[bounds.high]),))
    meets, misses = 0, len(ranking)
    steps = [(0, bounds.losses[bounds.high]), (len(ranking), bounds.losses[bounds.low])]
    while misses - meets > 1:
        count = (meets + misses) // 2
        loss = loss_of(count)
        steps.append((count, loss))
        if loss <= bounds.target_loss:
            meets = count
        else:
            misses = count
    return BitPlan(widths_at(ranking, bounds, meets), meets, tuple(steps))
