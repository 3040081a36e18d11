"""`make bench-hash`: SiDA's tables, Mixtral-offloading's figures, and what is won over what was there."""

from __future__ import annotations

import re
from collections.abc import Sequence

from recipes.bench.result import Result
from recipes.bench.tables import Line, Part
from recipes.bench.tables.stream import DEVICES, SHARES

LENGTHS = ("short", "middle", "long")
HALF = 50
PREDICTORS = ("gate", "hash", "both", "tables")
TIMES = (1, 2, 3)
POLICIES = ("auto", "foreseen", "foreseen without error", "Belady")
AT_HALF = ("on demand", "gate", "tables", "hash", "none, foreseen", "hash, foreseen", "auto, foreseen")
ABLATION = {
    "everything": f"auto {HALF}%", "without reading ahead": f"none {HALF}%", "without the cache": "without the cache",
    "naive": "naive",
}  # fmt: skip


class Rows:
    """The rows of a result by their names; cells of those that a model does not have are empty."""

    def __init__(self, result: Result) -> None:
        self._names = list(result.by_name)

    def cell(self, name: str, form: str = "") -> str:
        return f"{{{name}{f'|{form}' if form else ''}}}" if name in self._names else ""

    def found(self, pattern: str) -> list[str]:
        """What the first group of a pattern was in names of rows, each once, in their order."""
        matches = (re.fullmatch(pattern, name) for name in self._names)
        return list(dict.fromkeys(match[1] for match in matches if match))

    @property
    def models(self) -> list[str]:
        return self.found(r"(\w+): hash function")


def names(result: Result) -> Sequence[Part]:
    """SiDA's Table 4 and Mixtral-offloading's recall."""
    rows = Rows(result)
    return [_hits(rows), _recall(rows)]


def _hits(rows: Rows) -> Sequence[Line]:
    head = ("choices among the first named", *(f"{length}{times}" for length in LENGTHS for times in ("", ", 3 times")))
    lines: list[Line] = [head]
    for where in rows.found(r"(\w+, (?:encoder|decoder)), short: among the first(?: \d+)?"):
        (first, more) = rows.found(rf"{where}, short: (among the first(?: \d+)?)")
        cells = (rows.cell(f"{where}, {length}: {each}", "%") for length in LENGTHS for each in (first, more))
        lines.append((where, *cells))
    return lines


def _recall(rows: Rows) -> Sequence[Line]:
    whens = ["before the first layer", *(f"{count} ahead" for count in rows.found(r".*, (\d+) ahead: .*"))]
    lines: list[Line] = [("recall", "named by", *(f"{when}, {times} ×" for when in whens for times in TIMES))]
    for where in rows.found(r"(\w+, (?:encoder|decoder)), before the first layer: hash, 1 × as many"):
        for who in PREDICTORS:
            cells = [rows.cell(f"{where}, {when}: {who}, {times} × as many", "%") for when in whens for times in TIMES]
            if any(cells):
                lines.append((where, who, *cells))
    return lines


def routing(result: Result) -> Sequence[Part]:
    """SiDA's Table 3, Figures 3 and 8; and what its thread for the next batch brings."""
    rows = Rows(result)
    lines: list[Line] = [
        ("", "function", "of the pack", "with routers", "with the function", "kept", "choosing, routers",
         "choosing, function", *(f"not needed, {length}" for length in LENGTHS), "speed with 80% saved")
    ]  # fmt: skip
    for model in rows.models:
        metric = next(iter(rows.found(rf"{model}: (\w+) with routers")), "")
        lines.append(
            (f"{model}, {metric}" + " per token" * (metric == "perplexity"),
             rows.cell(f"{model}: hash function", ".2f") + " MB",
             rows.cell(f"{model}: hash function, of the pack", "%"), rows.cell(f"{model}: {metric} with routers"),
             rows.cell(f"{model}: {metric} with hash"), rows.cell(f"{model}: kept", ".1%"),
             *(rows.cell(f"{model}: choosing experts, with {what}", "%") for what in ("routers", "hash")),
             *(rows.cell(f"{model}, {length}: expert memory that is not needed", "%") for length in LENGTHS),
             rows.cell(f"{model}, short: speed with 80% of expert memory saved", ".2f"))
        )  # fmt: skip
    return [lines]


def beforehand(result: Result) -> Sequence[Part]:
    """`make bench-beforehand`: the speed of batches whose next one is worked on, to that without."""
    rows = Rows(result)
    lines: list[Line] = [("speed, to that without", "with routers", "with the function")]
    for where in rows.found(r"(\w+: batches of .* beforehand), with \w+"):
        lines.append((where, *(rows.cell(f"{where}, with {what}", ".2f") for what in ("routers", "hash"))))
    return [lines]


def hits(result: Result) -> Sequence[Part]:
    """Eviction, without reading ahead; and k of each layer."""
    rows = Rows(result)
    lines: list[Line] = [("hits", "room", *POLICIES, "encoder, behind Belady", "won by foreseen")]
    for model in rows.models:
        for share in SHARES:
            where = f"{model}, {share}%"
            cells = (rows.cell(f"{where}: hits under {policy}", "%") for policy in POLICIES)
            behind = rows.cell(f"{model}, encoder, {share}%: foreseen, behind Belady", ".1f")
            won = rows.cell(f"{where}: won by foreseen", "%")
            lines.append((model, f"{share}%", *cells, behind, won))
    ks = sorted(rows.found(r".*, k = (\d+): hits under lru"), key=int)
    latest: list[Line] = [("k experts of each layer", *ks)]
    for model in rows.models:
        for policy in ("layer-lru", "lru"):
            cells = (rows.cell(f"{model}, k = {k}: hits under {policy}", "%") for k in ks)
            latest.append((f"{model}, {policy}", *cells))
    return [lines, latest]


def speeds(result: Result) -> Sequence[Part]:
    """SiDA's Figures 9 and 11, the ablation, and whether the default is ever slower."""
    rows = Rows(result)
    places = [(model, device) for model in rows.models for device in DEVICES]
    half: list[Line] = [
        ("tokens/s", "drive", *AT_HALF, "all in memory", "hash, foreseen to on demand", "hash, foreseen to naive")
    ]
    parts: list[Line] = [("tokens/s", "drive", *ABLATION)]
    never: list[Line] = [("auto to none", "drive", *(f"{share}%" for share in SHARES))]
    for model, device in places:
        where, begins = f"{model}, {device}", (model, DEVICES[device])
        best = f"{where}: hash, foreseen {HALF}% to"
        half.append(
            (*begins, *(rows.cell(f"{where}: {side} {HALF}%: decode") for side in AT_HALF),
             rows.cell(f"{where}: all in memory: decode"), rows.cell(f"{best} on demand", ".2f"),
             rows.cell(f"{best} naive", ".2f"))
        )  # fmt: skip
        parts.append((*begins, *(rows.cell(f"{where}: {side}: decode") for side in ABLATION.values())))
        never.append((*begins, *(rows.cell(f"{where}: auto {share}% to none", ".2f") for share in SHARES)))
    return [half, parts, never]
