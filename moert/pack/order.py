"""order.safetensors: which neuron of the source lies at each place of an expert in blocks of neurons. SPEC.md says what
it is for; to run a pack nobody needs it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from moert.pack.codec import F32, QuantizedMatrix
from moert.pack.errors import HeaderInvalid
from moert.pack.model_spec import STACKS, ExpertKey, LayerKey, ModelSpec
from moert.pack.neurons import DOWN
from moert.pack.reader import Pack, Projection
from moert.pack.tensors import TensorFile, to_bytes

ORDER = "order.safetensors"
VERSION = 1
AGAIN = "convert the model"

U32 = npt.NDArray[np.uint32]

_LAYER = re.compile("([ED])([0-9]{2,5})")


@dataclass(frozen=True)
class NeuronOrder:
    """Of each layer with experts, in the order of execution, [experts, d_ff]: the numbers that the neurons of each
    expert have in the source, as they lie."""

    layers: Mapping[LayerKey, U32]

    def of(self, key: ExpertKey) -> U32:
        """Of one expert [d_ff]."""
        found: U32 = self.layers[key.at][key.expert]
        return found

    @property
    def digest(self) -> str:
        """sha256, in hexadecimal, of what the file holds."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def placed(
        self, key: ExpertKey, projections: Mapping[str, Projection], biases: Mapping[str, F32]
    ) -> tuple[dict[str, Projection], dict[str, F32]]:
        """Matrices [d_ff, d_model] of an expert, `down` as its transpose, and biases [out], in this order. What the
        expert computes stays the same, but for the order of sums."""
        rows = self.of(key)
        matrices = {name: _rows(matrix, rows) for name, matrix in projections.items()}
        return matrices, {name: bias if name == DOWN else bias[rows] for name, bias in biases.items()}

    def check(self, spec: ModelSpec) -> None:
        """Raises HeaderInvalid if this is not an order of a model of this shape."""
        shape = spec.moe.n, spec.moe.ffn.d_ff
        found = {str(at): rows.shape for at, rows in self.layers.items()}
        expected = {str(at): shape for at in spec.moe_layers()}
        for at in sorted({*found, *expected}):
            if found.get(at) != expected.get(at):
                raise HeaderInvalid(
                    f"{ORDER}: layer {at} has (experts, d_ff) {found.get(at)}, in the model {expected.get(at)}: "
                    f"{AGAIN} again"
                )

    def to_bytes(self) -> bytes:
        """The file's content; equal orders give equal bytes."""
        metadata: dict[str, object] = {"format": "model.pack order", "version": VERSION}
        return to_bytes({str(at): rows for at, rows in self.layers.items()}, metadata)

    @classmethod
    def from_bytes(cls, body: bytes) -> NeuronOrder:
        """Raises HeaderInvalid or FormatTooNew."""
        file = TensorFile(ORDER, body, VERSION, AGAIN)
        stacks = {name[0].upper(): name for name in STACKS}
        found = [match for name in file.names() if (match := _LAYER.fullmatch(name))]
        keys = {LayerKey(stacks[match[1]], int(match[2])) for match in found}
        file.only(map(str, keys))
        if not keys:
            raise file.wrong("has no layer")
        in_order = sorted(keys, key=lambda at: (STACKS.index(at.stack), at.layer))
        return cls({at: _layer(file, at) for at in in_order})


def load_order(pack: Pack) -> NeuronOrder | None:
    """That of a pack's neurons; None where they lie as in the source. Raises PackError."""
    if ORDER not in pack.manifest.files:
        return None
    found = NeuronOrder.from_bytes(pack.read_file(ORDER))
    found.check(pack.manifest.model)
    if not pack.has_neurons:
        raise HeaderInvalid(f"{ORDER} is there, and experts do not lie by neurons: {AGAIN} again")
    return found


def _layer(file: TensorFile, at: LayerKey) -> U32:
    rows: U32 = file.tensor(str(at), np.uint32, 2)
    if not np.array_equal(np.sort(rows, axis=1), np.broadcast_to(np.arange(rows.shape[1]), rows.shape)):
        raise file.wrong(f"{at} should name each neuron of an expert once")
    return rows


def _rows(matrix: Projection, rows: U32) -> Projection:
    if isinstance(matrix, QuantizedMatrix):
        parts: dict[str, Any] = {name: getattr(matrix, name)[rows] for name in ("qweight", "scale", "minimum")}
        return replace(matrix, **parts)
    return matrix[rows]
