"""Room for experts, shared out to their parts. Pure."""

from __future__ import annotations

import math
from typing import NamedTuple

COLUMNS = 0.25
"""Of the room, what columns get at least where a token goes to few of the experts: an expert's rows are asked for
whenever it is, its columns only where they fire; but those of a frequent expert more often than a rare one's rows."""


class Shares(NamedTuple):
    """Of the cache of experts' gate and up, and of that of blocks: of columns, or where whole blocks are read of
    both."""

    rows_bytes: int
    blocks_bytes: int


def all_to_blocks(room_bytes: int, blocks_bytes: int, one_bytes: int) -> Shares:
    """Where whole blocks are read. `blocks_bytes`: of all experts; `one_bytes`: see `shares`."""
    return Shares(0, blocks_bytes if room_bytes >= blocks_bytes else max(0, room_bytes - one_bytes))


def shares(
    room_bytes: int, rows_bytes: int, least_rows_bytes: int, columns_bytes: int, one_bytes: int, asked: float = 0.0
) -> Shares:  # fmt: skip
    """Of so much room. `rows_bytes`, `columns_bytes`: of all experts; `least_rows_bytes`: what a token can ask for of a
    layer; `one_bytes`: all columns of one expert, for which there is room beside unless all of all have some; `asked`:
    the share of its experts that a layer asks for at each token."""
    if room_bytes >= rows_bytes + columns_bytes:
        return Shares(rows_bytes, columns_bytes)
    left = max(0, room_bytes - one_bytes)
    columns = min(columns_bytes, max(left - rows_bytes, int((1 - asked) * COLUMNS * left)))
    rows = min(rows_bytes, max(left - columns, least_rows_bytes))
    return Shares(rows, max(0, min(columns, left - rows)))


def room_for(rows_bytes: int, one_bytes: int, asked: float) -> int:
    """Room in which `shares` leaves so many bytes to rows, however many columns there are."""
    return one_bytes + math.ceil(rows_bytes / (1 - (1 - asked) * COLUMNS))
