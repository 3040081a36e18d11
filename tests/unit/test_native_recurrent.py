"""Native kernels of mixers with a state of fixed size: beside the reference, and the same bits in any pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_problems import all_natives, normal

from moert.kernels.backend import NormWeights
from moert.kernels.native import NativeBackend
from moert.kernels.reference import ReferenceBackend
from moert.pack.codec import F32

Step = Callable[["NativeBackend | ReferenceBackend", slice, F32], F32]
"""What a backend makes of some tokens, from a state that it changes."""

REFERENCE = ReferenceBackend()
pieces_of = st.lists(st.integers(1, 9), min_size=1, max_size=4)
seeds, shares = st.integers(0, 1 << 20), st.integers(1, 3)


@pytest.fixture(scope="module")
def natives() -> Iterator[list[NativeBackend]]:
    with all_natives() as opened:
        yield list(opened.values())


def beside_the_reference(natives: list[NativeBackend], step: Step, state: F32, pieces: Sequence[int]) -> None:
    """All natives give the same bits, as a whole and in pieces, and to float32 what the reference gives."""
    expected, left = run(REFERENCE, step, state, [sum(pieces)])
    first, first_left = run(natives[0], step, state, [sum(pieces)])
    np.testing.assert_allclose(first, expected, rtol=1e-5, atol=2e-5 * max(1, np.abs(expected).max()))
    np.testing.assert_allclose(first_left, left, rtol=1e-5, atol=2e-5 * np.abs(left).max(initial=1))
    for backend in natives:
        for cut in ([sum(pieces)], pieces, [1] * sum(pieces)):
            found, found_left = run(backend, step, state, cut)
            assert np.array_equal(found, first), backend.name
            assert np.array_equal(found_left, first_left), backend.name


def run(backend: NativeBackend | ReferenceBackend, step: Step, state: F32, pieces: Sequence[int]) -> tuple[F32, F32]:
    ends, state = np.cumsum(pieces), state.copy()
    made = [step(backend, slice(end - count, end), state) for end, count in zip(ends, pieces, strict=True)]
    return np.concatenate(made), state


@settings(max_examples=40)
@given(
    seed=seeds, pieces=pieces_of, channels=st.integers(1, 1200), k=st.integers(1, 9), biased=st.booleans(),
    silu=st.booleans(),
)  # fmt: skip
def test_a_convolution(
    natives: list[NativeBackend], seed: int, pieces: list[int], channels: int, k: int, biased: bool, silu: bool
) -> None:
    rng = np.random.default_rng(seed)
    wide, taps, bias = normal(rng, sum(pieces), channels + 5), normal(rng, k, channels), normal(rng, channels)
    x = wide[:, 3 : channels + 3]  # columns of a wider array
    step: Step = lambda backend, at, state: backend.conv(x[at], taps, bias if biased else None, state, silu)  # noqa: E731
    beside_the_reference(natives, step, normal(rng, k - 1, channels), pieces)


@settings(max_examples=40)
@given(
    seed=seeds, pieces=pieces_of, keys=shares, shared=shares, dk=st.integers(1, 70), dv=st.integers(1, 300),
    each=st.booleans(),
)  # fmt: skip
def test_the_delta_rule(
    natives: list[NativeBackend], seed: int, pieces: list[int], keys: int, shared: int, dk: int, dv: int, each: bool
) -> None:
    rng, tokens, heads = np.random.default_rng(seed), sum(pieces), keys * shared
    sizes = [keys * dk, keys * dk, heads * dv]
    q, k, v = np.split(normal(rng, tokens, sum(sizes)), np.cumsum(sizes)[:2], axis=1)
    q, k, v = q.reshape(tokens, keys, dk), k.reshape(tokens, keys, dk), v.reshape(tokens, heads, dv)
    decay = -np.abs(normal(rng, tokens, heads, dk) if each else normal(rng, tokens, heads))
    beta = rng.uniform(size=(tokens, heads)).astype(np.float32)
    step: Step = lambda backend, at, state: backend.delta(q[at], k[at], v[at], decay[at], beta[at], state)  # noqa: E731
    beside_the_reference(natives, step, normal(rng, heads, dk, dv), pieces)


@settings(max_examples=40)
@given(
    seed=seeds, pieces=pieces_of, groups=shares, shared=st.integers(1, 40), p=st.sampled_from([1, 1, 2, 5, 16]),
    n=st.integers(1, 70), each=st.booleans(),
)  # fmt: skip
def test_a_scan(
    natives: list[NativeBackend], seed: int, pieces: list[int], groups: int, shared: int, p: int, n: int, each: bool
) -> None:
    rng, tokens, heads = np.random.default_rng(seed), sum(pieces), groups * shared
    x, dt, d = normal(rng, tokens, heads, p), np.abs(normal(rng, tokens, heads)), normal(rng, heads)
    a, b, c = (
        -np.abs(normal(rng, heads, n if each else 1)),
        normal(rng, tokens, groups, n),
        normal(rng, tokens, groups, n),
    )
    step: Step = lambda backend, at, state: backend.scan(x[at], dt[at], a, b[at], c[at], d, state)  # noqa: E731
    beside_the_reference(natives, step, normal(rng, heads, p, n), pieces)


@settings(max_examples=40)
@given(seed=seeds, rows=st.integers(1, 40), groups=shares, size=st.integers(1, 300), last=st.booleans())
def test_gates(natives: list[NativeBackend], seed: int, rows: int, groups: int, size: int, last: bool) -> None:
    rng, n = np.random.default_rng(seed), groups * size
    x, gate, norm = 5 * normal(rng, rows, n), 5 * normal(rng, rows, n), NormWeights(normal(rng, n), None, 1e-5)
    steps: list[Callable[[NativeBackend | ReferenceBackend, slice], F32]] = [
        lambda backend, at: backend.gated(x[at], gate[at], norm, groups, last),
        lambda backend, at: backend.gated(x[at], gate[at]),
        lambda backend, at: backend.softplus(x[at], norm.weight),
        lambda backend, at: backend.sigmoid(x[at]),
    ]
    for step in steps:
        expected, first = step(REFERENCE, slice(rows)), step(natives[0], slice(rows))
        np.testing.assert_allclose(first, expected, rtol=1e-5, atol=1e-6)
        for backend in natives:
            assert np.array_equal(step(backend, slice(rows)), first), backend.name
            alone = [step(backend, slice(row, row + 1)) for row in range(rows)]
            assert np.array_equal(np.concatenate(alone), first), backend.name


@pytest.mark.parametrize("tokens", [1, 70])
def test_threads_share_the_heads_of_a_large_model(natives: list[NativeBackend], tokens: int) -> None:
    """The delta rules of Qwen3-Next and Kimi Linear and Granite 4's scan, at full size."""
    rng = np.random.default_rng(tokens)
    q, k, v = normal(rng, tokens, 16, 128), normal(rng, tokens, 16, 128), normal(rng, tokens, 32, 128)
    decay, beta = -np.abs(normal(rng, tokens, 32)), rng.uniform(size=(tokens, 32)).astype(np.float32)
    step: Step = lambda backend, at, state: backend.delta(q[at], k[at], v[at], decay[at], beta[at], state)  # noqa: E731
    beside_the_reference(natives, step, normal(rng, 32, 128, 128), [tokens])
    q, k, decay = (normal(rng, tokens, 32, 128) for _ in range(3))
    decay = -np.abs(decay)
    beside_the_reference(natives, step, normal(rng, 32, 128, 128), [tokens])
    x, dt, a, d = (
        normal(rng, tokens, 48, 64),
        np.abs(normal(rng, tokens, 48)),
        -np.abs(normal(rng, 48, 1)),
        normal(rng, 48),
    )
    b, c = normal(rng, tokens, 1, 128), normal(rng, tokens, 1, 128)
    scan: Step = lambda backend, at, state: backend.scan(x[at], dt[at], a, b[at], c[at], d, state)  # noqa: E731
    beside_the_reference(natives, scan, normal(rng, 48, 64, 128), [tokens])


def test_no_tokens_change_nothing(natives: list[NativeBackend]) -> None:
    rng = np.random.default_rng(0)
    taps, before, heads = normal(rng, 4, 8), normal(rng, 3, 8), normal(rng, 0, 2)
    state = normal(rng, 2, 8, 8)
    for backend in natives:
        inputs, left = before.copy(), state.copy()
        vectors, columns = np.empty((0, 2, 8), np.float32), np.empty((0, 8), np.float32)
        assert backend.conv(columns, taps, None, inputs, True).shape == (0, 8)
        assert backend.delta(vectors, vectors, vectors, heads, heads, left).shape == (0, 2, 8)
        found = backend.scan(vectors, heads, taps[:2, :1].copy(), vectors, vectors, taps[0, :2].copy(), left)
        assert found.shape == (0, 2, 8)
        assert np.array_equal(inputs, before)
        assert np.array_equal(left, state)
