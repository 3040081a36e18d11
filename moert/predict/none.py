"""No prediction: nothing is loaded before it is demanded."""

from __future__ import annotations

from collections.abc import Sequence

from moert.pack.model_spec import Stack
from moert.predict.predictor import Selected


class NoPrediction:
    def next_experts(self, stack: Stack, layer: int, history: Sequence[Selected]) -> list[int]:
        return []
