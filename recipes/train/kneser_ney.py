"""Interpolated Kneser–Ney language model over integer streams (Chen & Goodman, 1999, modified discounts).

N-grams are held as 64-bit hashes in sorted arrays, so that ten million tokens fit in memory and lookups are
vectorised; with that many distinct n-grams a collision has a chance of about one in a million.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MIX = np.uint64(0x9E3779B97F4A7C15)


def hashes(stream: np.ndarray, order: int) -> np.ndarray:
    """Hash of the ``order`` symbols that begin at each position; [len − order + 1] of uint64."""
    total = np.zeros(max(len(stream) - order + 1, 0), dtype=np.uint64)
    for offset in range(order):
        total = (total + stream[offset : offset + len(total)].astype(np.uint64) + np.uint64(1)) * MIX
        total ^= total >> np.uint64(29)
    return total


@dataclass(frozen=True)
class Table:
    """Counts of one order, in sorted arrays: n-grams, and for contexts the total and the mass that is backed off."""

    ngrams: np.ndarray  # uint64
    counts: np.ndarray  # float64
    contexts: np.ndarray  # uint64
    totals: np.ndarray  # float64
    backed: np.ndarray  # float64, sum of the discounts of a context's n-grams
    discounts: np.ndarray  # for counts of 1, 2 and 3 or more


def discounts_of(counts: np.ndarray) -> np.ndarray:
    """Modified Kneser–Ney discounts from the numbers of n-grams seen once to four times."""
    seen = [max(int((counts == n).sum()), 1) for n in (1, 2, 3, 4)]
    base = seen[0] / (seen[0] + 2 * seen[1])
    raw = [n - (n + 1) * base * seen[n] / seen[n - 1] for n in (1, 2, 3)]
    return np.clip(raw, 0.1, [0.95, 1.95, 2.95])


def lookup(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Value of each wanted key in sorted ``keys``, 0 where it is missing."""
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[place] == wanted, values[place], 0.0)


def make_table(ngrams: np.ndarray, contexts: np.ndarray, counts: np.ndarray) -> Table:
    """Table from distinct n-grams with the hash of their context and their count."""
    discounts = discounts_of(counts)
    taken = discounts[np.clip(counts, 1, 3).astype(int) - 1]
    heads, inverse = np.unique(contexts, return_inverse=True)
    order = np.argsort(ngrams)
    return Table(
        ngrams[order],
        counts[order].astype(np.float64),
        heads,
        np.bincount(inverse, weights=counts),
        np.bincount(inverse, weights=taken),
        discounts,
    )


class KneserNey:
    """Model of ``order`` symbols; the lowest level interpolates with base probabilities that the caller gives."""

    def __init__(self, stream: np.ndarray, order: int):
        self.order = order
        self.tables: list[Table] = []  # from order 1 upwards
        hashed = {n: hashes(stream, n) for n in range(1, order + 1)}
        above: np.ndarray | None = None  # first positions of the distinct n-grams one order up
        for n in range(order, 0, -1):
            if above is None:
                grams, first, counts = np.unique(hashed[n], return_index=True, return_counts=True)
            else:  # continuation counts: how many distinct symbols come before
                grams, place, counts = np.unique(hashed[n][above + 1], return_index=True, return_counts=True)
                first = above[place] + 1
            contexts = hashed[n - 1][first] if n > 1 else np.zeros(len(first), dtype=np.uint64)
            self.tables.insert(0, make_table(grams, contexts, counts))
            above = first

    def probabilities(self, stream: np.ndarray, base: np.ndarray) -> np.ndarray:
        """Probability of each symbol given up to order − 1 before it; ``base`` [len] is that of the lowest level."""
        result = base.astype(np.float64)
        for n, table in enumerate(self.tables, start=1):
            grams = hashes(stream, n)
            heads = hashes(stream, n - 1)[: len(grams)] if n > 1 else np.zeros(len(grams), dtype=np.uint64)
            counts = lookup(table.ngrams, table.counts, grams)
            totals = lookup(table.contexts, table.totals, heads)
            backed = lookup(table.contexts, table.backed, heads)
            taken = np.where(counts > 0, table.discounts[np.clip(counts, 1, 3).astype(int) - 1], 0.0)
            tail = result[n - 1 :]
            known = totals > 0
            safe = np.where(known, totals, 1.0)
            result[n - 1 :] = np.where(known, (counts - taken) / safe + backed / safe * tail, tail)
        return result
