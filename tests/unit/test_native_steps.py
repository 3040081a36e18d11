"""Native steps of one token (attention, router, head) beside the same steps in torch with the same products."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_problems import FLOATS, KINDS, Kind, open_native, random_stored, running
from random_packs import DECODER, ENCODER_DECODER

from moert.kernels import library
from moert.kernels.backend import StoredWeights
from moert.kernels.native import NativeBackend
from moert.models.attention import CrossAttention, SelfAttention
from moert.models.kv import KvCache
from moert.models.layers import Head, RelativeBias, Rotary, rms_norm
from moert.models.moe import select
from moert.pack.model_spec import ModelSpec, backbone_tensors

LAYER = "decoder.0"


@pytest.fixture(scope="module")
def backends() -> Iterator[list[NativeBackend]]:
    if library.load() is None:
        pytest.skip(f"no native kernels: {library.missing()}")
    opened = [open_native(name, threads) for name in running() for threads in (1, 3)]
    yield opened
    for backend in opened:
        backend.close()


def random_weights(spec: ModelSpec, kind: Kind, seed: int) -> dict[str, StoredWeights]:
    """Those of the decoder's first layer; a matrix in the kind that is asked for."""
    rng = np.random.default_rng(seed)
    found: dict[str, StoredWeights] = {}
    for name, shape in backbone_tensors(spec).items():
        if name.startswith(LAYER):
            size = 1.5 * shape[-1] ** -0.5
            if len(shape) == 1:
                found[name] = torch.from_numpy(1 + 0.2 * rng.normal(size=shape)).float()
            else:
                found[name] = random_stored(rng, kind, *shape, 16, size)
    return found


def close(found: torch.Tensor, expected: torch.Tensor, kind: Kind) -> None:
    """Matrices of codes see rounded activations: one that lies between two steps may fall either way for a difference
    in the last bit, and is then off by 1/127 of the largest."""
    bound = (1e-5 if kind in FLOATS else 0.02) * max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(found, expected, rtol=0, atol=bound)


ATTENTION = {
    "plain": {}, "clipped": {"clip_qkv": 0.7}, "without norms": {"qk_norm": False, "clip_qkv": 0.9},
    "one key head a head": {"n_kv_heads": 4, "n_heads": 4}, "four heads a key head": {"n_heads": 4, "head_dim": 20},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", ATTENTION)
def test_attention_with_rotary_positions(backends: list[NativeBackend], kind: Kind, variant: str) -> None:
    spec = replace(DECODER, **{"d_model": 40, **ATTENTION[variant]})
    rng = torch.Generator().manual_seed(1)
    prompt, rotary = torch.randn(5, 40, generator=rng), Rotary(spec.head_dim, spec.rope_theta)
    tokens = torch.randn(130, 1, 40, generator=rng)  # the cache and the positions grow on the way
    for backend in backends:
        block = SelfAttention(spec, random_weights(spec, kind, 2), LAYER, backend)
        caches = [KvCache(spec.n_kv_heads, spec.head_dim) for _ in range(2)]
        for cache in caches:
            block.rotated(prompt.clone(), cache, rotary)
        for token in tokens[:: 1 if backend is backends[0] else 13]:
            found, expected = token.clone(), token.clone()
            block.step(found, caches[0], rotary.turn(caches[0].length), None)
            block.rotated(expected, caches[1], rotary)
            close(found, expected, kind)
        for half in (0, 1):
            kept = [cache._buffer[half, :, : cache.length] for cache in caches]
            close(kept[0], kept[1], kind)


@pytest.mark.parametrize("kind", KINDS)
def test_attention_with_relative_positions(backends: list[NativeBackend], kind: Kind) -> None:
    spec = replace(ENCODER_DECODER, d_model=40, n_heads=3, n_kv_heads=3)
    rng = torch.Generator().manual_seed(1)
    bias = RelativeBias(torch.randn(8, 3, generator=rng), 16, bidirectional=False)
    tokens = torch.randn(20, 1, 40, generator=rng)
    for backend in backends:
        block = SelfAttention(spec, random_weights(spec, kind, 2), LAYER, backend)
        caches = [KvCache(3, spec.head_dim) for _ in range(2)]
        for at, token in enumerate(tokens, 1):
            found, expected = token.clone(), token.clone()
            block.step(found, caches[0], None, bias.latest(at).by_offset)
            block.biased(expected, caches[1], bias.latest(at))
            close(found, expected, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 9, 70])
