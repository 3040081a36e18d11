"""Native attention beside plain arithmetic in double precision, and beside itself: a token gets the same bits however
many come with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
from attention_answers import close, close_kept, exact_attend, exact_kept, exact_norm, found_keys
from attention_problems import (
    AnyBackend,
    Problem,
    keep,
    latent_problems,
    make,
    make_latent,
    nothing_behind,
    problems,
    raw,
    read,
)  # fmt: skip
from hypothesis import given, settings
from hypothesis import strategies as st
from native_problems import CODED, KINDS, Kind, all_natives, random_stored

from moert.kernels.backend import Positions
from moert.kernels.native import NativeBackend
from moert.kernels.pages import KEYS, KvBits
from moert.kernels.reference import ReferenceBackend
from moert.models.kv import Kept
from moert.pack.codec import F32
from moert.pack.parts import Attention
from tests.pairs import thinned

Backends = list[NativeBackend]
some_tokens = st.lists(st.sampled_from([1, 1, 2, 5, 60, 70]), min_size=1, max_size=3)
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {}, "clipped": {"clip": 0.7, "qk_norm": "whole"}, "without norms": {"clip": 0.9},
    "norms of each head": {"qk_norm": "head"}, "one key head a head": {"kv": 4, "shared": 1},
    "four heads a key head": {"kv": 1, "shared": 4}, "heads of 128": {"dim": 128},
    "odd heads": {"dim": 33, "turning": 0.4}, "biases": {"biases": "qkvo", "layer": True},
    "a gate": {"gate": True, "biases": "qkv"}, "a gate with a bias": {"biases": "qkvog"},
    "chunks of 50": {"chunk": 50, "scaled": True},
    "normed after turning": {"qk_norm": "head", "norm_turned": True, "v_norm": True},
    "normed at the end": {"after": True, "add": 0.3},
}  # fmt: skip
LATENT: dict[str, dict[str, Any]] = {
    "plain": {}, "low rank": {"q_rank": 24, "layer": True}, "biases": {"q_rank": 24, "bias": True, "after": True},
    "without turns": {"turns": False, "add": 0.3}, "one head": {"n": 1, "nope": 33, "kv_rank": 15},
    "gates": {"gate": True, "q_rank": 24},
}  # fmt: skip


@pytest.fixture(scope="module")
def backends() -> Iterator[Backends]:
    with all_natives() as opened:
        yield list(opened.values())


def same(one: tuple[F32, Kept], other: tuple[F32, Kept]) -> bool:
    (x, kept), (y, others) = one, other
    return np.array_equal(x, y) and all(map(np.array_equal, raw(kept), raw(others)))


def ways(pieces: list[int], backend: NativeBackend) -> list[list[int]]:
    """In these pieces, all at once, and, by one thread, one after the other until behind the first block of keys."""
    total = sum(pieces)
    ones = min(total, KEYS + 2)
    one_by_one = [1] * ones + ([total - ones] if total > ones else [])
    return [pieces, [total], *([one_by_one] if backend.threads == 1 else [])]


def check_own(backend: AnyBackend, problem: Problem, x: F32, pieces: list[int]) -> tuple[F32, Kept]:
    """What comes out is what its own keys and values, and those of the exact answer, say."""
    rounds = not backend.widens
    out, kept = read(backend, problem, problem.on(backend), x, pieces)
    keys, values = found_keys(kept)
    assert nothing_behind(kept)
    expected = exact_kept(problem, exact_norm(x.astype(np.float64), problem.norms["before"]), rounds)
    for mine, exactly in zip((keys, values), expected, strict=True):
        close_kept(mine, exactly, problem)
    close(out, exact_attend(problem, x, keys, values, rounds), problem.kind)
    return out, kept


def check_everywhere(backends: Backends, problem: Problem, pieces: list[int]) -> None:
    """One is right, and all give the same in every way."""
    x = problem.tokens(sum(pieces))
    first = check_own(backends[0], problem, x, pieces)
    for backend in backends:
        weights = problem.on(backend)
        for way in ways(pieces, backend):
            assert same(read(backend, problem, weights, x, way), first), (backend.name, backend.threads, way)


@settings(max_examples=100)
@given(problem=problems(), pieces=some_tokens, window=st.sampled_from([None, None, 1, 5, 70]))
def test_a_decoders_tokens_attend_to_those_before_them(
    backends: Backends, problem: Problem, pieces: list[int], window: int | None
) -> None:
    assert isinstance(problem.part, Attention)
    check_everywhere(backends, replace(problem, part=replace(problem.part, window=window)), pieces)


@settings(max_examples=100)
@given(problem=latent_problems(), pieces=some_tokens)
def test_a_decoders_tokens_attend_to_latent_features(backends: Backends, problem: Problem, pieces: list[int]) -> None:
    check_everywhere(backends, problem, pieces)


@settings(max_examples=30)
@given(problem=problems(causal=False), tokens=st.integers(1, 150))
def test_an_encoders_tokens_attend_to_all(backends: Backends, problem: Problem, tokens: int) -> None:
    x = problem.tokens(tokens)
    first = check_own(backends[0], problem, x, [tokens])
    assert all(same(read(backend, problem, problem.on(backend), x, [tokens]), first) for backend in backends)


@thinned("kind, shape, bits", (*KINDS, *CODED), SHAPES, get_args(KvBits))
def test_each_shape_at_each_width(backends: Backends, kind: Kind, shape: str, bits: KvBits) -> None:
    """The keys grow on the way, over more than one block."""
    check_grown(backends, make(kind=kind, bits=bits, **{"turning": 1, **SHAPES[shape]}))


@thinned("kind, shape, bits", (*KINDS, *CODED), LATENT, get_args(KvBits))
def test_each_latent_shape_at_each_width(backends: Backends, kind: Kind, shape: str, bits: KvBits) -> None:
    check_grown(backends, make_latent(kind=kind, bits=bits, **LATENT[shape]))


def check_grown(backends: Backends, problem: Problem) -> None:
    x = problem.tokens(140)
    first = check_own(backends[0], problem, x, [5] + [1] * 135)
    assert all(same(read(backend, problem, problem.on(backend), x, [140]), first) for backend in backends[1:])


@settings(max_examples=40)
@given(
    problem=problems(own=False, causal=False), pieces=some_tokens,
    lengths=st.lists(st.sampled_from([1, 8, 61, 70]), min_size=1, max_size=3),
)  # fmt: skip
def test_attention_to_the_encoded_input(
    backends: Backends, problem: Problem, lengths: list[int], pieces: list[int]
) -> None:
    encoded, x = problem.tokens(sum(lengths)), problem.tokens(sum(pieces))
    first = None
    for backend in backends:
        weights = problem.on(backend)
        for before in (lengths, [len(encoded)]):
            kept = keep(backend, weights, encoded, before, problem.bits)
            stays = raw(kept)
            for way in ways(pieces, backend):
                out, start = x.copy(), 0
                for tokens in way:
                    backend.attend(weights, out[start : start + tokens], kept, 0, Positions())
                    start += tokens
                first = first or (out, kept)
                assert same((out, kept), first)
                assert all(map(np.array_equal, raw(kept), stays))
    assert first is not None
    keys, values = found_keys(first[1])
    expected = exact_kept(problem, encoded.astype(np.float64), rounds=True)
    for mine, exactly in zip((keys, values), expected, strict=True):
        close_kept(mine, exactly, problem)
    close(first[0], exact_attend(problem, x, keys, values, rounds=True), problem.kind)


@thinned("bits, own, power", get_args(KvBits), [True, False], [-60, -24, 0, 16, 60])
def test_keys_and_values_of_any_size_are_kept_alike(backends: Backends, bits: KvBits, own: bool, power: int) -> None:
    """What a matrix of values grows by, the one behind it makes up for; keys likewise, and queries. So the answer is
    the same but for the rounding of numbers that 16 bits do not hold exactly."""
    plain = make(own=own, causal=False, scale=0.05, bits=bits)
    shapes = {"q": (80, 40), "k": (40, 40), "v": (40, 40), "o": (40, 80)}
    weights = {
        name: random_stored(np.random.default_rng(at), "F32", *shape, None, 0.1)
        for at, (name, shape) in enumerate(shapes.items())
    }
    powers = {"q": -power, "k": power, "v": power, "o": -power}
    scaled = {
        name: replace(one, data=np.ldexp(one.data, powers[name]))  # type: ignore[arg-type, call-overload]
        for name, one in weights.items()
    }
    plain, problem = (replace(plain, matrices=plain.matrices | each) for each in (weights, scaled))
    x = problem.tokens(7)
    hidden = exact_norm(x.astype(np.float64), problem.norms["before"]) if own else x.astype(float)
    expected, kept_first = exact_kept(problem, hidden, True), None
    both: list[AnyBackend] = [*backends, ReferenceBackend()]
    for backend in both:
        first = problem.on(backend)
        if own:
            out, kept = read(backend, problem, first, x, [7])
            np.testing.assert_allclose(out, read(backend, plain, plain.on(backend), x, [7])[0], rtol=2e-3, atol=2e-3)
        else:
            kept = keep(backend, first, x, [7], bits)
        for mine, exactly in zip(found_keys(kept), expected, strict=True):
            largest = np.abs(exactly).max(-1, keepdims=True)
            bound = largest / 127 * 0.52 if bits == 8 else 2.0**-11 * np.abs(exactly) + 2.0**-15 * largest
            assert (np.abs(mine - exactly) <= 1.01 * bound + 1e-5 * largest).all()
        if isinstance(backend, NativeBackend):
            kept_first = kept_first or kept
            assert all(map(np.array_equal, raw(kept), raw(kept_first)))


def test_a_key_that_is_not_finite_leaves_no_number_behind(backends: Backends) -> None:
    problem = make(causal=False)
    x = problem.tokens(3)
    x[1, 0] = np.inf
    for backend in (*backends, ReferenceBackend()):
        with np.errstate(all="ignore"):
            out, _ = read(backend, problem, problem.on(backend), x, [3])
        assert np.isnan(out).all(-1).any()
