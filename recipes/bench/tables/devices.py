"""`make bench-devices`: experts on a simulated card, in memory and on a drive."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from recipes.bench.result import Result, Row
from recipes.bench.tables import Line, Part

OURS, BEST = "two devices", ": by the best of the others"
OTHERS = (
    "all on the processor", "LRU offloading", "layers split", "experts of layers split, all else on the card",
)  # fmt: skip
HITS = "hits on the card with room for "
ALONE = "by the clock that times it"


def parts(result: Result) -> Sequence[Part]:
    rows = result.by_name
    raced = [name.removesuffix(BEST) for name in rows if name.endswith(BEST)]
    raced = [what for what in raced if f"{what}: {OURS}" in rows]
    shown = {f"{what}{BEST}" for what in raced}
    single = [row.name for row in result.rows if row.aim is not None or ALONE in row.name]
    lines = [(name, f"{{{name}}} {rows[name].unit}") for name in single if name not in shown]
    head = "tokens/s", OURS, *OTHERS, "by the best of these"
    tables = [head, *(_raced(what, rows) for what in raced)], [("", "measured"), *lines], _hits(rows), _published(rows)
    return [table for table in tables if len(table) > 1]


def _raced(what: str, rows: Mapping[str, Row]) -> Line:
    there = [f"{what}: {name}" for name in OTHERS if f"{what}: {name}" in rows]
    best = rows[f"{what}: {OURS}"].value / max(rows[name].value for name in there)
    cells = (f"{{{what}: {name}}}" if f"{what}: {name}" in rows else "" for name in OTHERS)
    return what, f"{{{what}: {OURS}}}", *cells, f"{best:.2f} ×"


def _hits(rows: Collection[str]) -> Sequence[Line]:
    names = [name.removeprefix(HITS) for name in rows if name.startswith(HITS)]
    rooms, ways = (list(dict.fromkeys(name.split(": ")[at] for name in names)) for at in (0, 1))
    return [
        ("hits on the card with room for", *ways),
        *((room, *(f"{{{HITS}{room}: {way}}}%" for way in ways)) for room in rooms),
    ]


def _published(rows: Collection[str]) -> Sequence[Line]:
    theirs = ": their method"
    where = [name.removesuffix(theirs) for name in rows if name.endswith(theirs)]
    return [
        ("tokens/s", "Mixtral-offloading's method", OURS),
        *((what, f"{{{what}{theirs}}}", f"{{{what}: {OURS}}}") for what in where),
    ]
