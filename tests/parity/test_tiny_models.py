"""Tiny random models through a 16-bit pack: moert's own code must compute what transformers computes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from packs import greedy, open_model, pack_of, reference_greedy
from tiny import OLMOE_VARIANTS, SWITCH_VARIANTS, VOCAB, tiny_olmoe, tiny_switch

from moeconv.checkpoint import Checkpoint
from moert.models.kv import state_bytes

PROMPTS, MAX_NEW = 8, 12
CASES = [("switch", name, overrides) for name, overrides in SWITCH_VARIANTS.items()]
CASES += [("olmoe", name, overrides) for name, overrides in OLMOE_VARIANTS.items()]


@pytest.mark.parametrize(("family", "name", "overrides"), CASES, ids=[f"{case[0]}: {case[1]}" for case in CASES])
def test_logits_and_greedy_tokens_equal_transformers(
    family: str, name: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    source = (tiny_switch if family == "switch" else tiny_olmoe)(tmp_path / "hf", **overrides)
    model, runner = open_model(pack_of(source, tmp_path / "model.pack"))
    reference = Checkpoint.open(source).arch.load(source, torch.float32)
    chance = random.Random(name)
    prompts = [[chance.randrange(2, VOCAB) for _ in range(1 + 5 * prompt)] for prompt in range(PROMPTS)]
    expected = reference_greedy(reference, prompts, MAX_NEW)
    for ids, tokens in zip(prompts, expected, strict=True):
        target = [0, *(chance.randrange(2, VOCAB) for _ in range(9))]
        torch.testing.assert_close(*_all_logits(model, reference, ids, target), atol=1e-4, rtol=1e-4)
        assert greedy(model, ids, MAX_NEW) == tokens
    assert len({tuple(tokens) for tokens in expected}) > PROMPTS // 2, (
        "the random model writes the same whatever it is asked: it proves nothing"
    )
    assert (runner.dropped > 0) == (name == "small capacity")


def _all_logits(model: Any, reference: Any, ids: list[int], target: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.inference_mode():
        if model.spec.encoder is None:
            return model.forward_all(ids), reference(torch.tensor([ids])).logits[0]
        expected = reference(torch.tensor([ids]), decoder_input_ids=torch.tensor([target])).logits[0]
        return model.forward_all(ids, target), expected


@pytest.mark.parametrize("family", ["switch", "olmoe"])
def test_steps_equal_one_pass_across_cache_blocks(family: str, tmp_path: Path) -> None:
    """Stepping past the block size grows the caches and the position tables; the logits stay those of one pass."""
    source = (tiny_switch if family == "switch" else tiny_olmoe)(tmp_path / "hf", expert_capacity=1000)
    model, _ = open_model(pack_of(source, tmp_path / "model.pack"))
    chance = random.Random(1)
    ids = [chance.randrange(2, VOCAB) for _ in range(120)]
    more = [chance.randrange(2, VOCAB) for _ in range(160)]
    state, logits = model.prefill(ids)
    rows = [logits] + [model.step(state, token) for token in more]
    if model.spec.encoder is None:
        expected = model.forward_all(ids + more)[len(ids) - 1 :]
    else:
        expected = model.forward_all(ids, [0, *more])
    torch.testing.assert_close(torch.stack(rows), expected, atol=1e-4, rtol=1e-4)
    assert 0 < state.nbytes <= state_bytes(model.spec, len(ids), len(more))
