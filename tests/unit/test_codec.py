"""The reference codec against bytes worked out by hand, against torch, and there and back again."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from moert.pack.codec import (
    INT_WIDTHS,
    Mxfp4Matrix,
    QuantizedMatrix,
    dequantize,
    from_bfloat16,
    n_groups,
    pack_codes,
    row_bytes,
    to_bfloat16,
    to_mxfp4,
    unpack_codes,
)

# Codes of one row, least significant bits first, worked out with pencil and paper.
BY_HAND = {
    2: ([0, 1, 2, 3, 1], [0b11_10_01_00, 0b01]),
    3: ([5, 2, 7, 0, 4], [0b00_11_10_01, 0b00, 0b1_0_1_0_1]),
    4: ([1, 15, 8], [0xF1, 0x08]),
    8: ([0, 128, 255], [0, 128, 255]),
}


@pytest.mark.parametrize("bits", INT_WIDTHS)
def test_bytes_worked_out_by_hand(bits: int) -> None:
    codes, expected = BY_HAND[bits]
    packed = pack_codes(np.array([codes, codes], dtype=np.uint8), bits)
    assert packed.tolist() == [expected, expected]
    assert unpack_codes(packed, bits, len(codes)).tolist() == [codes, codes]
    assert row_bytes(9, bits) == {2: 3, 3: 5, 4: 5, 8: 9}[bits]


@given(st.data())
def test_codes_come_back(data: st.DataObject) -> None:
    bits = data.draw(st.sampled_from(INT_WIDTHS))
    shape = data.draw(st.tuples(st.integers(1, 5), st.integers(1, 67)))
    codes = data.draw(hnp.arrays(np.uint8, shape, elements=st.integers(0, (1 << bits) - 1)))
    packed = pack_codes(codes, bits)
    assert packed.dtype == np.uint8
    assert packed.shape == (shape[0], row_bytes(shape[1], bits))
    np.testing.assert_array_equal(unpack_codes(packed, bits, shape[1]), codes)


@given(st.data())
def test_mxfp4_comes_back(data: st.DataObject) -> None:
    rows, inputs = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 70)))
    codes = data.draw(hnp.arrays(np.uint8, (rows, inputs), elements=st.integers(0, 15)))
    exponent = data.draw(hnp.arrays(np.uint8, (rows, n_groups(inputs, 32)), elements=st.integers(6, 250)))
    given_weights = Mxfp4Matrix(inputs, pack_codes(codes, 4), exponent).widened()
    found = to_mxfp4(given_weights)
    assert found.qweight.shape == (rows, row_bytes(inputs, 4))
    np.testing.assert_array_equal(found.widened().view(np.uint32), given_weights.view(np.uint32))
    table = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    for i, j in np.ndindex(rows, inputs):
        value = math.ldexp(table[codes[i, j] & 7], int(exponent[i, j // 32]) - 127)
        assert given_weights[i, j] == (-value if codes[i, j] & 8 else value)


@pytest.mark.parametrize("weights", [[5.0], [6.0, 0.25], [1.0, 1.25], [float("nan")], [float("inf")], [1e-40, 1.0]])
def test_what_mxfp4_does_not_hold(weights: list[float]) -> None:
    assert to_mxfp4(np.array([weights], dtype=np.float32)) is None


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_code_too_large_is_refused(bits: int) -> None:
    with pytest.raises(ValueError, match=f"{1 << bits} does not fit in {bits} bits"):
        pack_codes(np.array([[0, 1 << bits]], dtype=np.uint8), bits)


@given(st.data())
def test_dequantize_is_scale_times_code_plus_minimum(data: st.DataObject) -> None:
    bits = data.draw(st.sampled_from(INT_WIDTHS))
    out_features, in_features = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 40)))
    group_size = data.draw(st.integers(1, in_features))
    groups = n_groups(in_features, group_size)
    codes = data.draw(hnp.arrays(np.uint8, (out_features, in_features), elements=st.integers(0, (1 << bits) - 1)))
    halves = hnp.arrays(np.float16, (out_features, groups), elements=st.floats(-8, 8, width=16))
    scale, minimum = data.draw(halves), data.draw(halves)
    matrix = QuantizedMatrix(bits, in_features, group_size, pack_codes(codes, bits), scale, minimum)
    found = dequantize(matrix)
    assert found.dtype == np.float32
    for i in range(out_features):
        for j in range(in_features):
            g = j // group_size
            product = np.float32(codes[i, j]) * np.float32(scale[i, g])
            assert found[i, j] == product + np.float32(minimum[i, g])


@given(hnp.arrays(np.uint32, st.integers(1, 50)))
@example(np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF], np.uint32))  # ties, and what becomes infinite
def test_bfloat16_is_rounded_as_torch_does(patterns: np.ndarray) -> None:
    values = patterns.view(np.float32)
    numbers = ~np.isnan(values)
    expected = torch.from_numpy(values.copy()).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    found = to_bfloat16(values)
    np.testing.assert_array_equal(found[numbers], expected[numbers])
    assert np.isnan(from_bfloat16(found)[~numbers]).all()


def test_every_bfloat16_pattern_comes_back() -> None:
    patterns = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    values = from_bfloat16(patterns)
    numbers = ~np.isnan(values)
    np.testing.assert_array_equal(to_bfloat16(values)[numbers], patterns[numbers])
