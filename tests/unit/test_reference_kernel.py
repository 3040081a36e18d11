"""The torch reference against the numpy codec and against the plain formula."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moert.kernels.reference import ACTIVATIONS, demanded, expert_ffn, grouped_ffn, weights
from moert.pack.codec import INT_WIDTHS, QuantizedMatrix, dequantize, n_groups, pack_codes


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


def test_demanded_experts_come_once_in_ascending_order() -> None:
    assert demanded(torch.tensor([[5, 2], [-1, 5], [0, -1]])) == [0, 2, 5]
    assert demanded(torch.full((3, 1), -1)) == []


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("tokens", [1, 7])
def test_grouped_ffn_is_the_weighted_sum_and_leases_each_expert_once(gated: bool, tokens: int) -> None:
    names = ("gate", "up", "down") if gated else ("up", "down")
    experts = {
        e: {name: random_matrix(e, 4, *((6, 10) if name == "down" else (10, 6)), 32) for name in names}
        for e in range(5)
    }
    chance = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, 6, generator=chance)
    chosen = torch.stack([torch.randperm(5, generator=chance)[:2] for _ in range(tokens)])
    chosen[0, 1] = -1
    share = torch.rand(tokens, 2, generator=chance)
    leased: list[int] = []

    @contextmanager
    def lease(expert: int) -> Iterator[dict[str, QuantizedMatrix]]:
        leased.append(expert)
        yield experts[expert]

    found = grouped_ffn(hidden, chosen, share, "silu", lease)
    expected = torch.zeros_like(hidden)
    for row in range(tokens):
        for expert, weight in zip(chosen[row].tolist(), share[row], strict=True):
            if expert >= 0:
                expected[row] += weight * expert_ffn(experts[expert], hidden[row : row + 1], "silu")[0]
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    assert leased == demanded(chosen)
