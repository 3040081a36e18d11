"""What mixes tokens through a state of fixed size, beside what transformers says that it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from native_problems import all_natives, normal
from torch.nn.functional import softplus
from transformers.models.granitemoehybrid import modeling_granitemoehybrid as granite
from transformers.models.jamba import modeling_jamba as jamba
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.lfm2 import modeling_lfm2 as lfm2
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from moert.kernels import library
from moert.kernels.backend import Backend, NormWeights, opaque
from moert.kernels.reference import ReferenceBackend
from moert.pack.codec import F32
from tests.pairs import thinned

TOKENS = 9


@pytest.fixture(scope="module")
def backends() -> Iterator[list[Backend]]:
    """The reference, and each instruction set that runs here, with one thread and with several."""
    if library.load() is None:
        yield [opaque(ReferenceBackend())]
        return
    with all_natives() as opened:
        yield [opaque(ReferenceBackend()), *(opaque(each) for each in opened.values())]


def close(found: F32, expected: torch.Tensor, atol: float = 2e-5) -> None:
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected.numpy().reshape(found.shape), rtol=1e-5, atol=atol)


def tensors(*arrays: F32) -> list[torch.Tensor]:
    """Copies, as a batch of one."""
    return [torch.from_numpy(array.copy())[None] for array in arrays]


# Short convolution


@thinned("module, biased, silu, k", [qwen, granite, jamba, lfm2], [False, True], [False, True], [3, 4])
def test_a_convolution_is_that_of_transformers(
    backends: list[Backend], module: object, biased: bool, silu: bool, k: int
) -> None:
    rng = np.random.default_rng(k)
    x, taps, bias = normal(rng, TOKENS, 37), normal(rng, k, 37), normal(rng, 37) if biased else None
    weight, act = torch.from_numpy(taps.T.copy()), "silu" if silu else None
    wide_bias = None if bias is None else torch.from_numpy(bias)
    whole = module.causal_conv1d_fn(torch.from_numpy(x.T.copy())[None], weight, wide_bias, activation=act)  # type: ignore[attr-defined]
    for backend in backends:
        state, before = np.zeros((k - 1, 37), np.float32), torch.zeros(1, 37, k - 1)
        for at in range(TOKENS):
            found = backend.conv(x[at : at + 1], taps, bias, state, silu)
            column = torch.from_numpy(x[at])[None, :, None]
            each = module.causal_conv1d_update(column, before, weight, wide_bias, activation=act)  # type: ignore[attr-defined]
            close(found, each)
            close(found, whole[0, :, at])
            assert np.array_equal(state, before[0].numpy().T)


# Gated delta rule


def check_delta(backends: list[Backend], rule: Callable[..., Any], given: tuple[F32, ...], first: F32) -> None:
    """Compares results and states with those of `rule`, a function of transformers, for q, k, v, decay and beta."""
    expected, left = rule(
        *tensors(*given), initial_state=tensors(first)[0], output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    for backend in backends:
        state = first.copy()
        close(backend.delta(*given, state), expected)
        close(state, left)


@pytest.mark.parametrize(("keys", "heads", "dk", "dv"), [(2, 2, 16, 16), (2, 6, 33, 20), (1, 4, 8, 70)])
@pytest.mark.parametrize("begun", [False, True])
def test_the_delta_rule_is_that_of_qwen3_next(
    backends: list[Backend], keys: int, heads: int, dk: int, dv: int, begun: bool
) -> None:
    rng = np.random.default_rng(dk)
    q, k, v = normal(rng, TOKENS, keys, dk), normal(rng, TOKENS, keys, dk), normal(rng, TOKENS, heads, dv)
    decay, beta = -np.abs(normal(rng, TOKENS, heads)), rng.uniform(size=(TOKENS, heads)).astype(np.float32)
    first = normal(rng, heads, dk, dv) * np.float32(begun)
    for rule in (qwen.torch_recurrent_gated_delta_rule, qwen.torch_chunk_gated_delta_rule):
        check_delta(backends, rule, (q, k, v, decay, beta), first)


@pytest.mark.parametrize(("heads", "dim"), [(2, 16), (3, 33), (1, 70)])
@pytest.mark.parametrize("begun", [False, True])
def test_the_delta_rule_by_feature_is_that_of_kimi_linear(
    backends: list[Backend], heads: int, dim: int, begun: bool
) -> None:
    rng = np.random.default_rng(dim)
    q, k, v, decay = (normal(rng, TOKENS, heads, dim) for _ in range(4))
    decay, beta = -np.abs(decay), rng.uniform(size=(TOKENS, heads)).astype(np.float32)
    first = normal(rng, heads, dim, dim) * np.float32(begun)
    for rule in (kimi.recurrent_kimi_delta_attention, kimi.chunk_kimi_delta_attention):
        check_delta(backends, rule, (q, k, v, decay, beta), first)


def test_a_vector_of_zeros_has_no_direction(backends: list[Backend]) -> None:
    zeros, ones = np.zeros((1, 1, 4), np.float32), np.ones((1, 1, 4), np.float32)
    for backend in backends:
        state = np.zeros((1, 4, 4), np.float32)
        assert not backend.delta(zeros, zeros, ones, -ones[0, :, :1], ones[0, :, :1], state).any()
        assert not state.any()


# Scan


@pytest.mark.parametrize(("heads", "groups", "p", "n"), [(6, 1, 8, 16), (4, 2, 5, 33), (4, 4, 64, 128)])
def test_a_scan_is_that_of_mamba_2(backends: list[Backend], heads: int, groups: int, p: int, n: int) -> None:
    rng = np.random.default_rng(n)
    x, b, c = normal(rng, TOKENS, heads, p), normal(rng, TOKENS, groups, n), normal(rng, TOKENS, groups, n)
    steps, bias, a, d = normal(rng, TOKENS, heads), normal(rng, heads), -np.abs(normal(rng, heads)), normal(rng, heads)
    first = normal(rng, heads, p, n)
    wide = [torch.from_numpy(each) for each in (a, bias, d)]
    expected, left = granite.mamba2_chunk_scan(
        *tensors(x, steps), wide[0], *tensors(b, c), chunk_size=4, D=wide[2], dt_bias=wide[1], dt_softplus=True,
        initial_states=tensors(first)[0], return_final_states=True,
    )  # fmt: skip
    for backend in backends:
        state = first.copy()
        dt = backend.softplus(steps, bias)
        close(backend.scan(x, dt, a[:, None], b, c, d, state), expected, atol=1e-4)
        close(state, left)
        alone, [before] = first.copy(), tensors(first)
        for at in range(TOKENS):
            dt = backend.softplus(steps[at : at + 1], bias)
            found = backend.scan(x[at : at + 1], dt, a[:, None], b[at : at + 1], c[at : at + 1], d, alone)
            one = tensors(x[at], steps[at][:, None].repeat(p, 1))
            close(
                found,
                granite.mamba2_selective_state_update(
                    before, *one, wide[0][:, None, None].expand(-1, p, n), *tensors(b[at], c[at]),
                    wide[2][:, None].expand(-1, p), wide[1][:, None].expand(-1, p), dt_softplus=True,
                ),
                atol=1e-4,
            )  # fmt: skip
        close(alone, before)


@pytest.mark.parametrize(("channels", "n"), [(70, 16), (33, 5)])
def test_a_scan_is_that_of_mamba_1(backends: list[Backend], channels: int, n: int) -> None:
    rng = np.random.default_rng(n)
    x, z, steps = (normal(rng, TOKENS, channels) for _ in range(3))
    a, b, c = -np.abs(normal(rng, channels, n)), normal(rng, TOKENS, n), normal(rng, TOKENS, n)
    bias, d = normal(rng, channels), normal(rng, channels)
    columns = [each.transpose(1, 2) for each in tensors(x, steps, b, c, z)]
    expected, left = jamba.mamba_selective_scan(
        *columns[:2], torch.from_numpy(a), *columns[2:4], torch.from_numpy(d), columns[4], torch.from_numpy(bias),
        delta_softplus=True, return_last_state=True,
    )  # fmt: skip
    for backend in backends:
        state, dt = np.zeros((channels, 1, n), np.float32), backend.softplus(steps, bias)
        found = backend.scan(x[:, :, None], dt, a, b[:, None], c[:, None], d, state)
        close(backend.gated(found[:, :, 0], z), expected[0].T)
        close(state, left)


# Time steps and gates


def test_softplus_is_that_of_torch(backends: list[Backend]) -> None:
    x = np.concatenate((np.linspace(-100, 100, 40003), [-1e30, -math.inf, math.inf])).astype(np.float32)[None]
    bias = np.zeros(x.size, np.float32)
    expected = softplus(torch.from_numpy(x).double(), threshold=700)
    for backend in backends:
        np.testing.assert_allclose(backend.softplus(x, bias), expected, rtol=5e-7, atol=1e-37)
        added = backend.softplus(np.zeros((2, x.size), np.float32), x[0])
        assert np.array_equal(added, np.repeat(backend.softplus(x, bias), 2, axis=0))
        assert np.isnan(backend.softplus(np.full((1, 1), math.nan, np.float32), bias[:1])).all()


def test_sigmoid_is_that_of_torch(backends: list[Backend]) -> None:
    x = np.linspace(-90, 90, 4001, dtype=np.float32)
    for backend in backends:
        close(backend.sigmoid(x), torch.from_numpy(x).sigmoid(), atol=1e-7)
        assert np.isfinite(backend.sigmoid(np.array([-1e30, 1e30], np.float32))).all()


@pytest.mark.parametrize(("n", "groups"), [(96, 1), (96, 4), (35, 7), (6, 6)])
def test_norms_with_gates_are_those_of_transformers(backends: list[Backend], n: int, groups: int) -> None:
    rng = np.random.default_rng(n)
    x, gate, norm = normal(rng, 5, n), normal(rng, 5, n), NormWeights(normal(rng, n), None, 1e-3)
    last = granite.GraniteMoeHybridRMSNormGated(n, n // groups, norm.eps)
    first = qwen.Qwen3NextRMSNormGated(n, norm.eps)
    for made in (first, last):
        made.weight.data[:] = torch.from_numpy(norm.weight)
    with torch.no_grad():
        wide = [torch.from_numpy(each) for each in (x, gate)]
        expected_last, expected_first = last(*wide), first(*wide)
    for backend in backends:
        close(backend.gated(x, gate, norm, groups, last=True), expected_last)
        found = backend.gated(x, gate, norm, groups)
        if groups == 1:
            close(found, expected_first)
        parts = [
            backend.gated(x[:, at], gate[:, at], NormWeights(norm.weight[at], None, norm.eps))
            for at in (slice(part * n // groups, (part + 1) * n // groups) for part in range(groups))
        ]
        np.testing.assert_allclose(found, np.concatenate(parts, axis=1), rtol=1e-6)
