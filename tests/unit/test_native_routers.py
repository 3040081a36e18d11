"""Routers beside torch, transformers and the formulas of the families: scores, and which experts these choose."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
import torch
from attention_answers import exact_norm, exact_sigmoid, times
from attention_problems import AnyBackend, random_norm
from hypothesis import given, settings
from hypothesis import strategies as st
from native_problems import F64, FLOATS, KINDS, Dtype, Kind, all_natives, floats, normal, random_stored
from transformers.models.phimoe.modeling_phimoe import sparsemixer

from moert.kernels.backend import I64, NormWeights, RouterWeights, Stored
from moert.kernels.native import NativeBackend
from moert.kernels.reference import ReferenceBackend
from moert.pack.codec import F32
from moert.pack.parts import Groups, Router

Score = Literal["softmax", "sigmoid", "sigmoid_of_chosen", "sparsemixer", "sqrt_softplus"]
ONES = NormWeights(np.ones(1, np.float32), None, 1e-5)
seeds = st.integers(0, 1 << 20)


@pytest.fixture(scope="module")
def natives() -> Iterator[list[NativeBackend]]:
    with all_natives() as opened:
        yield list(opened.values())


@pytest.fixture(scope="module")
def backends(natives: list[NativeBackend]) -> list[AnyBackend]:
    return [*natives, ReferenceBackend()]


def choose(
    backend: AnyBackend, scores: F32, part: Router, bias: F32 | None = None, scale: F32 | None = None,
    factor: float = 1.0,
) -> tuple[I64, F32]:  # fmt: skip
    matrix = backend.matrix(floats("F32", np.zeros((scores.shape[1], 1))))
    return backend.choose(scores.copy(), RouterWeights(part, factor, ONES, None, matrix, bias, scale))


@settings(max_examples=60)
@given(
    seed=seeds, dtype=st.sampled_from(FLOATS), tokens=st.integers(1, 5),
    experts=st.one_of(st.integers(1, 40), st.just(700)), d_model=st.integers(1, 150),
    score=st.sampled_from(["softmax", "sigmoid", "sparsemixer", "sqrt_softplus"]), layer=st.booleans(),
    own=st.booleans(), biased=st.booleans(),
)  # fmt: skip
def test_scores_are_those_of_torch(
    backends: list[AnyBackend], seed: int, dtype: Dtype, tokens: int, experts: int, d_model: int, score: Score,
    layer: bool, own: bool, biased: bool,
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    stored, bias = floats(dtype, rng.normal(0, d_model**-0.5, (experts, d_model))), normal(rng, experts)
    x, norm = normal(rng, tokens, d_model), random_norm(rng, d_model, layer)
    other = random_norm(rng, d_model, soft=True) if own else None
    hidden, sees = (exact_norm(x.astype(np.float64), each) for each in (norm, other or norm))
    numbers = torch.from_numpy(times(stored, sees, rounds=False, bias=bias if biased else None))
    made = {"softmax": numbers.softmax(-1), "sigmoid": numbers.sigmoid(), "sparsemixer": numbers}
    expected = made.get(score, torch.nn.functional.softplus(numbers).sqrt()).numpy()
    for backend in backends:
        matrix = backend.matrix(stored, bias if biased else None)
        part = Router(1, False, None, score, bias=biased, own_norm=own)
        normed, found = backend.scores(x, RouterWeights(part, 1.0, norm, other, matrix, None, None))
        np.testing.assert_allclose(normed, hidden, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 if score == "sparsemixer" else 1e-7)


@settings(max_examples=60)
@given(seed=seeds, tokens=st.integers(1, 5), experts=st.integers(1, 40), renormalise=st.booleans())
def test_the_likeliest_are_chosen_as_by_torch(
    backends: list[AnyBackend], seed: int, tokens: int, experts: int, renormalise: bool
) -> None:
    rng = np.random.default_rng(seed)
    top_k = int(rng.integers(1, min(9, experts) + 1))
    scores = torch.from_numpy(3 * normal(rng, tokens, experts)).softmax(-1)
    best = scores.topk(top_k)
    expected, order = best.indices.sort(-1)
    shares = best.values.gather(1, order)
    if renormalise:
        shares = shares / shares.sum(-1, keepdim=True)
    scale = rng.uniform(0.5, 2, experts).astype(np.float32)
    for backend in backends:
        chosen, weights = choose(backend, scores.numpy(), Router(top_k, renormalise, None))
        assert np.array_equal(chosen, expected.numpy())
        np.testing.assert_allclose(weights, shares.numpy(), rtol=1e-6)
        part = Router(top_k, renormalise, None, factor=2.5, expert_scale=True)
        again, weights = choose(backend, scores.numpy(), part, scale=scale, factor=0.5)
        assert np.array_equal(again, chosen)
        np.testing.assert_allclose(weights, shares.numpy() * scale[chosen] * 2.5 * 0.5, rtol=1e-6)


@settings(max_examples=100)
@given(seed=seeds, tokens=st.integers(1, 5), experts=st.integers(1, 30), renormalise=st.booleans())
def test_of_equals_the_first_are_chosen(
    backends: list[AnyBackend], seed: int, tokens: int, experts: int, renormalise: bool
) -> None:
    """Powers of two, so that sums are exact."""
    rng = np.random.default_rng(seed)
    top_k = int(rng.integers(1, experts + 1))
    scores = rng.choice([0.0625, 0.125, 0.5], (tokens, experts)).astype(np.float32)
    if not renormalise:
        scores[rng.random((tokens, experts)) < 0.5] = 0
    ranked = [sorted(range(experts), key=lambda expert, row=row: (-row[expert], expert)) for row in scores]
    expected = np.array([sorted(row[:top_k]) for row in ranked])
    shares = np.take_along_axis(scores, expected, 1)
    if renormalise:
        shares = shares / shares.sum(1, keepdims=True)
    for backend in backends:
        found, weights = choose(backend, scores, Router(top_k, renormalise, None))
        assert (found.dtype, weights.dtype) == (np.int64, np.float32)
        assert np.array_equal(found, expected)
        assert np.array_equal(weights, shares)


def grouped(scores: F64, bias: F64, part: Router) -> tuple[I64, F64]:
    """As in DeepSeek-V3: groups by the sum of their best, experts of the best groups by score and bias, weights without
    it."""
    assert part.groups is not None
    choice = torch.from_numpy(scores + bias)
    by_group = choice.view(len(scores), part.groups.n, -1)
    worth = by_group.topk(min(part.groups.top, by_group.shape[-1])).values.sum(-1)
    mask = torch.zeros_like(worth).scatter_(1, worth.topk(part.groups.best).indices, 1).bool()
    left = by_group.masked_fill(~mask[..., None], -torch.inf).view(choice.shape)
    chosen = np.sort(left.topk(part.top_k).indices.numpy(), axis=1)
    return chosen, np.take_along_axis(scores, chosen, 1)


@settings(max_examples=100)
@given(
    seed=seeds, tokens=st.integers(1, 5), groups=st.integers(1, 8), size=st.integers(1, 12),
    top=st.sampled_from([1, 2]), renormalise=st.booleans(), score=st.sampled_from(["softmax", "sigmoid"]),
)  # fmt: skip
def test_groups_are_those_of_deepseek(
    backends: list[AnyBackend], seed: int, tokens: int, groups: int, size: int, top: int, renormalise: bool,
    score: Score,
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    best = int(rng.integers(1, groups + 1))
    top_k = int(rng.integers(1, min(8, best * size) + 1))
    numbers, bias = normal(rng, tokens, groups * size), np.float32(0.3) * normal(rng, groups * size)
    numbers = exact_sigmoid(numbers) if score == "sigmoid" else torch.from_numpy(numbers).softmax(-1).numpy()
    scores = numbers.astype(np.float32)
    part = Router(top_k, renormalise, None, score, choice_bias=True, groups=Groups(groups, best, top), factor=2.5)
    expected, shares = grouped(scores.astype(np.float64), bias.astype(np.float64), part)
    if renormalise:
        shares = shares / shares.sum(1, keepdims=True)
    for backend in backends:
        chosen, weights = choose(backend, scores, part, bias)
        assert np.array_equal(chosen, expected)
        np.testing.assert_allclose(weights, 2.5 * shares, rtol=1e-6)


@settings(max_examples=60)
@given(seed=seeds, tokens=st.integers(1, 5), experts=st.integers(1, 30))
def test_a_bias_chooses_and_does_not_weigh(backends: list[AnyBackend], seed: int, tokens: int, experts: int) -> None:
    rng = np.random.default_rng(seed)
    top_k = int(rng.integers(1, min(8, experts) + 1))
    scores, bias = rng.uniform(0.1, 1, (tokens, experts)).astype(np.float32), normal(rng, experts)
    expected = np.sort(np.argsort(-(scores + bias), axis=1)[:, :top_k], axis=1)
    shares = np.take_along_axis(scores, expected, 1)
    for backend in backends:
        chosen, weights = choose(backend, scores, Router(top_k, True, None, "sigmoid", choice_bias=True), bias)
        assert np.array_equal(chosen, expected)
        np.testing.assert_allclose(weights, shares / shares.sum(1, keepdims=True), rtol=1e-6)


@settings(max_examples=100)
@given(
    seed=seeds, tokens=st.integers(1, 5), experts=st.integers(2, 30), jitter=st.sampled_from([0.0, 0.01, 0.2]),
    whole=st.booleans(),
)  # fmt: skip
def test_the_sparse_mixer_is_that_of_transformers(
    backends: list[AnyBackend], seed: int, tokens: int, experts: int, jitter: float, whole: bool
) -> None:
    """`whole`: few different numbers, zero among them."""
    rng = np.random.default_rng(seed)
    scores = rng.integers(-3, 4, (tokens, experts)).astype(np.float32) if whole else normal(rng, tokens, experts)
    theirs, chosen = sparsemixer(torch.from_numpy(scores), jitter, training=False)
    expected, order = chosen.sort(-1)
    for backend in backends:
        found, weights = choose(backend, scores, Router(2, False, None, "sparsemixer", jitter=jitter))
        assert np.array_equal(found, expected.numpy())
        np.testing.assert_allclose(weights, theirs.gather(1, order).numpy(), rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sparsemixer"])
def test_a_token_is_routed_the_same_alone_and_in_company(
    natives: list[NativeBackend], kind: Kind, score: Score
) -> None:
    rng = np.random.default_rng(6)
    stored, x, norm = random_stored(rng, kind, 60, 130, 32, 0.5), normal(rng, 9, 130), random_norm(rng, 130)
    part = Router(4, True, None, score)
    if score == "sigmoid":
        part = replace(part, groups=Groups(6, 3, 2))
    first = routed(natives[0], stored, norm, part, x)
    for backend in natives:
        together = routed(backend, stored, norm, part, x)
        assert np.array_equal(together[0], backend.norm(x, norm))
        alone = [routed(backend, stored, norm, part, x[at : at + 1]) for at in range(9)]
        assert all(map(np.array_equal, together, map(np.concatenate, zip(*alone, strict=True))))
        assert all(map(np.array_equal, together, first))


def routed(backend: AnyBackend, stored: Stored, norm: NormWeights, part: Router, x: F32) -> tuple[F32, F32, I64, F32]:
    router = RouterWeights(part, 1.0, norm, None, backend.matrix(stored), None, None)
    hidden, scores = backend.scores(x, router)
    return hidden, scores, *backend.choose(scores.copy(), router)


def preferred(deciding: F32, top_k: int, bonus: float, sure: int, recent: list[int]) -> list[int]:
    """As `Backend.prefer` says, one expert after the other."""
    numbers, taken = deciding.copy(), list[int]()
    while len(taken) < top_k:
        if len(taken) == sure:
            numbers[recent] += np.float32(bonus)
        left = [expert for expert in range(len(numbers)) if expert not in taken]
        taken.append(max(left, key=lambda expert: (numbers[expert], -expert)))
    return sorted(taken)


@settings(max_examples=200)
@given(
    seed=seeds, experts=st.integers(1, 40), bonus=st.sampled_from([0.0, 0.05, 0.3, 10.0]), biased=st.booleans(),
    score=st.sampled_from(["softmax", "sigmoid_of_chosen", "sparsemixer"]), ties=st.booleans(),
)  # fmt: skip
def test_recent_experts_are_preferred(
    backends: list[AnyBackend], seed: int, experts: int, bonus: float, biased: bool, score: Score, ties: bool
) -> None:
    rng = np.random.default_rng(seed)
    top_k = int(rng.integers(1, min(8, experts) + 1))
    sure, k = int(rng.integers(0, top_k + 1)), int(rng.integers(top_k, experts + 1))
    known = rng.permutation(experts)[: int(rng.integers(0, k + 1))]
    before = np.full(k, -1, np.int32)
    before[: len(known)] = known
    scores = rng.integers(0, 4, (1, experts)).astype(np.float32) if ties else normal(rng, 1, experts)
    bias = normal(rng, experts) if biased and score == "softmax" else None
    expected = preferred(scores[0] if bias is None else scores[0] + bias, top_k, bonus, sure, known.tolist())
    part = Router(top_k, False, None, score, choice_bias=bias is not None, jitter=0.2 if score == "sparsemixer" else 0)
    found = []
    for backend in backends:
        recent, matrix = before.copy(), backend.matrix(floats("F32", np.zeros((experts, 1))))
        router = RouterWeights(part, 1.0, ONES, None, matrix, bias, None)
        chosen, weights = backend.prefer(scores, router, bonus, sure, recent)
        assert chosen[0].tolist() == expected
        others = [expert for expert in known.tolist() if expert not in expected]
        assert recent.tolist() == [*expected, *others, *[-1] * k][:k]
        found.append(weights)
        if bonus == 0 or sure == top_k:
            exact = backend.choose(scores, router)
            assert all(map(np.array_equal, (chosen, weights), exact))
    for weights in found:
        np.testing.assert_allclose(weights, found[-1], rtol=1e-5)
    if score == "softmax":
        assert np.array_equal(found[0], scores[:, expected])
