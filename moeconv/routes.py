"""Routing of text, recorded for packs: counts of successive experts, and the trace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from moert.pack.model_spec import STACKS, LayerKey, StackName
from moert.pack.paths import (
    DROPPED,
    I64,
    MOST_ENTRIES,
    U16,
    ContextCounts,
    LayerPaths,
    StackTrace,
    Trace,
    TransitionTable,
)

_CHUNK_TOKENS = 8192
SampleRoutes = Mapping[StackName, npt.NDArray[np.integer[Any]]]
"""For each stack with experts [tokens, layers, top_k]: the experts of one sample's tokens, -1 where a token was
dropped. The layers are those with experts, in order."""


def build(num_experts: int, routes: Mapping[LayerKey, npt.NDArray[np.integer[Any]]]) -> TransitionTable:
    """Returns the counts of routing traces.

    `routes`: [tokens, top_k] for each layer with experts, in the order of execution; row t is the same token in every
    layer of a stack, -1 marks a layer that dropped it. With top_k > 1 every pair of experts (one of each of the two
    layers before) counts once for every expert selected after it.
    """
    layers: dict[LayerKey, LayerPaths] = {}
    so_far: dict[StackName, list[I64]] = {}
    for at, experts in routes.items():
        before = so_far.setdefault(at.stack, [])
        before.append(np.asarray(experts, dtype=np.int64))
        layers[at] = _count_layer(before, num_experts)
    return TransitionTable(num_experts, layers)


def _count_layer(layers: list[I64], size: int) -> LayerPaths:
    """Returns the counts of the last of `layers`."""
    present = layers[-1]
    selected = present[present >= 0]
    if selected.size and int(selected.max()) >= size:
        raise ValueError(f"a trace names expert {int(selected.max())}, there are {size}")
    frequency = np.bincount(selected, minlength=size).astype(np.uint64)
    one = _table(_entries(layers[-2:], size) if len(layers) > 1 else (), size)
    two = _table(_entries(layers[-3:], size) if len(layers) > 2 else (), size)
    return LayerPaths(frequency, one, two)


def _entries(layers: list[I64], size: int) -> Iterator[I64]:
    """Yields context * size + expert for every choice of one expert of each layer that a token went to, in chunks. The
    experts of all layers but the last are the context."""
    for start in range(0, len(layers[-1]), _CHUNK_TOKENS):
        entries, kept = np.zeros(1, np.int64), np.ones(1, bool)
        for place, layer in enumerate(layers):
            others = [1 + other for other in range(len(layers)) if other != place]
            experts = np.expand_dims(layer[start : start + _CHUNK_TOKENS], others)
            entries, kept = entries * size + experts, kept & (experts >= 0)
        yield entries[kept]


def _table(chunks: Iterable[I64], size: int) -> ContextCounts:
    """Returns a sparse table that counts pairs of context and expert, given in chunks as context * size + expert."""
    entries, counts = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    for chunk in chunks:
        found, times = np.unique(chunk, return_counts=True)
        merged, where = np.unique(np.concatenate([entries, found]), return_inverse=True)
        counts = np.bincount(where, np.concatenate([counts, times]), len(merged)).astype(np.int64)
        entries = merged
    contexts, first = np.unique(entries // size, return_index=True)
    return ContextCounts(
        contexts=contexts.astype(np.uint32),
        rows=np.append(first, len(entries)).astype(np.uint32),
        experts=(entries % size).astype(np.uint16),
        counts=np.minimum(counts, np.iinfo(np.uint32).max).astype(np.uint32),
    )


def record(num_experts: int, samples: Iterable[SampleRoutes]) -> Trace:
    """Returns the trace of the first samples, as many as MOST_ENTRIES allows; the first one may be cut short."""
    kept: list[SampleRoutes] = []
    room = MOST_ENTRIES
    for sample in samples:
        entries = sum(routes.size for routes in sample.values())
        if entries > room:
            if not kept:
                kept.append({name: routes[: len(routes) * room // entries] for name, routes in sample.items()})
            break
        kept.append(sample)
        room -= entries
    stacks: dict[StackName, StackTrace] = {}
    for name in STACKS:
        parts = [sample[name] for sample in kept if name in sample]
        if parts:
            starts = np.cumsum([0, *map(len, parts)]).astype(np.uint32)
            stacks[name] = StackTrace(_as_u16(np.concatenate(parts), num_experts), starts)
    return Trace(num_experts, stacks)


def _as_u16(experts: npt.NDArray[np.integer[Any]], num_experts: int) -> U16:
    if experts.size and not -1 <= experts.min() <= experts.max() < num_experts:
        raise ValueError(f"a trace names experts {experts.min()} to {experts.max()}, there are {num_experts}")
    return np.where(experts < 0, DROPPED, experts).astype(np.uint16)


def at_least(table: TransitionTable, count: int) -> TransitionTable:
    """Returns the table without counts below `count` after an expert or two; how often each expert was selected
    stays."""
    layers = {
        at: replace(paths, one_before=_at_least(paths.one_before, count), two_before=_at_least(paths.two_before, count))
        for at, paths in table.layers.items()
    }
    return TransitionTable(table.num_experts, layers)


def _at_least(table: ContextCounts, count: int) -> ContextCounts:
    kept = table.counts >= count
    rows = np.append(0, kept.cumsum())[table.rows]
    some = np.diff(rows) > 0
    return ContextCounts(
        contexts=table.contexts[some],
        rows=np.append(rows[:-1][some], rows[-1]).astype(np.uint32),
        experts=table.experts[kept],
        counts=table.counts[kept],
    )
