"""A pack as a model of transformers: whole in memory, layer by layer, or checked tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from moeconv.errors import ConversionError, VerifyFailed
from moeconv.matrices import Projection, biases_of, matrices_of, projection_weights, read_expert, stored_matrices
from moeconv.measure.passes import Origin, Passes, Room
from moeconv.order import NeuronOrder, load_order
from moeconv.progress import Progress, unseen
from moeconv.quantizers.trained import MOST_GAIN, gained, norms_of
from moeconv.source.archs import FAMILIES, Description, Family
from moeconv.source.archs.config import transformers_model
from moeconv.source.archs.weights import Rows, fill_backbone, put_tables
from moeconv.source.checkpoint import Checkpoint
from moeconv.source.experts import ExpertCalls
from moeconv.source.outline import CONFIG, GENERATION_CONFIG, MAX_JSON_BYTES, Outline, line
from moeconv.strict_json import NotJson, parse
from moeconv.writer import checksums
from moert.pack.codec import F32, U8, QuantizedMatrix, TrellisMatrix, dequantize, power_of, times_two
from moert.pack.documents import brief
from moert.pack.errors import HashMismatch, HeaderInvalid
from moert.pack.layout import DOWN, NEURONS, U32, NeuronLayout
from moert.pack.manifest import BACKBONE, NGRAMS, dense_width, quantized, stem_of, stored_tensors
from moert.pack.model_spec import ExpertKey, ModelSpec
from moert.pack.reader import CHECKED_BYTES, FLOATS, MANIFEST, Pack, all_finite, checksums_from_bytes, tables_of
from moert.pack.tensors import header_of

# A pack in memory as the transformers model, so that other code than the runtime runs its weights.


@dataclass(frozen=True)
class PackedModel:
    """A pack's weights, dequantized to float32, inside the transformers model of its config.json."""

    pack: Pack
    family: Family
    spec: ModelSpec
    model: Any
    calls: ExpertCalls

    @classmethod
    def open(cls, pack: Pack) -> PackedModel:
        """Loads a pack. Raises ConversionError for a pack of a family that this program does not know, or a
        PackError."""
        family, description = described(pack)
        with transformers_model(pack.root):
            model: Any = family.empty(pack.root)
        spec = pack.manifest.model
        backbone = backbone_weights(pack)
        fill_backbone(model, description, ((name, backbone(name)) for name in spec.tensors))
        put_tables(model, description, table_rows(pack))
        for key in spec.expert_keys():
            body = read_expert(pack, key)
            for name, projection in matrices_of(pack, key, body).items():
                weight = torch.from_numpy(projection_weights(projection))
                family.expert_weight(model, key, name).copy_(weight)
            for name, bias in biases_of(pack, key, body).items():
                family.expert_bias(model, key, name).copy_(torch.from_numpy(bias))
        return cls(pack, family, spec, model, ExpertCalls(model, family, spec))

    @property
    def layers(self) -> None:
        """None: it is in memory."""
        return None

    @property
    def stored_head(self) -> None:
        """None: a pack's head never changes."""
        return None


def described(pack: Pack) -> tuple[Family, Description]:
    """Returns the family and the description of the model in a pack's config.json. Raises ConversionError for a family
    that this program does not know, or a PackError."""
    config = _object(pack, CONFIG)
    if str(config.get("model_type", "")) not in FAMILIES:
        raise ConversionError(
            f"{CONFIG} in the pack has model_type {brief(config.get('model_type'))}: not supported: convert again"
        )
    generation = _object(pack, GENERATION_CONFIG) if GENERATION_CONFIG in pack.manifest.files else {}
    outline, spec = Outline.of(config, generation, pack.root / CONFIG), pack.manifest.model
    if _shapes(outline.spec) != _shapes(spec):
        raise ConversionError(f"{CONFIG} in {pack.root} is of another model than its manifest: convert again")
    return outline.family, outline.description


def _object(pack: Pack, name: str) -> dict[str, Any]:
    """Returns a JSON object of the pack. Raises ConversionError or a PackError."""
    entry = pack.manifest.files.get(name)
    if entry is not None and entry.nbytes > MAX_JSON_BYTES:
        raise ConversionError(f"{name} in the pack has {entry.nbytes} bytes: convert again")
    try:
        found = parse(pack.read_file(name), finite=False)
    except NotJson as error:
        raise ConversionError(f"{name} in the pack is not JSON ({error}): convert again") from None
    if not isinstance(found, dict):
        raise ConversionError(f"{name} in the pack should be a JSON object, found {brief(found)}: convert again")
    return found


def _shapes(spec: ModelSpec) -> Any:
    """Returns the shapes of all tensors that a model of this spec has in memory."""
    moe = spec.moe
    each = {name: spec.projection_shape(name) for name in moe.ffn.projections}
    return {name: tensor.shape for name, tensor in spec.tensors.items()}, [*spec.experts], moe.n, each, moe.ffn.bias


