"""Routing of calibration text: how often experts follow one another, and the recorded trace."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from moert.pack.model_spec import STACKS, LayerKey, ModelSpec, StackName
from moert.pack.tensors import FileKind, TensorFile

PATHS = "paths.safetensors"
_AGAIN = "profile the paths of this pack"
_PATHS = FileKind(PATHS, "paths", 2, _AGAIN)
_CHUNK_TOKENS = 8192
_MOST_LAYERS = 4096
_COLUMNS: Mapping[str, Any] = {"contexts": np.uint32, "rows": np.uint32, "experts": np.uint16, "counts": np.uint32}
"""The tensors of a table of counts, and their types: see ContextCounts."""

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
        """Returns the counts of all given contexts, added up: [num_experts]."""
        if not len(self.contexts):
            return np.zeros(num_experts)
        wanted = contexts.astype(np.uint32)  # as the table has them, or searching would copy the table
        at = np.minimum(np.searchsorted(self.contexts, wanted), len(self.contexts) - 1)
        found = at[self.contexts[at] == wanted]
        starts = self.rows[found].astype(np.int64)
        lengths = self.rows[found + 1] - starts
        entries = np.repeat(starts - (lengths.cumsum() - lengths), lengths) + np.arange(lengths.sum())
        counts: F64 = np.bincount(self.experts[entries], self.counts[entries], num_experts).astype(
            np.float64, copy=False
        )
        return counts

    def at_least(self, count: int) -> ContextCounts:
        """Returns the counts that are at least `count`, without the others."""
        kept = self.counts >= count
        rows = np.append(0, kept.cumsum())[self.rows]
        some = np.diff(rows) > 0
        return ContextCounts(
            contexts=self.contexts[some],
            rows=np.append(rows[:-1][some], rows[-1]).astype(np.uint32),
            experts=self.experts[kept],
            counts=self.counts[kept],
        )


@dataclass(frozen=True)
class LayerPaths:
    """The counts of one layer. frequency [num_experts] u64; the first layers of a stack have empty context tables."""

    frequency: npt.NDArray[np.uint64]
    one_before: ContextCounts
    two_before: ContextCounts


@dataclass(frozen=True)
class TransitionTable:
    """The counts of every layer with experts, in the order of execution."""

    num_experts: int
    layers: Mapping[LayerKey, LayerPaths]

    def of_stack(self, stack: StackName) -> list[LayerPaths]:
        """Returns the counts of a stack's layers in order."""
        return [paths for at, paths in self.layers.items() if at.stack == stack]

    def probabilities(self, at: LayerKey, one_before: Sequence[int] = (), two_before: Sequence[int] = ()) -> F64:
        """Returns for each expert of the layer how likely a token goes to it: [num_experts].

        `one_before` are the token's experts in the layer with experts before, `two_before` in the one before that; -1
        is ignored. Counts of all contexts are added; where they are zero, the context is shorter by a layer, at last
        empty. All zeros if no token was ever seen in this layer.
        """
        counts = self.counts(at, one_before, two_before)[0]
        total = counts.sum()
        return counts / total if total else counts

    def counts(self, at: LayerKey, one_before: Sequence[int] = (), two_before: Sequence[int] = ()) -> tuple[F64, int]:
        """Returns counts [num_experts] and the number of layers looked back: 2, 1 or 0. Raises KeyError for a layer
        that the table does not have."""
        paths, size = self.layers[at], self.num_experts
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

    def at_least(self, count: int) -> TransitionTable:
        """Returns the table without counts below `count` after an expert or two; how often each expert was selected
        stays."""
        layers = {
            at: replace(paths, one_before=paths.one_before.at_least(count), two_before=paths.two_before.at_least(count))
            for at, paths in self.layers.items()
        }
        return TransitionTable(self.num_experts, layers)

    def check(self, spec: ModelSpec) -> None:
        """Raises HeaderInvalid if the table does not fit a model of this shape."""
        _PATHS.check(
            "experts", dict.fromkeys(self.layers, self.num_experts), dict.fromkeys(spec.moe_layers(), spec.moe.n)
        )

    def to_bytes(self) -> bytes:
        """Returns the file's content; equal tables give equal bytes."""
        tensors: dict[str, npt.NDArray[Any]] = {}
        for (stack, layer), paths in self.layers.items():
            at = f"{stack}.{layer}"
            tensors[f"{at}.frequency"] = paths.frequency
            for name, table in (("one", paths.one_before), ("two", paths.two_before)):
                tensors |= {f"{at}.{name}.{column}": getattr(table, column) for column in _COLUMNS}
        layers = {
            f"{stack}_layers": ",".join(str(at.layer) for at in self.layers if at.stack == stack)
            for stack in dict.fromkeys(at.stack for at in self.layers)
        }
        return _PATHS.body(tensors, num_experts=self.num_experts, **layers)

    @classmethod
    def from_bytes(cls, body: bytes) -> TransitionTable:
        """Returns the table that a file's content holds. Raises HeaderInvalid or FormatTooNew."""
        file = TensorFile(_PATHS, body)
        size = file.number("num_experts", 65535)
        order = [
            LayerKey(stack, layer)
            for stack in STACKS
            if file.has(f"{stack}_layers")
            for layer in file.numbers(f"{stack}_layers", _MOST_LAYERS)
        ]
        return cls(size, {at: _layer(file, f"{at.stack}.{at.layer}", size) for at in order})


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
    table = ContextCounts(**{column: file.tensor(f"{at}.{column}", dtype) for column, dtype in _COLUMNS.items()})
    rows = table.rows
    sound = (
        len(rows) == len(table.contexts) + 1
        and len(table.experts) == len(table.counts)
        and rows[0] == 0
        and rows[-1] == len(table.experts)
        and bool((rows[1:] > rows[:-1]).all())
        and bool((table.contexts[1:] > table.contexts[:-1]).all())
        and all(int(values.max(initial=0)) < below for values, below in ((table.contexts, contexts),
                                                                         (table.experts, size)))
    )  # fmt: skip
    if not sound:
        raise file.wrong(f"the table {at} contradicts itself")
    return table


