"""Texts that must be written anew from some point on, and how many of them go together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

WRITTEN_ROWS = 256  # rows that are written anew in one batch,
WRITTEN_TOKENS = 16384  # and tokens of their inputs


@dataclass(frozen=True)
class Rewrite:
    """A row whose text changes from the end of `prefix` on."""

    probe: int
    place: int
    prefix: list[int]
    encoded: Tensor  # [source tokens, d_model]
    mask: Tensor  # [source tokens]


def batches(rewrites: Sequence[Rewrite]) -> Iterator[list[Rewrite]]:
    """Rows that start at like places."""
    part: list[Rewrite] = []
    widest = 0
    for rewrite in sorted(rewrites, key=lambda rewrite: len(rewrite.prefix)):
        widest = max(widest, len(rewrite.encoded))
        if part and (len(part) == WRITTEN_ROWS or widest * (len(part) + 1) > WRITTEN_TOKENS):
            yield part
            part, widest = [], len(rewrite.encoded)
        part.append(rewrite)
    if part:
        yield part
