"""The readable arithmetic against the codec, plain formulas, torch and transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from attention_answers import close, close_kept, exact_attend, exact_kept, exact_norm, found_keys, unsteadiness
from attention_problems import Problem, keep, latent_problems, make, make_latent, nothing_behind, problems, read
from hypothesis import example, given, settings
from hypothesis import strategies as st
from native_problems import ACTIVATION, FLOATS, Dtype, floats, normal

from moert.kernels.backend import ExpertView, Floats, Positions, ProjectionView, Stored
from moert.kernels.reference import Plain, ReferenceBackend, activated, ffn, product
from moert.pack.codec import QuantizedMatrix, dequantize, n_groups, pack_codes
from moert.pack.parts import Act, Ffn
from tests.pairs import thinned

GATED = Ffn(10, Act("silu"), gated=True)
SHAPES = {"gate": (10, 6), "up": (10, 6), "down": (6, 10)}


def random_matrix(seed: int, bits: int, out_features: int, in_features: int, group_size: int) -> QuantizedMatrix:
    chance = np.random.default_rng(seed)
    groups = n_groups(in_features, group_size)
    codes = chance.integers(0, 1 << bits, (out_features, in_features)).astype(np.uint8)
    scale = chance.uniform(0.001, 0.1, (out_features, groups)).astype(np.float16)
    minimum = chance.normal(0, 0.1, (out_features, groups)).astype(np.float16)
    return QuantizedMatrix(bits, in_features, group_size, pack_codes(codes, bits), scale, minimum)


@pytest.mark.parametrize("dtype", FLOATS)
def test_floats_are_widened_to_a_copy(dtype: Dtype) -> None:
    """The same numbers as torch says that the bytes are; what is stored may lie in a mapped file that goes."""
    types = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
    stored = floats(dtype, np.random.default_rng(0).normal(size=(5, 7)))
    found = ReferenceBackend().matrix(stored).weight
    same = torch.frombuffer(bytearray(stored.data.tobytes()), dtype=types[dtype]).reshape(5, 7).float()
    assert found.dtype == np.float32
    assert np.array_equal(found, same.numpy())
    assert not np.shares_memory(found, stored.data)


@pytest.mark.parametrize("name", ACTIVATION)
def test_activations_equal_those_of_transformers(name: Any) -> None:
    from transformers.activations import ACT2FN

    x = np.linspace(-12, 12, 4001, dtype=np.float32)
    found, expected = activated(Act(name), x), ACT2FN[name](torch.from_numpy(x).double()).numpy()
    assert found.dtype == np.float32
    # what is small for a negative number is the rest of a difference of two large ones
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=2e-7 * np.abs(x).max())


def test_silu_has_a_slope() -> None:
    x = np.linspace(-12, 12, 4001, dtype=np.float32)
    expected = x / (1 + np.exp(-1.702 * x.astype(np.float64)))
    np.testing.assert_allclose(activated(Act("silu", slope=1.702), x), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ACTIVATION)
def test_activations_of_very_large_numbers_stay_quiet(name: Any) -> None:
    with np.errstate(all="raise", under="ignore"):
        found = activated(Act(name), np.array([-1e4, -100, 100, 1e4], np.float32))
    large = np.array([0, 0, 100, 1e4], np.float32)
    assert np.array_equal(found, large * large if name == "relu2" else large)


def test_rows_are_those_of_the_whole_matrix() -> None:
    backend = ReferenceBackend()
    for stored in (random_matrix(1, 3, 7, 10, 4), floats("BF16", np.random.default_rng(0).normal(size=(7, 10)))):
        whole = backend.matrix(stored)
        assert np.array_equal(backend.rows(whole, [6, 0, 6]), whole.weight[[6, 0, 6]])
        assert whole.weight.dtype == np.float32


@thinned("gated, limit, slope, plus, biased", [False, True], [None, 0.5], [(1.0, 0.0), (1.702, 1.0)], [False, True])
def test_a_feed_forward_part_is_its_formula(
    gated: bool, limit: float | None, slope: float, plus: float, biased: bool
) -> None:
    spec = Ffn(10, Act("silu", limit, slope, plus), gated, biased)
    chance = np.random.default_rng(0)
    x, matrices = normal(chance, 3, 6), {name: normal(chance, *shape) for name, shape in SHAPES.items()}
    bias = {name: normal(chance, len(matrix)) * np.float32(biased) for name, matrix in matrices.items()}
    parts = {name: Plain(matrices[name], bias[name] if biased else None) for name in spec.projections}
    for row, got in zip(x.tolist(), ffn(parts, x, spec), strict=True):
        expected = bias["down"].astype(np.float64)
        for unit in range(10):
            wide, bent = (
                sum(a * b for a, b in zip(matrices[name][unit].tolist(), row, strict=True)) + float(bias[name][unit])
                for name in ("up", "gate")
            )
            if limit is not None:
                wide, bent = min(wide, limit), min(bent, limit)
                wide = max(wide, -limit) if gated else wide
            hidden = bent / (1 + np.exp(-slope * bent)) * (wide + plus) if gated else wide / (1 + np.exp(-slope * wide))
            expected += matrices["down"][:, unit] * hidden
        np.testing.assert_allclose(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tokens", [1, 7])
def test_experts_add_their_share_to_the_tokens_they_run(tokens: int) -> None:
    backend, chance = ReferenceBackend(), np.random.default_rng(0)
    matrices = [{name: Plain(normal(chance, *shape)) for name, shape in SHAPES.items()} for _ in range(3)]
    experts = [backend.dense(each["gate"], each["up"], each["down"]) for each in matrices]
    x, before = normal(chance, tokens, 6), normal(chance, tokens, 6)
    share, every = chance.uniform(size=(3, tokens)).astype(np.float32), np.arange(tokens, dtype=np.int32)
    expected = before + sum(share[e][:, None] * ffn(matrices[e], x, GATED) for e in range(3))
    one_by_one, at_once = before.copy(), before.copy()
    for expert, by in zip(experts, share, strict=True):
        backend.mixture([expert], [tokens], every, by, x, one_by_one, GATED)
    np.testing.assert_allclose(one_by_one, expected, atol=1e-6, rtol=1e-5)
    backend.mixture(experts, [tokens] * 3, np.tile(every, 3), share.reshape(-1), x, at_once, GATED)
    assert np.array_equal(at_once, one_by_one)
    if tokens == 1:
        parts, in_parts = np.empty((3, 6), np.float32), before.copy()
        backend.parts(experts[1:], x, parts[1:], GATED)
        backend.parts(experts[:1], x, parts[:1], GATED)
        backend.add_parts(parts, share[:, 0], in_parts)
        assert np.array_equal(in_parts, one_by_one)
    some = before.copy()
    backend.mixture(experts[:1], [1], every[-1:], np.array([2], np.float32), x, some, GATED)
    assert np.array_equal(some[:-1], before[:-1])
    np.testing.assert_allclose(some[-1], before[-1] + 2 * ffn(matrices[0], x[-1:], GATED)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("biased", [False, True])
def test_an_expert_is_read_from_where_its_projections_lie(biased: bool) -> None:
    """At places of their own in a buffer, of codes and of both 16-bit types."""
    backend, chance, x = ReferenceBackend(), np.random.default_rng(4), normal(np.random.default_rng(3), 1, 6)
    up, down = random_matrix(1, 3, 10, 6, 4), random_matrix(2, 4, 6, 10, 4)
    gate = floats("BF16", np.random.default_rng(2).normal(size=(10, 6)))
    body, views = bytearray(b"\xff" * 24), dict[str, ProjectionView]()
    order: dict[str, Stored] = {"down": down, "gate": gate, "up": up}
    bias = {name: normal(chance, SHAPES[name][0]) if biased else None for name in order}
    for name, stored in order.items():
        parts = [stored.data] if isinstance(stored, Floats) else [stored.qweight, stored.scale, stored.minimum]
        places = []
        for part in (*parts, bias[name]) if biased else parts:
            body += b"\xff" * (8 + -len(body) % 8)
            places.append(len(body))
            body += part.tobytes()
        bits, group = (16, 0) if isinstance(stored, Floats) else (stored.bits, stored.group_size)
        last = places.pop() if biased else None
        views[name] = ProjectionView(SHAPES[name], bits, group, "BF16", tuple(places), last)
    found = np.empty((1, 6), np.float32)
    backend.parts([backend.expert(ExpertView(np.frombuffer(body, np.uint8), views))], x, found, GATED)
    exact = {"gate": gate.widened(), "up": dequantize(up), "down": dequantize(down)}
    expected = ffn({name: Plain(matrix, bias[name]) for name, matrix in exact.items()}, x, GATED)
    assert np.array_equal(found, expected)


# Attention


@thinned("causal, biased, shared", [True, False], [True, False], [1, 4])
def test_attention_is_that_of_torch(causal: bool, biased: bool, shared: int) -> None:
    problem, backend = make(shared=shared, causal=causal, biased=biased), ReferenceBackend()
    x, held = problem.tokens(30), problem.on(backend)
    out, _ = read(backend, problem, held, x, [30])
    hidden = backend.norm(x, problem.norms["before"])
    query, key, value = (
        torch.from_numpy(product(hidden, held.matrices[name]).reshape(30, -1, 20)).transpose(0, 1) for name in "qkv"
    )
    mask = torch.zeros(1, 30, 30)
    if biased:
        bias, zero = problem.positions(0, 30).bias, problem.positions(0, 30).zero
        assert bias is not None
        mask = torch.stack([torch.from_numpy(bias[:, zero - at :][:, :30]) for at in range(30)], 1)
    if causal:
        mask = mask.masked_fill(torch.ones(30, 30).triu(1).bool(), -torch.inf)
    mixed = torch.nn.functional.scaled_dot_product_attention(
        query, key.half().float(), value.half().float(), mask, scale=problem.part.scale, enable_gqa=True
    )
    expected = x + product(mixed.transpose(0, 1).reshape(30, -1).numpy(), held.matrices["o"])
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


STEEP = make_latent(
    seed=1064, kind=4, n=2, q_rank=None, kv_rank=64, nope=1, turning=2, v=1, d_model=66, scale=1.0, turns=True,
    bias=True, layer=False, after=True, add=1.0, bits=16,
)  # fmt: skip
"""Whose scores are so large that some processors' sums are off by more than usual."""
STEEP_IN_ONE_DIRECTION = make_latent(
    seed=31, kind=8, n=1, q_rank=None, kv_rank=32, nope=1, turning=8, v=12, d_model=31, scale=1.0, turns=False,
    bias=False, layer=False, after=True, add=1.0, bits=8, gate=False,
)  # fmt: skip
"""The same, where not every direction of the tokens shows it."""


