"""Does it pay to lay neurons side by side that fire together? The paper's negative result, on recorded firings. Pure.

An order is made of the first half of a recording and judged on the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from moert.experts.neurons.keeping import I64
from tests.bench.flash_firings import Bits, Firings
from tests.bench.result import Row

SIZES = (2, 4, 8, 16, 32)
LEAST_VISITS = 64
"""Of an expert that is looked at."""
MOST_EXPERTS = 4
"""Of a layer that are looked at: those with the most tokens."""


def as_given(fired: Bits, size: int) -> I64:
    return np.arange(fired.shape[1])


def by_frequency(fired: Bits, size: int) -> I64:
    """Those that fire most come first."""
    return np.argsort(-fired.sum(axis=0), kind="stable")


def together(fired: Bits, size: int) -> I64:
    """Blocks of `size`: each begins with the most frequent neuron that is left, and takes again and again the one whose
    tokens are most like those that ask for the block (Jaccard)."""
    counts, left = fired.sum(axis=0), np.ones(fired.shape[1], np.bool_)
    order: list[int] = []
    while left.any():
        chosen = int(np.where(left, counts, -1).argmax())
        asked, both = np.zeros(len(fired), np.bool_), np.zeros_like(counts)
        for _ in range(min(size, int(left.sum()))):
            order.append(chosen)
            left[chosen] = False
            more = fired[:, chosen] & ~asked
            asked |= more
            both += fired[more].sum(axis=0)
            alike = both / np.maximum(1, counts + int(asked.sum()) - both)
            chosen = int(np.where(left, alike, -1).argmax())
    return np.array(order)


ORDERS: Mapping[str, Callable[[Bits, int], I64]] = {
    "as given": as_given, "by frequency": by_frequency, "together": together,
}  # fmt: skip


def touched(fired: Bits, order: I64, size: int) -> float:
    """Of the blocks of `size` neurons in this order, how many a token asks for, on average. 0..1"""
    ordered = fired[:, order]
    ordered = np.pad(ordered, ((0, 0), (0, -ordered.shape[1] % size)))
    return float(ordered.reshape(len(ordered), -1, size).any(axis=2).mean())


def closest_friends(fired: Bits) -> I64:
    """[d_ff]: the other neuron that fires most often when this one does."""
    columns = fired.astype(np.float32)
    both = columns.T @ columns
    np.fill_diagonal(both, -1)
    found: I64 = both.argmax(axis=1)
    return found


def halves(firings: Firings) -> Iterator[tuple[Bits, Bits]]:
    """Of the experts that were asked most, the first and the second half of their tokens."""
    for layer, experts in enumerate(firings.experts):
        fired = firings.fired(layer)
        numbers, counts = np.unique(experts, return_counts=True)
        most = numbers[np.argsort(-counts, kind="stable")][:MOST_EXPERTS]
        for expert in most.tolist():
            mine = fired[experts == expert]
            if len(mine) >= LEAST_VISITS:
                yield mine[: len(mine) // 2], mine[len(mine) // 2 :]


def order_rows(name: str, firings: Firings) -> Iterator[Row]:
    parts = list(halves(firings))
    if not parts:
        return
    for size in SIZES:
        for what, order in ORDERS.items():
            share = np.mean([touched(later, order(first, size), size) for first, later in parts])
            yield Row(f"{name}, blocks of {size}: {what}", 100 * float(share), "% of blocks", n=len(parts))
    friends = [closest_friends(first) for first, _ in parts]
    distinct = np.mean([len(np.unique(each)) / len(each) for each in friends])
    yield Row(f"{name}: neurons that are anyone's closest friend", 100 * float(distinct), "% of all", n=len(parts))
