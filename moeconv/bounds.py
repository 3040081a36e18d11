"""Which two widths bracket the target? Step two of EdgeMoE §3.2: all experts at each allowed width. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from moeconv.artifacts import BitBounds
from moeconv.errors import TargetMissed


def bracket(losses: Mapping[int, float], target_loss: float) -> BitBounds:
    """`losses`: width → loss with all experts at that width. Raises TargetMissed when no width meets the target.

    A loss need not fall with every wider width (it is measured, and noisy), so `high` is the narrowest width from
    which on all wider ones meet the target as well.
    """
    high = None
    for width in sorted(losses, reverse=True):
        if not losses[width] <= target_loss:  # also where nothing could be measured (NaN)
            break
        high = width
    if high is None:
        widest = max(losses)
        raise TargetMissed(
            f"with all experts at {widest} bits the loss is {losses[widest]:.2%}, above the target of "
            f"{target_loss:.2%}: allow wider experts with --bits, or a larger --loss"
        )
    narrower = [width for width in losses if width < high]
    return BitBounds(target_loss, high, max(narrower) if narrower else None, dict(losses))
