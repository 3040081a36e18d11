"""`make bench-flash`: single neurons in place of whole experts."""

from __future__ import annotations

import re
from collections.abc import Sequence

from recipes.bench.result import Result
from recipes.bench.tables import Line, Part
from recipes.bench.tables.hashed import Rows
from recipes.bench.tables.stream import DEVICES

SHARES = ("25%", "50%", "75%")
SPENT = ("reading", "deciding", "computing")
ORDERS = ("as given", "in the pack", "by frequency", "together")
KEPT = ("window", "lru", "lfu", "recent", "Belady")


def nbytes(result: Result) -> Sequence[Part]:
    """Bytes a token beside whole experts."""
    rows = Rows(result)
    models = rows.found(r"(\w+): columns, of whole experts")
    asked: list[Line] = [
        ("model", "neurons that fire", "whole experts ask for, kB a token", "columns of what fires", "ratio",
         "answers that differ")
    ]  # fmt: skip
    for name in models:
        differ = ", ".join(rows.cell(f"{name}, {share}: answers that differ") for share in SHARES)
        asked.append(
            (name, rows.cell(f"{name}: neurons that fire", "%"), rows.cell(f"{name}: whole experts ask for"),
             rows.cell(f"{name}: columns ask for"), rows.cell(f"{name}: columns, of whole experts", ".2f"), differ)
        )  # fmt: skip
    read: list[Line] = [
        ("model", "room", "whole experts read, kB a token", "what fires", "of whole experts", "what is predicted",
         "of whole experts", "of what whole experts ask for")
    ]  # fmt: skip
    for name in models:
        for where, share in ((f"{name}, {share}", share) for share in SHARES):
            read.append(
                (name, share, rows.cell(f"{where}: whole experts read"), rows.cell(f"{where}: neurons read"),
                 rows.cell(f"{where}: neurons, of whole experts", ".2f"), rows.cell(f"{where}: predicted read"),
                 rows.cell(f"{where}: predicted, of whole experts", ".2f"),
                 rows.cell(f"{where}: predicted, of what whole experts ask for", ".2f"))
            )  # fmt: skip
    return [asked, read, *_in_order(rows), *_predictors(rows)]


def _in_order(rows: Rows) -> Sequence[Part]:
    """Nothing of results that have no packs in the checkpoint's order."""
    beside = "of those in the checkpoint's order"
    names = rows.found(rf"(\w+): columns asked for, {beside}")
    lines: list[Line] = [(f"in the pack's order, {beside}", "asked for", *(f"read, room {share}" for share in SHARES))]
    for name in names:
        read = (rows.cell(f"{name}, {share}: neurons read, {beside}", ".2f") for share in SHARES)
        lines.append((name, rows.cell(f"{name}: columns asked for, {beside}", ".2f"), *read))
    return [lines] if names else []


def _predictors(rows: Rows) -> Sequence[Part]:
    """Nothing where none was trained."""
    names = rows.found(r"(\w+): predictor: size")
    lines: list[Line] = [("predictor", "of the pack", "of what fires it names", "of all neurons", "of blocks", "lost")]
    for name in names:
        whats = ("size", "firing neurons that it names", "neurons that it names", "blocks")
        cells = (rows.cell(f"{name}: predictor: {what}", "%") for what in whats)
        lines.append((name, *cells, rows.cell(f"{name}: loss by the predictor", "interval.1%")))
    return [lines] if names else []


def speeds(result: Result) -> Sequence[Part]:
    """The steps, beside today's engine, and at published shapes."""
    rows = Rows(result)
    return [_steps(rows), _today(rows), _shapes(rows)]


def _steps(rows: Rows) -> Sequence[Line]:
    lines: list[Line] = [("model", "drive", "step", "tokens/s", "× naive", "kB a token", *SPENT)]
    for where in rows.found(r"(\w+, \w+, steps): naive: decode"):
        name, device, _ = where.split(", ")
        for step in rows.found(rf"{where}: (.+): decode"):
            lines.append((name, DEVICES[device], step, *_cells(rows, where, step, f"{where}: {step} to naive")))
    return lines