TRACE = "trace.safetensors"
_TRACE = FileKind(TRACE, "trace", 1, _AGAIN)
DROPPED = 65535
"""The number in place of an expert where a token was sent to none, since the one that it selected was full."""
MOST_ENTRIES = 1 << 17
"""The most entries (one expert of one token in one layer) that are recorded: 256 KiB."""

EVICTION_SHARES = (12, 25, 50, 75)
"""Shares of the experts' bytes, in percent, that eviction policies are chosen for."""
EVICTION = "eviction"

U16 = npt.NDArray[np.uint16]
_POLICY = re.compile("([1-9][0-9]{0,2})=([a-z-]{1,32})")
SampleRoutes = Mapping[StackName, npt.NDArray[np.integer[Any]]]
"""For each stack with experts [tokens, layers, top_k]: the experts of one sample's tokens, -1 where a token was
dropped. The layers are those with experts, in order."""


@dataclass(frozen=True)
class StackTrace:
    """The recorded routing of one stack: experts [tokens, layers, top_k] u16, DROPPED where there is none; sample i has
    the tokens starts[i] to starts[i + 1] - 1, starts [samples + 1] u32."""

    experts: U16
    starts: npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Trace:
    """The routing of some samples: the encoder reads all tokens of a sample at once, the decoder one by one.

    `eviction`: share of the experts' bytes that has room, in percent → the name of the eviction policy that hits most
    often there; ascending, empty in files of older writers.
    """

    num_experts: int
    stacks: Mapping[StackName, StackTrace]
    eviction: Mapping[int, str] = field(default_factory=dict)

    def eviction_at(self, share: float) -> str | None:
        """Returns the name of the policy for the recorded share that is nearest to `share` (a fraction), of two as near
        the smaller one; None where none is recorded."""
        nearest = min(self.eviction, key=lambda percent: abs(percent - 100 * share), default=None)
        return None if nearest is None else self.eviction[nearest]

    @property
    def n_samples(self) -> int:
        return min((len(stack.starts) - 1 for stack in self.stacks.values()), default=0)

    @property
    def decoder_tokens(self) -> int:
        return len(self.stacks["decoder"].experts) if "decoder" in self.stacks else 0

    def sample(self, index: int) -> dict[StackName, U16]:
        """Returns the experts of one sample [tokens, layers, top_k], the encoder's first."""
        return {
            name: self.stacks[name].experts[self.stacks[name].starts[index] : self.stacks[name].starts[index + 1]]
            for name in STACKS
            if name in self.stacks
        }

    def check(self, spec: ModelSpec) -> None:
        """Raises HeaderInvalid if the trace does not fit a model of this shape."""
        found = {name: (self.num_experts, *trace.experts.shape[1:]) for name, trace in self.stacks.items()}
        expected = spec.of_stacks(lambda layers: (spec.moe.n, layers, spec.moe.router.top_k))
        _TRACE.check("(experts, layers, top_k)", found, expected)

    def to_bytes(self) -> bytes:
        """Returns the file's content; equal traces give equal bytes."""
        tensors: dict[str, npt.NDArray[Any]] = {}
        for name, stack in self.stacks.items():
            tensors[f"{name}.experts"], tensors[f"{name}.samples"] = stack.experts, stack.starts
        chosen = ",".join(f"{percent}={name}" for percent, name in self.eviction.items())
        return _TRACE.body(tensors, num_experts=self.num_experts, **({EVICTION: chosen} if chosen else {}))

    @classmethod
    def from_bytes(cls, body: bytes) -> Trace:
        """Returns the trace that a file's content holds. Raises HeaderInvalid or FormatTooNew."""
        file = TensorFile(_TRACE, body)
        num_experts = file.number("num_experts", 65535)
        stacks: dict[StackName, StackTrace] = {}
        for name in STACKS:
            if file.has_tensor(f"{name}.experts"):
                stacks[name] = _stack(file, name, num_experts)
        entries = sum(stack.experts.size for stack in stacks.values())
        if entries > MOST_ENTRIES:
            raise file.wrong(f"has {entries} entries, none has more than {MOST_ENTRIES}")
        if not stacks or len({len(stack.starts) for stack in stacks.values()}) > 1:
            raise file.wrong("has no stack, or stacks with different numbers of samples")
        return cls(num_experts, stacks, _eviction(file))


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


