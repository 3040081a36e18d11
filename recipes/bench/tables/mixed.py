"""`make bench-mixed`: a table for each model, what lies outside the experts down and the experts across."""

from __future__ import annotations

import re
from collections.abc import Sequence

from recipes.bench.result import Result
from recipes.bench.tables import Line, Part

_OUTSIDE = re.compile(r"(?P<model>\w+), (?P<outside>\w+ at \d+): size outside")
_EXPERTS = re.compile(r"(?P<model>\w+), experts at (?P<bits>\d+): size")


def parts(result: Result) -> Sequence[Part]:
    outside = [(found["model"], found["outside"]) for found in filter(None, map(_OUTSIDE.fullmatch, result.by_name))]
    experts = [(found["model"], found["bits"]) for found in filter(None, map(_EXPERTS.fullmatch, result.by_name))]
    return [
        _grid(model, [each for of, each in outside if of == model], [bits for of, bits in experts if of == model])
        for model in dict.fromkeys(model for model, _ in outside)
    ]


def _grid(model: str, outside: Sequence[str], experts: Sequence[str]) -> Sequence[Line]:
    heads = [f"experts {bits} ({{{model}, experts at {bits}: effective|.2f}})" for bits in experts]
    lines: list[Line] = [(model, *heads)]
    for each in outside:
        lines.append((each.replace(" at", ""), *(_cell(f"{model}, {each}, experts at {bits}") for bits in experts)))
    return lines


def _cell(where: str) -> str:
    return f"{{{where}: perplexity|,.1f}} ({{{where}: loss|+,.1f}}%), {{{where}: size|.1f}} MB"
