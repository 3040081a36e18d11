"""`make bench-large`: whole models of published sizes, by device and memory."""

from __future__ import annotations

import re
from collections.abc import Sequence

from recipes.bench.result import Result
from recipes.bench.tables import Part

DECODE = re.compile(r"(?P<where>(?P<model>\w+), (?P<device>\w+), (?P<memory>[\d.]+ GB)): moert: decode")
RATIO = re.compile(
    r"(?P<where>(?P<model>\w+), (?P<device>\w+), (?P<memory>[\d.]+ GB) \(own routers\)): moert to (?P<other>[^:]+)"
)
MODELS = {"olmoe": "OLMoE-1B-7B", "qwen3": "Qwen3-30B-A3B"}


def parts(result: Result) -> Sequence[Part]:
    found = [match for row in result.rows if (match := DECODE.fullmatch(row.name))]
    head = (
        "", "drive, `--memory`", "tokens/s", "of the bound", "prompt of 2,048, to reading or computing",
        "start to first token", "Python", "deciding",
    )  # fmt: skip
    lines = [
        (
            f"{MODELS[each['model']]}, {{{each['model']}: experts}} GB",
            f"{each['device']}, {each['memory']}",
            f"{{{each['where']}: moert: decode}}",
            f"{{{each['where']}: share of the bound}}",
            f"{{{each['where']}: prompt of 2048 tokens to the longer of both}} ×",
            f"{{{each['where']}: start to first token}} s",
            f"{{{each['where']}: share of a token: Python}}%",
            f"{{{each['where']}: share of a token: deciding}}%",
        )
        for each in found
    ]
    return [[head, *lines], _beside_llama(result)]


def _beside_llama(result: Result) -> Part:
    """Where both have figures."""
    named = {row.name: match for row in result.rows if (match := RATIO.fullmatch(row.name))}
    lines = [
        (
            MODELS[each["model"]],
            f"{each['device']}, {each['memory']}",
            f"{{{each['where']}: moert: decode}}",
            f"{{{each['where']}: {each['other']}: decode}}",
            f"{{{name}}} ×",
        )
        for name, each in named.items()
    ]
    return [("random routers", "drive, memory", "moert, tokens/s", "llama.cpp, tokens/s", "moert to llama.cpp"), *lines]
