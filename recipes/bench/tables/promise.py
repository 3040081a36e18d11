"""`make bench-promise`: how often the held-out loss stayed under the target, and how often simulated bounds hold."""

from __future__ import annotations

import re
from collections.abc import Sequence

from moert.pack.manifest import in_words
from recipes.bench.result import Result
from recipes.bench.tables import Line, Part

_CASE = re.compile(r"(?P<case>[^,]+): packs")
_SIMULATED = re.compile(
    r"(?P<documents>\d+) documents of (?P<sizes>\S+) sizes, .* (?P<confidence>\d+%)(?P<none>: no.*)?"
)


def parts(result: Result) -> Sequence[Part]:
    """Cases in the order of the file."""
    head = ("", "packs", "held-out loss stayed under its bound", "median held-out loss", "median bound")
    cases = [found["case"] for found in map(_CASE.fullmatch, result.by_name) if found]
    lines: list[Line] = [head, *(_case(case, result) for case in cases)]
    return [lines, *_simulation(result)]


def _case(case: str, result: Result) -> Line:
    """Counted from the splits, each by the bound that its pack was printed with."""
    bounds = {
        name.removesuffix(": bound"): row.value
        for name, row in result.by_name.items()
        if name.startswith(f"{case}, split ") and name.endswith(": bound")
    }
    under = sum(result.by_name[f"{split}: held-out loss"].value <= bound for split, bound in bounds.items())
    promised = f"{case}: median bound at 95%" in result.by_name
    return (
        case.replace("perplexity", in_words("perplexity")),
        f"{{{case}: packs}} {{{case}: packs@unit}}",
        f"{under} of {len(bounds)}",
        f"{{{case}: median held-out loss|.2%}}",
        f"{{{case}: median bound at 95%|.2%}}" if promised else f"{{{case}: median bound|.2%}}, nothing promised",
    )


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
