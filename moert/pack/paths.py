"""paths.safetensors: which experts follow which, counted on calibration text (EdgeMoE §3.3). SPEC.md has the layout.

Layers here are layers with experts, counted from 0 within each stack. A context is a selected expert of the layer
before, or a pair (a, b) of experts of the two layers before, a of the earlier one, with the id a * num_experts + b.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from moert.pack.errors import HeaderInvalid
from moert.pack.model_spec import STACKS, ModelSpec, Stack
from moert.pack.tensors import TensorFile, to_bytes

PATHS = "paths.safetensors"
VERSION = 1
_CHUNK_TOKENS = 8192

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ContextCounts:
    """Sparse counts [contexts, num_experts], one row for each context that was seen.

    contexts u32, ascending; row i holds experts[rows[i] : rows[i + 1]] (u16, ascending) with their counts (u32).
    """

    contexts: npt.NDArray[np.uint32]
    rows: npt.NDArray[np.uint32]
    experts: npt.NDArray[np.uint16]
    counts: npt.NDArray[np.uint32]

    def total(self, contexts: I64, num_experts: int) -> F64:
        """The counts of all given contexts, added up: [num_experts]."""
        out = np.zeros(num_experts)
        if not len(self.contexts):
            return out
        at = np.minimum(np.searchsorted(self.contexts, contexts), len(self.contexts) - 1)
        for row in at[self.contexts[at] == contexts].tolist():
            span = slice(int(self.rows[row]), int(self.rows[row + 1]))
            out[self.experts[span]] += self.counts[span]
        return out


@dataclass(frozen=True)
class LayerPaths:
    """Counts for one layer. frequency [num_experts] u64; the first layers of a stack have empty context tables."""

    frequency: npt.NDArray[np.uint64]
    one_before: ContextCounts
    two_before: ContextCounts


@dataclass(frozen=True)
class TransitionTable:
    """The counts of every layer with experts of every stack."""

    num_experts: int
    stacks: Mapping[Stack, tuple[LayerPaths, ...]]

    def probabilities(
        self, stack: Stack, layer: int, one_before: Sequence[int] = (), two_before: Sequence[int] = ()
    ) -> F64:
        """[num_experts]: how likely a token goes to each expert of `layer` (a layer with experts, from 0).

        `one_before` are the token's experts in the layer before, `two_before` in the one before that; -1 is ignored.
        Counts of all contexts are added; where they are zero, one layer less is looked at, at last none. All zeros if
        nothing was ever seen in this layer.
        """
        counts = self.counts(stack, layer, one_before, two_before)[0]
        total = counts.sum()
        return counts / total if total else counts

    def counts(
        self, stack: Stack, layer: int, one_before: Sequence[int] = (), two_before: Sequence[int] = ()
    ) -> tuple[F64, int]:
        """(counts [num_experts], layers looked back: 2, 1 or 0). Raises IndexError for a layer that is not there."""
        paths, size = self.stacks[stack][layer], self.num_experts
        before = np.array([expert for expert in one_before if expert >= 0], dtype=np.int64)
        earlier = np.array([expert for expert in two_before if expert >= 0], dtype=np.int64)
        if len(before) and len(earlier):
            counts = paths.two_before.total((earlier[:, None] * size + before[None, :]).ravel(), size)
            if counts.any():
                return counts, 2
        if len(before):
            counts = paths.one_before.total(before, size)
            if counts.any():
                return counts, 1
        return paths.frequency.astype(np.float64), 0

    def check(self, spec: ModelSpec) -> None:
        """Raises HeaderInvalid if the tables are not those of a model of this shape."""
        found = {stack: len(layers) for stack, layers in self.stacks.items()}
        towers = {stack: spec.stack(stack) for stack in STACKS}
        expected = {stack: len(tower.moe_layers) for stack, tower in towers.items() if tower is not None}
        if self.num_experts != spec.moe.num_experts or found != expected:
            raise HeaderInvalid(
                f"{PATHS} counts {self.num_experts} experts in {found} layers, the model has {spec.moe.num_experts} "
                f"in {expected}: profile the paths of this pack again"
            )

    def to_bytes(self) -> bytes:
        """The file's content; equal tables give equal bytes."""
        tensors: dict[str, npt.NDArray[Any]] = {}
        for stack, layers in self.stacks.items():
            for index, paths in enumerate(layers):
                at = f"{stack}.{index}"
                tensors[f"{at}.frequency"] = paths.frequency
                for name, table in (("one", paths.one_before), ("two", paths.two_before)):
                    tensors[f"{at}.{name}.contexts"] = table.contexts
                    tensors[f"{at}.{name}.rows"] = table.rows
                    tensors[f"{at}.{name}.experts"] = table.experts
                    tensors[f"{at}.{name}.counts"] = table.counts
        metadata = {"format": "model.pack paths", "version": VERSION, "num_experts": self.num_experts}
        metadata |= {f"{stack}_layers": len(layers) for stack, layers in self.stacks.items()}
        return to_bytes(tensors, metadata)

    @classmethod
    def from_bytes(cls, body: bytes) -> TransitionTable:
        """Raises HeaderInvalid or FormatTooNew."""
        file = TensorFile(PATHS, body, VERSION)
        size = file.number("num_experts", 65535)
        stacks: dict[Stack, tuple[LayerPaths, ...]] = {}
        for stack in STACKS:
            if file.has(f"{stack}_layers"):
                n_layers = file.number(f"{stack}_layers", 4096)
                stacks[stack] = tuple(_layer(file, f"{stack}.{index}", size) for index in range(n_layers))
        return cls(size, stacks)


