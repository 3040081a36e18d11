"""Files of packs whose experts lie in blocks of neurons: checksums, the neurons' order, their predictor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from moert.pack.codec import F32, U8, QuantizedMatrix
from moert.pack.errors import HashMismatch
from moert.pack.layout import DOWN, NEURONS, U32, NeuronLayout, checksums
from moert.pack.manifest import Manifest
from moert.pack.model_spec import ExpertKey, LayerKey, ModelSpec
from moert.pack.reader import Pack, Projection
from moert.pack.tensors import FileKind, TensorFile

CONVERT_AGAIN = "convert the model"
_CHECKSUMS = FileKind(NEURONS, "neurons", 1, CONVERT_AGAIN)


def checksums_to_bytes(of: Mapping[ExpertKey, U32]) -> bytes:
    """Returns the file's content; equal checksums give equal bytes."""
    return _CHECKSUMS.body({str(key): of[key] for key in sorted(of)})


def checksums_from_bytes(body: bytes, manifest: Manifest) -> dict[ExpertKey, U32]:
    """Returns for each expert its checksums, uint32 [n_checksums]: see moert.pack.layout.checksums. Raises
    HeaderInvalid, FormatTooNew."""
    file = TensorFile(_CHECKSUMS, body)
    file.only(str(entry.key) for entry in manifest.experts)
    found: dict[ExpertKey, U32] = {}
    for entry in manifest.experts:
        expected = manifest.neurons(entry).n_checksums
        sums: U32 = file.tensor(str(entry.key), np.uint32)
        if len(sums) != expected:
            raise file.wrong(f"{entry.key} should have {expected} checksums, found {len(sums)}")
        found[entry.key] = sums
    return found


def check_pieces(key: ExpertKey, layout: NeuronLayout, buffer: U8, expected: U32) -> None:
    """Checks that the pieces of an expert, all of whose bytes are in `buffer`, have the checksums `expected`. Raises
    HashMismatch."""
    if not np.array_equal(checksums(layout, buffer), expected):
        raise HashMismatch(f"{NEURONS}: a checksum of {key} is not that of its neurons: convert the model again")


ORDER = "order.safetensors"
_ORDER = FileKind(ORDER, "order", 1, CONVERT_AGAIN)


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
    return matrix[rows]


PREDICTOR = "predictor.safetensors"
MOST_RANK = 4096
MOST_PER_BLOCK = 1 << 16
_PREDICTOR = FileKind(PREDICTOR, "predictor", 1, "train the predictor of this pack's neurons")

F16 = npt.NDArray[np.float16]


class Kept(NamedTuple):
    """The shares that a layer's predictor names on held-out text: of firing neurons, of all neurons, and of blocks
    (those with a named neuron)."""

    firing: float
    neurons: float
    blocks: float


@dataclass(frozen=True)
class LayerPredictor:
    """The predictor of one layer, with r = rank: compress [r, features] is shared by its experts; heads [experts, d_ff,
    r] and their biases [experts, d_ff] give scores of the experts' input x [features]: heads[e] · (compress · x) +
    bias[e]. Neurons with a score of at least threshold [experts] are named."""

    compress: F16
    heads: F16
    bias: F32
    threshold: F32
    kept: Kept

    def tensors(self) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        """Yields the tensors with their names in the file, without the layer's name."""
        yield from (("compress", self.compress), ("heads", self.heads))
        yield from (("bias", self.bias), ("threshold", self.threshold), ("kept", np.array(self.kept, np.float32)))


@dataclass(frozen=True)
class PredictedLoss:
    """The loss of the pack on held-out text where only named neurons are computed: `loss` with its 95% interval."""

    loss: float
    low: float
    high: float


@dataclass(frozen=True)
class NeuronPredictor:
    """The predictors of all layers with experts, in the order of execution. `missed`: the share of firing neurons'
    weight that was allowed to go unnamed when thresholds were set. `per_block`: the neurons of a block that
    `Kept.blocks` counts. `loss`: None where it was not measured."""

    layers: Mapping[LayerKey, LayerPredictor]
    missed: float
    per_block: int
    loss: PredictedLoss | None = None

    @property
    def rank(self) -> int:
        return len(next(iter(self.layers.values())).compress)

    @property
    def kept(self) -> Kept:
        """Returns the mean over all layers."""
        each = [layer.kept for layer in self.layers.values()]
        return Kept(*(sum(shares) / len(each) for shares in zip(*each, strict=True)))

    def check(self, spec: ModelSpec) -> None:
        """Raises HeaderInvalid if the predictor does not fit a model of this shape."""
        found = {at: (layer.compress.shape[1], *layer.bias.shape) for at, layer in self.layers.items()}
        expected = dict.fromkeys(spec.moe_layers(), (spec.expert_width, spec.moe.n, spec.moe.ffn.d_ff))
        _PREDICTOR.check("(features, experts, d_ff)", found, expected)

    def to_bytes(self) -> bytes:
        """Returns the file's content; equal predictors give equal bytes."""
        tensors = {f"{at}.{part}": array for at, layer in self.layers.items() for part, array in layer.tensors()}
        tensors["missed"] = np.array([self.missed], np.float64)
        if self.loss is not None:
            tensors["loss"] = np.array([self.loss.loss, self.loss.low, self.loss.high], np.float64)
        return _PREDICTOR.body(tensors, rank=self.rank, per_block=self.per_block)

    @classmethod
    def from_bytes(cls, body: bytes) -> NeuronPredictor:
        """Returns the predictor that a file's content holds. Raises HeaderInvalid or FormatTooNew."""
        file = TensorFile(_PREDICTOR, body)
        rank, per_block = file.number("rank", MOST_RANK), file.number("per_block", MOST_PER_BLOCK)
        layers = {at: _layer(file, at, rank) for at in file.layers(".compress")}
        if not layers:
            raise file.wrong("has no layer")
        names = [f"{at}.{part}" for at, layer in layers.items() for part, _ in layer.tensors()]
        file.only([*names, "missed", "loss"])
        missed = float(file.shaped("missed", np.float64, 1)[0])
        if not 0 <= missed <= 1:
            raise file.wrong(f"missed should be a share, found {missed}")
        loss = PredictedLoss(*file.shaped("loss", np.float64, 3).tolist()) if file.has_tensor("loss") else None
        return cls(layers, missed, per_block, loss)


def load_predictor(pack: Pack) -> NeuronPredictor | None:
    """Returns the predictor of a pack's neurons; None where the pack has none. Raises PackError."""
    if PREDICTOR not in pack.manifest.files:
        return None
    found = NeuronPredictor.from_bytes(pack.read_file(PREDICTOR))
    found.check(pack.manifest.model)
    return found


def _layer(file: TensorFile, at: LayerKey, rank: int) -> LayerPredictor:
    """Returns one layer's predictor. Every shape follows from the shapes of `compress` and `heads`."""

    def take(part: str, dtype: Any, *shape: int) -> npt.NDArray[Any]:
        return file.shaped(f"{at}.{part}", dtype, *shape)

    compress, heads = take("compress", np.float16, rank, -1), take("heads", np.float16, -1, -1, rank)
    bias, threshold = take("bias", np.float32, *heads.shape[:2]), take("threshold", np.float32, len(heads))
    kept = take("kept", np.float32, 3)
    if not ((kept >= 0) & (kept <= 1)).all():
        raise file.wrong(f"{at}.kept should be three shares")
    return LayerPredictor(compress, heads, bias, threshold, Kept(*kept.tolist()))
