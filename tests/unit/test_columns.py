"""Matrices that are coded as their transposes: bounds that hold for odd shapes, and errors that others make up for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeconv.errors import WeightsUnusable
from moeconv.packing.packed import error_share
from moeconv.quantizers import QUANTIZERS, Inputs, gptq
from moeconv.quantizers.gptq import ColumnProblem, hessian_of
from moert.pack.codec import F32, INT_WIDTHS, dequantize, unpack_codes
from tests.pairs import thinned
from tests.unit.test_quantizers import PLAIN, inputs_of, random_weights, same

shapes = st.tuples(st.integers(1, 3), st.integers(1, 150), st.integers(1, 40))  # n, out, in
widths = st.sampled_from(INT_WIDTHS)
sizes = st.sampled_from([0, 32, 64])


@settings(max_examples=40)
@given(shapes, widths, sizes, st.sampled_from(PLAIN), st.sampled_from([0, 3, 400]))
def test_any_shape(shape: tuple[int, int, int], bits: int, group: int, name: str, rows: int) -> None:
    (n, out, inputs), quantizer = shape, QUANTIZERS[name](group)
    weights, known = random_weights(shape, rows), inputs_of(n, inputs, rows, quantizer.wants)
    matrices = quantizer.columns(weights, bits, None if quantizer.wants == "nothing" else known)
    groups = 1 if group == 0 or name == "channel" else -(-out // group)
    for weight, matrix in zip(weights, matrices, strict=True):
        assert (matrix.bits, matrix.in_features) == (bits, out)
        assert matrix.scale.shape == matrix.minimum.shape == (inputs, groups)
        codes = unpack_codes(matrix.qweight, bits, out)
        assert codes.shape == (inputs, out)
        assert codes.max() < 2**bits
        stored = dequantize(matrix)
        assert np.isfinite(stored).all()
        assert stored.shape == weight.T.shape


@settings(max_examples=20)
@given(shapes, widths, st.sampled_from(PLAIN), st.sampled_from([0, 32]))
def test_a_batch_gives_what_each_gives_alone(shape: tuple[int, int, int], bits: int, name: str, group: int) -> None:
    quantizer = QUANTIZERS[name](group)
    weights, inputs = random_weights(shape, 0), inputs_of(shape[0], shape[2], 60, quantizer.wants)
    for i, matrix in enumerate(quantizer.columns(weights, bits, inputs)):
        alone = Inputs.of(inputs.rows[i : i + 1], inputs.moment[i : i + 1])
        assert same(matrix, quantizer.columns(weights[i : i + 1], bits, alone)[0])


@pytest.mark.parametrize("name", ["channel", "group"])
def test_those_that_code_rows_one_by_one_code_the_transpose(name: str) -> None:
    """A row of it is weighed by one input alone, so that what is known of inputs has no say."""
    weights, quantizer = random_weights((2, 70, 24), 0), QUANTIZERS[name](32)
    told = quantizer.columns(weights, 3, inputs_of(2, 24, 50, "squares"))
    plain = quantizer.quantize(np.ascontiguousarray(weights.transpose(0, 2, 1)), 3, None)
    assert all(same(one, other) for one, other in zip(told, plain, strict=True))


def lost(weights: F32, inputs: Inputs, stored: list[F32]) -> float:
    misses = [one.T - weight for one, weight in zip(stored, weights, strict=True)]
    return sum(float(((miss @ moment) * miss).sum()) for miss, moment in zip(misses, inputs.moment, strict=True))


@pytest.mark.parametrize("group", [0, 32])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_errors_are_made_up_for_by_other_columns(bits: int, group: int) -> None:
    weights, products = random_weights((2, 48, 96), 0), inputs_of(2, 96, 500, "products")
    losses = {
        name: lost(weights, products, list(map(dequantize, QUANTIZERS[name](group).columns(weights, bits, products))))
        for name in ("gptq", "group")
    }
    assert losses["gptq"] < 0.6 * losses["group"]


@pytest.mark.parametrize("size", [20, 48])
def test_no_sweep_makes_anything_worse(size: int) -> None:
    """Also where the last group is shorter, and where an input was always silent."""
    weights, inputs = random_weights((2, 48, 70), 3), inputs_of(2, 70, 40, "products")
    hessian = hessian_of(inputs)
    turned = torch.from_numpy(weights).mT.contiguous()
    losses = []
    for sweeps in range(4):
        codes, scale, minimum = ColumnProblem(turned, hessian, 2, size).solved(sweeps)
        wide = [each.repeat_interleave(size, 2)[:, :, :48] for each in (scale, minimum)]
        miss = turned - (codes * wide[0] + wide[1])
        losses.append(float((miss * torch.stack([h @ m for h, m in zip(hessian.products, miss, strict=True)])).sum()))
    assert losses == sorted(losses, reverse=True)
    assert losses[1] < 0.97 * losses[0]


def test_large_matrices_are_coded_a_few_groups_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of outputs have nothing to do with each other."""
    weights, inputs, seen = random_weights((2, 150, 40), 0), inputs_of(2, 40, 200, "products"), []
    whole = QUANTIZERS["gptq"](32).columns(weights, 3, inputs)
    solved = ColumnProblem.solved
    monkeypatch.setattr(ColumnProblem, "solved", lambda self, sweeps: seen.append(self.out) or solved(self, sweeps))
    monkeypatch.setattr(gptq, "_WORK_BYTES", 2 * gptq._COPIES * 4 * 2 * 40 * 32)
    for one, other in zip(QUANTIZERS["gptq"](32).columns(weights, 3, inputs), whole, strict=True):
        assert one.scale.shape == other.scale.shape
        assert np.allclose(dequantize(one), dequantize(other), atol=1e-2)
    assert seen == [64, 64, 22]


@pytest.mark.parametrize("name", PLAIN)
def test_constant_and_zero_columns_are_exact(name: str) -> None:
    weight = np.array([[0.0] * 8, [0.5] * 8, [-2.0] * 8], dtype=np.float32)
    [matrix] = QUANTIZERS[name](None).columns(np.ascontiguousarray(weight.T)[None], 2, None)
    assert np.array_equal(dequantize(matrix), weight)


@pytest.mark.parametrize("name", PLAIN)
def test_weights_that_float16_cannot_hold_are_refused(name: str) -> None:
    with pytest.raises(WeightsUnusable, match="float16"):
        QUANTIZERS[name](None).columns(np.array([[[1e6], [0.0]]], dtype=np.float32), 4, None)


@thinned("bits, name, group, rows", INT_WIDTHS, ["group", "gptq"], [0, 32], [0, 5, 30, 500])
def test_verify_tells_fitted_weights_from_others(bits: int, name: str, group: int, rows: int) -> None:
    for shape in ((24, 40), (40, 24), (48, 96)):
        weights, quantizer = random_weights((4, *shape), rows), QUANTIZERS[name](group)
        inputs = inputs_of(4, shape[1], rows, quantizer.wants, seed=rows)
        for i, matrix in enumerate(quantizer.columns(weights, bits, inputs)):
            assert error_share(matrix, weights[i].T, each=False) < 0.85
            assert error_share(matrix, weights[i - 1].T, each=False) > 1.15
