"""Numbers as files of what is learnt hold them: in float16, or not at all."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from moeconv.errors import ConversionError
from moert.pack.hash import F16

_MOST_LOST = 2.0**-9  # of a matrix' length; rounding loses at most 2^-11 of each number


def half(numbers: Tensor) -> F16:
    """Returns the numbers in float16. Raises ConversionError where float16 does not hold them; of a bias, which may be
    next to nothing beside what it is added to, only where one is too large."""
    exact = numbers.detach().numpy().astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        made: F16 = exact.astype(np.float16)
        lost = np.linalg.norm(made - exact) > _MOST_LOST * np.linalg.norm(exact)
    if not np.isfinite(made).all() or (exact.ndim > 1 and lost):
        largest = np.abs(exact).max()
        raise ConversionError(
            f"float16 does not hold numbers of what is learnt (the largest is {largest:.3g}): this model's own are too "
            "large or too small to learn from; convert it without"
        )
    return made
