"""Native matrix products beside plain arithmetic in double precision."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Sequence
from ctypes import addressof, c_void_p

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_problems import (
    KINDS,
    THREADS,
    Kind,
    Natives,
    activations,
    all_natives,
    block_of,
    exact,
    magnitude,
    product,
    random_stored,
    rounded,
    running,
)  # fmt: skip

from moert.kernels import library
from moert.kernels.native import NativeBackend, NativeMatrix
from moert.pack.codec import F32, QuantizedMatrix, pack_codes
from tests.pairs import thinned

GROUPS = (None, 16, 32, 64, 10, 48, 1)
kinds, groups = st.sampled_from(KINDS), st.sampled_from(GROUPS)
sizes, tokens_of = st.integers(1, 200), st.one_of(st.integers(1, 5), st.integers(1, 40))


@pytest.fixture(scope="module")
def backends() -> Iterator[Natives]:
    with all_natives() as opened:
        yield opened


def test_the_library_is_there_where_there_is_a_compiler() -> None:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    assert library.missing() is None, "run make native: without it nothing tests the native kernels"


def together(backend: NativeBackend, x: F32, matrices: Sequence[NativeMatrix]) -> F32:
    """The products with all matrices in one call, beside one another."""
    outputs = [np.empty((len(x), matrix.rows), np.float32) for matrix in matrices]
    addresses = (c_void_p * len(matrices))(*[addressof(matrix.struct) for matrix in matrices])
    places = (c_void_p * len(matrices))(*[output.ctypes.data for output in outputs])
    assert not backend._call.moert_linear(backend._pool, len(matrices), addresses, x, len(x), places)
    return np.concatenate(outputs, 1)


@settings(max_examples=150)
@given(
    seed=st.integers(0, 1 << 20), parts=st.lists(st.tuples(kinds, groups, st.integers(1, 40)), min_size=1, max_size=4),
    cols=sizes, tokens=tokens_of,
)  # fmt: skip
def test_linear_is_the_product_with_rounded_activations(
    backends: Natives, seed: int, parts: list[tuple[Kind, int | None, int]], cols: int, tokens: int
) -> None:
    rng = np.random.default_rng(seed)
    stored = [random_stored(rng, kind, rows, cols, group) for kind, group, rows in parts]
    x = activations(rng, tokens, cols)
    products = [product(part, x) for part in stored]
    values, terms = (np.concatenate(each, 1) for each in zip(*products, strict=True))
    for backend in backends.values():
        matrices = [backend.matrix(part) for part in stored]
        found = np.concatenate([backend.linear(x, matrix) for matrix in matrices], 1)
        assert found.shape == values.shape
        assert (np.abs(found - values) <= 1e-6 * terms).all(), backend.name
        assert np.array_equal(together(backend, x, matrices), found), backend.name


@settings(max_examples=100)
@given(seed=st.integers(0, 1 << 20), kind=kinds, group=groups, rows=st.integers(1, 40), cols=sizes)
def test_rows_are_the_weights_themselves(
    backends: Natives, seed: int, kind: Kind, group: int | None, rows: int, cols: int
) -> None:
    rng = np.random.default_rng(seed)
    stored = random_stored(rng, kind, rows, cols, group)
    picked = rng.integers(0, rows, 5).tolist()
    expected, terms = exact(stored)[picked], magnitude(stored)[picked]
    for backend in backends.values():
        found = backend.rows(backend.matrix(stored), picked)
        assert (np.abs(found - expected) <= 2e-7 * terms).all(), backend.name


@thinned("scale, bits, size", [2.0**-24, 3 * 2.0**-24, 2.0**-14, 65504.0, -65504.0], [2, 3, 4, 8], [1e-30, 1.0, 1e15])
def test_extreme_scales(backends: Natives, scale: float, bits: int, size: float) -> None:
    rng = np.random.default_rng(bits)
    codes = rng.integers(0, 1 << bits, (5, 70)).astype(np.uint8)
    scales, minimum = np.full((5, 3), scale, np.float16), np.array([[scale, -scale, 0]] * 5, np.float16)
    stored = QuantizedMatrix(bits, 70, 32, pack_codes(codes, bits), scales, minimum)
    x = activations(rng, 2, 70) * np.float32(size)
    values, terms = product(stored, x)
    for backend in backends.values():
        found = backend.linear(x, backend.matrix(stored))
        assert (np.abs(found - values) <= 1e-6 * terms + 1e-37).all(), backend.name


@settings(max_examples=40)
@given(seed=st.integers(0, 1 << 20), bits=st.sampled_from([2, 3, 4, 8]), group=groups, cols=sizes, tokens=tokens_of)
def test_whole_numbers_give_the_same_on_every_instruction_set(
    backends: Natives, seed: int, bits: int, group: int | None, cols: int, tokens: int
) -> None:
    rng = np.random.default_rng(seed)
    stored = random_stored(rng, bits, 7, cols, group)
    assert isinstance(stored, QuantizedMatrix)
    stored.scale[:] = rng.integers(-1, 3, stored.scale.shape)
    stored.minimum[:] = rng.integers(-4, 5, stored.scale.shape)
    x = rng.integers(-127, 128, (tokens, cols)).astype(np.float32)
    x[:, :: block_of(stored)] = 127  # then each block's scale is 1
    expected = (x.astype(np.int64) @ exact(stored).astype(np.int64).T).astype(np.float32)
    for backend in backends.values():
        assert np.array_equal(backend.linear(x, backend.matrix(stored)), expected)


@thinned("bits, cols", [2, 3, 4, 8], [96, 640, 1500])
def test_the_largest_codes_and_inputs_have_room(backends: Natives, bits: int, cols: int) -> None:
    """In the sums of whole numbers, for one token and for many."""
    codes = np.full((40, cols), (1 << bits) - 1, np.uint8)
    scale, minimum = np.ones((40, 1), np.float16), np.zeros((40, 1), np.float16)
    stored = QuantizedMatrix(bits, cols, cols, pack_codes(codes, bits), scale, minimum)
    for backend in backends.values():
        for tokens in (1, 3, 40):
            found = backend.linear(np.full((tokens, cols), -1, np.float32), backend.matrix(stored))
            np.testing.assert_allclose(found, -cols * codes[0, 0].astype(float), rtol=1e-5)


@thinned("kind, group, rows, cols", KINDS, [None, 32, 10], [(150, 700), (37, 45), (2, 3300)])
def test_a_token_gets_the_same_alone_in_company_and_from_several_threads(
    backends: Natives, kind: Kind, group: int | None, rows: int, cols: int
) -> None:
    rng = np.random.default_rng(3)
    stored, x = random_stored(rng, kind, rows, cols, group), activations(rng, 11, cols)
    for name in running():
        one, several = (backends[name, threads] for threads in THREADS)
        alone = one.linear(x, one.matrix(stored))
        assert np.array_equal(several.linear(x, several.matrix(stored)), alone)
        each = [backend.linear(x[t : t + 1], backend.matrix(stored)) for t in range(11) for backend in (one, several)]
        assert np.array_equal(np.concatenate(each[::2]), alone)
        assert np.array_equal(np.concatenate(each[1::2]), alone)


def test_not_a_number_and_infinity_stay_with_their_token(backends: Natives) -> None:
    rng = np.random.default_rng(0)
    for kind in KINDS:
        stored = random_stored(rng, kind, 9, 75, 16)
        good = activations(rng, 5, 75)
        for wrong in (math.nan, math.inf, -math.inf):
            x = good.copy()
            x[2, 40] = wrong
            for backend in backends.values():
                matrix = backend.matrix(stored)
                found, expected = backend.linear(x, matrix), backend.linear(good, matrix)
                others = [0, 1, 3, 4]
                assert np.array_equal(found[others], expected[others])
                assert not np.isfinite(found[2][found[2] != 0]).any()


def test_the_rule_of_rounding() -> None:
    x = np.zeros((1, 40), np.float32)
    x[0, :4] = 127, 63.5, -0.5, 1.4
    x[0, 32:34] = 0.5, -0.1
    assert rounded(x, 32)[0, :4].tolist() == [127, 64, 0, 1]
    assert np.allclose(rounded(x, 32)[0, 32:34], [0.5, -25 * 0.5 / 127], rtol=1e-6)
    assert not rounded(x, 32)[0, 4:32].any()
