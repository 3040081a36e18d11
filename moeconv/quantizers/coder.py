"""Coders: codes of experts and of all other matrices at chosen widths, kept on disk if they do not fit memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save
from torch import Tensor

from moeconv.artifacts import Bits, DenseUnit
from moeconv.dense import QUANTIZER, WEIGHED, dense_of_units, head_of
from moeconv.errors import ConversionError, WeightsUnusable
from moeconv.matrices import Projection, projection_weights
from moeconv.quantizers.gptq import GptqQuantizer
from moeconv.quantizers.group import GroupQuantizer
from moeconv.quantizers.moments import SIDES, Moments, Side, side_of
from moeconv.quantizers.quantizer import Coded, Inputs, Quantizer, times_powers
from moeconv.quantizers.trained import NOTHING
from moeconv.quantizers.trellis import TrellisQuantizer
from moeconv.source.checkpoint import Checkpoint
from moeconv.source.outline import CheckpointError
from moeconv.writer import power_stored
from moert.pack.codec import (
    F32,
    QuantizedMatrix,
    TrellisMatrix,
    Width,
    from_bfloat16,
    power_of,
    power_of_halves,
    times_two,
    to_bfloat16,
    to_mxfp4,
)
from moert.pack.files import write_atomically
from moert.pack.layout import DOWN, Neurons
from moert.pack.manifest import Dense, Dtype16, Quantization, dense_width, stored_tensors
from moert.pack.model_spec import ExpertKey, ModelSpec, StackName
from moert.pack.tensors import DTYPE_BITS

# Codes of experts on disk, made once and used for every plan: for models whose experts do not fit memory.

_PARTS = {QuantizedMatrix: ("qweight", "scale", "minimum"), TrellisMatrix: ("stream", "scale")}


class Seals(Protocol):
    """The record of finished files: a moeconv.measure.workdir.Journal."""

    def seal(self, *paths: Path) -> None: ...

    def sealed(self, path: Path) -> bool: ...


class KeptCodes:
    """Codes in `folder`, a file for each expert and width. `about` names everything that the codes depend on. A file
    counts as finished once `finish` has noted it, whoever wrote it. Methods raise ConversionError, in one line, if the
    disk refuses, and for a file that was changed since."""

    def __init__(self, folder: Path, about: str, seals: Seals | None = None) -> None:
        """`seals`: None for an object that only writes codes."""
        self.folder, self.about, self._seals = folder, about, seals
        self._last: tuple[Path, dict[str, Coded]] | None = None
        self._finished: set[Path] = set()

    def has(self, key: ExpertKey, bits: Width) -> bool:
        return self._has(self._file(key, bits))

    def finish(self, key: ExpertKey, widths: Sequence[Width]) -> None:
        """Notes that the files of an expert's codes at these widths are finished."""
        files = [self._file(key, bits) for bits in widths]
        if self._seals is not None:
            self._seals.seal(*files)
        self._finished.update(files)

    def get(self, key: ExpertKey, projection: str, bits: Width) -> Coded | None:
        file = self._file(key, bits)
        if self._last is not None and self._last[0] == file:
            return self._last[1][projection]
        if not self.has(key, bits):
            return None
        try:
            tensors = load_file(file)
            names = {name.split(".")[0] for name in tensors} - {"seen"}
            found = {name: _matrix(tensors, name, bits) for name in names}
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise ConversionError(f"{file} can't be read ({error}): delete it, and it is made again") from None
        self._last = file, found
        return found[projection]

    def put(self, key: ExpertKey, bits: Width, rows: int, matrices: Mapping[str, Coded]) -> None:
        """Writes an expert's codes at a width. `rows`: tokens that the expert saw."""
        tensors = {"seen.rows": np.array([rows])}
        for name, one in matrices.items():
            tensors |= {f"{name}.{part}": getattr(one, part) for part in _PARTS[type(one)]}
            group_size = one.group_size if isinstance(one, QuantizedMatrix) else 0
            tensors[f"{name}.sizes"] = np.array([one.in_features, group_size, one.power])
        file, body = self._file(key, bits), save(tensors)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, body)
        except OSError as error:
            raise ConversionError(f"can't write {file}: {error.strerror}; free some space and run again") from None

    def rows(self, key: ExpertKey) -> int | None:
        """Returns the number of tokens that the expert saw; None if it was not coded."""
        there = sorted(self.folder.glob(f"{key.at}/E{key.expert:03d}-*.safetensors"))
        return next((int(load_file(file)["seen.rows"][0]) for file in there if self._has(file)), None)

    def _has(self, file: Path) -> bool:
        if file not in self._finished and self._seals is not None and self._seals.sealed(file):
            self._finished.add(file)
        return file in self._finished

    def _file(self, key: ExpertKey, bits: Width) -> Path:
        return self.folder / str(key.at) / f"E{key.expert:03d}-{bits}.safetensors"