def build(num_experts: int, routes: Mapping[Stack, Sequence[npt.NDArray[np.integer[Any]]]]) -> TransitionTable:
    """Counts routing traces.

    `routes`: for each stack, one array [tokens, top_k] for each of its layers with experts, in order; row t is the
    same token in every layer, -1 marks a layer that dropped it. With top_k > 1 every pair of experts (one of each of
    the two layers before) counts once for every expert selected after it.
    """
    stacks: dict[Stack, tuple[LayerPaths, ...]] = {}
    for stack in STACKS:
        if stack in routes:
            layers = [np.asarray(array, dtype=np.int64) for array in routes[stack]]
            stacks[stack] = tuple(_count_layer(layers[: index + 1], num_experts) for index in range(len(layers)))
    return TransitionTable(num_experts, stacks)


def _count_layer(layers: list[I64], size: int) -> LayerPaths:
    """Counts for the last of `layers`."""
    present = layers[-1]
    selected = present[present >= 0]
    if selected.size and int(selected.max()) >= size:
        raise ValueError(f"a trace names expert {int(selected.max())}, there are {size}")
    frequency = np.bincount(selected, minlength=size).astype(np.uint64)
    one = _table(_pairs(layers[-2], present, size), size) if len(layers) > 1 else _table(iter(()), size)
    if len(layers) < 3:
        return LayerPaths(frequency, one, _table(iter(()), size))
    return LayerPaths(frequency, one, _table(_triples(layers[-3], layers[-2], present, size), size))


def _pairs(before: I64, present: I64, size: int) -> Iterator[I64]:
    for start in range(0, len(present), _CHUNK_TOKENS):
        rows = slice(start, start + _CHUNK_TOKENS)
        b, c = np.broadcast_arrays(before[rows, :, None], present[rows, None, :])
        yield (b * size + c)[(b >= 0) & (c >= 0)]


def _triples(earlier: I64, before: I64, present: I64, size: int) -> Iterator[I64]:
    for start in range(0, len(present), _CHUNK_TOKENS):
        rows = slice(start, start + _CHUNK_TOKENS)
        a, b, c = np.broadcast_arrays(
            earlier[rows, :, None, None], before[rows, None, :, None], present[rows, None, None, :]
        )
        yield ((a * size + b) * size + c)[(a >= 0) & (b >= 0) & (c >= 0)]


def _table(chunks: Iterator[I64], size: int) -> ContextCounts:
    """Counts pairs of context and expert, given in chunks as context * size + expert → a sparse table."""
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


def _layer(file: TensorFile, at: str, size: int) -> LayerPaths:
    frequency = file.tensor(f"{at}.frequency", np.uint64)
    if len(frequency) != size:
        raise file.wrong(f"{at}.frequency has {len(frequency)} experts, expected {size}")
    return LayerPaths(
        frequency,
        _sparse(file, f"{at}.one", size, size),
        _sparse(file, f"{at}.two", size, size * size),
    )


def _sparse(file: TensorFile, at: str, size: int, contexts: int) -> ContextCounts:
    table = ContextCounts(
        contexts=file.tensor(f"{at}.contexts", np.uint32),
        rows=file.tensor(f"{at}.rows", np.uint32),
        experts=file.tensor(f"{at}.experts", np.uint16),
        counts=file.tensor(f"{at}.counts", np.uint32),
    )
    rows = table.rows.astype(np.int64)
    sound = (
        len(rows) == len(table.contexts) + 1
        and len(table.experts) == len(table.counts)
        and rows[0] == 0
        and rows[-1] == len(table.experts)
        and bool((np.diff(rows) > 0).all())
        and bool((np.diff(table.contexts.astype(np.int64)) > 0).all())
        and all(int(values.max(initial=0)) < below for values, below in ((table.contexts, contexts),
                                                                         (table.experts, size)))
    )  # fmt: skip
    if not sound:
        raise file.wrong(f"the table {at} contradicts itself")
    return table
