"""What the counts of paths.safetensors say: how few paths most tokens take, and how well the next expert is guessed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from moert.pack.model_spec import STACKS, StackName
from moert.pack.paths import ContextCounts, LayerPaths, TransitionTable

F64 = npt.NDArray[np.float64]


def path_shares(table: TransitionTable, stack: StackName) -> tuple[F64, F64] | None:
    """(share of paths, share of tokens), both from 0 to 1, the most frequent paths first (EdgeMoE Fig. 4).

    The table counts paths through three successive layers with experts; those of all such layers go in. None where
    the stack has fewer layers or nothing was counted.
    """
    counts = [layer.two_before.counts for layer in table.of_stack(stack) if len(layer.two_before.counts)]
    if not counts:
        return None
    ordered = np.sort(np.concatenate(counts).astype(np.float64))[::-1]
    tokens = np.concatenate([[0.0], np.cumsum(ordered)]) / ordered.sum()
    return np.arange(len(tokens)) / (len(tokens) - 1), tokens


def top_share(shares: tuple[F64, F64], share: float = 0.2) -> float:
    """Share of tokens that take one of the `share` most frequent paths."""
    return float(np.interp(share, *shares))


def prediction(table: TransitionTable, top_k: int) -> list[tuple[float, float, float]] | None:
    """Top-1, top-2 and top-3 accuracy with the experts of 0, 1 and 2 layers before known (EdgeMoE Fig. 8).

    Top-n: the expert is among the n * top_k most counted ones. Each choice is judged by the counts of all the others,
    its own left out, so a context seen once predicts nothing. With top_k > 1 one expert of each layer is taken as
    known. Layers that have two before them; None where there is no such layer.
    """
    judged = [layer for stack in STACKS for layer in table.of_stack(stack)[2:]]
    results: list[tuple[float, float, float]] = []
    for known in range(3):
        hits, total = np.zeros(3), 0.0
        for layer in judged:
            for counts in _contexts(layer, known):
                hits += [_hits(counts, n * top_k) for n in (1, 2, 3)]
                total += counts.sum()
        if not total:
            return None
        first, second, third = (hits / total).tolist()
        results.append((first, second, third))
    return results


def _contexts(layer: LayerPaths, known: int) -> Iterator[F64]:
    """The counts of the experts seen in each context, in order of the experts."""
    if known == 0:
        yield layer.frequency.astype(np.float64)
        return
    table: ContextCounts = layer.one_before if known == 1 else layer.two_before
    for start, stop in zip(table.rows[:-1].tolist(), table.rows[1:].tolist(), strict=True):
        yield table.counts[start:stop].astype(np.float64)


def _hits(counts: F64, n: int) -> float:
    """How many of the counted choices are still among the n most counted when they themselves are taken away."""
    ordered = np.sort(counts)[::-1]
    bar = max(1.0, ordered[n]) if len(ordered) > n else 1.0
    return float(counts[counts - 1 >= bar].sum())
