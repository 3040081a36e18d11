"""Files that are learnt from a model's answers to text: the hash function, the neurons' order, and their predictor.

The hash function is a small network that predicts from a text's tokens which experts every layer will choose (SiDA, Du
et al. 2023, arXiv 2310.18859); moert.beside.sida.network runs it. SPEC.md has the layouts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from moert.pack.codec import F16, F32
from moert.pack.model_spec import STACKS, LayerKey, ModelSpec, StackName
from moert.pack.reader import Pack
from moert.pack.tensors import FileKind, TensorFile

HASH = "hash.safetensors"
_HASH = FileKind(HASH, "hash", 1, "train the hash function of this pack")
LSTM_LAYERS = 2
DIRECTIONS = ("forward", "backward")
ATTENTION = ("query", "key", "value")
MOST_WIDTH = 4096


@dataclass(frozen=True)
class Lstm:
    """One direction of one LSTM layer with `h` cells: inputs [4h, n], bias [4h], recurrent [h, 4h], gates in the order
    input, forget, cell, output."""

    inputs: F16
    bias: F16
    recurrent: F16


@dataclass(frozen=True)
class StackHash:
    """The hash function of one stack, with w features: compress [w, d_model] and its bias [w]; for each LSTM layer one
    direction, or two of w / 2 cells in an encoder; `own` and `encoded`, matrices [w, w] by the names of ATTENTION, the
    latter only in a decoder behind an encoder; heads [layers, experts, w] and their biases [layers, experts]. `hits`
    [layers, 2]: the share of held-out choices that are among the top_k, and among the 3 · top_k, experts that the
    function names first."""

    compress: F16
    compress_bias: F16
    lstm: tuple[tuple[Lstm, ...], ...]
    own: Mapping[str, F16]
    encoded: Mapping[str, F16]
    heads: F16
    head_bias: F16
    hits: F32

    @property
    def width(self) -> int:
        return len(self.compress)

    def tensors(self) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        """Yields the tensors with their names in the file, without the stack's name."""
        yield from (("compress.weight", self.compress), ("compress.bias", self.compress_bias))
        for place, layer in enumerate(self.lstm):
            for direction, part in zip(DIRECTIONS, layer, strict=False):
                for name in ("inputs", "bias", "recurrent"):
                    yield f"lstm.{place}.{direction}.{name}", getattr(part, name)
        for kind, matrices in (("own", self.own), ("encoded", self.encoded)):
            yield from ((f"{kind}.{name}.weight", matrix) for name, matrix in matrices.items())
        yield from (("heads.weight", self.heads), ("heads.bias", self.head_bias), ("hits", self.hits))


@dataclass(frozen=True)
class RoutedLoss:
    """The loss of the pack on held-out text where the hash function takes the place of the routers and each token goes
    to `top_k` experts: `loss` with its 95% interval."""

    top_k: int
    loss: float
    low: float
    high: float


@dataclass(frozen=True)
class HashFunction:
    """The hash function of a pack: `stacks` has each stack with experts. `routed`: None where that loss was not
    measured."""

    num_experts: int
    stacks: Mapping[StackName, StackHash]
    routed: RoutedLoss | None = None

    def layer_hits(self, spec: ModelSpec) -> dict[LayerKey, tuple[float, float]]:
        """Returns the two hit rates of each layer: see StackHash.hits."""
        return {
            at: (float(row[0]), float(row[1]))
            for name, stack in self.stacks.items()
            for at, row in zip(spec.moe_layers(name), stack.hits, strict=True)
        }

    def check(self, spec: ModelSpec) -> None:
        """Raises HeaderInvalid if the function does not fit a model of this shape."""
        found = {
            name: (self.num_experts, len(stack.heads), stack.compress.shape[1]) for name, stack in self.stacks.items()
        }
        expected = spec.of_stacks(lambda layers: (spec.moe.n, layers, spec.d_model))
        _HASH.check("(experts, layers, d_model)", found, expected)
        if len({stack.width for stack in self.stacks.values()}) > 1:
            raise _HASH.wrong("both stacks should have as many features")
        for name, stack in self.stacks.items():
            if bool(stack.encoded) != (name == "decoder" and "encoder" in self.stacks):
                raise _HASH.wrong("only a decoder looks at the encoder")

    def to_bytes(self) -> bytes:
        """Returns the file's content; equal functions give equal bytes."""
        tensors = {f"{name}.{part}": array for name, stack in self.stacks.items() for part, array in stack.tensors()}
        if self.routed is None:
            return _HASH.body(tensors, num_experts=self.num_experts)
        tensors["routed"] = np.array([self.routed.loss, self.routed.low, self.routed.high], np.float64)
        return _HASH.body(tensors, num_experts=self.num_experts, routed_top_k=self.routed.top_k)

    @classmethod
    def from_bytes(cls, body: bytes) -> HashFunction:
        """Returns the function that a file's content holds. Raises HeaderInvalid or FormatTooNew."""
        file = TensorFile(_HASH, body)
        size = file.number("num_experts", 65535)
        stacks = {name: _stack(file, name, size) for name in STACKS if file.has_tensor(f"{name}.compress.weight")}
        if not stacks:
            raise file.wrong("has no stack")
        return cls(size, stacks, _routed(file, size))


