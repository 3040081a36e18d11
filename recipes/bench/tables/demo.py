"""The demo: what its conversions came to, and how the packs ran."""

from __future__ import annotations

import re
from collections.abc import Sequence

from recipes.bench.result import Result
from recipes.bench.tables import Line, Part

MODELS = ("g2p", "wiki")
"""Of the demo itself."""
SHARES = (100, 50, 25)
_TARGET = ": target"
EVICTIONS = ("auto", "paper", "lru", "lfu")


def parts(result: Result) -> Sequence[Part]:
    """All models that the result has."""
    models = [name.removesuffix(_TARGET) for name in result.by_name if name.endswith(_TARGET)]
    conversions: list[Line] = [
        ("model", "target", "metric", "reference", "pack", "promised at 95%",
         "held-out loss (95% interval)", "matrices × bits", "expert bytes", "of FP16", "of INT4"),
    ]  # fmt: skip
    conversions += [conversion(name, result) for name in models]
    policies = [f"hit rate: {EVICTIONS[0]}", *EVICTIONS[1:]]
    runs: list[Line] = [("model", "room for experts", *policies, "knowing the future", "tokens/s", "process")]
    runs += [run(f"{name}, {share}%", name, share) for name in models for share in SHARES]
    return [conversions, runs]


def conversion(name: str, result: Result) -> Line:
    widths = re.compile(rf"{name}: matrices at (\d+) bits")
    counts = [f"{{{found[0]}}}×{found[1]}" for found in map(widths.fullmatch, result.by_name) if found]
    lost = f"{{{name}: held-out loss|interval.1%}}{above_promise(name, result)}"
    return (
        name, f"{{{name}: target|%}}", f"{{{name}: pack@unit}}", value_of(name, "reference", result),
        value_of(name, "pack", result), f"under {{{name}: promised|.1%}}", lost,
        ", ".join(counts), f"{{{name}: expert bytes|.2f}} MB", f"{{{name}: expert bytes of FP16|%}}",
        f"{{{name}: expert bytes of INT4|%}}",
    )  # fmt: skip


def value_of(name: str, which: str, result: Result) -> str:
    """Returns the metric's value; behind a perplexity per word that per token, where it was kept."""
    by_tokens = f"{name}: {which} per token"
    return f"{{{name}: {which}|.4g}}" + f" (per token {{{by_tokens}|.4g}})" * (by_tokens in result.by_name)


def above_promise(name: str, result: Result) -> str:
    """Returns what is said behind a held-out loss that is larger than its bound."""
    lost, promised = result.by_name.get(f"{name}: held-out loss"), result.by_name.get(f"{name}: promised")
    return ", above the promise" if lost and promised and lost.value > promised.value else ""


def run(what: str, name: str, share: int) -> Line:
    """With room for all nothing is ever evicted, and there are no hit rates."""
    rates = [f"{what}: hit rate, {policy}" for policy in (*EVICTIONS, "knowing the future")]
    return (
        name,
        f"{share}% ({{{what}: room for experts|.1f}} MB)",
        *(f"{{{rate}|.1%}}" if share < 100 else "" for rate in rates),
        f"{{{what}: decode|,.0f}}",
        f"{{{what}: process|.0f}} MB",
    )
