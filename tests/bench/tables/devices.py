"""`make bench-devices`: experts on a simulated card, in memory and on a drive."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tests.bench.result import Result
from tests.bench.tables import Line, Part

OURS, BEST = "two devices", ": by the best of the others"
OTHERS = "all on the processor", "LRU offloading", "layers split"
HITS = "hits on the card with room for "


def parts(result: Result) -> Sequence[Part]:
    rows = result.by_name
    head = "tokens/s", OURS, *OTHERS, "by the best of these", "aim"
    raced = [
        (
            what,
            *(f"{{{what}: {name}}}" for name in (OURS, *OTHERS)),
            f"{{{what}{BEST}}} ×",
            rows[f"{what}{BEST}"].aim or "",
        )
        for what in (name.removesuffix(BEST) for name in rows if name.endswith(BEST))
        if f"{what}: {OURS}" in rows
    ]
    shown = {f"{line[0]}{BEST}" for line in raced}
    aimed = [(row.name, f"{{{row.name}}} {row.unit}", row.aim or "") for row in result.rows if row.aim is not None]
    aimed = [line for line in aimed if line[0] not in shown]
    tables = [head, *raced], [("", "measured", "aim"), *aimed], _hits(rows), _published(rows)
    return [table for table in tables if len(table) > 1]


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
