"""Quantises experts at given widths, for measuring (`trial`) and for writing the pack (`emit`) alike."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from moeconv.artifacts import Bits
from moeconv.errors import WeightsUnusable
from moeconv.quantizers.kept import KeptCodes
from moeconv.quantizers.moments import SIDES, Moments, Side, side_of
from moeconv.quantizers.quantizer import Inputs, Quantizer, times_powers
from moeconv.source.checkpoint import F32, Checkpoint
from moeconv.source.outline import CheckpointError
from moert.pack.codec import (
    QuantizedMatrix,
    dequantize,
    from_bfloat16,
    power_of,
    power_of_halves,
    times_two,
    to_bfloat16,
    to_mxfp4,
)
from moert.pack.layout import DOWN, Neurons
from moert.pack.manifest import Dtype16
from moert.pack.model_spec import ExpertKey, ModelSpec, StackName
from moert.pack.reader import Projection

ORIGINAL = 32
"""The width of an expert as the checkpoint has it; 16 is what a pack stores, which may round a float32 source."""

CACHE_BYTES = 256 << 20
BATCH_BYTES = 64 << 20  # of float32 weights


Wanted = tuple[ExpertKey, Bits]


def batches(spec: ModelSpec, wanted: Iterable[Wanted]) -> list[list[Wanted]]:
    """Experts of one layer beside each other, as many as may be quantised in one call (`BATCH_BYTES`)."""
    at_once = max(1, BATCH_BYTES // (4 * spec.weights_per_expert()))
    layers: dict[tuple[StackName, int], list[Wanted]] = {}
    for key, bits in wanted:
        layers.setdefault((key.stack, key.layer), []).append((key, bits))
    return [layer[start : start + at_once] for layer in layers.values() for start in range(0, len(layer), at_once)]


def dtype16_of(checkpoint: Checkpoint) -> Dtype16:
    """ "BF16" or "F16": how a pack of this checkpoint stores 16 bits."""
    return "BF16" if checkpoint.source_dtype == "BF16" else "F16"


def restored(coded: Projection, form16: str) -> F32:
    """The weights [out, in], float32, that a pack gives back for one coded projection."""
    if isinstance(coded, QuantizedMatrix):
        return dequantize(coded)
    if form16 == "MXFP4":  # which it is already
        return coded
    if form16 == "BF16":
        return from_bfloat16(to_bfloat16(coded))
    power = power_of_halves(coded)
    return times_two(times_two(coded, -power).astype(np.float16).astype(np.float32), power)


def check_16(what: str, weight: F32) -> None:
    """Raises CheckpointError for values that are not finite; `what` names the weights."""
    if not np.isfinite(weight).all():
        raise CheckpointError(f"{what} holds values that are not finite: the checkpoint is damaged")


class ExpertCoder:
    """`fallbacks` names the (expert, projection) pairs whose inputs were too few for the quantiser (`too_few` of it).

    What was quantised is remembered, the latest `CACHE_BYTES` of it. With `kept`, codes are those that were made
    before, and are not remembered here. `neurons`: how a pack lays experts in blocks of neurons; then `down` is coded
    as its transpose.
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
        self._cache: OrderedDict[tuple[ExpertKey, str, int], QuantizedMatrix] = OrderedDict()
        self._cached_bytes = 0

    @property
    def dtype16(self) -> Dtype16:
        return dtype16_of(self.checkpoint)

    @property
    def mxfp4(self) -> bool:
        """Whether experts of 16 bits are stored in the four that they have in the checkpoint."""
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
        """Tokens that an expert saw; None where nobody looked."""
        if self.kept is not None:
            return self.kept.rows(key)
        return None if self.moments is None else self.moments.rows(key)

    @property
    def inputs_digest(self) -> str | None:
        """What codes depend on beside the weights and their widths."""
        if self.kept is not None:
            return self.kept.about
        return None if self.moments is None else self.moments.digest

    def code(self, key: ExpertKey, bits: Bits) -> dict[str, Projection]:
        """Projection → what a pack stores at that width: a QuantizedMatrix, or weights [out, in] for 16 bits; `down` as
        its transpose where a pack has it so.

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
        return coded

    def weights(self, key: ExpertKey, bits: Bits) -> dict[str, F32]:
        """Projection → weights [out, in] as a pack gives them back; ORIGINAL stands for the checkpoint's own."""
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
        """Quantises one of the `batches`, so that `code` and `weights` find it. An expert alone is left to them."""
        together: dict[tuple[str, int], list[ExpertKey]] = {}
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

    def _quantize(self, keys: list[ExpertKey], name: str, bits: int, weights: F32) -> list[QuantizedMatrix]:
        """weights [n, out, in] of one projection of n experts of a layer."""
        matrices = self._checked(keys, name, bits, weights, self._inputs(keys, name))
        for key, matrix in zip(keys, matrices, strict=True):
            self._remember((key, name, bits), matrix)
        return matrices

    def coded(
        self, key: ExpertKey, bits: int, weights: Mapping[str, F32], inputs: Mapping[Side, Inputs] | None
    ) -> dict[str, QuantizedMatrix]:
        """All matrices of an expert as `code` gives them, of weights [out, in] whose inputs the caller knows; not
        remembered. Matrices with the same inputs are coded as one, which is faster: their rows are coded each by
        itself."""
        found: dict[str, QuantizedMatrix] = {}
        for side in SIDES:
            names = [name for name in weights if side_of(name) == side]
            powers = {name: power_of(weights[name]) for name in names}
            rows = np.concatenate([np.ldexp(weights[name], -powers[name]) for name in names])
            known = None if inputs is None else inputs[side]
            whole = self._checked([key], " and ".join(names), bits, rows[None], known)[0]
            if len(names) == 1:
                found[names[0]] = replace(whole, power=powers[names[0]])
                continue
            ends = np.cumsum([len(weights[name]) for name in names]).tolist()
            for name, start, end in zip(names, [0, *ends], ends, strict=False):
                parts = {part: getattr(whole, part)[start:end] for part in ("qweight", "scale", "minimum")}
                found[name] = replace(whole, **parts, power=powers[name])
        return found

    def _checked(
        self, keys: list[ExpertKey], name: str, bits: int, weights: F32, inputs: Inputs | None
    ) -> list[QuantizedMatrix]:
        make = self.quantizer.columns if self._is_turned(name) else self.quantizer.quantize
        try:
            matrices = times_powers(make, weights, bits, inputs)
        except WeightsUnusable as error:
            which = f"expert {keys[0]}" if len(keys) == 1 else f"experts {keys[0]} to {keys[-1]}"
            raise WeightsUnusable(f"{which}, {name}, at {bits} bits: {error}") from None
        for key, matrix in zip(keys, matrices, strict=True):
            if not (np.isfinite(matrix.scale).all() and np.isfinite(matrix.minimum).all()):
                raise WeightsUnusable(f"expert {key}, {name}: its scales at {bits} bits are not finite in float16")
        return matrices

    def _inputs(self, keys: list[ExpertKey], name: str) -> Inputs | None:
        return None if self.moments is None else self.moments.inputs(keys, name)

    def _cached(self, key: ExpertKey, name: str, bits: int) -> QuantizedMatrix | None:
        if self.kept is not None and bits < 16 and (before := self.kept.get(key, name, bits)) is not None:
            return before
        found = self._cache.get((key, name, bits))
        if found is not None:
            self._cache.move_to_end((key, name, bits))
        return found

    def _remember(self, at: tuple[ExpertKey, str, int], matrix: QuantizedMatrix) -> None:
        if at not in self._cache:
            self._cache[at] = matrix
            self._cached_bytes += _nbytes(matrix)
        while self._cached_bytes > CACHE_BYTES:
            _, dropped = self._cache.popitem(last=False)
            self._cached_bytes -= _nbytes(dropped)


def _nbytes(matrix: QuantizedMatrix) -> int:
    return matrix.qweight.nbytes + matrix.scale.nbytes + matrix.minimum.nbytes
