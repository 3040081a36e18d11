"""The exact future from a recorded trace: the most that prediction can bring. For replays and tests."""

from __future__ import annotations

from collections.abc import Sequence

from moert.pack.model_spec import Stack
from moert.predict.predictor import Prediction, Situation


class Oracle:
    """Follows a trace: `steps` are (stack, layer with experts from 0, its experts) in the order of execution.

    Each question moves one step on; the first is about the second step, since nobody asks about the first.
    """

    def __init__(self, steps: Sequence[tuple[Stack, int, Sequence[int]]]) -> None:
        self._steps = steps
        self._at = 0

    def predict(self, situation: Situation) -> Prediction:
        """Raises ValueError when asked about another layer than the trace has next."""
        asked = (situation.stack, situation.layer)
        self._at += 1
        if self._at >= len(self._steps):
            return []
        stack, layer, experts = self._steps[self._at]
        if asked != (stack, layer):
            if asked == ("decoder", 0) and layer == 0:
                return []  # a new request began with its encoder
            raise ValueError(f"asked about {asked[0]} {asked[1]}, the trace has {stack} {layer}")
        return [(expert, 1.0) for expert in experts]