@settings(max_examples=100)
@given(
    problem=st.one_of(problems(), latent_problems()),
    pieces=st.lists(st.sampled_from([1, 1, 5, 60, 70]), min_size=1, max_size=3),
)
@example(STEEP, [60, 60, 60])
@example(STEEP_IN_ONE_DIRECTION, [60, 60])
def test_attention_is_its_formula(problem: Problem, pieces: list[int]) -> None:
    backend, x = ReferenceBackend(), problem.tokens(sum(pieces))
    out, kept = read(backend, problem, problem.on(backend), x, pieces)
    keys, values = found_keys(kept)
    assert nothing_behind(kept)
    hidden = exact_norm(x.astype(np.float64), problem.norms["before"])
    for found, expected in zip((keys, values), exact_kept(problem, hidden, rounds=False), strict=True):
        close_kept(found, expected, problem)
    expected = exact_attend(problem, x, keys, values, rounds=False)
    close(out, expected, "F32", unsteadiness(problem, x, keys, values))


@settings(max_examples=40)
@given(problem=problems(own=False, causal=False), tokens=st.integers(1, 70), length=st.integers(1, 140))
def test_attention_to_an_encoded_input_is_its_formula(problem: Problem, tokens: int, length: int) -> None:
    backend, x, encoded = ReferenceBackend(), problem.tokens(tokens), problem.tokens(length)
    held, out = problem.on(backend), x.copy()
    kept = keep(backend, held, encoded, [length - length // 2, length // 2] if length > 1 else [1], problem.bits)
    keys, values = found_keys(kept)
    for found, expected in zip((keys, values), exact_kept(problem, encoded.astype(float), rounds=False), strict=True):
        close_kept(found, expected, problem)
    backend.attend(held, out, kept, 0, Positions())
    close(out, exact_attend(problem, x, keys, values, rounds=False), "F32")
