"""The quantizers: bounds that hold for odd shapes and extreme weights, the same result alone and in a batch."""

from __future__ import annotations

import gguf as ggml
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeconv.errors import WeightsUnusable
from moeconv.packing.packed import error_share
from moeconv.quantizers import QUANTIZERS, Inputs, codes_of, gptq
from moeconv.quantizers.quantizer import times_powers
from moeconv.quantizers.source import codes_of_source
from moert.pack.codec import F32, INT_WIDTHS, QuantizedMatrix, dequantize, unpack_codes
from tests.pairs import thinned

shapes = st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 150))
widths = st.sampled_from(INT_WIDTHS)
sizes = st.sampled_from([0, 32, 64, 128])
PLAIN = sorted(name for name in QUANTIZERS if codes_of(name) == "plain")
"""The others' matrices have other codes: see test_trellis.py."""


def random_weights(shape: tuple[int, ...], seed: int, size: float = 1.0) -> F32:
    return (np.random.default_rng(seed).standard_normal(shape) * size).astype(np.float32)


def inputs_of(n: int, in_features: int, rows: int, wants: str, seed: int = 0) -> Inputs:
    """Moments of correlated inputs, one of which is always silent."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, rows, in_features)) @ rng.standard_normal((in_features, in_features))
    x[:, :, -1] = 0
    moment = np.einsum("nri,nrj->nij", x, x) / max(rows, 1)
    if wants == "squares":
        moment = np.diagonal(moment, axis1=1, axis2=2)
    return Inputs.of(np.full(n, rows), np.ascontiguousarray(moment, dtype=np.float32))


def same(one: QuantizedMatrix, other: QuantizedMatrix) -> bool:
    return all(np.array_equal(getattr(one, part), getattr(other, part)) for part in ("qweight", "scale", "minimum"))


@given(shapes, widths, st.floats(1e-6, 1e3), st.integers(0, 1000))
def test_channel_is_within_half_a_step(shape: tuple[int, ...], bits: int, size: float, seed: int) -> None:
    weights = random_weights(shape, seed, size)
    matrices = times_powers(QUANTIZERS["channel"](None).quantize, weights, bits, None)  # as they are packed
    for weight, matrix in zip(weights, matrices, strict=True):
        assert matrix.scale.shape == (shape[1], 1)
        assert error_share(matrix, weight, each=True) <= 1


@given(shapes, widths, sizes, st.floats(1e-4, 1e3), st.integers(0, 1000))
def test_group_is_never_worse_than_min_max(
    shape: tuple[int, ...], bits: int, group: int, size: float, seed: int
) -> None:
    weights = random_weights(shape, seed, size)
    inputs = inputs_of(shape[0], shape[2], 20, "squares", seed)
    matrices = QUANTIZERS["group"](group).quantize(weights, bits, inputs)
    h = inputs.moment / np.where(inputs.moment.mean(1, keepdims=True) > 0, inputs.moment.mean(1, keepdims=True), 1)
    h = np.where(inputs.moment.any(1, keepdims=True), h + 0.01, 1)
    width = min(group, shape[2]) or shape[2]
    for weight, matrix, each in zip(weights, matrices, h, strict=True):
        assert matrix.scale.shape == (shape[1], -(-shape[2] // width))
        assert unpack_codes(matrix.qweight, bits, shape[2]).max() < 2**bits
        for start in range(0, shape[2], width):
            part = slice(start, start + width)
            plain = dequantize(QUANTIZERS["channel"](None).quantize(weight[None, :, part], bits, None)[0])
            least = (np.square(plain - weight[:, part]) * each[part]).sum(1)
            found = (np.square(dequantize(matrix)[:, part] - weight[:, part]) * each[part]).sum(1)
            assert (found <= least * 1.001 + 1e-12 * size**2).all()


@settings(max_examples=40)
@given(shapes, widths, st.sampled_from([0, 32]), st.sampled_from([0, 3, 400]), st.integers(0, 1000))
def test_gptq_takes_any_shape(shape: tuple[int, ...], bits: int, group: int, rows: int, seed: int) -> None:
    weights = random_weights(shape, seed)
    inputs = inputs_of(shape[0], shape[2], rows, "products", seed)
    for matrix in QUANTIZERS["gptq"](group).quantize(weights, bits, inputs):
        assert unpack_codes(matrix.qweight, bits, shape[2]).max() < 2**bits
        assert np.isfinite(dequantize(matrix)).all()


@settings(max_examples=20)
@given(shapes, widths, st.sampled_from(PLAIN), st.sampled_from([0, 32]))
def test_a_batch_gives_what_each_gives_alone(shape: tuple[int, ...], bits: int, name: str, group: int) -> None:
    quantizer = QUANTIZERS[name](group)
    weights, inputs = random_weights(shape, 0), inputs_of(shape[0], shape[2], 60, quantizer.wants)
    batch = quantizer.quantize(weights, bits, inputs)
    for i, matrix in enumerate(batch):
        alone = Inputs.of(inputs.rows[i : i + 1], inputs.moment[i : i + 1])
        assert same(matrix, quantizer.quantize(weights[i : i + 1], bits, alone)[0])


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_what_knows_more_of_the_inputs_loses_less_of_the_outputs(bits: int) -> None:
    weights, products = random_weights((2, 48, 96), 0), inputs_of(2, 96, 500, "products")
    squares = Inputs.of(products.rows, np.ascontiguousarray(np.diagonal(products.moment, axis1=1, axis2=2)))

    def loss(name: str, inputs: Inputs | None) -> float:
        found = QUANTIZERS[name](0).quantize(weights, bits, inputs)
        misses = [dequantize(matrix) - weight for matrix, weight in zip(found, weights, strict=True)]
        return sum(float(((miss @ moment) * miss).sum()) for miss, moment in zip(misses, products.moment, strict=True))

    order = [loss("gptq", products), loss("group", squares), loss("channel", None)]
    assert order == sorted(order)
    assert order[0] < 0.6 * order[1]


@pytest.mark.parametrize("name", PLAIN)
def test_constant_and_zero_rows_are_exact(name: str) -> None:
    weight = np.array([[0.0] * 8, [0.5] * 8, [-2.0] * 8], dtype=np.float32)
    assert np.array_equal(dequantize(QUANTIZERS[name](None).quantize(weight[None], 2, None)[0]), weight)


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("value", [1e6, np.nan, -np.inf])
def test_weights_that_float16_cannot_hold_are_refused(name: str, value: float) -> None:
    with pytest.raises(WeightsUnusable, match="float16"):
        QUANTIZERS[name](None).quantize(np.array([[[value, 0.0]]], dtype=np.float32), 4, None)


@given(
    st.integers(1, 5), st.integers(1, 150), st.sampled_from([32, 64, 128]), st.sampled_from([1, -1]),
    st.sampled_from([1e-6, 0.01, 100.0]), st.integers(0, 1000),
)  # fmt: skip
def test_codes_that_weights_come_from_are_kept(
    rows: int, inputs: int, group: int, sign: int, size: float, seed: int
) -> None:
    """Steps from -8 to 7 and from -7 to 8, groups of zeros, and of few steps; not where one weight lies between."""
    rng = np.random.default_rng(seed)
    groups = -(-inputs // group)
    scale = (sign * size * (0.1 + rng.random((rows, groups)))).astype(np.float16)
    steps = (
        rng.integers(-rng.integers(0, 9, (rows, groups, 1)), 8, (rows, groups, group))
        * rng.integers(0, 2, groups)[:, None]
    )
    weights = (scale.astype(np.float32)[:, :, None] * steps).reshape(rows, -1)[:, :inputs].astype(np.float32)
    made = QUANTIZERS["source"](group)
    (matrix,) = made.quantize(weights[None], 4, None)
    assert np.array_equal(dequantize(matrix), weights)
    assert matrix.group_size == min(group, inputs)
    other = weights.copy()
    other[0, 0] = 0.37 * abs(float(scale[0, 0])) + other[0, 0]
    (kept, coded) = made.quantize(np.stack([weights, other]), 4, None)
    assert same(kept, matrix)
    if steps.reshape(rows, -1)[0, :inputs][:group].any():  # else the weight itself is a step
        assert same(coded, QUANTIZERS["group"](group).quantize(other[None], 4, None)[0])


@given(st.integers(1, 5), st.sampled_from([4, 8]), st.integers(0, 1000))
def test_codes_of_llama_cpp_are_kept(rows: int, bits: int, seed: int) -> None:
    """Q4_1, whose steps go upwards from the least weight, and Q8_0; not where one weight lies between."""
    weights = np.random.default_rng(seed).standard_normal((rows, 96)).astype(np.float32)
    kind = ggml.GGMLQuantizationType.Q4_1 if bits == 4 else ggml.GGMLQuantizationType.Q8_0
    weights = ggml.dequantize(ggml.quantize(weights, kind), kind)
    matrix = codes_of_source(weights, 32, bits)
    assert matrix is not None
    assert (matrix.bits, np.array_equal(dequantize(matrix), weights)) == (bits, True)
    weights[0, 0] += np.ptp(weights[0, :32]) / 1000
    assert codes_of_source(weights, 32, bits) is None


@thinned("bits, name, group, rows", INT_WIDTHS, ["group", "gptq"], [0, 32], [0, 1, 5, 30, 500])
def test_verify_tells_fitted_weights_from_others(bits: int, name: str, group: int, rows: int) -> None:
    """With a margin: inputs from many tokens or few, one of them a hundred times as loud in every second matrix."""
    for shape in ((24, 40), (40, 24), (48, 96)):
        weights, quantizer = random_weights((4, *shape), rows), QUANTIZERS[name](group)
        inputs = inputs_of(4, shape[1], rows, quantizer.wants, seed=rows)
        inputs.moment[::2, 0] *= 1e4 if quantizer.wants == "squares" else 100
        if quantizer.wants == "products":
            inputs.moment[::2, :, 0] *= 100
        for i, matrix in enumerate(quantizer.quantize(weights, bits, inputs)):
            assert error_share(matrix, weights[i], each=False) < 0.85
            assert error_share(matrix, weights[i - 1], each=False) > 1.15


def test_the_normal_equations_are_solved_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, inputs = random_weights((2, 40, 96), 0), inputs_of(2, 96, 200, "products")
    solved: list[int] = []
    solve = torch.linalg.solve

    def counting(grid: torch.Tensor, aim: torch.Tensor) -> torch.Tensor:
        solved.append(grid.nbytes)
        return solve(grid, aim)

    monkeypatch.setattr(torch.linalg, "solve", counting)
    whole = QUANTIZERS["gptq"](32).quantize(weights, 3, inputs)
    monkeypatch.setattr(gptq, "_WORK_BYTES", 2 * 7 * gptq._row_bytes(96, 32))
    solved.clear()
    for one, other in zip(QUANTIZERS["gptq"](32).quantize(weights, 3, inputs), whole, strict=True):
        assert np.allclose(dequantize(one), dequantize(other), atol=1e-2)
    assert max(solved) == 2 * 7 * 6**2 * 8


def test_verify_finds_one_changed_weight_in_channels() -> None:
    weight = random_weights((1, 8, 64), 0)
    matrix = QUANTIZERS["channel"](None).quantize(weight, 4, None)[0]
    changed = weight[0].copy()
    changed[3, 5] += 2
    assert error_share(matrix, weight[0], each=True) <= 1 < error_share(matrix, changed, each=True)
    assert error_share(weight[0], weight[0], each=True) == 0
    assert error_share(weight[0], weight[0] * 1.1, each=True) > 1