def _matrix(tensors: dict[str, np.ndarray], name: str, bits: Width) -> Coded:
    in_features, group_size, power = (int(size) for size in tensors[f"{name}.sizes"])
    if (stream := tensors.get(f"{name}.stream")) is not None:
        return TrellisMatrix(bits, in_features, stream, tensors[f"{name}.scale"], power)
    codes, scale, minimum = (tensors[f"{name}.{part}"] for part in _PARTS[QuantizedMatrix])
    return QuantizedMatrix(int(bits), in_features, group_size, codes, scale, minimum, power)


# Codes of experts at given widths, for measuring (`trial`) and for writing the pack (`emit`) alike.

ORIGINAL = 32
"""The width of an expert as the checkpoint has it; at 16 bits a pack may round a float32 source."""

CACHE_BYTES = 256 << 20
BATCH_BYTES = 64 << 20  # of float32 weights


Wanted = tuple[ExpertKey, Bits]


def batches(spec: ModelSpec, wanted: Iterable[Wanted]) -> list[list[Wanted]]:
    """Returns batches of experts, each of one layer and small enough to be quantized in one call (`BATCH_BYTES`)."""
    at_once = max(1, BATCH_BYTES // (4 * spec.weights_per_expert()))
    layers: dict[tuple[StackName, int], list[Wanted]] = {}
    for key, bits in wanted:
        layers.setdefault((key.stack, key.layer), []).append((key, bits))
    return [layer[start : start + at_once] for layer in layers.values() for start in range(0, len(layer), at_once)]


def dtype16_of(checkpoint: Checkpoint) -> Dtype16:
    """Returns "BF16" or "F16": the form in which a pack of this checkpoint stores 16 bits."""
    return "BF16" if checkpoint.source_dtype == "BF16" else "F16"


def restored(coded: Projection, form16: str) -> F32:
    """Returns the weights [out, in], float32, that a pack gives back for one coded projection."""
    if isinstance(coded, QuantizedMatrix | TrellisMatrix):
        return projection_weights(coded)
    if form16 == "MXFP4":  # which it is already
        return coded
    if form16 == "BF16":
        return from_bfloat16(to_bfloat16(coded))
    power = power_of_halves(coded)
    return times_two(times_two(coded, -power).astype(np.float16).astype(np.float32), power)


def check_16(what: str, weight: F32) -> None:
    """Raises CheckpointError if a value is not finite. The message calls the weights `what`."""
    if not np.isfinite(weight).all():
        raise CheckpointError(f"{what} holds values that are not finite: the checkpoint is damaged")


class ExpertCoder:
    """Quantizes experts. `fallbacks` names the (expert, projection) pairs whose inputs were too few for the quantizer
    (its `too_few`).

    It remembers the latest `CACHE_BYTES` of codes. With `kept`, codes come from there, made before, and are not
    remembered here. `neurons`: the layout of a pack that stores experts in blocks of neurons; then `down` is coded as
    its transpose. `trained`: numbers with gains for the rows of some matrices.
    """

    def __init__(
        self, checkpoint: Checkpoint, quantizer: Quantizer, moments: Moments | None, kept: KeptCodes | None = None,
        neurons: Neurons | None = None,
    ) -> None:  # fmt: skip
        self.checkpoint = checkpoint
        self.quantizer = quantizer
        self.moments = None if quantizer.wants == "nothing" else moments
        self.kept = kept
        self.neurons = neurons
        self.trained = NOTHING
        self._cache: OrderedDict[tuple[ExpertKey, str, Width], Coded] = OrderedDict()
        self._cached_bytes = 0

    @property
    def dtype16(self) -> Dtype16:
        return dtype16_of(self.checkpoint)

    @property
    def mxfp4(self) -> bool:
        """True if experts of 16 bits are stored in the four bits that they have in the checkpoint."""
        return self.checkpoint.description.mxfp4

    @property
    def fallbacks(self) -> list[tuple[ExpertKey, str]]:
        if self.moments is None and self.kept is None:
            return []
        spec = self.checkpoint.spec
        seen = {key: self._rows(key) for key in spec.expert_keys()}
        return [
            (key, projection)
            for key, rows in seen.items()
            for projection in spec.moe.ffn.projections
            if rows is not None and self.quantizer.too_few(rows, spec.projection_shape(projection)[1])
        ]

    def _rows(self, key: ExpertKey) -> int | None:
        """Returns the number of tokens that an expert saw; None if no text was run."""
        if self.kept is not None:
            return self.kept.rows(key)
        return None if self.moments is None else self.moments.rows(key)

    @property
    def inputs_digest(self) -> str | None:
        """The name of the inputs that codes depend on beside the weights and their widths; None for no inputs."""
        if self.kept is not None:
            return self.kept.about
        return None if self.moments is None else self.moments.digest

    def code(self, key: ExpertKey, bits: Bits) -> dict[str, Projection]:
        """Returns projection → its form in a pack at that width: a matrix of codes, or weights [out, in] for 16
        bits; `down` as its transpose if the pack's layout has blocks of neurons.

        Raises CheckpointError or WeightsUnusable, naming the expert, for values that the width can't hold.
        """
        coded: dict[str, Projection] = {}
        source: dict[str, F32] = {}
        for name, width in zip(self.checkpoint.spec.moe.ffn.projections, bits, strict=True):
            cached = self._cached(key, name, width)
            if cached is not None:
                coded[name] = cached
                continue
            source = source or self.checkpoint.expert(key)
            if width == 16:
                self._check_16(f"expert {key}, {name}", source[name])
                coded[name] = np.ascontiguousarray(source[name].T) if self._is_turned(name) else source[name]
            else:
                coded[name] = self._quantize([key], name, width, source[name][None])[0]
        widths = dict(zip(coded, bits, strict=True))
        return {name: self.trained.coded(key, name, widths[name], matrix) for name, matrix in coded.items()}

    def weights(self, key: ExpertKey, bits: Bits) -> dict[str, F32]:
        """Returns projection → weights [out, in] as a pack gives them back; at ORIGINAL, the checkpoint's own."""
        names = self.checkpoint.spec.moe.ffn.projections
        if ORIGINAL in bits:
            if set(bits) != {ORIGINAL}:
                raise ValueError(f"{key}: an expert is original as a whole or not at all, got {bits}")
            return self.checkpoint.expert(key)
        coded = self.code(key, bits)
        form16 = "MXFP4" if self.mxfp4 else self.dtype16
        found = {name: restored(coded[name], form16) for name in names}
        return {name: np.ascontiguousarray(one.T) if self._is_turned(name) else one for name, one in found.items()}

    def _is_turned(self, projection: str) -> bool:
        return self.neurons is not None and projection == DOWN

    def _check_16(self, what: str, weight: F32) -> None:
        if not self.mxfp4:
            check_16(what, weight)
        elif to_mxfp4(weight) is None:
            raise CheckpointError(f"{what} holds values that are not finite, or no MXFP4: the checkpoint is damaged")

    def prepare(self, batch: Sequence[Wanted]) -> None:
        """Quantizes one of the `batches`, so that `code` and `weights` find its codes. Matrices of one expert alone are
        left to these methods."""
        together: dict[tuple[str, Width], list[ExpertKey]] = {}
        for key, bits in batch:
            for name, width in zip(self.checkpoint.spec.moe.ffn.projections, bits, strict=True):
                if width < 16 and self._cached(key, name, width) is None:
                    keys = together.setdefault((name, width), [])
                    if key not in keys:
                        keys.append(key)
        together = {at: keys for at, keys in together.items() if len(keys) > 1}
        sources = {key: self.checkpoint.expert(key) for key in {key for keys in together.values() for key in keys}}
        for (name, width), keys in together.items():
            self._quantize(keys, name, width, np.stack([sources[key][name] for key in keys]))

    def _quantize(self, keys: list[ExpertKey], name: str, bits: Width, weights: F32) -> list[Coded]:
        """Returns the codes of weights [n, out, in]: one projection of n experts of a layer."""
        matrices = self._checked(keys, name, bits, weights, self._inputs(keys, name))
        for key, matrix in zip(keys, matrices, strict=True):
            self._remember((key, name, bits), matrix)
        return matrices

    def coded(
        self, key: ExpertKey, bits: Width, weights: Mapping[str, F32], inputs: Mapping[Side, Inputs] | None
    ) -> dict[str, Coded]:
        """Returns the codes of all matrices of an expert in the form of `code`, from weights [out, in] whose inputs the
        caller knows; they are not remembered. Matrices with the same inputs are coded as one where each row has plain
        codes by itself, which is faster."""
        found: dict[str, Coded] = {}
        for side in SIDES:
            names = [name for name in weights if side_of(name) == side]
            known = None if inputs is None else inputs[side]
            if len(names) == 1 or self.quantizer.codes == "trellis":
                found |= {name: self._checked([key], name, bits, weights[name][None], known)[0] for name in names}
                continue
            powers = {name: power_of(weights[name]) for name in names}
            rows = np.concatenate([np.ldexp(weights[name], -powers[name]) for name in names])
            whole = self._checked([key], " and ".join(names), bits, rows[None], known)[0]
            ends = np.cumsum([len(weights[name]) for name in names]).tolist()
            for name, start, end in zip(names, [0, *ends], ends, strict=False):
                parts = {part: getattr(whole, part)[start:end] for part in _PARTS[QuantizedMatrix]}
                found[name] = replace(whole, **parts, power=powers[name])
        return found

    def _checked(
        self, keys: list[ExpertKey], name: str, bits: Width, weights: F32, inputs: Inputs | None
    ) -> list[Coded]:
        make = self.quantizer.columns if self._is_turned(name) else self.quantizer.quantize
        try:
            matrices = times_powers(make, weights, bits, inputs)
        except WeightsUnusable as error:
            which = f"expert {keys[0]}" if len(keys) == 1 else f"experts {keys[0]} to {keys[-1]}"
            raise WeightsUnusable(f"{which}, {name}, at {bits} bits: {error}") from None
        for key, matrix in zip(keys, matrices, strict=True):
            if not _is_finite(matrix):
                raise WeightsUnusable(f"expert {key}, {name}: its scales at {bits} bits are not finite in float16")
        return matrices

    def _inputs(self, keys: list[ExpertKey], name: str) -> Inputs | None:
        return None if self.moments is None else self.moments.inputs(keys, name)

    def _cached(self, key: ExpertKey, name: str, bits: Width) -> Coded | None:
        if self.kept is not None and bits < 16 and (before := self.kept.get(key, name, bits)) is not None:
            return before
        found = self._cache.get((key, name, bits))
        if found is not None:
            self._cache.move_to_end((key, name, bits))
        return found

    def _remember(self, at: tuple[ExpertKey, str, Width], matrix: Coded) -> None:
        if at not in self._cache:
            self._cache[at] = matrix
            self._cached_bytes += _nbytes(matrix)
        while self._cached_bytes > CACHE_BYTES:
            _, dropped = self._cache.popitem(last=False)
            self._cached_bytes -= _nbytes(dropped)


def _arrays(matrix: Coded) -> Iterator[npt.NDArray[Any]]:
    return (getattr(matrix, part) for part in _PARTS[type(matrix)])


def _nbytes(matrix: Coded) -> int:
    return sum(each.nbytes for each in _arrays(matrix))


def _is_finite(matrix: Coded) -> bool:
    return all(np.isfinite(each).all() for each in _arrays(matrix))


# Codes of the matrices outside the experts, for measuring (`trial`) and for writing the pack (`emit`) alike.


class Form(NamedTuple):
    """The form of a matrix in a pack: its width (None: as in the source), and whether it has trellis codes."""

    width: int | None
    trellis: bool


class DenseCoder:
    """Quantizes the matrices outside the experts at the widths of `dense`; None leaves them all as they are. Codes are
    kept in memory, for the trial and the pack. `chooses`: a conversion chooses the widths, see `choose`. `moments`: a
    file with moments of their inputs, which then weigh errors; it is read when the first code is made. `trained`: of
    which norms get their weights, from the next measurement on."""

    def __init__(
        self, checkpoint: Checkpoint, dense: Dense | None, chooses: bool = False, moments: Path | None = None
    ) -> None:
        self.checkpoint = checkpoint
        self.dense = dense
        self.chooses = chooses
        self.chosen: Mapping[DenseUnit, int] = {}
        self.moments_file = moments
        self.trained = NOTHING
        self._tensors = checkpoint.spec.tensors
        self._coded: dict[tuple[str, Form], Projection] = {}

    def weighing(self, moments: Path | None) -> DenseCoder:
        """Returns a coder of the same matrices that weighs errors by the moments in a file, if there is one and the
        conversion chooses the widths."""
        return DenseCoder(self.checkpoint, self.dense, self.chooses, moments if self.chooses else None)

    def choose(self, widths: Mapping[DenseUnit, int]) -> None:
        """Gives all units their widths, from the next measurement on; without any, all are as in the checkpoint. Widths
        that were given once stay as they are."""
        if self.chooses:
            quantizer = QUANTIZER if self.moments_file is None else WEIGHED
            self.chosen, self.dense = dict(widths), dense_of_units(self.checkpoint.spec, widths, quantizer)

    @property
    def changed(self) -> dict[str, Form | str]:
        """Canonical name → the form of each matrix that has a width, or the digest of trained norms."""
        return {name: self.form(name) for name in self.names} | dict.fromkeys(self.trained.norms, self.trained.digest)

    @property
    def head_form(self) -> Form | None:
        """The form of the head's matrix; None where a pack has the checkpoint's own numbers."""
        form = self.form(head_of(self.checkpoint.spec))
        return None if form.width == 16 and self.checkpoint.source_dtype == "BF16" else form

    @property
    def names(self) -> list[str]:
        """Canonical names of the matrices that have a width."""
        return [name for name in self._tensors if self.width(name) is not None]

    def recorded(self) -> Dense | None:
        """Returns the manifest's entry on these matrices: `dense` with the matrices' powers of two."""
        if self.dense is None:
            return None
        form16 = dtype16_of(self.checkpoint)
        powers = {name: power_stored(self.code(name), form16) for name in self.names}
        return replace(self.dense, powers={name: power for name, power in powers.items() if power} or None)

    def width(self, name: str) -> int | None:
        return dense_width(self.checkpoint.spec, self.dense, name)

    def form(self, name: str) -> Form:
        width, role = self.width(name), self._tensors[name].role
        return Form(width, self.dense is not None and width is not None and width < 8 and role in self.dense.trellis)

    def code(self, name: str) -> Projection:
        """Returns one of `names` as a pack has it: a matrix of codes, or weights [out, in] for 16 bits.

        Raises CheckpointError or WeightsUnusable, naming the matrix, for values that the width can't hold.
        """
        form = self.form(name)
        assert form.width is not None, f"{name} is stored as in the source"
        if form.width == 16:
            weight = self.source(name).float().numpy()
            check_16(name, weight)
            return weight
        if (name, form) not in self._coded:
            self._coded[name, form] = self._quantize(name, form.width, form.trellis)
        return self._coded[name, form]

    def stored_weight(self, name: str) -> Tensor:
        """Returns the weights of one of `names` as a pack gives them back, float32 [out, in], or of a trained norm."""
        if name in self.trained.norms:
            return self.trained.norms[name].float()
        return torch.from_numpy(restored(self.code(name), dtype16_of(self.checkpoint)))

    def source(self, name: str) -> Tensor:
        """Returns a tensor of the backbone as the checkpoint has it, in its own type."""
        return self.checkpoint.backbone_tensor(name, self._tensors[name].shape)

    def backbone_bytes(self) -> tuple[int, int]:
        """Returns the bytes of all tensors outside the experts: in a pack, and in the checkpoint."""
        spec, stored, original = self.checkpoint.spec, 0, 0
        quantization = Quantization("", 0, dtype16_of(self.checkpoint), 0, self.dense)
        there = self.checkpoint.description.backbone
        for name, tensors in stored_tensors(spec, quantization).items():
            element = self.checkpoint.stored_tensor(name, self._tensors[name].shape).element_size()
            original += element * int(np.prod(self._tensors[name].shape)) if name in there else 0
            for dtype, shape in tensors.values():
                stored += (element if dtype is None else DTYPE_BITS[dtype] // 8) * int(np.prod(shape))
        return stored, original

    def _quantize(self, name: str, width: int, trellis: bool) -> Projection:
        assert self.dense is not None
        weight, inputs, group_size = self.source(name).float().numpy(), self._inputs(name), self.dense.group_size
        plain = GroupQuantizer(group_size) if inputs is None else GptqQuantizer(group_size)
        quantizer: Quantizer = TrellisQuantizer() if trellis else plain
        try:
            matrix = times_powers(quantizer.quantize, weight[None], width, inputs)[0]
        except WeightsUnusable as error:
            raise WeightsUnusable(f"{name}, at {width} bits: {error}") from None
        if not _is_finite(matrix):
            raise WeightsUnusable(f"{name}: its scales at {width} bits are not finite in float16")
        return matrix

    @cached_property
    def _moments(self) -> Moments | None:
        return None if self.moments_file is None else Moments.load(self.moments_file)

    def _inputs(self, name: str) -> Inputs | None:
        return None if self._moments is None else self._moments.beside(name)


# Errors of the weights alone at each width, where no text shows an expert's inputs.

SAMPLED_ROWS = 64  # of each matrix, evenly spread; rows are coded one by one, so that these stand for all


def squared_errors(coder: ExpertCoder, key: ExpertKey, widths: Iterable[Width]) -> Mapping[Width, float]:
    """Returns width → the sum of squared errors of an expert's weights, over all of its matrices, estimated from
    sampled rows.

    Raises CheckpointError or WeightsUnusable.
    """
    weights = dict(coder.checkpoint.expert(key))
    if coder.neurons is not None:
        weights[DOWN] = weights[DOWN].T  # whose rows are coded one by one then
    sampled = [(*_rows(weight), power_of(weight)) for weight in weights.values()]
    return {
        bits: sum(_error(coder, weight, bits, power) * share for weight, share, power in sampled) for bits in widths
    }


def _rows(weight: F32) -> tuple[F32, float]:
    """Returns some rows of a matrix [out, in], and the number of its rows that each stands for."""
    places: Sequence[int] = np.unique(np.linspace(0, len(weight) - 1, SAMPLED_ROWS).round().astype(int)).tolist()
    return weight[places], len(weight) / len(places)


def _error(coder: ExpertCoder, weight: F32, bits: Width, power: int) -> float:
    """Returns the sum of squared errors of some rows of a matrix whose power of two is `power`."""
    if bits == 16:
        stored = weight if coder.mxfp4 else restored(weight, coder.dtype16)
    else:
        coded = coder.quantizer.quantize(times_two(weight, -power)[None], bits, None)[0]
        stored = restored(replace(coded, power=power), coder.dtype16)
    return float(np.square(weight - stored, dtype=np.float64).sum())
