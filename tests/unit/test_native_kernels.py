"""Native matrix products and mixtures of experts beside plain arithmetic in double precision."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_problems import (
    F64,
    KINDS,
    THREADS,
    Kind,
    exact,
    magnitude,
    open_native,
    product,
    random_stored,
    rounded,
    running,
    seen,
    step_doubt,
)  # fmt: skip

from moert.kernels import library
from moert.kernels.backend import StoredWeights
from moert.kernels.native import NativeBackend
from moert.kernels.reference import ReferenceBackend
from moert.pack.codec import QuantizedMatrix, pack_codes
from moert.pack.model_spec import MoeSpec

Backends = dict[tuple[str, int], NativeBackend]
GROUPS = (None, 16, 32, 64, 10, 48, 1)
MOE = MoeSpec(num_experts=4, top_k=3, d_ff=1, activation="silu", gated=True, norm_topk=False, capacity=None)
kinds, groups = st.sampled_from(KINDS), st.sampled_from(GROUPS)
sizes, tokens_of = st.integers(1, 200), st.one_of(st.integers(1, 5), st.integers(1, 40))


@pytest.fixture(scope="module")
def backends() -> Iterator[Backends]:
    """By instruction set and threads."""
    if library.load() is None:
        pytest.skip(f"no native kernels: {library.missing()}")
    opened = {(name, threads): open_native(name, threads) for name in running() for threads in THREADS}
    yield opened
    for backend in opened.values():
        backend.close()


def test_the_library_is_there_where_there_is_a_compiler() -> None:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    assert library.missing() is None, "run make native: without it nothing tests the native kernels"


def activations(rng: np.random.Generator, tokens: int, cols: int) -> torch.Tensor:
    """A few outliers and a few zeros among them, and the first block of the first token all zeros."""
    x = rng.normal(0, 1, (tokens, cols)) * np.where(rng.random((tokens, cols)) < 0.02, 30, 1)
    x[rng.random((tokens, cols)) < 0.05] = 0
    x[0, :32] *= rng.integers(0, 2)
    return torch.from_numpy(x.astype(np.float32))


@settings(max_examples=150)
@given(
    seed=st.integers(0, 1 << 20), parts=st.lists(st.tuples(kinds, groups, st.integers(1, 40)), min_size=1, max_size=4),
    cols=sizes, tokens=tokens_of,
)  # fmt: skip
def test_linear_is_the_product_with_rounded_activations(
    backends: Backends, seed: int, parts: list[tuple[Kind, int | None, int]], cols: int, tokens: int
) -> None:
    rng = np.random.default_rng(seed)
    stored = [random_stored(rng, kind, rows, cols, group) for kind, group, rows in parts]
    x = activations(rng, tokens, cols)
    products = [product(part, x.numpy()) for part in stored]
    values, terms = (np.concatenate(each, 1) for each in zip(*products, strict=True))
    for backend in backends.values():
        found = backend.linear(x, [backend.matrix(part) for part in stored])
        assert found.shape == values.shape
        assert (np.abs(found.numpy() - values) <= 1e-6 * terms).all(), backend.name


@settings(max_examples=100)
@given(seed=st.integers(0, 1 << 20), kind=kinds, group=groups, rows=st.integers(1, 40), cols=sizes)
def test_rows_are_the_weights_themselves(
    backends: Backends, seed: int, kind: Kind, group: int | None, rows: int, cols: int
) -> None:
    rng = np.random.default_rng(seed)
    stored = random_stored(rng, kind, rows, cols, group)
    picked = rng.integers(0, rows, 5).tolist()
    expected, terms = exact(stored)[picked], magnitude(stored)[picked]
    for backend in backends.values():
        found = backend.rows(backend.matrix(stored), picked).numpy()
        assert (np.abs(found - expected) <= 2e-7 * terms).all(), backend.name


@pytest.mark.parametrize("scale", [2.0**-24, 3 * 2.0**-24, 2.0**-14, 65504.0, -65504.0])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e15])
def test_extreme_scales(backends: Backends, scale: float, bits: int, size: float) -> None:
    rng = np.random.default_rng(bits)
    codes = rng.integers(0, 1 << bits, (5, 70)).astype(np.uint8)
    scales, minimum = np.full((5, 3), scale, np.float16), np.array([[scale, -scale, 0]] * 5, np.float16)
    stored = QuantizedMatrix(bits, 70, 32, pack_codes(codes, bits), scales, minimum)
    x = activations(rng, 2, 70) * size
    values, terms = product(stored, x.numpy())
    for backend in backends.values():
        found = backend.linear(x, [backend.matrix(stored)]).numpy()
        assert (np.abs(found - values) <= 1e-6 * terms + 1e-37).all(), backend.name


@settings(max_examples=40)
@given(seed=st.integers(0, 1 << 20), bits=st.sampled_from([2, 3, 4, 8]), group=groups, cols=sizes, tokens=tokens_of)
def test_whole_numbers_give_the_same_on_every_instruction_set(
    backends: Backends, seed: int, bits: int, group: int | None, cols: int, tokens: int
) -> None:
    rng = np.random.default_rng(seed)
    stored = random_stored(rng, bits, 7, cols, group)
    assert isinstance(stored, QuantizedMatrix)
    stored.scale[:] = rng.integers(-1, 3, stored.scale.shape)
    stored.minimum[:] = rng.integers(-4, 5, stored.scale.shape)
    x = rng.integers(-127, 128, (tokens, cols)).astype(np.float32)
    x[:, ::32] = 127  # then each block's scale is 1
    expected = (x.astype(np.int64) @ exact(stored).astype(np.int64).T).astype(np.float32)
    for backend in backends.values():
        assert np.array_equal(backend.linear(torch.from_numpy(x), [backend.matrix(stored)]).numpy(), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", [None, 32, 10])
@pytest.mark.parametrize(("rows", "cols"), [(150, 700), (37, 45), (2, 3300)])
def test_a_token_gets_the_same_alone_in_company_and_from_several_threads(
    backends: Backends, kind: Kind, group: int | None, rows: int, cols: int
) -> None:
    rng = np.random.default_rng(3)
    stored, x = random_stored(rng, kind, rows, cols, group), activations(rng, 11, cols)
    for name in running():
        one, several = (backends[name, threads] for threads in THREADS)
        alone = one.linear(x, [one.matrix(stored)])
        assert torch.equal(several.linear(x, [several.matrix(stored)]), alone)
        each = [backend.linear(x[t : t + 1], [backend.matrix(stored)]) for t in range(11) for backend in (one, several)]
        assert torch.equal(torch.cat(each[::2]), alone)
        assert torch.equal(torch.cat(each[1::2]), alone)


def test_not_a_number_and_infinity_stay_with_their_token(backends: Backends) -> None:
    rng = np.random.default_rng(0)
    for kind in KINDS:
        stored = random_stored(rng, kind, 9, 75, 16)
        good = activations(rng, 5, 75)
        for wrong in (math.nan, math.inf, -math.inf):
            x = good.clone()
            x[2, 40] = wrong
            for backend in backends.values():
                matrix = backend.matrix(stored)
                found, expected = backend.linear(x, [matrix]), backend.linear(good, [matrix])
                others = [0, 1, 3, 4]
                assert torch.equal(found[others], expected[others])
                assert not found[2].isfinite()[found[2] != 0].any()
                expert, moe = backend.dense(None, matrix, backend.matrix(torch.ones(75, 9))), replace(MOE, gated=False)
                out = torch.zeros(5, 75)
                backend.run_all([expert], [5], torch.arange(5), torch.ones(5), x, out, moe)
                assert out[others].isfinite().all()


Expert = dict[str, StoredWeights]


def random_expert(
    rng: np.random.Generator, gated: bool, d_model: int, d_ff: int, group: int | None, widths: list[Kind]
) -> Expert:
    names = ("gate", "up", "down") if gated else ("up", "down")
    shapes = {"gate": (d_ff, d_model), "up": (d_ff, d_model), "down": (d_model, d_ff)}
    return {
        name: random_stored(rng, kind, *shapes[name], group, size=1.5 * shapes[name][1] ** -0.5)
        for name, kind in zip(names, widths, strict=False)
    }


def opened(backend: NativeBackend, expert: Expert) -> object:
    gate, up, down = (backend.matrix(expert[name]) if name in expert else None for name in ("gate", "up", "down"))
    return backend.dense(gate, up, down)


def plain_expert(expert: Expert, x: torch.Tensor, moe: MoeSpec) -> tuple[F64, F64]:
    """x [tokens, d_model] → expert(x), and a bound of what float32 and a rounding that falls the other way change."""
    limit = math.inf if moe.activation_limit is None else moe.activation_limit
    up, up_terms = product(expert["up"], x.numpy())
    bent, bent_terms = product(expert["gate"], x.numpy()) if moe.gated else (up, up_terms)
    hidden = ACTIVATION[moe.activation](np.minimum(bent, limit))
    error = 1.2 * 1e-6 * bent_terms + 1e-6 * np.abs(hidden)  # the slopes are below 1.2
    if moe.gated:
        up = np.clip(up, -limit, limit)
        error = error * np.abs(up) + 1e-6 * up_terms * (np.abs(hidden) + error)
        hidden = hidden * up
    down = expert["down"]
    inputs, wide = seen(down, hidden.astype(np.float32)), magnitude(down)
    if isinstance(down, QuantizedMatrix):
        share = float((error / np.maximum(np.abs(hidden).max(-1, keepdims=True), 1e-30)).max()) + 1e-6
        error = error + step_doubt(hidden, 40 * share) + 4 * error.max(-1, keepdims=True)
    return inputs @ exact(down).T, 1e-6 * np.abs(inputs) @ wide.T + error @ wide.T


ACTIVATION = {
    "relu": lambda x: np.maximum(x, 0),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
    "gelu_new": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}


@settings(max_examples=100)
@given(
    seed=st.integers(0, 1 << 20), activation=st.sampled_from(list(ACTIVATION)), gated=st.booleans(),
    limit=st.sampled_from([None, 0.4]), group=groups, d_model=st.integers(1, 100), d_ff=st.integers(1, 150),
    widths=st.lists(st.lists(kinds, min_size=3, max_size=3), min_size=1, max_size=3), tokens=tokens_of,
)  # fmt: skip
def test_experts_add_the_weighted_feed_forward(
    backends: Backends, seed: int, activation: str, gated: bool, limit: float | None, group: int | None, d_model: int,
    d_ff: int, widths: list[list[Kind]], tokens: int,
) -> None:  # fmt: skip
    moe = replace(MOE, activation=activation, gated=gated, activation_limit=limit)
    rng = np.random.default_rng(seed)
    experts = [random_expert(rng, gated, d_model, d_ff, group, each) for each in widths]
    x, before = activations(rng, tokens, d_model), activations(rng, tokens, d_model)
    share = torch.from_numpy(rng.uniform(0, 1, (len(experts), tokens)).astype(np.float32))
    chosen = [torch.from_numpy(np.sort(rng.permutation(tokens)[: rng.integers(1, tokens + 1)])) for _ in experts]
    expected = before.double().numpy()
    bound = 1e-6 * np.abs(expected)
    for expert, weights, rows in zip(experts, share, chosen, strict=True):
        value, error = plain_expert(expert, x[rows], moe)
        by = weights[rows].double().numpy()[:, None]
        expected[rows.numpy()] += by * value
        bound[rows.numpy()] += by * (error + 1e-6 * np.abs(value))
    for backend in backends.values():
        out, held = before.clone(), [opened(backend, expert) for expert in experts]
        for expert, weights, rows in zip(held, share, chosen, strict=True):
            backend.run_all([expert], [len(rows)], rows, weights[rows], x, out, moe)
        assert (np.abs(out.numpy() - expected) <= bound + 1e-7).all(), backend.name
        if tokens == 1:
            at_once = before.clone()
            backend.mix(held, share[:, 0].contiguous(), x, at_once, moe)
            assert torch.equal(at_once, out)


@pytest.mark.parametrize("activation", list(ACTIVATION))
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("d_model", "d_ff"), [(96, 75), (3300, 45)])
def test_experts_give_a_token_the_same_alone_in_company_and_from_several_threads(
    backends: Backends, activation: str, gated: bool, d_model: int, d_ff: int
) -> None:
    """With rows so long that few of them make a piece of work, and those cut across the vectors."""
    moe, rng = replace(MOE, activation=activation, gated=gated), np.random.default_rng(5)
    experts = [
        random_expert(rng, gated, d_model, d_ff, group, widths)
        for group, widths in ((None, [2, 3, 4]), (64, [4, 8, "BF16"]), (10, ["F16", 4, 3]))
    ]
    x, before = activations(rng, 9, d_model), activations(rng, 9, d_model)
    share = torch.from_numpy(rng.uniform(0, 1, (3, 9)).astype(np.float32))
    for name in running():
        found = []
        for backend in (backends[name, threads] for threads in THREADS):
            held = [opened(backend, expert) for expert in experts]
            together, mixed, alone = before.clone(), before.clone(), before.clone()
            for e, expert in enumerate(held):
                backend.run_all([expert], [9], torch.arange(9), share[e], x, together, moe)
                for t in range(9):
                    backend.run_all([expert], [1], torch.tensor([t]), share[e, t : t + 1], x, alone, moe)
            for t in range(9):
                backend.mix(held, share[:, t].contiguous(), x[t : t + 1], mixed[t : t + 1], moe)
            found += [together, mixed, alone]
        assert all(torch.equal(each, found[0]) for each in found), name


def test_floats_are_those_of_the_reference(backends: Backends) -> None:
    """16-bit and 32-bit weights meet activations as they are, so nothing but the order of sums differs."""
    rng, reference = np.random.default_rng(9), ReferenceBackend()
    x = activations(rng, 6, 130)
    for widths in (["F16"] * 3, ["BF16"] * 3, ["F32"] * 3):
        expert = random_expert(rng, True, 130, 90, None, list(widths))
        expected = torch.zeros_like(x)
        dense = reference.dense(*map(reference.matrix, expert.values()))
        reference.run_all([dense], [6], torch.arange(6), torch.ones(6), x, expected, MOE)
        for backend in backends.values():
            found = torch.zeros_like(x)
            backend.run_all([opened(backend, expert)], [6], torch.arange(6), torch.ones(6), x, found, MOE)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def test_the_rule_of_rounding() -> None:
    x = np.zeros((1, 40), np.float32)
    x[0, :4] = 127, 63.5, -0.5, 1.4
    x[0, 32:34] = 0.5, -0.1
    assert rounded(x)[0, :4].tolist() == [127, 64, 0, 1]
    assert np.allclose(rounded(x)[0, 32:34], [0.5, -25 * 0.5 / 127], rtol=1e-6)
    assert not rounded(x)[0, 4:32].any()