def backbone_of(pack: Pack) -> dict[str, Tensor]:
    """Returns every tensor of the pack's backbone, as stored. Raises ConversionError or a PackError."""
    try:
        found = load(pack.read_file(BACKBONE))
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise ConversionError(f"{BACKBONE} in the pack can't be read ({line(error)}): convert again") from None
    manifest = pack.manifest
    for parts in stored_tensors(manifest.model, manifest.quantization).values():
        for name, (_, shape) in parts.items():
            if name not in found or tuple(found[name].shape) != tuple(shape):
                raise ConversionError(f"{BACKBONE} in the pack lacks {name} of the shape {tuple(shape)}: convert again")
    return found


def dense_projection(pack: Pack, tensors: Mapping[str, Tensor], name: str) -> Projection:
    """Returns a matrix of the backbone that has a width, from `backbone_of`: at 16 bits as float32. Raises
    PackError."""
    model, quantization = pack.manifest.model, pack.manifest.quantization
    dense = quantization.dense
    assert dense is not None
    if (whole := f"{stem_of(name, dense)}.weight") in tensors:
        return times_two(tensors[whole].float().numpy(), dense.power(name))
    return quantized(model, quantization, name, lambda part: tensors[part].numpy())


def backbone_weights(pack: Pack) -> Callable[[str], Tensor]:
    """Returns a function from the canonical name of a tensor of the backbone to its float32 weights. The backbone is
    read at once and kept as it is stored. Raises ConversionError or a PackError."""
    tensors, manifest = backbone_of(pack), pack.manifest

    def weight(name: str) -> Tensor:
        if dense_width(manifest.model, manifest.quantization.dense, name) is None:
            return tensors[name].float()
        return torch.from_numpy(projection_weights(dense_projection(pack, tensors, name)))

    return weight


def table_rows(pack: Pack) -> Rows:
    """Returns a reader of rows of the pack's tables, in float32. Raises PackError."""
    tables = tables_of(pack)

    def rows(name: str, numbers: Tensor) -> Tensor:
        found = torch.from_numpy(tables[name][numbers.numpy()])
        return (found.view(torch.bfloat16) if tables[name].dtype == "BF16" else found).float()

    return rows


# A pack's model, layer by layer: for packs with dequantized weights that do not fit memory.


class PackedLayers(Passes):
    """A pack's weights, run layer by layer. Raises ConversionError for a pack of a family that this program does not
    know, or a PackError."""

    def __init__(self, pack: Pack, room: Room, show: Progress) -> None:
        self.pack = pack
        family, description = described(pack)
        origin = Origin(
            pack.root, family, description, backbone_weights(pack), table_rows(pack), self._expert, self._biases
        )
        super().__init__(origin, room, show)

    @property
    def weights_digest(self) -> str:
        return sha256((self.pack.root / MANIFEST).read_bytes()).hexdigest()

    def _expert(self, key: ExpertKey) -> Mapping[str, F32]:
        projections = matrices_of(self.pack, key, read_expert(self.pack, key))
        return {name: projection_weights(projection) for name, projection in projections.items()}

    def _biases(self, key: ExpertKey) -> Mapping[str, F32]:
        return biases_of(self.pack, key, read_expert(self.pack, key))


# The check of a pack: every hash, and against its source that each weight is within the error of its width.

MIN_MAX = "channel"  # the quantizer with every weight within half a step; the others are fitted as a whole
HALF_STEPS = 4  # fitted codes were found at 2.4 and less, where three inputs outweigh all others
APART = 0.75  # those of the weights themselves were found at 0.6 and less, those of others at 0.95 and more
F16_STEP = 2.0**-10  # spacing of float16 values, relative: the error from rounding scale and minimum
F16_FLOOR = 2.0**-24  # spacing of the smallest float16 values, before a matrix's power of two


@dataclass(frozen=True)
class Verified:
    """The result of a check. `worst` is the largest error of an expert, or of another matrix that has a width, as a
    share of the error that its width allows, or of a trained norm, as a share of TRAINED_APART; None without a source.
    All other tensors are equal to the source's."""

    files: int
    experts: int
    worst: float | None


def verify(pack: Pack, source: Checkpoint | None, show: Progress = unseen, trained: bool = False) -> Verified:
    """Checks a pack. `trained`: its report says that its norms were. Raises a PackError for a damaged file,
    VerifyFailed for weights that are not those of the source."""
    keys, files = pack.manifest.model.expert_keys(), sum(1 for _ in pack.pieces())
    with show("files", files, "file") as bar:
        for _ in pack.verify_hashes():
            bar.update(1)
    _check_numbers(pack, show)
    if pack.has_neurons:
        _check_pieces(pack, show)
    order = load_order(pack)
    if source is None:
        return Verified(files, len(keys), None)
    if source.spec != pack.manifest.model:
        raise VerifyFailed(f"{source.given} is not the model that {pack.root} was made from: their shapes differ")
    worst = max(
        _backbone_error(pack, source, trained), *(_expert_error(pack, source, key, order, trained) for key in keys)
    )
    return Verified(files, len(keys), worst)


