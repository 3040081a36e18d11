"""Isotonic regression: the monotone sequence nearest to a noisy one."""

from __future__ import annotations

from collections.abc import Sequence


def falling(values: Sequence[float]) -> list[float]:
    """The never-rising sequence with the least squared distance to `values` (pool adjacent violators)."""
    blocks: list[tuple[float, int]] = []  # mean, count
    for value in values:
        mean, count = value, 1
        while blocks and blocks[-1][0] < mean:
            before, size = blocks.pop()
            mean = (before * size + mean * count) / (size + count)
            count += size
        blocks.append((mean, count))
    return [mean for mean, count in blocks for _ in range(count)]


def rising(values: Sequence[float]) -> list[float]:
    """The never-falling sequence with the least squared distance to `values`."""
    return falling(list(values)[::-1])[::-1]
