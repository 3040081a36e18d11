"""A sample of a layer's tokens: what it holds, and what experts that saw few tokens are told of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moeconv.quantizers import QUANTIZERS, Inputs
from moeconv.quantizers.moments import SAMPLED, LayerSample, summed, told, worth
from moeconv.quantizers.quantizer import Wants
from moeconv.source.experts import Call
from moert.pack.codec import dequantize


def call(first: int, last: int, absent: set[int] | None = None) -> Call:
    numbers = torch.arange(first, last)
    chosen = torch.tensor([[-1 if number in (absent or set()) else 0] for number in numbers.tolist()])
    return Call(numbers[:, None].float(), chosen.view(-1, 1), torch.ones(last - first, 1))


@given(st.integers(1, 12), st.lists(st.integers(1, 60), min_size=1, max_size=12))
def test_tokens_are_spread_evenly_however_the_text_was_cut(size: int, parts: list[int]) -> None:
    cut, whole, total = LayerSample(size, 1), LayerSample(size, 1), sum(parts)
    ends = np.cumsum(parts).tolist()
    for start, end in zip([0, *ends], ends, strict=False):
        cut.add(call(start, end))
    whole.add(call(0, total))
    kept = cut.tokens(size)[:, 0].tolist()
    assert kept == whole.tokens(size)[:, 0].tolist()
    assert len(kept) <= SAMPLED * size
    assert len(kept) == total or len(kept) >= SAMPLED * size / 2
    assert len(set(np.diff(kept))) <= 1


def test_padding_is_left_out() -> None:
    sample = LayerSample(10, 1)
    sample.add(call(0, 6, {1, 4}))
    assert sample.tokens(10)[:, 0].tolist() == [0, 2, 3, 5]


def test_fewer_inputs_are_told_by_fewer_tokens() -> None:
    sample = LayerSample(10, 1)
    sample.add(call(0, 40))
    assert sample.tokens(5)[:, 0].tolist() == list(range(0, 40, 2))
    assert len(sample.tokens(3)) <= 3 * SAMPLED


def test_none_yet() -> None:
    assert LayerSample(3, 5).tokens(3).shape == (0, 5)


@pytest.mark.parametrize("wants", ["squares", "products"])
def test_many_tokens_of_its_own_drown_the_sample(wants: Wants) -> None:
    chance = torch.Generator().manual_seed(0)
    x, others = torch.randn(5000, 8, generator=chance), 3 * torch.randn(32, 8, generator=chance)
    few, many = (told(summed(x[:n], wants), n, summed(others, wants), 32, wants)[0] for n in (4, 5000))
    own = summed(x, wants) / 5000
    assert (many - own).abs().max() < 0.1
    assert (few - own).abs().max() > 1
    none, counted = told(torch.zeros_like(own), 0, summed(others, wants), 32, wants)
    assert torch.allclose(none, summed(others, wants) / 32, rtol=1e-5)
    assert counted == pytest.approx(32 * worth(32, 8, wants))


def test_without_any_token_there_is_nothing() -> None:
    mean, counted = told(torch.zeros(4, 4), 0, torch.zeros(4, 4), 0, "products")
    assert (counted, float(mean.abs().max())) == (0, 0)


def correlated(tokens: int, seed: int) -> torch.Tensor:
    chance = torch.Generator().manual_seed(seed)
    mix = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    return torch.randn(tokens, 8, generator=chance) @ mix + 0.3 * torch.randn(tokens, 64, generator=chance)


@pytest.mark.parametrize("rows", [0, 16, 64, 128])
@pytest.mark.parametrize("bits", [2, 3])
def test_few_tokens_do_better_with_those_of_their_layer(rows: int, bits: int) -> None:
    """On the outputs of other tokens of the same kind, beside what these few alone say."""
    weights = torch.randn(48, 64, generator=torch.Generator().manual_seed(1)).numpy()
    own, layer, others = correlated(rows, 1), correlated(256, 2), correlated(4000, 3).numpy()
    alone = Inputs.of(np.array([rows]), (own.T @ own / max(1, rows))[None].numpy())
    mean, counted = told(summed(own, "products"), rows, summed(layer, "products"), len(layer), "products")
    drawn = Inputs(np.array([rows]), mean[None].numpy(), np.array([counted], np.float32))

    def lost(inputs: Inputs) -> float:
        matrix = QUANTIZERS["gptq"](0).quantize(weights[None], bits, inputs)[0]
        return float(np.square(others @ (dequantize(matrix) - weights).T).mean())

    assert lost(drawn) < lost(alone)
