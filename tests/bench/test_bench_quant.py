"""How `make bench-quant` compares: documents resampled in pairs, equal bits, a peer's end that costs its own rows."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from recipes.bench.apart import Apart, Failure
from recipes.bench.likelihood import Likelihoods, Text, judge
from recipes.bench.peers import FOLDER, I_QUANTS, K_QUANTS, Ggml
from recipes.bench.quant import duels
from recipes.bench.subject import Result

needs_ggml = pytest.mark.skipif(not (FOLDER / "ggml").is_dir(), reason="ggml is not built: make build/peers/.built")


def judged(kls: np.ndarray) -> Likelihoods:
    return Likelihoods(nats=kls + 1.0, kls=kls, tokens=np.full(len(kls), 10.0))


def result(method: str, name: str, bits: float, kls: np.ndarray, calibration: np.ndarray | None = None) -> Result:
    return Result("m", method, name, bits, 0.1, {"calibration": judged(kls if calibration is None else calibration),
                                                 "heldout": judged(kls)})  # fmt: skip


def test_a_ratio_that_is_the_same_in_each_document_has_no_width_however_much_documents_differ():
    kls = np.random.default_rng(0).exponential(size=40)
    rows = {row.name: row for row in duels([result("peer", "p", 3.0, kls), result("ours", "o", 3.0, kls / 2)])[0]}
    ratio = rows["m against p, heldout: divergence"]
    assert (ratio.value, ratio.low, ratio.high, ratio.n) == pytest.approx((0.5, 0.5, 0.5, 40))
    assert ratio.met


def test_an_interval_holds_the_ratio_and_is_wide_where_documents_disagree():
    generator = np.random.default_rng(1)
    peer, mine = generator.exponential(size=(2, 40))
    rows = {row.name: row for row in duels([result("peer", "p", 3.0, peer), result("ours", "o", 3.0, mine)])[0]}
    ratio = rows["m against p, heldout: divergence"]
    assert ratio.low is not None
    assert ratio.high is not None
    assert ratio.low < ratio.value < ratio.high
    assert ratio.high - ratio.low > 0.2


def test_ours_is_chosen_on_calibration_text_among_those_of_no_more_bits():
    one = np.ones(8)
    found = [
        result("peer", "p", 3.0, one),
        result("ours", "larger", 3.1, one / 10),
        result("ours", "lucky", 2.9, one / 5, calibration=one),
        result("ours", "chosen", 2.5, one / 2),
    ]
    rows, chosen = duels(found)
    assert chosen == {"m against p": "chosen"}
    bits = next(row for row in rows if row.name == "m against p: bits of ours")
    assert (bits.value, bits.met) == (2.5, True)


def test_where_ours_needs_more_bits_that_is_a_missed_aim_and_the_ratio_has_none():
    one = np.ones(8)
    rows, _ = duels([result("peer", "p", 2.0, one), result("ours", "o", 2.2, one / 2)])
    assert [row.met for row in rows if row.name == "m against p: bits of ours"] == [False]
    assert {row.met for row in rows if row.name.endswith(("divergence", "perplexity"))} == {None}


def test_samples_of_one_document_are_added_up():
    class Fixed(torch.nn.Module):
        config = type("Config", (), {"is_encoder_decoder": False})

        def forward(self, input_ids, use_cache):
            return type("Out", (), {"logits": torch.zeros(*input_ids.shape, 4)})

    text = Text([{"input_ids": torch.zeros(3, 5, dtype=torch.int64), "labels": torch.zeros(3, 5, dtype=torch.int64)}],
                [7, 9, 7])  # fmt: skip
    found = judge(Fixed(), text)
    assert found.tokens.tolist() == [8, 4]
    assert found.nats == pytest.approx([8 * np.log(4), 4 * np.log(4)])


def test_a_process_that_aborts_or_raises_is_one_failure_and_the_next_call_is_answered():
    with Apart() as apart:
        with pytest.raises(Failure, match="its process ended"):
            apart.call(os.abort)
        with pytest.raises(Failure, match="ZeroDivisionError: "):
            apart.call(divmod, 1, 0)
        assert apart.call(divmod, 7, 2) == (3, 1)


@needs_ggml
@pytest.mark.parametrize("name", [*K_QUANTS, *I_QUANTS])
def test_what_a_format_can_hold_comes_back(name):
    weights = np.random.default_rng(0).standard_normal((1, 4, 128), dtype=np.float32)
    ggml, even = Ggml(name), np.ones((1, 128), np.float32)
    once = ggml.decode(ggml.encode(weights, even)).reshape(weights.shape)
    twice = ggml.decode(ggml.encode(once, even)).reshape(weights.shape)
    norm = np.square(weights).sum()
    assert np.square(once - weights).sum() / norm < 0.15
    assert np.square(twice - once).sum() / norm < 0.01


@needs_ggml
def test_a_block_written_by_hand_is_read_as_the_format_says():
    """Q4_K: 1.0 and 0.5 in float16; scales 1 and minima 2 of the first four groups of 32; codes 0 to 15."""
    block = np.zeros(144, np.uint8)
    block[:4] = np.array([1.0, 0.5], np.float16).view(np.uint8)
    block[4:8], block[8:12] = 1, 2
    block[16:48] = np.arange(32) % 16  # low halves are the first 32 weights
    found = Ggml("Q4_K").decode(block[None])[0]
    assert found[:32].tolist() == [float(code % 16) - 1.0 for code in range(32)]
    assert found[32:64].tolist() == [-1.0] * 32
