"""The baseline: each layer's experts by how often the calibration text went to them, whatever happened before."""

from __future__ import annotations

from collections.abc import Sequence

from moert.pack.model_spec import Stack
from moert.pack.paths import TransitionTable
from moert.predict.predictor import Selected, in_order_of


class Popularity:
    def __init__(self, tables: TransitionTable) -> None:
        self._tables = tables

    def next_experts(self, stack: Stack, layer: int, history: Sequence[Selected]) -> list[int]:
        return in_order_of(self._tables.probabilities(stack, layer))
