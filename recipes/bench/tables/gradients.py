"""`make bench-gradients`: every row of it, as it is called there."""

from __future__ import annotations

from collections.abc import Sequence

from recipes.bench.result import Result
from recipes.bench.tables import Part, listed


def parts(result: Result) -> Sequence[Part]:
    return [listed(result)]
