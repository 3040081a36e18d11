"""`make bench-promise`: how often the held-out loss stayed under the target."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tests.bench.result import Result
from tests.bench.tables import Line, Part

_CASE = re.compile(r"(?P<case>.+): held-out loss met the target")


def parts(result: Result) -> Sequence[Part]:
    """Cases in the order of the file."""
    lines: list[Line] = [("", "packs", "held-out loss met the target", "median held-out loss", "median bound")]
    cases = [found["case"] for found in map(_CASE.fullmatch, result.by_name) if found]
    lines += [
        (
            case,
            f"{{{case}: packs}} {{{case}: packs@unit}}",
            f"{{{case}: held-out loss met the target}}",
            f"{{{case}: median held-out loss|.1%}}",
            f"{{{case}: median bound at 95%|.1%}}",
        )
        for case in cases
    ]
    return [lines]
