"""Codes one input after the other: the C beside torch, and what both are for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moeconv.quantizers import QUANTIZERS, Inputs, coding, gptq
from moeconv.quantizers.gptq import Hessian, Rounding
from moert.kernels import library
from moert.pack.codec import F32, dequantize, unpack_codes

needs_library = pytest.mark.skipif(library.load() is None, reason="the native kernels were not built")


def problem(n: int, inputs: int, out: int, groups: int, bits: int, seed: int) -> tuple[Tensor, Hessian, Rounding]:
    """Weights [n, in, out], moments of correlated inputs, a grid; some scales are 0."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, 3 * inputs, inputs)) @ rng.standard_normal((inputs, inputs))
    moment = np.einsum("nri,nrj->nij", x, x).astype(np.float32) / (3 * inputs)
    hessian = Hessian(Inputs.of(np.full(n, 3 * inputs), moment))
    weights = torch.from_numpy(rng.standard_normal((n, inputs, out)).astype(np.float32))
    scale = torch.from_numpy((rng.random((n, groups, out)) * (rng.random((n, groups, out)) > 0.1)).astype(np.float32))
    minimum = torch.from_numpy(-rng.random((n, groups, out)).astype(np.float32) * 2)
    group = torch.from_numpy(rng.integers(0, groups, (n, inputs)))
    return weights, hessian, Rounding(scale, minimum, group, 2**bits - 1)


def both_ways(monkeypatch: pytest.MonkeyPatch, code: Rounding, *arguments: Tensor, improves: bool) -> list[Tensor]:
    """Codes by the C, and by torch."""
    found = []
    for way in (coding.code_inputs, lambda: None):
        monkeypatch.setattr(gptq, "code_inputs", way)
        given = [each.clone() for each in arguments]
        found.append(code.improved(*given) if improves else code.made(*given))
    return found


@needs_library
@settings(max_examples=40)
@given(st.integers(1, 3), st.integers(1, 300), st.integers(1, 90), st.integers(1, 4), st.sampled_from([2, 3, 4, 8]),
       st.booleans(), st.integers(0, 1000))  # fmt: skip
def test_the_c_finds_the_codes_that_torch_finds(
    n: int, inputs: int, out: int, groups: int, bits: int, improves: bool, seed: int
) -> None:
    """But for values between two codes, which roundings decide, and what follows from these in the same column."""
    weights, hessian, code = problem(n, inputs, out, groups, bits, seed)
    with pytest.MonkeyPatch.context() as patched:
        if improves:
            codes = torch.randint(0, code.top + 1, weights.shape, generator=torch.Generator().manual_seed(seed)).float()
            one, other = both_ways(patched, code, weights, hessian.products, codes, improves=True)
        else:
            one, other = both_ways(patched, code, weights, hessian.factor, improves=False)
    assert one.shape == other.shape == weights.shape
    assert torch.equal(one, one.round().clamp(0, code.top))
    assert (one != other).any(1).sum() <= 2 + n * out // 20


@needs_library
@pytest.mark.parametrize("group", [0, 32])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_matrix_loses_as_much_with_either(monkeypatch: pytest.MonkeyPatch, bits: int, group: int) -> None:
    rng = np.random.default_rng(bits)
    weights = rng.standard_normal((2, 48, 600)).astype(np.float32)
    x = rng.standard_normal((2, 900, 600)) @ rng.standard_normal((600, 600))
    inputs = Inputs.of(np.full(2, 900), (np.einsum("nri,nrj->nij", x, x) / 900).astype(np.float32))

    def lost() -> list[float]:
        found = QUANTIZERS["gptq"](group).quantize(weights, bits, inputs)
        misses: list[F32] = [dequantize(matrix) - weight for matrix, weight in zip(found, weights, strict=True)]
        assert all(unpack_codes(matrix.qweight, bits, 600).max() < 2**bits for matrix in found)
        return [float(((miss @ moment) * miss).sum()) for miss, moment in zip(misses, inputs.moment, strict=True)]

    with_c = lost()
    monkeypatch.setattr(gptq, "code_inputs", lambda: None)
    assert with_c == pytest.approx(lost(), rel=2e-3)


@pytest.mark.parametrize("way", ["c", "torch"])
def test_improving_never_loses_more(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    if way == "c" and library.load() is None:
        pytest.skip("the native kernels were not built")
    if way == "torch":
        monkeypatch.setattr(gptq, "code_inputs", lambda: None)
    weights, hessian, code = problem(2, 100, 40, 1, 2, 5)
    code = Rounding(code.scale.clamp(min=0.1), code.minimum, code.group, code.top)

    def missed(codes: Tensor) -> Tensor:
        return weights - (codes * code.scale + code.minimum)

    def loss(codes: Tensor) -> float:
        return float((missed(codes) * (hessian.products @ missed(codes))).sum())

    codes = ((weights - code.minimum) / code.scale).round().clamp(0, code.top)
    for _ in range(3):
        better = code.improved(hessian.products @ missed(codes), hessian.products, codes)
        assert loss(better) < loss(codes) * (1 + 1e-6)
        codes = better
