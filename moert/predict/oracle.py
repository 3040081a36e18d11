"""The exact future from a recorded trace: the most that prediction can bring. For replays and tests."""

from __future__ import annotations

from collections.abc import Sequence

from moert.pack.model_spec import Stack
from moert.predict.predictor import Selected


class Oracle:
    """Follows a trace: `steps` are (stack, layer with experts from 0, its experts) in the order of execution.

    Each question moves one step on; the first is about the second step, since nobody asks about the first.
    """

    def __init__(self, steps: Sequence[tuple[Stack, int, Sequence[int]]]) -> None:
        self._steps = steps
        self._at = 0

    def next_experts(self, stack: Stack, layer: int, history: Sequence[Selected]) -> list[int]:
        """Raises ValueError when asked about another layer than the trace has next."""
        self._at += 1
        if self._at >= len(self._steps):
            return []
        expected_stack, expected_layer, experts = self._steps[self._at]
        if (stack, layer) != (expected_stack, expected_layer):
            if (stack, layer) == ("decoder", 0) and expected_layer == 0:
                return []  # a new request began with its encoder
            raise ValueError(f"asked about {stack} {layer}, the trace has {expected_stack} {expected_layer}")
        return list(experts)
