"""The exact future from a recorded trace: the most that prediction can bring. For replays and tests."""

from __future__ import annotations

from collections.abc import Sequence

from moert.pack.model_spec import LayerKey
from moert.predict.predictor import Prediction, Situation


class Oracle:
    """Follows a trace: layers and what each demanded, in the order of execution.

    Each question moves one layer on; the first is about the second, since nobody asks about the first.
    """

    def __init__(self, trace: Sequence[tuple[LayerKey, Sequence[int]]]) -> None:
        self._trace = trace
        self._first = next((at for at, _ in trace if at.stack == "decoder"), None)
        self._place = 0

    def predict(self, situation: Situation) -> Prediction:
        """Raises ValueError when asked about another layer than the trace has next."""
        self._place += 1
        if self._place >= len(self._trace):
            return []
        at, experts = self._trace[self._place]
        if situation.at != at:
            if situation.at == self._first and at == self._trace[0][0]:
                return []  # a new request began with its encoder
            raise ValueError(f"asked about {situation.at}, the trace has {at}")
        return [(expert, 1.0) for expert in experts]
