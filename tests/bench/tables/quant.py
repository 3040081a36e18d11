"""`make bench-quant`: our quantisers beside others at equal effective bits."""

from __future__ import annotations

from collections.abc import Sequence

from tests.bench.result import Result
from tests.bench.tables import Line, Part


def parts(result: Result) -> Sequence[Part]:
    lines: list[Line] = [("", "")]
    return [lines]
