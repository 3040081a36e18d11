"""The linear quantiser: its error bound holds, for odd shapes and extreme weights, and verify measures it right."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeconv.errors import WeightsUnusable
from moeconv.quantizers import QUANTIZERS
from moeconv.verify import error_share
from moert.pack.codec import INT_WIDTHS, dequantize


@given(
    st.integers(1, 5), st.integers(1, 150), st.sampled_from(INT_WIDTHS), st.sampled_from([0, 32, 64, 128]),
    st.floats(1e-6, 1e3), st.integers(0, 1000),
)  # fmt: skip
def test_error_is_within_half_a_step(rows: int, columns: int, bits: int, group: int, size: float, seed: int) -> None:
    weight = (np.random.default_rng(seed).standard_normal((rows, columns)) * size).astype(np.float32)
    quantizer = QUANTIZERS["group" if group else "channel"](group)
    matrix = quantizer.quantize(weight, bits)
    assert matrix.scale.shape == (rows, 1 if not group else -(-columns // min(group, columns)))
    assert error_share(matrix, weight) <= 1


def test_constant_and_zero_rows_are_exact_in_float16() -> None:
    weight = np.array([[0.0] * 8, [0.5] * 8, [-2.0] * 8], dtype=np.float32)
    assert np.array_equal(dequantize(QUANTIZERS["channel"](0).quantize(weight, 2)), weight)


def test_more_bits_and_smaller_groups_err_less() -> None:
    weight = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)

    def error(name: str, group: int, bits: int) -> float:
        return float(np.square(dequantize(QUANTIZERS[name](group).quantize(weight, bits)) - weight).mean())

    by_bits = [error("channel", 0, bits) for bits in INT_WIDTHS]
    assert by_bits == sorted(by_bits, reverse=True)
    assert error("group", 32, 2) < error("group", 128, 2) < error("channel", 0, 2)


def test_other_weights_are_found_out() -> None:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((8, 64)).astype(np.float32)
    matrix = QUANTIZERS["group"](32).quantize(weight, 4)
    changed = weight.copy()
    changed[3, 5] += 2
    assert error_share(matrix, weight) <= 1 < error_share(matrix, changed)
    assert error_share(weight, weight) == 0
    assert error_share(weight, weight * 1.1) > 1


def test_weights_that_float16_cannot_hold_are_refused() -> None:
    with pytest.raises(WeightsUnusable, match="float16"):
        QUANTIZERS["channel"](0).quantize(np.array([[1e6, 0.0]], dtype=np.float32), 4)
