"""Room for experts, shared out to their parts. Pure."""

from __future__ import annotations

from typing import NamedTuple

COLUMNS = 0.25
"""Of the room, what columns get at least: rows are read whole where an expert is asked for, columns where they fire."""


class Shares(NamedTuple):
    rows_bytes: int
    columns_bytes: int


def shares(room_bytes: int, rows_bytes: int, least_rows_bytes: int, columns_bytes: int, one_bytes: int) -> Shares:
    """Of so much room. `rows_bytes`, `columns_bytes`: of all experts; `least_rows_bytes`: what a token can ask for of a
    layer; `one_bytes`: all columns of one expert, for which there is room beside unless all of all have some."""
    if room_bytes >= rows_bytes + columns_bytes:
        return Shares(rows_bytes, columns_bytes)
    left = max(0, room_bytes - one_bytes)
    columns = min(columns_bytes, max(left - rows_bytes, int(COLUMNS * left)))
    rows = min(rows_bytes, max(left - columns, least_rows_bytes))
    return Shares(rows, max(0, min(columns, left - rows)))