def _check_numbers(pack: Pack, show: Progress) -> None:
    """Raises a PackError for a weight that is no number."""
    check_backbone(pack)
    with show("numbers", len(pack.manifest.experts), "expert") as bar:
        for entry in pack.manifest.experts:
            check_expert(pack, entry.key, read_expert(pack, entry.key))
            bar.update(1)


def _check_pieces(pack: Pack, show: Progress) -> None:
    """Raises a PackError where the checksums of an expert's pieces do not fit its bytes."""
    expected = checksums_from_bytes(pack.read_file(NEURONS), pack.manifest)
    with show("pieces", len(expected), "expert") as bar:
        for key, sums in expected.items():
            check_pieces(key, pack.neurons(key), read_expert(pack, key), sums)
            bar.update(1)


TRAINED_APART = 0.5
"""The most that a trained norm differs from the source's, as a share of that one's root mean square."""


def _backbone_error(pack: Pack, source: Checkpoint, trained: bool) -> float:
    """Returns the largest share of an allowed error among all matrices of the backbone that have a width, and norms if
    they were trained. Raises VerifyFailed for another tensor that differs from the source's."""
    manifest, tensors, worst = pack.manifest, backbone_of(pack), 0.0
    norms = set(norms_of(source.description)) if trained else set()
    dense = manifest.quantization.dense
    for name, (_, shape, _) in source.spec.tensors.items():
        original = source.backbone_tensor(name, shape)
        if dense is not None and dense_width(source.spec, dense, name) is not None:
            stored = dense_projection(pack, tensors, name)
            worst = max(worst, _checked(name, stored, original.float().numpy(), dense.quantizer == MIN_MAX))
        elif name in norms:
            mine, theirs = tensors[name].float().numpy(), original.float().numpy()
            share = _rms(mine - theirs) / (TRAINED_APART * _rms(theirs) + F16_FLOOR)
            if not share <= 1:
                raise VerifyFailed(f"{name} is far from {source.given}: the pack was made from other weights")
            worst = max(worst, share)
        elif not torch.equal(tensors[name], source.stored_tensor(name, shape)):
            raise VerifyFailed(f"{name} differs from {source.given}: the pack was made from other weights")
    _check_tables(pack, source)
    return worst


def _check_tables(pack: Pack, source: Checkpoint) -> None:
    """Raises VerifyFailed for a table that differs from the source's."""
    rows = table_rows(pack)
    for name in source.spec.tables:
        start = 0
        for piece in source.table(name):
            numbers = torch.arange(start, start := start + len(piece))
            if not torch.equal(rows(name, numbers), piece.float()):
                raise VerifyFailed(f"{name} differs from {source.given}: the pack was made from other weights")


def _expert_error(pack: Pack, source: Checkpoint, key: ExpertKey, order: NeuronOrder | None, trained: bool) -> float:
    """Returns the largest share of an allowed error among an expert's matrices; where scales were trained, with the
    scales that fit best. Raises VerifyFailed."""
    stored, each = stored_matrices(pack, key, read_expert(pack, key)), pack.manifest.quantization.quantizer == MIN_MAX
    weights = dict(source.expert(key))
    if pack.has_neurons:
        weights[DOWN] = weights[DOWN].T
    if order is not None:
        weights = {name: weight[order.of(key)] for name, weight in weights.items()}
    if trained and not pack.has_neurons:
        stored = {name: gained(matrix, _untrained(matrix, weights[name], each)) for name, matrix in stored.items()}
    return max(_checked(f"expert {key}, {name}", stored[name], weight, each) for name, weight in weights.items())


def _untrained(matrix: Projection, weight: F32, each: bool) -> F32:
    """Returns the gains of a matrix's rows [out] that bring it nearest to weights [out, in], or with `each` to their
    ranges, as far as training may have gone."""
    back, tiny = projection_weights(matrix).astype(np.float64), np.finfo(np.float32).tiny
    if each:
        ratio = np.ptp(weight, axis=1) / np.maximum(np.ptp(back, axis=1), tiny)
    else:
        ratio = (back * weight).sum(1) / np.maximum(np.square(back).sum(1), tiny)
    gains: F32 = np.clip(ratio, 1 / MOST_GAIN, MOST_GAIN).astype(np.float32)
    return gains


def _checked(what: str, projection: Projection, weight: F32, each: bool) -> float:
    share = error_share(projection, weight, each)
    if not share <= 1:
        raise VerifyFailed(
            f"{what}: its error is {share:.1f} times what its width allows: the pack was made from other weights, or "
            "is damaged"
        )
    return share


