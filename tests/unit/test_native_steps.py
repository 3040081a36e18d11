"""Steps of a token beside attention, experts and routers (norm, head, gate) beside torch and double precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from attention_answers import close, exact_norm, exact_sigmoid, times
from attention_problems import EPS, AnyBackend, make, make_latent, random_norm, read
from hypothesis import given, settings
from hypothesis import strategies as st
from native_problems import KINDS, Kind, all_natives, floats, normal, random_stored

from moert.kernels.backend import NormWeights, RouterWeights
from moert.kernels.native import NativeBackend
from moert.kernels.reference import ReferenceBackend
from moert.pack.codec import F32
from moert.pack.parts import Groups, Router
from tests.pairs import thinned


@pytest.fixture(scope="module")
def natives() -> Iterator[list[NativeBackend]]:
    with all_natives() as opened:
        yield list(opened.values())


@pytest.fixture(scope="module")
def backends(natives: list[NativeBackend]) -> list[AnyBackend]:
    return [*natives, ReferenceBackend()]


ROUTERS = [
    Router(2, True, None),
    Router(2, True, None, "sigmoid", groups=Groups(5, 3, 2)),
    Router(2, False, None, "sparsemixer"),
]


def one_by_one(step: Callable[[F32], F32], x: F32) -> F32:
    """What a step makes of the tokens of x, each alone."""
    return np.concatenate([step(x[at : at + 1]) for at in range(len(x))])


@settings(max_examples=50)
@given(
    seed=st.integers(0, 1 << 20), tokens=st.integers(1, 9), n=st.integers(1, 300), eps=st.sampled_from([1e-3, 1.0]),
    layer=st.booleans(),
)  # fmt: skip
def test_a_norm_is_that_of_torch(
    backends: list[AnyBackend], seed: int, tokens: int, n: int, eps: float, layer: bool
) -> None:
    rng = np.random.default_rng(seed)
    x, norm = 10 * normal(rng, tokens, n), replace(random_norm(rng, n, layer), eps=eps)
    wide, by = (torch.from_numpy(each).double() for each in (x, norm.weight))
    if norm.bias is None:
        expected = torch.nn.functional.rms_norm(wide, (n,), by, eps).numpy()
    else:
        expected = torch.nn.functional.layer_norm(wide, (n,), by, torch.from_numpy(norm.bias).double(), eps).numpy()
    before = x.copy()
    for backend in backends:
        found = backend.norm(x, norm)
        # what two numbers differ by is known to what float32 holds of them
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-4 if layer else 0)
        assert np.array_equal(x, before)
        assert np.array_equal(one_by_one(partial(backend.norm, norm=norm), x), found)
        assert backend.name == "reference" or np.array_equal(found, backends[0].norm(x, norm))


@thinned("kind, factor, softcap, biased", KINDS, [1.0, 0.3], [None, 0.5], [False, True])
def test_the_head_is_a_norm_a_factor_and_a_product(
    backends: list[AnyBackend], kind: Kind, factor: float, softcap: float | None, biased: bool
) -> None:
    rng = np.random.default_rng(4)
    stored, x, norm = random_stored(rng, kind, 333, 75, 32), normal(rng, 5, 75), random_norm(rng, 75, layer=biased)
    bias, exact = normal(rng, 333) if biased else None, exact_norm(x.astype(np.float64), norm) * factor
    for backend in backends:
        matrix = backend.matrix(stored, bias)
        found = backend.head(x, norm, factor, softcap, matrix)
        expected = times(stored, exact, rounds=not backend.widens, bias=bias)
        if softcap is None and not biased:
            assert np.array_equal(found, backend.linear(backend.norm(x, norm) * np.float32(factor), matrix))
        close(found, expected if softcap is None else softcap * np.tanh(expected / softcap), kind)
        if not backend.widens:
            step = partial(backend.head, norm=norm, factor=factor, softcap=softcap, matrix=matrix)
            assert np.array_equal(one_by_one(step, x), found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_a_gate_is_a_sigmoid(backends: list[AnyBackend], kind: Kind, factor: float) -> None:
    rng = np.random.default_rng(5)
    stored, hidden, bias = random_stored(rng, kind, 1, 75, 32, 0.3), normal(rng, 6, 75), normal(rng, 1)
    for backend in backends:
        matrix = backend.matrix(stored, bias)
        expected = times(stored, hidden.astype(np.float64), rounds=not backend.widens, bias=bias)[:, 0]
        found = backend.gate(hidden, matrix, factor)
        close(found, factor * exact_sigmoid(expected), kind)
        assert backend.widens or np.array_equal(one_by_one(lambda x: backend.gate(x, matrix, factor), hidden), found)  # noqa: B023


@pytest.mark.parametrize("kind", KINDS)
def test_not_a_number_and_infinity_end_no_process(natives: list[NativeBackend], kind: Kind) -> None:
    """What comes of them is not said, but each step returns and what follows is right again."""
    rng, ones = np.random.default_rng(0), np.ones((1, 40), np.float32)
    problems = [make(kind=kind, qk_norm="whole", turning=1, gate=True), make_latent(kind=kind)]
    plain = NormWeights(ones[0], None, EPS)
    for backend in natives:
        matrix = backend.matrix(floats("F32", normal(rng, 5, 40)))
        routers = [RouterWeights(part, 1.0, plain, None, matrix, None, None) for part in ROUTERS]
        head = backend.matrix(random_stored(rng, kind, 9, 40, 16))
        blocks = [(problem, problem.on(backend)) for problem in problems]
        before = [read(backend, problem, weights, ones, [1])[0] for problem, weights in blocks]
        for wrong in (math.nan, math.inf, -math.inf, 3e38):
            x = ones.copy()
            x[0, 3] = wrong
            for problem, weights in blocks:
                read(backend, problem, weights, np.concatenate((x, ones)), [1, 1])
            for router in routers:
                _, scores = backend.scores(x, router)
                [chosen] = backend.choose(scores, router)[0].tolist()
                assert chosen == sorted(set(chosen))
                assert all(0 <= expert < 5 for expert in chosen)
            backend.head(x, plain, 1.0, None, head)
        assert np.isfinite(backend.head(ones, plain, 1.0, None, head)).all()
        for (problem, weights), expected in zip(blocks, before, strict=True):
            assert np.isfinite(expected).all()
            assert np.array_equal(read(backend, problem, weights, ones, [1])[0], expected)
