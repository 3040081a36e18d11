"""Paths: the routing of calibration text through the packed model, as counts of successive experts and as figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from moeconv.measure.scorers import Routed
from moeconv.routes import SampleRoutes, at_least, record
from moert.pack.model_spec import LayerKey, StackName
from moert.pack.paths import PATHS, ContextCounts, Trace, TransitionTable
from moert.pack.tensors import bound_of

Routes = dict[LayerKey, npt.NDArray[np.int64]]
"""Experts [tokens, top_k] of each layer with experts, in the order of execution; row t is the same token in all layers
of a stack."""

SCORED_TOKENS = 4000
MOST_SHARE = 0.01
LEAST_BYTES = 1 << 20
"""Tables may take this share of a pack, or these bytes of any pack."""
_ENTRY_BYTES, _CONTEXT_BYTES = 2 + 4, 4 + 4  # in paths.safetensors
_HEADER_BYTES = 9 * 2 * 10  # of a layer: offsets of its tensors have more digits than those of empty ones
_MOST_COUNT = 1 << 16  # larger counts are treated alike


@dataclass(frozen=True)
class PathFigures:
    """Figures of paths. `accuracy[known][n - 1]`: share of the experts that held-out tokens select which are among the
    n * top_k most probable ones, given the experts of the `known` layers before (paper's Fig. 8; with top_k = 1 the
    usual top-n accuracy). `coverage20`: share of tokens that take one of the 20% most frequent paths (a path: the first
    choice of each layer). `best_next`: how often held-out tokens select the likeliest next expert, given the two layers
    before. All but coverage are judged on layers that have two before them; None without one."""

    tokens: int
    coverage20: Mapping[StackName, float]
    best_next: float | None
    accuracy: tuple[tuple[float, float, float] | None, ...]


@dataclass(frozen=True)
class Bounded:
    """A table without the experts that were counted less than `least` times after one or two others; `left_out`: their
    share of these counts."""

    table: TransitionTable
    least: int
    left_out: float


def routes_of(parts: Sequence[Routed]) -> Routes:
    """Returns the routing of all samples: of running text, or of inputs and the greedy outputs to them."""
    return {at: torch.cat([part.experts[at] for part in parts]).numpy() for at in parts[0].experts}


def trace_of(parts: Sequence[Routed], num_experts: int) -> Trace:
    """Returns the routing sample by sample, in the order of the text and not of the batches."""
    samples: dict[int, SampleRoutes] = {}
    for part in parts:
        stacks: dict[StackName, list[npt.NDArray[np.int64]]] = {}
        for (stack, _), experts in part.experts.items():
            stacks.setdefault(stack, []).append(experts.numpy())
        pieces = {
            stack: np.split(np.stack(layers, axis=1), np.cumsum(part.lengths[stack])[:-1])
            for stack, layers in stacks.items()
        }
        for index, place in enumerate(part.samples):
            samples[place] = {stack: pieces[stack][index] for stack in pieces}
    return record(num_experts, (samples[place] for place in sorted(samples)))


def figures(table: TransitionTable, routes: Routes, heldout: Routes) -> PathFigures:
    """Returns the coverage on the profiled text and the accuracy of the table on held-out text."""
    accuracy = tuple(_accuracy(table, heldout, known) for known in (0, 1, 2))
    return PathFigures(
        tokens=sum(len(layers[0]) for layers in _by_stack(routes).values()),
        coverage20={stack: coverage(layers) for stack, layers in _by_stack(routes).items()},
        best_next=_best_next(table, heldout),
        accuracy=accuracy,
    )


def bounded(table: TransitionTable, pack_bytes: int) -> Bounded:
    """Returns the table with its most frequent entries, of all layers and after one expert and two alike, as many as
    fit into MOST_SHARE of a pack of `pack_bytes`, or into LEAST_BYTES, and into the largest file that is read."""
    counted = _tables(table)
    entries, contexts = np.zeros((2, _MOST_COUNT + 1), np.int64)  # by how often they were counted
    for part in counted:
        entries += _histogram(part.counts)
        if len(part.contexts):
            contexts += _histogram(np.maximum.reduceat(part.counts, part.rows[:-1]))
    empty_bytes = len(at_least(table, 1 << 32).to_bytes()) + _HEADER_BYTES * len(table.layers)
    nbytes = empty_bytes + _ENTRY_BYTES * _from_each_on(entries) + _CONTEXT_BYTES * _from_each_on(contexts)
    most = min(max(MOST_SHARE * pack_bytes, LEAST_BYTES), bound_of(PATHS).most_bytes)
    fits = np.append(nbytes[1:] <= most, True)
    least = 1 + int(fits.argmax())
    kept = table if least == 1 else at_least(table, least if least <= _MOST_COUNT else 1 << 32)
    return Bounded(kept, least, 1 - _total(_tables(kept)) / max(_total(counted), 1))


def _tables(table: TransitionTable) -> list[ContextCounts]:
    return [part for paths in table.layers.values() for part in (paths.one_before, paths.two_before)]


def _histogram(counts: npt.NDArray[np.uint32]) -> npt.NDArray[np.int64]:
    return np.bincount(np.minimum(counts, _MOST_COUNT), minlength=_MOST_COUNT + 1)


def _from_each_on(histogram: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return histogram[::-1].cumsum()[::-1]


def _total(tables: Sequence[ContextCounts]) -> int:
    return sum(int(part.counts.sum(dtype=np.int64)) for part in tables)


def _by_stack(routes: Routes) -> dict[StackName, list[npt.NDArray[np.int64]]]:
    found: dict[StackName, list[npt.NDArray[np.int64]]] = {}
    for at, experts in routes.items():
        found.setdefault(at.stack, []).append(experts)
    return found


def coverage(layers: Sequence[npt.NDArray[np.int64]], share: float = 0.2) -> float:
    """Returns the share of tokens with a path among the `share` most frequent of the seen paths."""
    paths = Counter(map(tuple, np.stack([layer[:, 0] for layer in layers], axis=1).tolist()))
    counts = sorted(paths.values(), reverse=True)
    top = max(1, round(share * len(counts)))
    return sum(counts[:top]) / sum(counts)


def _predictions(table: TransitionTable, routes: Routes, known: int) -> Iterator[tuple[set[int], list[int]]]:
    """Yields (experts that a token selects, all experts in order of probability), for every layer that has two before
    it and at most SCORED_TOKENS tokens, spread over all."""
    order = list(routes)
    for earlier, before, at in zip(order, order[1:], order[2:], strict=False):
        if earlier.stack != at.stack:
            continue
        count = len(routes[at])
        for token in np.unique(np.linspace(0, count - 1, min(count, SCORED_TOKENS)).astype(np.int64)):
            actual = set(_selected(routes[at], token))
            if actual:
                one = _selected(routes[before], token) if known > 0 else []
                two = _selected(routes[earlier], token) if known > 1 else []
                likely = np.argsort(-table.probabilities(at, one, two), kind="stable")
                yield actual, likely.tolist()


def _selected(layer: npt.NDArray[np.int64], token: int) -> list[int]:
    return [int(expert) for expert in layer[token] if expert >= 0]


def _accuracy(table: TransitionTable, routes: Routes, known: int) -> tuple[float, float, float] | None:
    hits, total = np.zeros(3), 0
    for actual, order in _predictions(table, routes, known):
        total += len(actual)
        for n in range(3):
            hits[n] += len(actual.intersection(order[: (n + 1) * len(actual)]))
    if not total:
        return None
    first, second, third = (hits / total).tolist()
    return first, second, third


def _best_next(table: TransitionTable, routes: Routes) -> float | None:
    hits = [order[0] in actual for actual, order in _predictions(table, routes, 2)]
    return float(np.mean(hits)) if hits else None