def _eviction(file: TensorFile) -> dict[int, str]:
    """Returns the policies by share, of text as 12=lru,25=expected."""
    if not file.has(EVICTION):
        return {}
    text = file.text(EVICTION)
    parts = _POLICY.findall(text)
    shares = [int(percent) for percent, _ in parts]
    joined = ",".join(f"{percent}={name}" for percent, name in parts)
    if joined != text or not parts or shares != sorted(set(shares)) or not 0 < shares[0] <= shares[-1] <= 100:
        raise file.wrong(f"{EVICTION} should be policies by rising percent, as 12=lru,25=expected, found {text[:40]!r}")
    return {int(percent): name for percent, name in parts}


def _stack(file: TensorFile, name: StackName, num_experts: int) -> StackTrace:
    experts: U16 = file.tensor(f"{name}.experts", np.uint16, 3)
    starts: npt.NDArray[np.uint32] = file.tensor(f"{name}.samples", np.uint32)
    sound = (
        len(starts) > 1
        and starts[0] == 0
        and starts[-1] == len(experts)
        and bool((starts[1:] >= starts[:-1]).all())
        and bool(((experts < num_experts) | (experts == DROPPED)).all())
    )
    if not sound:
        raise file.wrong(f"the routing of the {name} contradicts itself")
    return StackTrace(experts, starts)
