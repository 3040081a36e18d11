"""What a newcomer sees first: the demo's two models in one small table, and the picture in words."""

from __future__ import annotations

from collections.abc import Sequence

from recipes.bench.result import Result
from recipes.bench.tables import Line, Part
from recipes.bench.tables.demo import MODELS, SHARES, above_promise
from recipes.bench.tables.stream import BESIDE_LLAMA, DEVICES

LLAMA = "llama.cpp Q2_K"
ABOUT = {"g2p": "spelling → phonemes", "wiki": "Wikipedia text"}


def two_models(result: Result) -> Sequence[Part]:
    """A column for each model of the demo."""

    def line(what: str, template: str) -> Line:
        return (what, *(template.replace("NAME", name) for name in MODELS))

    lines: list[Line] = [
        ("", *(f"{name}: {ABOUT[name]}" for name in MODELS)),
        line("loss asked for", "{NAME: target|%} of {NAME: pack@unit}"),
        line("promised for further text, at 95%", "under {NAME: promised|.1%}"),
        (
            "measured on text kept apart (95% interval)",
            *(f"{{{name}: held-out loss|interval.1%}}{above_promise(name, result)}" for name in MODELS),
        ),
        line(
            "all experts, with their scales",
            "{NAME: expert bytes|.2f} MB, {NAME: expert bytes of FP16|%} of 16 bits",
        ),
        *(
            line(
                f"tokens/s with room for {share}% of the experts"
                if share < 100
                else "tokens/s with room for all experts",
                f"{{NAME, {share}%: decode|,.0f}}",
            )
            for share in SHARES
        ),
    ]
    return [lines]


def beside_llama(result: Result) -> Sequence[Part]:
    """One sentence: both in the same memory, drive by drive."""
    found = {match["device"]: match for match in map(BESIDE_LLAMA.fullmatch, result.by_name) if match}
    pieces = []
    for device, drive in DEVICES.items():
        where = found[device]["where"] if device in found else f"llama, {device}"
        mine, other = f"{{{where}: moert: decode}}", f"{{{where}: {LLAMA}: decode}}"
        pieces.append(f"{mine} tokens/s beside {other} ({drive})")
    size = next(iter(found.values()))["size"] if found else "?"
    return [f"In {size} MB, moert beside llama.cpp: {'; '.join(pieces)}."]
