"""Steps of a token beside attention and experts (norm, router, head) beside torch and double precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest
import torch
from attention_problems import EPS, AnyBackend, close, exact_norm, make, read, times
from hypothesis import given, settings
from hypothesis import strategies as st
from native_problems import FLOATS, KINDS, Dtype, Kind, all_natives, floats, normal, random_stored

from moert.kernels.backend import I64, Stored
from moert.kernels.native import NativeBackend
from moert.kernels.reference import ReferenceBackend
from moert.pack.codec import F32


@pytest.fixture(scope="module")
def natives() -> Iterator[list[NativeBackend]]:
    with all_natives() as opened:
        yield list(opened.values())


@pytest.fixture(scope="module")
def backends(natives: list[NativeBackend]) -> list[AnyBackend]:
    return [*natives, ReferenceBackend()]


def random_norm(rng: np.random.Generator, n: int) -> F32:
    return rng.uniform(0.5, 1.5, n).astype(np.float32)


def one_by_one(step: Callable[[F32], F32], x: F32) -> F32:
    """What a step makes of the tokens of x, each alone."""
    return np.concatenate([step(x[at : at + 1]) for at in range(len(x))])


@settings(max_examples=50)
@given(seed=st.integers(0, 1 << 20), tokens=st.integers(1, 9), n=st.integers(1, 300), eps=st.sampled_from([1e-6, 1.0]))
def test_a_norm_is_that_of_torch(backends: list[AnyBackend], seed: int, tokens: int, n: int, eps: float) -> None:
    rng = np.random.default_rng(seed)
    x, weight = 10 * normal(rng, tokens, n), random_norm(rng, n)
    wide, by = (torch.from_numpy(each).double() for each in (x, weight))
    expected, before = torch.nn.functional.rms_norm(wide, (n,), by, eps).numpy(), x.copy()
    for backend in backends:
        found = backend.norm(x, weight, eps)
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        assert np.array_equal(x, before)
        assert np.array_equal(one_by_one(partial(backend.norm, weight=weight, eps=eps), x), found)
        assert backend.name == "reference" or np.array_equal(found, backends[0].norm(x, weight, eps))


@settings(max_examples=60)
@given(
    seed=st.integers(0, 1 << 20), dtype=st.sampled_from(FLOATS), tokens=st.integers(1, 5),
    experts=st.one_of(st.integers(1, 40), st.just(700)), top_k=st.integers(1, 9), renormalise=st.booleans(),
    d_model=st.integers(1, 150),
)  # fmt: skip
def test_the_router_is_that_of_torch(
    backends: list[AnyBackend], seed: int, dtype: Dtype, tokens: int, experts: int, top_k: int, renormalise: bool,
    d_model: int,
) -> None:  # fmt: skip
    rng, top_k = np.random.default_rng(seed), min(top_k, experts)
    stored = floats(dtype, rng.normal(0, 3 * d_model**-0.5, (experts, d_model)))
    x, norm = normal(rng, tokens, d_model), random_norm(rng, d_model)
    hidden = exact_norm(x.astype(np.float64), norm)
    expected = torch.from_numpy(times(stored, hidden, rounds=False)).softmax(-1)
    best = expected.topk(top_k)
    chosen, order = best.indices.sort(-1)
    shares = best.values.gather(1, order)
    if renormalise:
        shares = shares / shares.sum(-1, keepdim=True)
    ranked = expected.sort(descending=True).values
    clear = top_k == experts or bool((ranked[:, top_k - 1] - ranked[:, top_k] > 1e-5 * ranked[:, 0]).all())
    for backend in backends:
        normed, probabilities = backend.scores(x, norm, EPS, backend.matrix(stored))
        np.testing.assert_allclose(normed, hidden, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(probabilities, expected.numpy(), rtol=1e-4, atol=1e-7)
        if clear:  # else either is right
            found, weights = backend.choose(probabilities, top_k, renormalise)
            assert np.array_equal(found, chosen.numpy())
            np.testing.assert_allclose(weights, shares.numpy(), rtol=1e-4, atol=1e-7)


@settings(max_examples=100)
@given(seed=st.integers(0, 1 << 20), tokens=st.integers(1, 5), experts=st.integers(1, 30), renormalise=st.booleans())
def test_of_equals_the_first_are_chosen(
    backends: list[AnyBackend], seed: int, tokens: int, experts: int, renormalise: bool
) -> None:
    """Powers of two, so that sums are exact."""
    rng = np.random.default_rng(seed)
    top_k = int(rng.integers(1, experts + 1))
    probabilities = rng.choice([0.0625, 0.125, 0.5], (tokens, experts)).astype(np.float32)
    if not renormalise:
        probabilities[rng.random((tokens, experts)) < 0.5] = 0
    ranked = [sorted(range(experts), key=lambda expert, row=row: (-row[expert], expert)) for row in probabilities]
    expected = np.array([sorted(row[:top_k]) for row in ranked])
    shares = np.take_along_axis(probabilities, expected, 1)
    if renormalise:
        shares = shares / shares.sum(1, keepdims=True)
    for backend in backends:
        found, weights = backend.choose(probabilities.copy(), top_k, renormalise)
        assert (found.dtype, weights.dtype) == (np.int64, np.float32)
        assert np.array_equal(found, expected)
        assert np.array_equal(weights, shares)


def test_the_router_takes_the_first_of_equals(backends: list[AnyBackend]) -> None:
    router = np.zeros((6, 10), np.float32)
    router[4] = 1
    for backend in backends:
        matrix, ones = backend.matrix(floats("F32", router)), np.ones(10, np.float32)
        chosen, weights = backend.choose(backend.scores(ones[None], ones, 1e-5, matrix)[1], 2, False)
        assert chosen.tolist() == [[0, 4]]
        assert weights[0, 1] > 0.99


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_is_routed_the_same_alone_and_in_company(natives: list[NativeBackend], kind: Kind) -> None:
    rng = np.random.default_rng(6)
    stored, x, norm = random_stored(rng, kind, 60, 130, 32, 0.5), normal(rng, 9, 130), random_norm(rng, 130)
    first = routed(natives[0], stored, norm, x)
    for backend in natives:
        together = routed(backend, stored, norm, x)
        assert np.array_equal(together[0], backend.norm(x, norm, EPS))
        alone = [routed(backend, stored, norm, x[at : at + 1]) for at in range(9)]
        assert all(map(np.array_equal, together, map(np.concatenate, zip(*alone, strict=True))))
        assert all(map(np.array_equal, together, first))


def routed(backend: AnyBackend, stored: Stored, norm: F32, x: F32) -> tuple[F32, F32, I64, F32]:
    hidden, probabilities = backend.scores(x, norm, EPS, backend.matrix(stored))
    return hidden, probabilities, *backend.choose(probabilities.copy(), 4, True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_the_head_is_a_norm_a_factor_and_a_product(backends: list[AnyBackend], kind: Kind, factor: float) -> None:
    rng = np.random.default_rng(4)
    stored, x, norm = random_stored(rng, kind, 333, 75, 32), normal(rng, 5, 75), random_norm(rng, 75)
    exact = exact_norm(x.astype(np.float64), norm) * factor
    for backend in backends:
        matrix = backend.matrix(stored)
        found = backend.head(x, norm, EPS, factor, matrix)
        scaled = backend.norm(x, norm, EPS) * np.float32(factor)
        assert np.array_equal(found, backend.linear(scaled, matrix))
        expected = times(stored, exact, rounds=not backend.widens)
        close(found, expected, kind)
        if not backend.widens:
            step = partial(backend.head, norm=norm, eps=EPS, factor=factor, matrix=matrix)
            assert np.array_equal(one_by_one(step, x), found)


@pytest.mark.parametrize("kind", KINDS)
def test_not_a_number_and_infinity_end_no_process(natives: list[NativeBackend], kind: Kind) -> None:
    """What comes of them is not said, but each step returns and what follows is right again."""
    rng, ones = np.random.default_rng(0), np.ones((1, 40), np.float32)
    problem = make(kind=kind, qk_norm="whole", turning=1)
    for backend in natives:
        router = backend.matrix(floats("F32", normal(rng, 5, 40)))
        head = backend.matrix(random_stored(rng, kind, 9, 40, 16))
        attention = problem.on(backend)
        before = read(backend, problem, attention, ones, [1])[0]
        for wrong in (math.nan, math.inf, -math.inf, 3e38):
            x = ones.copy()
            x[0, 3] = wrong
            read(backend, problem, attention, np.concatenate((x, ones)), [1, 1])
            _, probabilities = backend.scores(x, ones[0], 1e-5, router)
            [chosen] = backend.choose(probabilities, 2, True)[0].tolist()
            assert chosen == sorted(set(chosen))
            assert all(0 <= expert < 5 for expert in chosen)
            backend.head(x, ones[0], 1e-5, 1.0, head)
        assert np.isfinite(backend.head(ones, ones[0], 1e-5, 1.0, head)).all()
        assert np.isfinite(before).all()
        assert np.array_equal(read(backend, problem, attention, ones, [1])[0], before)
