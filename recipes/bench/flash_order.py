"""Does it pay to lay neurons side by side that fire together? The paper's negative result, on recorded firings. Pure.

An order is made of the first half of a recording and judged on the second; that of a pack was made of calibration text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from moert.beside.flash.keeping import I64
from moert.pack.neurons import NeuronOrder
from recipes.bench.flash_firings import Bits, Firings
from recipes.bench.result import Row

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

IN_THE_PACK = "in the pack"
"""By how often they fire on calibration text."""


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


def as_trained(firings: Firings, order: NeuronOrder) -> Firings:
    """The same in the order of the checkpoint, recorded of a pack that has this one."""
    packed = np.empty_like(firings.packed)
    for layer, rows in enumerate(rows for at, rows in order.layers.items() if at.stack == "decoder"):
        fired = firings.fired(layer)
        found = np.empty_like(fired)
        np.put_along_axis(found, rows[firings.experts[layer]].astype(np.int64), fired, axis=1)
        packed[layer] = np.packbits(found, axis=1)
    return replace(firings, packed=packed)


def halves(firings: Firings) -> Iterator[tuple[int, int, Bits, Bits]]:
    """Of the experts that were asked most, by layer and number, the first and the second half of their tokens."""
    for layer, experts in enumerate(firings.experts):
        fired = firings.fired(layer)
        numbers, counts = np.unique(experts, return_counts=True)
        most = numbers[np.argsort(-counts, kind="stable")][:MOST_EXPERTS]
        for expert in most.tolist():
            mine = fired[experts == expert]
            if len(mine) >= LEAST_VISITS:
                yield layer, expert, mine[: len(mine) // 2], mine[len(mine) // 2 :]


def order_rows(name: str, firings: Firings, order: NeuronOrder | None = None) -> Iterator[Row]:
    """`order`: of the pack that was recorded; None: it has that of the checkpoint."""
    parts = list(halves(firings if order is None else as_trained(firings, order)))
    if not parts:
        return
    places = [] if order is None else [at for at in order.layers if at.stack == "decoder"]
    for size in SIZES:
        shares = {what: [touched(b, of(a, size), size) for _, _, a, b in parts] for what, of in ORDERS.items()}
        if order is not None:
            lies = [order.of(places[layer].expert(expert)).astype(np.int64) for layer, expert, _, _ in parts]
            shares[IN_THE_PACK] = [touched(b, each, size) for each, (_, _, _, b) in zip(lies, parts, strict=True)]
        for what, each in shares.items():
            share = float(np.mean(each))
            yield Row(f"{name}, blocks of {size}: {what}", 100 * share, "% of blocks", n=len(parts))
    friends = [closest_friends(first) for _, _, first, _ in parts]
    distinct = np.mean([len(np.unique(each)) / len(each) for each in friends])
    yield Row(f"{name}: neurons that are anyone's closest friend", 100 * float(distinct), "% of all", n=len(parts))
