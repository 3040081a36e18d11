"""What is learnt is stored in float16 as it is, or refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moeconv.errors import ConversionError
from moeconv.foresight.examples import half
from moeconv.foresight.neurons import LayerNetwork

MATRIX = torch.randn(20, 30, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("by", [1.0, 2.0**12, 2.0**-12, 0.0])
def test_what_float16_holds_is_stored(by: float) -> None:
    """Of a bias also what vanishes beside all else."""
    assert not half(MATRIX[0] * 2.0**-30).any()
    numbers = MATRIX * by
    made = half(numbers)
    assert made.dtype == np.float16
    np.testing.assert_allclose(made, numbers.numpy(), rtol=2**-10, atol=2.0**-24)


@pytest.mark.parametrize("numbers", [MATRIX * 2.0**20, MATRIX * 2.0**-20, MATRIX[0] * 2.0**20, MATRIX / 0])
def test_what_it_does_not_hold_is_refused(numbers: torch.Tensor) -> None:
    with pytest.raises(ConversionError, match=r"float16 does not hold numbers of what is learnt \(the largest is "):
        half(numbers)


def test_a_predictor_of_large_numbers_is_refused() -> None:
    with pytest.raises(ConversionError, match="too large or too small"):
        LayerNetwork(MATRIX, MATRIX.T * 1e6, torch.zeros(30)).stored()
