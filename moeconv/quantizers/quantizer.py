"""The protocol of quantizers; the simplest quantizer, with one scale a channel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from moeconv.errors import WeightsUnusable
from moert.pack.codec import F32, Codes, QuantizedMatrix, TrellisMatrix, Width, pack_codes, power_of

# The protocol of every quantizer: weights in, codes with scales out.

Wants = Literal["nothing", "squares", "products"]
Coded = QuantizedMatrix | TrellisMatrix
"""A matrix as a quantizer codes it."""

MAX_F16 = 65504.0


@dataclass(frozen=True, eq=False)
class Inputs:
    """The moments of the inputs x of n matrices.

    `rows` [n] counts the tokens that a matrix saw. `moment` is the mean of x**2, [n, in] ("squares"), or of x xᵀ, [n,
    in, in] ("products"); all zero for a matrix without inputs. `counted` [n] is the number of tokens behind this mean,
    which may be larger than `rows`: see moeconv.quantizers.moments.
    """

    rows: npt.NDArray[np.int64]
    moment: F32
    counted: F32

    @classmethod
    def of(cls, rows: npt.NDArray[np.int64], moment: F32) -> Inputs:
        """Returns the moments whose means count only the tokens that each matrix saw."""
        return cls(rows, moment, rows.astype(np.float32))


class Quantizer(Protocol):
    """A quantizer. The pack's manifest records its `group_size`: inputs per scale, 0 for one scale per output channel;
    for matrices that are coded by columns, outputs per scale, 0 for one scale per column."""

    @property
    def name(self) -> str: ...

    @property
    def group_size(self) -> int: ...

    @property
    def codes(self) -> Codes:
        """The codes of its matrices, which decide what widths there are."""
        ...

    @property
    def wants(self) -> Wants:
        """The moments of the inputs that improve its codes; it works without any."""
        ...

    def too_few(self, rows: int, in_features: int) -> bool:
        """Returns whether `rows` tokens are too few to rely on their inputs alone."""
        ...

    def quantize(self, weights: F32, bits: Width, inputs: Inputs | None) -> Sequence[Coded]:
        """Returns the codes of n matrices of one shape, `weights` [n, out, in], at a width below 16 that the codes have
        (moert.pack.manifest.WIDTHS_OF). The result for a matrix does not depend on the other ones.

        Raises WeightsUnusable for weights that are not finite or that float16 can't bracket.
        """
        ...

    def columns(self, weights: F32, bits: Width, inputs: Inputs | None) -> Sequence[Coded]:
        """Returns the codes of the matrices' transposes [in, out], whose groups run along the outputs. `weights` and
        `inputs` belong to the matrices themselves, as for `quantize`."""
        ...


AnyCoded = TypeVar("AnyCoded", QuantizedMatrix, TrellisMatrix, Coded)


def times_powers(
    make: Callable[[F32, Width, Inputs | None], Sequence[AnyCoded]], weights: F32, bits: Width, inputs: Inputs | None
) -> list[AnyCoded]:
    """Returns matrices of weights [n, out, in] quantized by `make`, each after its division by its power of two."""
    powers = [power_of(one) for one in weights]
    if any(powers):
        weights = np.stack([np.ldexp(one, -power) for one, power in zip(weights, powers, strict=True)])
    made = make(weights, bits, inputs)
    return [replace(one, power=power) if power else one for one, power in zip(made, powers, strict=True)]


def check_range(weights: F32) -> None:
    """Raises WeightsUnusable, in one line, if a weight is not finite or beyond float16."""
    largest = float(np.abs(weights).max(initial=0.0))
    if not largest < MAX_F16:
        raise WeightsUnusable(
            f"weights that are not finite, or larger than float16 can hold (found {largest:.6g}), can't be quantized"
        )


# Linear quantization between the smallest and the largest weight of an output channel (EdgeMoE §3.2).


@dataclass(frozen=True)
class ChannelQuantizer:
    """w ≈ scale * code + minimum, with minimum = min(w) and scale = (max(w) - min(w)) / (2**bits - 1) of a channel.

    Codes are rounded against the float16 values of scale and minimum, which the pack stores.
    """

    name: str = "channel"
    group_size: int = 0
    codes: Codes = "plain"
    wants: Wants = "nothing"

    def too_few(self, rows: int, in_features: int) -> bool:
        return False

    def quantize(self, weights: F32, bits: Width, inputs: Inputs | None) -> list[QuantizedMatrix]:
        return [self._matrix(weight, int(bits)) for weight in weights]

    def columns(self, weights: F32, bits: Width, inputs: Inputs | None) -> list[QuantizedMatrix]:
        return self.quantize(weights.transpose(0, 2, 1), bits, None)

    def _matrix(self, weight: F32, bits: int) -> QuantizedMatrix:
        check_range(weight)
        low, high = weight.min(axis=1, keepdims=True), weight.max(axis=1, keepdims=True)
        minimum = low.astype(np.float16)
        scale = ((high - minimum.astype(np.float32)) / (2**bits - 1)).astype(np.float16)
        step = np.where(scale > 0, scale, 1).astype(np.float32)
        codes = np.clip(np.rint((weight - minimum.astype(np.float32)) / step), 0, 2**bits - 1).astype(np.uint8)
        in_features = weight.shape[1]
        return QuantizedMatrix(bits, in_features, in_features, pack_codes(codes, bits), scale, minimum)
