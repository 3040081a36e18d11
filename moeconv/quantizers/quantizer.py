"""What every quantiser is: weights in, codes with scales out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from moeconv.errors import WeightsUnusable
from moert.pack.codec import F32, QuantizedMatrix, power_of

Wants = Literal["nothing", "squares", "products"]

MAX_F16 = 65504.0


@dataclass(frozen=True, eq=False)
class Inputs:
    """What is known of the inputs x of n matrices.

    `rows` [n] counts the tokens seen. `moment` is the mean of x**2, [n, in] ("squares"), or of x xᵀ, [n, in, in]
    ("products"); all zero for a matrix that is told of none. `counted` [n] are the tokens that it is a mean of, which
    may be more than those seen: see moeconv.quantizers.sample.
    """

    rows: npt.NDArray[np.int64]
    moment: F32
    counted: F32

    @classmethod
    def of(cls, rows: npt.NDArray[np.int64], moment: F32) -> Inputs:
        """Of the tokens seen alone."""
        return cls(rows, moment, rows.astype(np.float32))


class Quantizer(Protocol):
    """`group_size` is what the pack's manifest records: inputs per scale, 0 for one scale per output channel; of what
    is coded by columns, outputs per scale, 0 for one scale per column."""

    @property
    def name(self) -> str: ...

    @property
    def group_size(self) -> int: ...

    @property
    def wants(self) -> Wants:
        """Which moments of the inputs help it; it works without any."""
        ...

    def too_few(self, rows: int, in_features: int) -> bool:
        """Whether inputs of so many tokens are too few to be used as they are; what happens then, the class says."""
        ...

    def quantize(self, weights: F32, bits: int, inputs: Inputs | None) -> list[QuantizedMatrix]:
        """weights [n, out, in]: n matrices of one shape; bits 2, 3, 4 or 8. Each result is that of its matrix alone.

        Raises WeightsUnusable for weights that are not finite or that float16 can't bracket.
        """
        ...

    def columns(self, weights: F32, bits: int, inputs: Inputs | None) -> list[QuantizedMatrix]:
        """The same as their transposes [in, out], whose groups run along the outputs. `weights` and `inputs` are those
        of the matrices themselves."""
        ...


def times_powers(
    make: Callable[[F32, int, Inputs | None], list[QuantizedMatrix]], weights: F32, bits: int, inputs: Inputs | None
) -> list[QuantizedMatrix]:
    """Matrices of weights [n, out, in] as `make` quantises them, each after it was divided by its power of two."""
    powers = [power_of(one) for one in weights]
    if any(powers):
        weights = np.stack([np.ldexp(one, -power) for one, power in zip(weights, powers, strict=True)])
    made = make(weights, bits, inputs)
    return [replace(one, power=power) if power else one for one, power in zip(made, powers, strict=True)]


def check_range(weights: F32) -> None:
    """Raises WeightsUnusable, in one line."""
    largest = float(np.abs(weights).max(initial=0.0))
    if not largest < MAX_F16:
        raise WeightsUnusable(
            f"weights that are not finite, or larger than float16 can hold (found {largest:.6g}), can't be quantised"
        )
