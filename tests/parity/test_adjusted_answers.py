"""Tiny random models with a penalty of repetition and a bias: greedy answers, beams and their scores equal those of
transformers, and so do the logarithms of probabilities."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from packs import open_model, pack_of
from tiny import TINY, VOCAB, transformers_model

from moert.engine.generation import GenerationResult
from moert.engine.session import Session
from moert.kernels.backend import opaque
from moert.models.model import Model
from moert.stats import RequestTimes
from tests.kept_keys import WideKeys
from tests.open_gate import OpenGate

MAX_NEW, PROMPTS = 12, 6
PENALTY, BIAS = 1.4, {7: 1.5, 20: -2.0}
ADJUSTED = {"repeat_penalty": PENALTY, "logit_bias": BIAS}
FAMILIES = ["olmoe", "switch_transformers", "qwen3_moe"]


def answer(model: Model, ids: list[int], **settings: Any) -> GenerationResult:
    with Session(model, None, OpenGate(), RequestTimes(), lambda: None) as session:  # type: ignore[arg-type]
        request = session.add(ids, max_new_tokens=MAX_NEW, **{**ADJUSTED, **settings})
        for _ in session:
            pass
    return request.answer.result


def expected(reference: Any, ids: list[int], **settings: Any) -> Any:
    batch = torch.tensor([ids])
    with torch.inference_mode():
        return reference.generate(
            batch, attention_mask=torch.ones_like(batch), do_sample=False, max_new_tokens=MAX_NEW,
            repetition_penalty=PENALTY, sequence_bias=[[[token], value] for token, value in BIAS.items()],
            return_dict_in_generate=True, output_scores=True, output_logits=True, **settings,
        )  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_penalties_and_bias_equal_those_of_transformers(family: str, tmp_path: Path) -> None:
    source = TINY[family][0](tmp_path / "hf")
    model, reference = open_model(pack_of(source, tmp_path / "model.pack"), opaque(WideKeys()))[0], None
    reference = transformers_model(source)
    end = reference.config.get_text_config(decoder=True).eos_token_id
    chance, changed = random.Random(family), 0
    for length in range(3, 3 + 5 * PROMPTS, 5):
        ids = [chance.randrange(2, VOCAB) for _ in range(length)]
        before = 1 if model.spec.encoder is not None else length
        theirs, ours = expected(reference, ids, num_beams=1), answer(model, ids, logprobs=3)
        assert ours.tokens == theirs.sequences[0, before:].tolist()
        assert ours.logprobs is not None
        for told, row in zip(ours.logprobs, theirs.logits, strict=True):
            best = torch.log_softmax(row[0], 0).topk(3)
            assert [each.id for each in told.likeliest] == best.indices.tolist()
            assert [each.logprob for each in told.likeliest] == pytest.approx(best.values.tolist(), abs=3e-4)
        changed += ours.tokens != answer(model, ids, repeat_penalty=1.0, logit_bias=None).tokens
        theirs, ours = expected(reference, ids, num_beams=3), answer(model, ids, beams=3)
        row = theirs.sequences[0, before:].tolist()
        assert ours.tokens == (row[: row.index(end) + 1] if end in row else row)
        assert ours.score == pytest.approx(float(theirs.sequences_scores[0]), abs=3e-4)
    assert changed > PROMPTS // 2