def _cells(rows: Rows, where: str, what: str, *ratios: str) -> Sequence[str]:
    """Speed, its ratios, what was read for a token, where its time went."""
    spent = (rows.cell(f"{where}: {what}: {part}", "%") for part in SPENT)
    beside = (rows.cell(each, ".2f") for each in ratios)
    return (
        rows.cell(f"{where}: {what}: decode"), *beside, rows.cell(f"{where}: {what}: read for a token"), *spent
    )  # fmt: skip


def _today(rows: Rows) -> Sequence[Line]:
    lines: list[Line] = [("model", "drive", "room", "read", "tokens/s", "× whole experts", "kB a token", *SPENT)]
    for where in rows.found(r"(\w+, \w+): whole experts \d+%: decode"):
        name, device = where.split(", ")
        for what in rows.found(rf"{where}: (.+ \d+%): decode"):
            read, _, share = what.rpartition(" ")
            cells = _cells(rows, where, what, f"{where}: {what} to whole experts")
            lines.append((name, DEVICES[device], share, read, *cells))
    return lines


def _shapes(rows: Rows) -> Sequence[Line]:
    lines: list[Line] = [
        ("shape and firings", "fire", "drive", "room", "read", "tokens/s", "× naive", "× whole experts", "kB a token",
         *SPENT, "of naive's bytes", "process, MB")
    ]  # fmt: skip
    for where in rows.found(r"(.+ like \w+, \w+, \d+%): naive: decode"):
        shape, device, room = where.split(", ")
        for what in rows.found(rf"{re.escape(where)}: ([\w ,+-]+): decode"):
            ratios = (f"{where}: {what} to naive", f"{where}: {what} to whole experts")
            lines.append(
                (shape, rows.cell(f"{shape}: neurons that fire", "%"), DEVICES[device], room, what,
                 *_cells(rows, where, what, *ratios), rows.cell(f"{where}: {what}: read, of naive", ".2f"),
                 rows.cell(f"{where}: {what}: peak memory of the process", ".0f"))
            )  # fmt: skip
    return lines


def curves(result: Result) -> Sequence[Part]:
    """What a window leaves to be loaded, hits, and orders."""
    rows = Rows(result)
    return [_windows(rows), _hits(rows), _orders(rows), _friends(rows)]


def _windows(rows: Rows) -> Sequence[Line]:
    sizes = rows.found(r".+: window of (\d+): loaded")
    lines: list[Line] = [("tokens in the window", "fire", *sizes)]
    for name in rows.found(r"(\w+): window of \d+: loaded"):
        lines += [
            (f"{name}, loaded", rows.cell(f"{name}: fire for a token", ".1%"),
             *(rows.cell(f"{name}: window of {size}: loaded", ".1%") for size in sizes)),
            (f"{name}, kept of a layer", "", *(rows.cell(f"{name}: window of {size}: kept", "%") for size in sizes)),
        ]  # fmt: skip
    return lines


def _hits(rows: Rows) -> Sequence[Line]:
    lines: list[Line] = [("hits", "room for blocks", *KEPT)]
    for name in rows.found(r"(\w+): room for \d+% of blocks: lru"):
        for room in rows.found(rf"{name}: room for (\d+%) of blocks: lru"):
            cells = (rows.cell(f"{name}: room for {room} of blocks: {way}", "%") for way in KEPT)
            lines.append((f"{name}, blocks of {rows.cell(f'{name}: block')}", room, *cells))
    return lines


def _orders(rows: Rows) -> Sequence[Line]:
    sizes = rows.found(r".+, blocks of (\d+): as given")
    lines: list[Line] = [("blocks that a token asks for", *(f"of {size} neurons" for size in sizes))]
    for name in rows.found(r"(\w+), blocks of \d+: as given"):
        for order in ORDERS:
            cells = [rows.cell(f"{name}, blocks of {size}: {order}", "%") for size in sizes]
            lines += [(f"{name}, {order}", *cells)] if any(cells) else []
    return lines


def _friends(rows: Rows) -> str:
    what = "neurons that are anyone's closest friend"
    found = (f"{rows.cell(f'{name}: {what}', '%')} of {name}'s" for name in rows.found(rf"(\w+): {what}"))
    return f"The closest friend of some other neuron of its expert are {', '.join(found)}."
