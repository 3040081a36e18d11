"""`make bench-plans`: plans of as many bytes by the sweep's ranking and by others, and all experts at one width."""

from __future__ import annotations

import re
from collections.abc import Sequence

from recipes.bench.result import Result
from recipes.bench.tables import Line, Part

_UNIFORM = re.compile(r"(?P<model>\w+), all at (?P<bits>\d+) bits: loss")
_SWEPT = re.compile(r"(?P<model>\w+), (?P<bits>[\d.]+) bits, sweep: loss")


def parts(result: Result) -> Sequence[Part]:
    lines: list[Line] = [("model", "bits a weight", "experts", "by the sweep", "by usage", "at random", "all alike")]
    for name in result.by_name:
        if found := _UNIFORM.fullmatch(name):
            where = name.removesuffix(": loss")
            size = f"{{{where}: experts|.2f}} MB"
            lines.append((found["model"], f"{found['bits']} and scales", size, "", "", "", f"{{{name}|interval.2%}}"))
        elif found := _SWEPT.fullmatch(name):
            lines.append(_mixed(found["model"], found["bits"]))
    return [lines]


def _mixed(model: str, bits: str) -> Line:
    where = f"{model}, {bits} bits"
    return (
        model,
        bits,
        f"{{{where}, sweep: experts|.2f}} MB",
        *(f"{{{where}, {ranking}: loss|interval.2%}}" for ranking in ("sweep", "usage")),
        f"{{{where}, random: least loss|.2%}} to {{{where}, random: largest loss|.2%}}",
        "",
    )
