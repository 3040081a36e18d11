"""`make bench-ahead`: reading ahead beside not doing so, and beside LRU over experts of two bits."""

from __future__ import annotations

from collections.abc import Sequence

from recipes.bench.result import Result
from recipes.bench.tables import Part
from recipes.bench.tables.stream import DEVICES, LARGE, SHARES

SIDES = ("gate", "none", "INT2, LRU")


def parts(_: Result) -> Sequence[Part]:
    lines = [("drive", "room for experts", *SIDES, *(f"gate × {other}" for other in SIDES[1:]))]
    for device, drive in DEVICES.items():
        for share in SHARES:
            where = f"{LARGE}, {device}:"
            speeds = (f"{{{where} {side} {share}%: decode}}" for side in SIDES)
            ratios = (f"{{{where} gate {share}% to {other}|.2f}}" for other in SIDES[1:])
            lines.append((drive, f"{share}%", *speeds, *ratios))
    return [lines]
