"""`make bench-peers`: moert beside llama.cpp and transformers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from recipes.bench.result import Result
from recipes.bench.tables import Line, Part
from recipes.bench.tables.demo import MODELS

LEVELS = {"4.5 bits": "Q4_K", "2.6 bits": "Q2_K"}


SIDES = {"": "llama.cpp", ", not repacked": "its weights as in the file", ", as released": "compiled as its wheels are"}
"""How the rows of llama.cpp's settings end → the heads of their columns."""


def parts(result: Result) -> Sequence[Part]:
    sides = [side for side in SIDES if f"4.5 bits: decode: Q4_K{side}" in result.by_name]
    both = partial(_both, sides)
    lines: list[Line] = [
        ("", "moert", *(SIDES[side] for side in sides), "ratio to the best"),
        both("4.5 bits, tokens/s", "4.5 bits: decode"),
        both("the same beside one busy process", "4.5 bits: decode with one busy process", ""),
        both("prompt of 512 tokens, tokens/s", "4.5 bits: prefill of 512"),
        both("prompt of 4,096 tokens, tokens/s", "4.5 bits: prefill of 4096"),
        both("behind 8,000 tokens, tokens/s", "4.5 bits: decode behind 8000"),
        both("first token after a prompt of 128, s", "4.5 bits: first token after 128"),
        both("start to first token, 16 tokens of prompt, s", "4.5 bits: start to first token"),
        both("2.6 bits, tokens/s", "2.6 bits: decode"),
        both("prompt of 512 tokens, tokens/s", "2.6 bits: prefill of 512"),
        both("first token after a prompt of 128, s", "2.6 bits: first token after 128"),
    ]
    trained: list[Line] = [
        ("tokens/s", "moert", "transformers", "ratio"),
        source("g2p", "g2p: 24 tokens after a prompt"),
        source("wiki", "wiki: 32 tokens after a prompt"),
    ]
    whole: list[Line] = [
        ("`moert run`, all experts in memory", *MODELS),
        (
            "start of the program to first token, s",
            *(f"{{{name}: start of the program to first token|.2f}}" for name in MODELS),
        ),
        ("the most that the process holds, MB", *(f"{{{name}: most that the process holds|.0f}}" for name in MODELS)),
        (
            "of it beside weights, experts, keys and values",
            *(f"{{{name}: beside weights, experts, keys and values|.0f}}" for name in MODELS),
        ),
    ]
    return [lines, trained, whole, bits(), f"{traffic()} {build(result)}"]


def _both(sides: Sequence[str], said: str, row: str, only: str | None = None) -> Line:
    """Ours and llama.cpp's settings, or `only` one of them."""
    peer = LEVELS[row.split(":")[0]]
    cells = ("" if only not in (None, side) else f"{{{row}: {peer}{side}}}" for side in sides)
    return said, f"{{{row}: moert}}", *cells, f"{{{row}: ratio|.2f}}"


def source(name: str, row: str) -> Line:
    return name, f"{{{row}: moert}}", f"{{{row}: transformers}}", f"{{{row}: ratio|.1f}}"


def bits() -> str:
    """Of an expert's weight on both sides."""
    row = "{{{level}: effective bits of an expert's weight: {side}|.3f}}"
    sides = [
        f"{row.format(level=level, side='moert')} bits in ours and {row.format(level=level, side=peer)} in {peer}"
        for level, peer in LEVELS.items()
    ]
    return f"An expert's weight has, scales counted, {', and '.join(sides)}."


def traffic() -> str:
    row = "{{{level}: read for each token: {side}|.0f}}"
    sides = [
        f"{row.format(level=level, side='moert')} MB where {peer} reads {row.format(level=level, side=peer)}"
        for level, peer in LEVELS.items()
    ]
    return f"For each token ours reads {', and '.join(sides)}."


def build(result: Result) -> str:
    """How llama.cpp was compiled, from the settings."""
    settings = result.context["settings"]
    said = "; ".join(f"{how}: {found}" for how, found in settings.get("llama_cpp_built", {}).items() if found)
    return f"llama.cpp is llama-cpp-python {settings['llama_cpp_python']}" + (f" ({said})." if said else ".")
