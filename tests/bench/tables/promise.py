"""`make bench-promise`: how often the held-out loss stayed under the target, and how often simulated bounds hold."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tests.bench.result import Result
from tests.bench.tables import Line, Part

_CASE = re.compile(r"(?P<case>.+): held-out loss met the target")
_SIMULATED = re.compile(
    r"(?P<documents>\d+) documents of (?P<sizes>\S+) sizes, .* (?P<confidence>\d+%)(?P<none>: no.*)?"
)


def parts(result: Result) -> Sequence[Part]:
    """Cases in the order of the file."""
    lines: list[Line] = [("", "packs", "held-out loss met the target", "median held-out loss", "median bound")]
    cases = [found["case"] for found in map(_CASE.fullmatch, result.by_name) if found]
    lines += [
        (
            case,
            f"{{{case}: packs}} {{{case}: packs@unit}}",
            f"{{{case}: held-out loss met the target}}",
            f"{{{case}: median held-out loss|.2%}}",
            f"{{{case}: median bound at 95%|.2%}}",
        )
        for case in cases
    ]
    return [lines, *_simulation(result)]


def _simulation(result: Result) -> list[list[Line]]:
    """Where a promise is given: for each number of documents and kind of sizes, the row that held least often."""
    lowest: dict[tuple[str, str, str], str] = {}
    for name, row in result.by_name.items():
        found = _SIMULATED.fullmatch(name)
        if found and not found["none"]:
            setting = found["documents"], found["sizes"], found["confidence"]
            if setting not in lowest or row.value < result.by_name[lowest[setting]].value:
                lowest[setting] = name
    head: Line = ("documents", "sizes", "promised at", "held at least in")
    return [[head, *((*setting, f"{{{name}|.1f}}%") for setting, name in lowest.items())]] if lowest else []
