"""The torch reference against the numpy codec and against the plain formula."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moert.kernels.reference import ACTIVATIONS, ReferenceBackend, ffn, rows, weights
from moert.pack.codec import INT_WIDTHS, QuantizedMatrix, dequantize, n_groups, pack_codes
from moert.pack.model_spec import MoeSpec

MOE = MoeSpec(num_experts=5, top_k=2, d_ff=10, activation="silu", gated=True, norm_topk=False, capacity=None)
SHAPES = {"gate": (10, 6), "up": (10, 6), "down": (6, 10)}


def random_matrix(seed: int, bits: int, out_features: int, in_features: int, group_size: int) -> QuantizedMatrix:
    chance = np.random.default_rng(seed)
    groups = n_groups(in_features, group_size)
    codes = chance.integers(0, 1 << bits, (out_features, in_features)).astype(np.uint8)
    scale = chance.uniform(0.001, 0.1, (out_features, groups)).astype(np.float16)
    minimum = chance.normal(0, 0.1, (out_features, groups)).astype(np.float16)
    return QuantizedMatrix(bits, in_features, group_size, pack_codes(codes, bits), scale, minimum)


@given(
    seed=st.integers(0, 1 << 20), bits=st.sampled_from(INT_WIDTHS), out_features=st.integers(1, 9),
    in_features=st.integers(1, 70), group_size=st.sampled_from([1, 3, 32, 64]), whole=st.booleans(),
)  # fmt: skip
def test_weights_equal_the_codec_bit_for_bit(
    seed: int, bits: int, out_features: int, in_features: int, group_size: int, whole: bool
) -> None:
    matrix = random_matrix(seed, bits, out_features, in_features, in_features if whole else group_size)
    assert np.array_equal(weights(matrix).numpy(), dequantize(matrix))


def test_weights_of_16_bits_are_not_copied() -> None:
    values = np.ones((2, 3), dtype=np.float32)
    assert weights(values).data_ptr() == values.ctypes.data


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_equal_those_of_transformers(name: str) -> None:
    from transformers.activations import ACT2FN

    x = torch.linspace(-12, 12, 4001)
    assert torch.equal(ACTIVATIONS[name](x), ACT2FN[name](x))


def test_rows_are_those_of_the_whole_matrix() -> None:
    for stored in (random_matrix(1, 3, 7, 10, 4), torch.randn(7, 10).bfloat16()):
        whole = ReferenceBackend().matrix(stored)
        assert torch.equal(rows(stored, [6, 0, 6]), whole[[6, 0, 6]])
        assert whole.dtype == torch.float32


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("limit", [None, 0.5])
def test_a_feed_forward_part_is_its_formula(gated: bool, limit: float | None) -> None:
    moe = replace(MOE, gated=gated, activation_limit=limit)
    chance = torch.Generator().manual_seed(0)
    x, (gate, up) = torch.randn(3, 6, generator=chance), torch.randn(2, 10, 6, generator=chance)
    down = torch.randn(6, 10, generator=chance)
    found = ffn({"up": up, "down": down} | ({"gate": gate} if gated else {}), x, moe)
    for row, got in zip(x.tolist(), found, strict=True):
        expected = torch.zeros(6)
        for unit in range(10):
            wide, bent = (sum(a * b for a, b in zip(matrix[unit].tolist(), row, strict=True)) for matrix in (up, gate))
            if limit is not None:
                wide, bent = min(wide, limit), min(bent, limit)
                wide = max(wide, -limit) if gated else wide
            hidden = bent / (1 + np.exp(-bent)) * wide if gated else wide / (1 + np.exp(-wide))
            expected += down[:, unit] * hidden
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tokens", [1, 7])
def test_experts_add_their_share_to_the_tokens_they_run(tokens: int) -> None:
    backend, chance = ReferenceBackend(), torch.Generator().manual_seed(0)
    matrices = [{name: torch.randn(*shape, generator=chance) for name, shape in SHAPES.items()} for _ in range(3)]
    experts = [backend.dense(each["gate"], each["up"], each["down"]) for each in matrices]
    x, before = torch.randn(2, tokens, 6, generator=chance).unbind()
    share = torch.rand(3, tokens, generator=chance)
    expected = before + sum(share[e][:, None] * ffn(matrices[e], x, MOE) for e in range(3))
    one_by_one = before.clone()
    for expert, by in zip(experts, share, strict=True):
        backend.run_all([expert], [tokens], torch.arange(tokens), by, x, one_by_one, MOE)
    torch.testing.assert_close(one_by_one, expected, atol=1e-6, rtol=1e-5)
    if tokens == 1:
        at_once = before.clone()
        backend.mix(experts, share[:, 0], x, at_once, MOE)
        assert torch.equal(at_once, one_by_one)
    some = before.clone()
    backend.run_all(experts[:1], [1], torch.tensor([tokens - 1]), torch.tensor([2.0]), x, some, MOE)
    assert torch.equal(some[:-1], before[:-1])
    torch.testing.assert_close(some[-1], before[-1] + 2 * ffn(matrices[0], x[-1:], MOE)[0])
