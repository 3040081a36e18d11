"""Measures what one changed expert costs: as exact as a full evaluation, from the few rows that can differ.

All experts but one are as in the base, whose layer boundaries are kept. A changed expert moves only the rows routed
to it: w · (FFN_q(x) − FFN(x)) is added to them where the layer ends. What comes after is computed again only for
samples with such rows, and, where attention is causal, from the first such row on. An expert without rows is free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from moeconv.artifacts import Probe
from moeconv.measure.scorers import Scores
from moert.pack.model_spec import LayerKey


@dataclass(frozen=True)
class Found:
    """The scores with this expert changed, and what it took: operations in expert rows, and samples whose
    text hung on a tie that the order of summation decides."""

    probe: Probe
    scores: Scores
    flops: int
    near_ties: int


class Prober(Protocol):
    """Answers probes on the samples of one scorer."""

    def prepare(self) -> Scores:
        """Runs the model in full, as it stands, and keeps what probes start from. This state is the base."""
        ...

    def probe(self, probes: Sequence[Probe]) -> list[Found]:
        """Answers to probes of one layer, in their order."""
        ...

    def rows_of(self) -> dict[LayerKey, list[int]]:
        """For each layer with experts, how many rows the base gave to each expert."""
        ...
