"""Routing of calibration text: how often experts follow one another, and the recorded trace."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from moert.pack.model_spec import STACKS, LayerKey, ModelSpec, StackName
from moert.pack.tensors import FileKind, TensorFile

PATHS = "paths.safetensors"
_AGAIN = "profile the paths of this pack"
_PATHS = FileKind(PATHS, "paths", 2, _AGAIN)
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

EVICTION = "eviction"

U16 = npt.NDArray[np.uint16]
_POLICY = re.compile("([1-9][0-9]{0,2})=([a-z-]{1,32})")


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
