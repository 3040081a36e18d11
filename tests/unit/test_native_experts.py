"""Native mixtures of experts beside plain arithmetic in double precision."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_problems import (
    ACTIVATION,
    FLOATS,
    KINDS,
    THREADS,
    Biases,
    Kind,
    Natives,
    Projections,
    activations,
    all_natives,
    floats,
    normal,
    plain_expert,
    random_stored,
    running,
)  # fmt: skip

from moert.kernels.backend import ExpertView, Floats, ProjectionView, Stored
from moert.kernels.native import NativeBackend, NativeExpert
from moert.kernels.reference import ReferenceBackend
from moert.pack.codec import F32
from moert.pack.parts import Act, Ffn
from tests.pairs import thinned

GROUPS = (None, 16, 32, 64, 10, 48, 1)
kinds, groups = st.sampled_from(KINDS), st.sampled_from(GROUPS)
WIDTHS: list[tuple[int | None, list[Kind]]] = [(None, [2, 3, 4]), (64, [4, 8, "BF16"]), (10, ["F16", 4, 3])]
tokens_of = st.one_of(st.integers(1, 5), st.integers(1, 40))


@pytest.fixture(scope="module")
def backends() -> Iterator[Natives]:
    with all_natives() as opened:
        yield opened


def random_expert(
    rng: np.random.Generator, gated: bool, d_model: int, d_ff: int, group: int | None, widths: list[Kind]
) -> Projections:
    names = ("gate", "up", "down") if gated else ("up", "down")
    shapes = {"gate": (d_ff, d_model), "up": (d_ff, d_model), "down": (d_model, d_ff)}
    return {
        name: random_stored(rng, kind, *shapes[name], group, size=1.5 * shapes[name][1] ** -0.5)
        for name, kind in zip(names, widths, strict=False)
    }


def random_biases(rng: np.random.Generator, biased: bool, expert: Projections) -> Biases:
    return {name: normal(rng, rows_in(stored)) for name, stored in expert.items()} if biased else {}


def rows_in(stored: Stored) -> int:
    return len(stored.data if isinstance(stored, Floats) else stored.qweight)


def opened(backend: NativeBackend, expert: Projections, biases: Biases | None = None) -> NativeExpert:
    matrices = {name: backend.matrix(stored, (biases or {}).get(name)) for name, stored in expert.items()}
    return backend.dense(matrices.get("gate"), matrices["up"], matrices["down"])


def rows_of(tokens: Sequence[int]) -> npt.NDArray[np.int32]:
    return np.array(tokens, np.int32)


@settings(max_examples=100)
@given(
    seed=st.integers(0, 1 << 20), activation=st.sampled_from(list(ACTIVATION)), gated=st.booleans(),
    limit=st.sampled_from([None, 0.4]), group=groups, d_model=st.integers(1, 100), d_ff=st.integers(1, 150),
    slope=st.sampled_from([1.0, 1.702]), plus=st.sampled_from([0.0, 1.0]), biased=st.booleans(),
    widths=st.lists(st.lists(kinds, min_size=3, max_size=3), min_size=1, max_size=3), tokens=tokens_of,
)  # fmt: skip
def test_experts_add_the_weighted_feed_forward(
    backends: Natives, seed: int, activation: Any, gated: bool, limit: float | None, group: int | None, d_model: int,
    d_ff: int, slope: float, plus: float, biased: bool, widths: list[list[Kind]], tokens: int,
) -> None:  # fmt: skip
    spec = Ffn(1, Act(activation, limit, slope if activation == "silu" else 1.0, plus), gated, biased)
    rng = np.random.default_rng(seed)
    experts = [random_expert(rng, gated, d_model, d_ff, group, each) for each in widths]
    biases = [random_biases(rng, biased, expert) for expert in experts]
    x, before = activations(rng, tokens, d_model), activations(rng, tokens, d_model)
    share = rng.uniform(0, 1, (len(experts), tokens)).astype(np.float32)
    chosen = [np.sort(rng.permutation(tokens)[: rng.integers(1, tokens + 1)]).astype(np.int32) for _ in experts]
    weights = [by[rows] for by, rows in zip(share, chosen, strict=True)]
    expected = before.astype(np.float64)
    bound = 1e-6 * np.abs(expected)
    for expert, bias, by, rows in zip(experts, biases, weights, chosen, strict=True):
        value, error = plain_expert(expert, x[rows], spec, bias)
        expected[rows] += by[:, None].astype(np.float64) * value
        bound[rows] += by[:, None] * (error + 1e-6 * np.abs(value))
    for backend in backends.values():
        out, held = before.copy(), [opened(backend, *each) for each in zip(experts, biases, strict=True)]
        counts, rows, by = list(map(len, chosen)), np.concatenate(chosen), np.concatenate(weights)
        backend.mixture(held, counts, rows, by, x, out, spec)
        assert (np.abs(out - expected) <= bound + 1e-7).all(), backend.name
        one_by_one = before.copy()
        for each, mine, of in zip(held, chosen, weights, strict=True):
            backend.mixture([each], [len(mine)], mine, of, x, one_by_one, spec)
        assert np.array_equal(one_by_one, out), backend.name


@thinned("activation, gated, d_model, d_ff", list(ACTIVATION), [False, True], [(96, 75), (3300, 45)])
def test_experts_give_a_token_the_same_alone_in_company_and_from_several_threads(
    backends: Natives, activation: Any, gated: bool, d_model: int, d_ff: int
) -> None:
    """With rows so long that few of them make a piece of work, and those cut across the vectors."""
    spec, rng = Ffn(1, Act(activation), gated), np.random.default_rng(5)
    experts = [random_expert(rng, gated, d_model, d_ff, group, widths) for group, widths in WIDTHS]
    x, before = activations(rng, 9, d_model), activations(rng, 9, d_model)
    share = rng.uniform(0, 1, (3, 9)).astype(np.float32)
    for name in running():
        found = []
        for backend in (backends[name, threads] for threads in THREADS):
            held = [opened(backend, expert) for expert in experts]
            at_once, in_turn, alone, mixed, in_parts = (before.copy() for _ in range(5))
            backend.mixture(held, [9] * 3, rows_of([*range(9)] * 3), share.reshape(-1), x, at_once, spec)
            for expert, by in zip(held, share, strict=True):
                backend.mixture([expert], [9], rows_of(range(9)), by, x, in_turn, spec)
                for t in range(9):
                    backend.mixture([expert], [1], rows_of([t]), by[t : t + 1], x, alone, spec)
            for t in range(9):
                token, into, by = x[t : t + 1], mixed[t : t + 1], share[:, t].copy()
                backend.mixture(held, [1] * 3, rows_of([0] * 3), by, token, into, spec)
                backend.add_parts(parts_as_they_come(backend, held, token, spec), by, in_parts[t : t + 1])
            found += [at_once, in_turn, alone, mixed, in_parts]
        assert all(np.array_equal(each, found[0]) for each in found), name


def parts_as_they_come(backend: NativeBackend, experts: Sequence[NativeExpert], token: F32, spec: Ffn) -> F32:
    """What each expert makes of a token: the last one alone, and the others together after it."""
    parts = np.full((len(experts), token.shape[1]), np.nan, np.float32)
    backend.parts(experts[-1:], token, parts[-1:], spec)
    backend.parts(experts[:-1], token, parts[:-1], spec)
    return parts


def test_floats_are_those_of_the_reference(backends: Natives) -> None:
    """16-bit and 32-bit weights meet activations as they are, so nothing but the order of sums differs."""
    rng, reference, spec = np.random.default_rng(9), ReferenceBackend(), Ffn(1, Act("silu"), gated=True)
    x = activations(rng, 6, 130)
    for dtype in FLOATS:
        expert = random_expert(rng, True, 130, 90, None, [dtype] * 3)
        biases = random_biases(rng, dtype == "F16", expert)
        expected, rows, ones = np.zeros_like(x), rows_of(range(6)), np.ones(6, np.float32)
        dense = reference.dense(*(reference.matrix(stored, biases.get(name)) for name, stored in expert.items()))
        reference.mixture([dense], [6], rows, ones, x, expected, spec)
        for backend in backends.values():
            found = np.zeros_like(x)
            backend.mixture([opened(backend, expert, biases)], [6], rows, ones, x, found, spec)
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * float(np.abs(expected).max()))


def test_an_expert_in_a_buffer_is_the_same_as_its_matrices(backends: Natives) -> None:
    """With its biases behind the matrices."""
    rng, spec = np.random.default_rng(3), Ffn(40, Act("silu", plus=1.0), gated=True, bias=True)
    expert = random_expert(rng, True, 33, 40, 16, [3, "BF16", 8])
    biases, body, views = random_biases(rng, True, expert), bytearray(), dict[str, ProjectionView]()
    for name, stored in expert.items():
        parts = [stored.data] if isinstance(stored, Floats) else [stored.qweight, stored.scale, stored.minimum]
        places = []
        for part in (*parts, biases[name]):
            places.append(len(body))
            body += part.tobytes() + bytes(-part.nbytes % 64)
        bits, group = (16, 0) if isinstance(stored, Floats) else (stored.bits, stored.group_size)
        shape = spec.shape(name, 33)
        views[name] = ProjectionView(shape, bits, group, "BF16", tuple(places[:-1]), places[-1])
    x, view = activations(rng, 1, 33), ExpertView(np.frombuffer(body, np.uint8), views)
    for backend in backends.values():
        found, expected = np.empty((1, 33), np.float32), np.empty((1, 33), np.float32)
        backend.parts([backend.expert(view)], x, found, spec)
        backend.parts([opened(backend, expert, biases)], x, expected, spec)
        assert np.array_equal(found, expected)
        value, error = plain_expert(expert, x, spec, biases)
        assert (np.abs(found - value) <= error + 1e-7).all()


def test_not_a_number_and_infinity_stay_with_their_token(backends: Natives) -> None:
    rng = np.random.default_rng(0)
    spec, ones, others = Ffn(1, Act("silu"), gated=False), np.ones(5, np.float32), [0, 1, 3, 4]
    for kind in KINDS:
        expert = {"up": random_stored(rng, kind, 9, 75, 16), "down": floats("F32", np.ones((75, 9)))}
        good = activations(rng, 5, 75)
        for wrong in (math.nan, math.inf, -math.inf):
            x = good.copy()
            x[2, 40] = wrong
            for backend in backends.values():
                found, expected, held = (
                    np.zeros((5, 75), np.float32),
                    np.zeros((5, 75), np.float32),
                    opened(backend, expert),
                )
                backend.mixture([held], [5], rows_of(range(5)), ones, x, found, spec)
                backend.mixture([held], [5], rows_of(range(5)), ones, good, expected, spec)
                assert np.array_equal(found[others], expected[others])
                assert np.isfinite(found[others]).all()
