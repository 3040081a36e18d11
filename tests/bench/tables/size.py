"""`make bench-size`: every row of it, as it is called there."""

from __future__ import annotations

from collections.abc import Sequence

from tests.bench.result import Result
from tests.bench.tables import Part


def parts(result: Result) -> Sequence[Part]:
    lines = [(row.name, f"{{{row.name}}} {row.unit}", row.aim or "") for row in result.rows]
    return [[("", "measured", "aim"), *lines]]
