"""The order of the neurons in a pack: the number that each has in the source (SPEC.md, order.safetensors), and orders
that are made of firings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from moeconv.matrices import Projection
from moert.pack.codec import F32, QuantizedMatrix, TrellisMatrix
from moert.pack.layout import DOWN, U32
from moert.pack.learnt import ORDER
from moert.pack.model_spec import ExpertKey, LayerKey, ModelSpec
from moert.pack.reader import Pack
from moert.pack.tensors import FileKind, TensorFile

_ORDER = FileKind(ORDER, "order", 1, "convert the model")


@dataclass(frozen=True)
class NeuronOrder:
    """The order of the neurons: for each layer with experts, in the order of execution, [experts, d_ff]: the numbers
    that the neurons of each expert have in the source, in the order of the pack."""

    layers: Mapping[LayerKey, U32]

    def of(self, key: ExpertKey) -> U32:
        """Returns the order of one expert's neurons [d_ff]."""
        found: U32 = self.layers[key.at][key.expert]
        return found

    @property
    def digest(self) -> str:
        """Returns the sha256, in hexadecimal, of the file's content."""
        import hashlib  # takes memory, and opening a pack needs none of it

        return hashlib.sha256(self.to_bytes()).hexdigest()

    def placed(
        self, key: ExpertKey, projections: Mapping[str, Projection], biases: Mapping[str, F32]
    ) -> tuple[dict[str, Projection], dict[str, F32]]:
        """Returns matrices [d_ff, d_model] of an expert, `down` as its transpose, and biases [out], in this order. The
        expert's output stays the same, but for the order of sums."""
        rows = self.of(key)
        matrices = {name: _rows(matrix, rows) for name, matrix in projections.items()}
        return matrices, {name: bias if name == DOWN else bias[rows] for name, bias in biases.items()}

    def check(self, spec: ModelSpec) -> None:
        """Raises HeaderInvalid if the order does not fit a model of this shape."""
        shape = spec.moe.n, spec.moe.ffn.d_ff
        found = {at: rows.shape for at, rows in self.layers.items()}
        _ORDER.check("(experts, d_ff)", found, dict.fromkeys(spec.moe_layers(), shape))

    def to_bytes(self) -> bytes:
        """Returns the file's content; equal orders give equal bytes."""
        return _ORDER.body({str(at): rows for at, rows in self.layers.items()})

    @classmethod
    def from_bytes(cls, body: bytes) -> NeuronOrder:
        """Returns the order that a file's content holds. Raises HeaderInvalid or FormatTooNew."""
        file = TensorFile(_ORDER, body)
        layers = file.layers()
        file.only(map(str, layers))
        if not layers:
            raise file.wrong("has no layer")
        return cls({at: _order_of_layer(file, at) for at in layers})


def load_order(pack: Pack) -> NeuronOrder | None:
    """Returns the order of a pack's neurons; None where they lie as in the source. Raises PackError."""
    if ORDER not in pack.manifest.files:
        return None
    found = NeuronOrder.from_bytes(pack.read_file(ORDER))
    found.check(pack.manifest.model)
    if not pack.has_neurons:
        raise _ORDER.wrong("it is there, and experts do not lie by neurons")
    return found


def _order_of_layer(file: TensorFile, at: LayerKey) -> U32:
    rows: U32 = file.tensor(str(at), np.uint32, 2)
    if not np.array_equal(np.sort(rows, axis=1), np.broadcast_to(np.arange(rows.shape[1]), rows.shape)):
        raise file.wrong(f"{at} should name each neuron of an expert once")
    return rows


def _rows(matrix: Projection, rows: U32) -> Projection:
    if isinstance(matrix, QuantizedMatrix):
        parts: dict[str, Any] = {name: getattr(matrix, name)[rows] for name in ("qweight", "scale", "minimum")}
        return replace(matrix, **parts)
    assert not isinstance(matrix, TrellisMatrix), "blocks of neurons have plain codes"
    return matrix[rows]


# Orders that are made of firings. Pure.

Bits = npt.NDArray[np.bool_]
I64 = npt.NDArray[np.int64]

NEAR = 2048
"""Neurons of like frequency among which a block takes its own: in time, d_ff then counts once and not twice."""


def by_frequency(counts: I64) -> I64:
    """Returns neurons by falling number of firings [..., d_ff]; those with equal numbers stay in their order."""
    return np.argsort(-counts, axis=-1, kind="stable")


def together(fired: Bits, size: int) -> I64:
    """Returns neurons [d_ff] in blocks of `size` that fire for the same rows; fired [rows, d_ff]. Each block begins
    with the most frequent neuron that is left, and takes again and again the one whose rows are most like those that
    ask for the block (Jaccard)."""
    frequent, step = by_frequency(fired.sum(axis=0)), max(1, NEAR // size) * size
    parts = [frequent[start : start + step] for start in range(0, len(frequent), step)]
    return np.concatenate([part[_grouped(np.take(fired, part, axis=1), size)] for part in parts])


def _grouped(fired: Bits, size: int) -> I64:
    """Returns the same of neurons by falling frequency."""
    counts, left = fired.sum(axis=0), np.ones(fired.shape[1], np.bool_)
    order = np.empty(len(counts), np.int64)
    for place in range(len(order)):
        if place % size == 0:
            asked, both = np.zeros(len(fired), np.bool_), np.zeros_like(counts)
            chosen = int(left.argmax())
        else:
            alike = both / np.maximum(1, counts + int(asked.sum()) - both)
            chosen = int(np.where(left, alike, -1).argmax())
        order[place], left[chosen] = chosen, False
        more = fired[:, chosen] & ~asked
        asked |= more
        both += fired[more].sum(axis=0)
    return order


def touched(fired: Bits, order: I64, size: int) -> float:
    """Returns the share of blocks of `size` neurons in this order that a row asks for, on average; fired [rows, d_ff].
    0..1"""
    ordered = fired[:, order]
    ordered = np.pad(ordered, ((0, 0), (0, -ordered.shape[1] % size)))
    return float(ordered.reshape(len(ordered), -1, size).any(axis=2).mean())