def error_share(projection: Projection, weight: F32, each: bool) -> float:
    """Returns the error of a projection, as a share of the error that its width allows. 16-bit weights may be off by
    their rounding.

    With `each`, the largest error counts, and a weight may be off by half a step of its group, (max - min) /
    (2**bits - 1) / 2, and by the rounding of scale and minimum to float16: the error of min-max quantization. Fitted
    codes trade errors of some weights for those of others, in favour of the outputs, so that their root mean square
    counts. It may be `HALF_STEPS` times that of half a step, but no more than `APART` times the distance of unrelated
    weights: √(v + v'), where v and v' are the variances of both inside groups. Of trellis codes it is the latter, of
    whole matrices.
    """
    floor = F16_FLOOR * 2.0 ** power_of(weight)
    if isinstance(projection, TrellisMatrix):
        back = projection_weights(projection)
        return _rms(back - weight) / (APART * math.hypot(_rms(weight), _rms(back)) + floor)
    if not isinstance(projection, QuantizedMatrix):
        return float((np.abs(projection - weight) / (np.abs(weight) * 2.0**-8 + floor)).max())
    starts = np.arange(0, projection.in_features, projection.group_size)
    low, high = np.minimum.reduceat(weight, starts, axis=1), np.maximum.reduceat(weight, starts, axis=1)
    half_step = (high - low) / (2**projection.bits - 1) / 2
    rounding = F16_STEP * (np.maximum(np.abs(low), np.abs(high)) + high - low) + floor * 2**projection.bits
    stored = dequantize(projection)
    error = np.abs(stored - weight)
    if each:
        return float((error / _wide(half_step + rounding, projection)).max())
    apart = math.sqrt(_variance(weight, projection) + _variance(stored, projection))
    allowed = min(HALF_STEPS * _rms(_wide(half_step, projection)), APART * apart) + _rms(_wide(rounding, projection))
    return _rms(error) / allowed


def _variance(weights: F32, projection: QuantizedMatrix) -> float:
    """Returns the mean square of weights [out, in] less the mean of their group."""
    starts = np.arange(0, projection.in_features, projection.group_size)
    counts = np.diff([*starts, projection.in_features])
    means: F32 = (np.add.reduceat(weights, starts, axis=1) / counts).astype(np.float32)
    return _rms(weights - _wide(means, projection)) ** 2


def _rms(values: F32) -> float:
    return math.sqrt(np.square(values, dtype=np.float64).mean())


def _wide(per_group: F32, projection: QuantizedMatrix) -> F32:
    """Returns a value for each weight [out, in] from one for each group [out, groups]."""
    return np.repeat(per_group, projection.group_size, axis=1)[:, : projection.in_features]


def check_expert(pack: Pack, key: ExpertKey, buffer: U8) -> None:
    """Checks that all weights of an expert, whose bytes are given, are finite. Raises HeaderInvalid."""
    arrays: list[npt.NDArray[Any]] = list(biases_of(pack, key, buffer).values())
    for projection in stored_matrices(pack, key, buffer).values():
        if isinstance(projection, QuantizedMatrix):
            arrays += [projection.scale, projection.minimum]
        elif isinstance(projection, TrellisMatrix):
            arrays.append(projection.scale)
        else:
            arrays.append(projection)
    if not all(np.isfinite(array).all() for array in arrays):
        raise HeaderInvalid(
            f"{pack.entry(key).path}: expert {key} has numbers that are not finite: convert the model again"
        )


def check_backbone(pack: Pack) -> None:
    """Checks that all floats outside the experts are finite. Raises HeaderInvalid."""
    for name in (BACKBONE, NGRAMS):
        if name in pack.manifest.files:
            _check_floats(pack, name)


def _check_floats(pack: Pack, relative: str) -> None:
    with pack.opened(relative) as file:
        for name, place in header_of(file, pack.room).tensors.items():
            for start in range(place.start, place.stop, CHECKED_BYTES) if place.dtype in FLOATS else ():
                body = file.read(min(CHECKED_BYTES, place.stop - start), start)
                if not all_finite(place.dtype, np.frombuffer(body, np.uint8)):
                    raise HeaderInvalid(
                        f"{relative}: {name[:80]!a} has numbers that are not finite: convert the model again"
                    )


def check_pieces(key: ExpertKey, layout: NeuronLayout, buffer: U8, expected: U32) -> None:
    """Checks that the pieces of an expert, all of whose bytes are in `buffer`, have the checksums `expected`. Raises
    HashMismatch."""
    if not np.array_equal(checksums(layout, buffer), expected):
        raise HashMismatch(f"{NEURONS}: a checksum of {key} is not that of its neurons: convert the model again")
