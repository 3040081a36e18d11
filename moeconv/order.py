"""The order of the neurons in a pack: the number that each has in the source (SPEC.md, order.safetensors)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

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