def test_attention_to_the_encoded_input(backends: list[NativeBackend], kind: Kind, length: int) -> None:
    spec = replace(ENCODER_DECODER, d_model=40, n_heads=4, n_kv_heads=2)
    encoded, token = torch.randn(length + 1, 40, generator=torch.Generator().manual_seed(1)).split([length, 1])
    for backend in backends:
        block = CrossAttention(spec, random_weights(spec, kind, 2), LAYER, backend)
        keys, values = block.encode(encoded)
        before = keys.clone(), values.clone()
        found, expected = token.clone(), token.clone()
        block.step(found, keys, values)
        block(expected, keys, values)
        close(found, expected, kind)
        assert torch.equal(keys, before[0])
        assert torch.equal(values, before[1])


@settings(max_examples=60)
@given(
    seed=st.integers(0, 1 << 20), kind=st.sampled_from(list(FLOATS)),
    experts=st.one_of(st.integers(1, 40), st.just(700)), top_k=st.integers(1, 9), norm_topk=st.booleans(),
    d_model=st.integers(1, 150),
)  # fmt: skip
def test_the_router_is_that_of_torch(
    backends: list[NativeBackend], seed: int, kind: Kind, experts: int, top_k: int, norm_topk: bool, d_model: int
) -> None:
    moe = replace(DECODER.moe, num_experts=experts, top_k=min(top_k, experts), norm_topk=norm_topk)
    rng = np.random.default_rng(seed)
    stored = torch.from_numpy(rng.normal(0, 3 * d_model**-0.5, (experts, d_model))).to(FLOATS[str(kind)])
    x, norm = torch.from_numpy(rng.normal(size=(1, d_model)).astype(np.float32)), torch.rand(d_model)
    hidden = rms_norm(x, norm, 1e-5)
    chosen, weights = select(hidden @ stored.float().T, moe)
    ranked = (hidden @ stored.float().T)[0].softmax(-1).sort(descending=True).values
    if moe.top_k < experts and ranked[moe.top_k - 1] - ranked[moe.top_k] < 1e-5 * ranked[0]:
        return  # either is right
    for backend in backends:
        found = backend.route(x, norm, 1e-5, backend.matrix(stored), moe)
        torch.testing.assert_close(found[0], hidden, rtol=1e-5, atol=1e-6)
        assert found[1] == chosen[0].tolist()
        torch.testing.assert_close(found[2], weights[0], rtol=1e-4, atol=1e-7)


def test_the_router_takes_the_first_of_equals(backends: list[NativeBackend]) -> None:
    router, x, norm = torch.zeros(6, 10), torch.ones(1, 10), torch.ones(10)
    router[4] = 1
    for backend in backends:
        _, chosen, weights = backend.route(x, norm, 1e-5, backend.matrix(router), replace(DECODER.moe, num_experts=6))
        assert chosen == [0, 4]
        assert weights[1] > 0.99


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_the_head_is_that_of_several_tokens(backends: list[NativeBackend], kind: Kind, factor: float) -> None:
    rng = np.random.default_rng(4)
    spec, stored = replace(DECODER, logit_scale=factor, norm_eps=1e-3), random_stored(rng, kind, 333, 75, 32)
    x, norm = torch.from_numpy(rng.normal(size=(2, 75)).astype(np.float32)), torch.rand(75) + 0.5
    for backend in backends:
        head = Head(norm, backend.matrix(stored), spec, backend)
        close(torch.cat([head(x[:1]), head(x[1:])]), head(x), kind)


def test_not_a_number_and_infinity_end_no_process(backends: list[NativeBackend]) -> None:
    """What comes of them is not said, but each step returns and what follows is right again."""
    spec = replace(DECODER, d_model=40)
    rotary = Rotary(spec.head_dim, spec.rope_theta)
    for kind in KINDS:
        for backend in backends:
            weights = random_weights(spec, kind, 2)
            router = backend.matrix(torch.randn(5, 40))
            head = Head(torch.ones(40), backend.matrix(random_stored(np.random.default_rng(0), kind, 9, 40, 16)), spec,
                        backend)  # fmt: skip
            block = SelfAttention(spec, weights, LAYER, backend)
            for wrong in (math.nan, math.inf, -math.inf, 3e38):
                x = torch.ones(1, 40)
                x[0, 3] = wrong
                block.step(x.clone(), KvCache(spec.n_kv_heads, spec.head_dim), rotary.turn(0), None)
                _, chosen, _ = backend.route(x, torch.ones(40), 1e-5, router, replace(DECODER.moe, num_experts=5))
                assert chosen == sorted(set(chosen))
                assert all(0 <= expert < 5 for expert in chosen)
                head(x)
            assert head(torch.ones(1, 40)).isfinite().all()
