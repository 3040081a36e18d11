"""What the tables in the text show.

A table is its lines, the first of them the head; cells and paragraphs are templates that name rows of the result
(recipes/bench/blocks.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from recipes.bench.result import Result

Line = Sequence[str]
Part = Sequence[Line] | str
"""A table, or a paragraph of running text."""


@dataclass(frozen=True)
class Block:
    """What lies between two markers: `parts` of the result called `result`."""

    result: str
    parts: Callable[[Result], Sequence[Part]]


def listed(result: Result) -> Part:
    """Every row of a result, as it is called there."""
    lines = [(row.name, f"{{{row.name}}} {row.unit}") for row in result.rows]
    return [("", "measured"), *lines]
