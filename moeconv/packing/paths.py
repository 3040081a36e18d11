"""Which expert follows which? Routing of calibration text through the packed model, as counts and as figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from moeconv.measure.scorers import Routed
from moert.pack.model_spec import LayerKey, StackName
from moert.pack.paths import TransitionTable
from moert.pack.trace import SampleRoutes, Trace, record

Routes = dict[LayerKey, npt.NDArray[np.int64]]
"""[tokens, top_k] of each layer with experts, in the order of execution; row t is the same token in all of a stack."""

SCORED_TOKENS = 4000


@dataclass(frozen=True)
class PathFigures:
    """`accuracy[known][n - 1]`: how much of what held-out tokens select is among the n * top_k most probable experts,
    given the experts of the `known` layers before (paper's Fig. 8; with top_k = 1 the usual top-n accuracy).
    `coverage20`: share of tokens that take one of the 20% most frequent paths (a path: the first choice of each
    layer). `best_next`: how often held-out tokens select the likeliest next expert, given the two layers before. All
    but coverage are judged on layers that have two before them; None where there is no such layer."""

    tokens: int
    coverage20: Mapping[StackName, float]
    best_next: float | None
    accuracy: tuple[tuple[float, float, float] | None, ...]


def routes_of(parts: Sequence[Routed]) -> Routes:
    """The routing of all samples: of running text, or of inputs and the greedy outputs to them."""
    return {at: torch.cat([part.experts[at] for part in parts]).numpy() for at in parts[0].experts}


def trace_of(parts: Sequence[Routed], num_experts: int) -> Trace:
    """The same sample by sample, in the order of the text and not of the batches."""
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
    """Coverage on the profiled text, accuracy of the table on held-out text."""
    accuracy = tuple(_accuracy(table, heldout, known) for known in (0, 1, 2))
    return PathFigures(
        tokens=sum(len(layers[0]) for layers in _by_stack(routes).values()),
        coverage20={stack: coverage(layers) for stack, layers in _by_stack(routes).items()},
        best_next=_best_next(table, heldout),
        accuracy=accuracy,
    )


def _by_stack(routes: Routes) -> dict[StackName, list[npt.NDArray[np.int64]]]:
    found: dict[StackName, list[npt.NDArray[np.int64]]] = {}
    for at, experts in routes.items():
        found.setdefault(at.stack, []).append(experts)
    return found


def coverage(layers: Sequence[npt.NDArray[np.int64]], share: float = 0.2) -> float:
    """Share of tokens whose path is among the `share` most frequent of the paths that were seen."""
    paths = Counter(map(tuple, np.stack([layer[:, 0] for layer in layers], axis=1).tolist()))
    counts = sorted(paths.values(), reverse=True)
    top = max(1, round(share * len(counts)))
    return sum(counts[:top]) / sum(counts)


def _predictions(table: TransitionTable, routes: Routes, known: int) -> Iterator[tuple[set[int], list[int]]]:
    """(what a token selects, all experts in order of probability), for every layer that has two before it and at most
    SCORED_TOKENS tokens, spread over all."""
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
