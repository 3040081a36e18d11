"""`make bench-less`: routing that prefers what was used lately, beside exact routing."""

from __future__ import annotations

import re
from collections.abc import Sequence

from recipes.bench.result import Result
from recipes.bench.tables import Line, Part

MODELS = ("wiki", "wikids", "g2p", "marks")
SHARES = ("25%", "50%")
DRIVES = {"ssd": "500 MB/s", "nvme": "unthrottled"}
_LEVEL = re.compile(r"(?P<where>(?P<model>.+): (?P<beyond>\S+) beyond, (?P<share>\S+) in memory): asks for")
_RACED = re.compile(r"(?P<where>(?P<model>[\w-]+), (?P<drive>\w+)): (?P<what>\S+) (?P<share>\d+%) to exact")


def parts(result: Result) -> Sequence[Part]:
    return [asked(result), resident(), raced(result), sentences(result)]


def asked(result: Result) -> Sequence[Line]:
    """Routing beside widths that are there, on held-out text."""
    lines: list[Line] = [
        ("model", "in memory", "may lose beyond the widths", "lost, held-out", "asks for, kB a token", "exact routing",
         "ratio")
    ]  # fmt: skip
    for found in filter(None, map(_LEVEL.fullmatch, result.by_name)):
        where = found["where"]
        lines.append(
            (found["model"], found["share"], found["beyond"], f"{{{where}: held-out loss beyond the widths'|.2f}}%",
             f"{{{where}: asks for|.0f}}", f"{{{where}: exact routing asks for|.0f}}",
             f"{{{where}: asks for, of exact|.2f}}")
        )  # fmt: skip
    return lines


def resident() -> Sequence[Line]:
    """Whole conversions."""
    lines: list[Line] = [
        ("model", "--resident", "promised at 95%", "held-out loss", "kB a token", "same widths, exact routing",
         "of --loss 5% alone")
    ]  # fmt: skip
    for model in MODELS:
        for share in SHARES:
            where = f"{model}: --resident {share}"
            lines.append(
                (model, share, f"under {{{where}: promised|.1f}}%", f"{{{where}: held-out loss|interval.1f}}%",
                 f"{{{where}: reads|.0f}}", f"{{{where}: the same widths routed exactly|.0f}}",
                 f"{{{where}: to widths alone|.2f}}")
            )  # fmt: skip
    return lines


def raced(result: Result) -> Sequence[Line]:
    """On imitated drives."""
    lines: list[Line] = [
        ("model", "drive", "room for experts", "routing", "tokens/s", "exact routing", "ratio", "bytes a token",
         "of the bound of exact routing")
    ]  # fmt: skip
    for found in filter(None, map(_RACED.fullmatch, result.by_name)):
        where, what, share = found["where"], found["what"], found["share"]
        bound = f"{where}: {what} {share} to the bound of exact routing"
        lines.append(
            (found["model"], DRIVES[found["drive"]], share, what if what == "--resident" else f"{what} beyond",
             f"{{{where}: {what} {share}: decode}}", f"{{{where}: exact {share}: decode}}",
             f"{{{where}: {what} {share} to exact|.2f}}", f"{{{where}: {what} {share} to exact: bytes|.2f}}",
             f"{{{bound}|%}}" if bound in result.by_name else "")
        )  # fmt: skip
    return lines


def sentences(result: Result) -> str:
    llama = next((name for name in result.by_name if name.endswith("preferring 50% to llama.cpp")), None)
    above = "decision of a layer above exact|.1f"
    same = "answers that differ over room, drive, batch and threads"
    words = over_routings("g2p, {}: words right|.1f", "%")
    written = ("wiki", "wikids")
    likely = {name: over_routings(f"{name}, {{}}: perplexity of what it writes, unquantised|.0f") for name in written}
    again = {name: over_routings(f"{name}, {{}}: repeated|.1f", "%") for name in written}
    said = [
        f"A layer's decision takes {{wiki: {above}}} µs more than exact routing's on wiki, {{wikids: {above}}} µs on "
        "wikids.",
        f"With exact routing, with that for half and with that for a quarter of the experts {words} of g2p's held-out "
        "words come out right. A thousand tokens that wiki writes freely have a perplexity per token of "
        f"{likely['wiki']} under the unquantised model, wikids' {likely['wikids']}; four tokens in a row were there "
        f"before in {again['wiki']} of places, {again['wikids']}.",
        "Answers that differ over room for experts, drive, batch and threads: "
        + ", ".join(f"{{{model}: {same}}} ({model})" for model in MODELS) + ".",
    ]  # fmt: skip
    larger = "experts of --resident to those of --loss alone|.2f"
    said.append(
        f"Fitted to a quarter of the experts in memory, widths are larger: experts take {{wiki: {larger}}} times the "
        f"bytes of those of --loss 5% alone on wiki, {{wikids: {larger}}} times on wikids."
    )
    if llama is not None:
        said.append(
            "Preferring what was used lately, moert has in the same memory as llama.cpp, at 500 MB/s, both with random "
            f'routers, {{{llama}|.1f}} × its speed; "Small devices" has what exact routing has.'
        )
    return " ".join(said)


def over_routings(row: str, unit: str = "") -> str:
    """The same figure of all three."""
    first, second, third = (f"{{{row.format(routing)}}}{unit}" for routing in ("exact", "50%", "25%"))
    return f"{first}, {second} and {third}"
