"""The one event that everything about experts hears: a layer needs some of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from moert.pack.model_spec import ExpertKey, LayerKey


class Demand(NamedTuple):
    """The router of a layer has decided for all tokens of a pass: `experts` are needed, each once, ascending."""

    at: LayerKey
    experts: tuple[int, ...]

    def expert_keys(self) -> list[ExpertKey]:
        return [self.at.expert(number) for number in self.experts]


class Arrivals(NamedTuple):
    """How far reading ahead had come when a demand was made: predicted experts that were begun to be read, and how many
    of those demanded are still to be read from the beginning."""

    begun: list[ExpertKey]
    missing: int


Listener = Callable[[Demand], object]
"""Is told of every demand, in the order of execution."""
