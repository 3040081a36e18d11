"""Which blocks a predictor names, and small things that runners of experts share."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_predictor import random_layer
from tiny_packs import SWITCH

from moert.beside.flash.keeping import all_to_blocks
from moert.beside.flash.runner import Scores, blocks_with, neurons_in
from moert.engine.budget import Budget
from moert.errors import NotFinite
from moert.experts.streaming import by_expert
from moert.kernels import open_backend
from moert.pack.layout import Coding, NeuronLayout, Neurons, neuron_layout
from moert.pack.learnt import Kept, NeuronPredictor
from moert.pack.model_spec import LayerKey

AT = LayerKey("decoder", 0)


def layout_of(piece_bytes: int) -> NeuronLayout:
    return neuron_layout(SWITCH, {"up": 4, "down": 4}, Coding(0, "BF16"), 4096, Neurons(piece_bytes, True))


@given(st.data(), st.integers(1, 9), st.sampled_from([1, 5, 8, 64]))
def test_blocks_are_those_of_the_neurons(data: st.DataObject, tokens: int, per_block: int) -> None:
    d_ff = 30
    layout = layout_of(512)._replace(d_ff=d_ff, per_block=per_block, n_blocks=-(-d_ff // per_block))
    named = np.array([[data.draw(st.integers(0, 9)) == 0 for _ in range(d_ff)] for _ in range(tokens)])
    blocks = blocks_with(layout, named)
    assert blocks.shape == (tokens, layout.n_blocks)
    for token in range(tokens):
        expected = {neuron // per_block for neuron in named[token].nonzero()[0].tolist()}
        assert set(blocks[token].nonzero()[0].tolist()) == expected
        computed = {neuron for block in expected for neuron in layout.block(block)}
        assert set(neurons_in(layout, blocks)[token].nonzero()[0].tolist()) == computed


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_scores_are_those_of_the_matrices(kernels: str) -> None:
    layer, x = random_layer(24, 6, 28, rank=5), np.random.default_rng(0).standard_normal((7, 24)).astype(np.float32)
    backend = open_backend(kernels, 2)
    scores = Scores(NeuronPredictor({AT: layer}, 0.05, 4), backend)
    compressed = scores.compressed(AT, x)
    for number in range(6):
        exact = layer.heads[number].astype(np.float64) @ (layer.compress.astype(np.float64) @ x.T.astype(np.float64))
        exact = exact.T + layer.bias[number] - layer.threshold[number]
        found = scores.named(AT.expert(number), compressed)
        clear = np.abs(exact) > 1e-4
        assert np.array_equal(found[clear], (exact >= 0)[clear])
    if kernels == "auto":
        alone = np.concatenate([scores.compressed(AT, x[token : token + 1]) for token in range(7)])
        assert alone.tobytes() == compressed.tobytes()
    backend.close()


def test_scores_that_are_no_numbers_end_in_one_line() -> None:
    layer = random_layer(24, 6, 28, rank=5)
    scores = Scores(NeuronPredictor({AT: layer}, 0.05, 4), open_backend("reference", 1))
    with (
        np.errstate(all="ignore"),
        pytest.raises(NotFinite, match=r"predictor.safetensors gives numbers that are not finite"),
    ):
        scores.named(AT.expert(0), np.full((1, 5), 3e38, np.float32))


chosen = st.lists(st.lists(st.integers(0, 7), min_size=2, max_size=2, unique=True).map(sorted), min_size=1, max_size=6)


@given(chosen=chosen, dropped=st.sets(st.integers(0, 11)))
def test_one_token_goes_to_its_experts_as_one_of_several_does(chosen: list[list[int]], dropped: set[int]) -> None:
    experts = np.array(chosen)
    experts.reshape(-1)[[place for place in sorted(dropped) if place < experts.size]] = -1
    weights = np.arange(1, experts.size + 1, dtype=np.float32).reshape(experts.shape)
    together, tokens = by_expert(experts, weights), {}
    start = 0
    for number, count in zip(together.needed, together.counts, strict=True):
        for place in range(start, start + count):
            tokens.setdefault(int(together.tokens[place]), []).append((number, float(together.weights[place])))
        start += count
    for token in range(len(experts)):
        alone = by_expert(experts[token : token + 1], weights[token : token + 1])
        assert list(zip(alone.needed, alone.weights.tolist(), strict=True)) == tokens.get(token, [])
        assert (alone.counts, alone.tokens.tolist()) == ([1] * len(alone.needed), [0] * len(alone.needed))


def test_all_room_is_for_blocks() -> None:
    assert all_to_blocks(100, 90, 20) == (0, 90)
    assert all_to_blocks(80, 90, 20) == (0, 60), "with room for one expert beside"
    assert all_to_blocks(10, 90, 20) == (0, 0)


def test_a_token_asks_for_a_part_of_its_experts() -> None:
    budget = Budget(1000, 0, 50, 200, 800)
    found = budget.held_as(budget.token_bytes // 4, 900)
    assert (found.token_bytes, found.layer_bytes, found.expert_bytes) == (50, 50, 900)
    assert budget.held_as(budget.token_bytes // 4, 700).expert_bytes == 800


def test_what_is_kept_is_the_mean_over_layers() -> None:
    layer = random_layer(4, 2, 6)
    layers = {AT: layer, LayerKey("decoder", 1): replace(layer, kept=Kept(0.25, 0.75, 1.0))}
    assert NeuronPredictor(layers, 0.05, 4).kept == Kept(0.5, 0.5, 0.75)
