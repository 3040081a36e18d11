"""`make bench-outlook`: tokens a second that `moeconv plan` expects, beside those that were measured."""

from __future__ import annotations

from collections.abc import Sequence

from recipes.bench.result import Result
from recipes.bench.tables import Part

OFF = ": off by"


def parts(result: Result) -> Sequence[Part]:
    names = [row.name.removesuffix(OFF) for row in result.rows if row.name.endswith(OFF)]
    runs = [
        (
            name,
            f"{{{name}: measured}}",
            f"{{{name}: expected}}",
            f"{{{name}: off by}}%",
            f"{{{name}: off by, with the hits of that run}}%",
        )
        for name in names
    ]
    whole = [
        (name, f"{{{name}: measured}}", f"{{{name}: expected}}", f"{{{name}: off by, all in memory}}%", "")
        for name in (row.name.removesuffix(": off by, all in memory") for row in result.rows)
        if f"{name}: off by, all in memory" in result.by_name
    ]
    head = ("tokens/s", "measured", "expected", "off by", "the same with the hits of that run")
    said = (
        "{all: within the aim} {all: within the aim@unit} were within the aim; the median was off by "
        "{all: off by, median}%, and with the hit rates of those runs by "
        "{all: off by, median, with the hits of those runs}%."
    )
    return [[head, *runs, *whole], said]