def _routed(file: TensorFile, size: int) -> RoutedLoss | None:
    if not file.has("routed_top_k"):
        return None
    return RoutedLoss(file.number("routed_top_k", size), *file.shaped("routed", np.float64, 3).tolist())


def _stack(file: TensorFile, stack: StackName, size: int) -> StackHash:
    """Returns one stack's function. Every shape follows from `compress`, `heads` and the directions in the file."""

    def take(name: str, *shape: int) -> F16:
        return file.shaped(f"{stack}.{name}", np.float16, *shape)

    compress = take("compress.weight", -1, -1)
    width = len(compress)
    if not 1 <= width <= MOST_WIDTH:
        raise file.wrong(f"{stack} has {width} features, expected 1 to {MOST_WIDTH}")
    ways = DIRECTIONS if file.has_tensor(f"{stack}.lstm.0.backward.inputs") else DIRECTIONS[:1]
    if len(ways) > 1 and (stack != "encoder" or width % 2):
        raise file.wrong(f"{stack} is read backward, which an encoder of an even width is")
    cells = width // len(ways)
    lstm = tuple(
        tuple(
            Lstm(
                take(f"lstm.{layer}.{way}.inputs", 4 * cells, width),
                take(f"lstm.{layer}.{way}.bias", 4 * cells),
                take(f"lstm.{layer}.{way}.recurrent", cells, 4 * cells),
            )
            for way in ways
        )
        for layer in range(LSTM_LAYERS)
    )
    encoded = file.has_tensor(f"{stack}.encoded.query.weight")
    heads = take("heads.weight", -1, size, width)
    hits: F32 = file.tensor(f"{stack}.hits", np.float32, 2)
    if hits.shape != (len(heads), 2) or not ((hits >= 0) & (hits <= 1)).all():
        raise file.wrong(f"{stack}.hits should be two shares for each layer")
    return StackHash(
        compress,
        take("compress.bias", width),
        lstm,
        {name: take(f"own.{name}.weight", width, width) for name in ATTENTION},
        {name: take(f"encoded.{name}.weight", width, width) for name in ATTENTION} if encoded else {},
        heads,
        take("heads.bias", len(heads), size),
        hits,
    )


ORDER = "order.safetensors"


PREDICTOR = "predictor.safetensors"
MOST_RANK = 4096
MOST_PER_BLOCK = 1 << 16
_PREDICTOR = FileKind(PREDICTOR, "predictor", 1, "train the predictor of this pack's neurons")


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
        layers = {at: _predictor_of_layer(file, at, rank) for at in file.layers(".compress")}
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


def _predictor_of_layer(file: TensorFile, at: LayerKey, rank: int) -> LayerPredictor:
    """Returns one layer's predictor. Every shape follows from the shapes of `compress` and `heads`."""

    def take(part: str, dtype: Any, *shape: int) -> npt.NDArray[Any]:
        return file.shaped(f"{at}.{part}", dtype, *shape)

    compress, heads = take("compress", np.float16, rank, -1), take("heads", np.float16, -1, -1, rank)
    bias, threshold = take("bias", np.float32, *heads.shape[:2]), take("threshold", np.float32, len(heads))
    kept = take("kept", np.float32, 3)
    if not ((kept >= 0) & (kept <= 1)).all():
        raise file.wrong(f"{at}.kept should be three shares")
    return LayerPredictor(compress, heads, bias, threshold, Kept(*kept.tolist()))
