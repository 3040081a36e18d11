"""Beam search of the trained reference models: answers and their scores equal those of transformers, in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from packs import Tiny, open_model
from test_reference_models import model_folder, prompts
from tokenizers import Tokenizer

from moeconv.source.checkpoint import Checkpoint
from moert.engine.generation import EarlyStopping, GenerationResult
from moert.engine.session import Session
from moert.kernels.backend import opaque
from moert.models.model import Model
from moert.stats import RequestTimes
from tests.kept_keys import WideKeys
from tests.open_gate import OpenGate

MAX_NEW, RETURNED, MANY, FEW = 24, 3, 10, 1
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"beams": 4},
    "penalty": {"beams": 4, "length_penalty": 0.4, "early_stopping": True},
    "never": {"beams": 6, "length_penalty": -0.5, "early_stopping": "never"},
}


def expected_answers(
    reference: Any, ids: list[int], beams: int, length_penalty: float = 1.0, early_stopping: EarlyStopping = False
) -> list[tuple[list[int], float]]:
    """What transformers gives, end tokens included."""
    batch = torch.tensor([ids])
    with torch.inference_mode():
        found = reference.generate(
            batch, attention_mask=torch.ones_like(batch), do_sample=False, num_beams=beams,
            length_penalty=length_penalty, early_stopping=early_stopping, num_return_sequences=RETURNED,
            max_new_tokens=MAX_NEW, return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
    config = reference.config.get_text_config(decoder=True)
    start, end = 1 if config.is_encoder_decoder else len(ids), config.eos_token_id
    rows = [row[start:] for row in found.sequences.tolist()]
    whole = [row[: row.index(end) + 1] if end in row else row for row in rows]
    return list(zip(whole, found.sequences_scores.tolist(), strict=True))


def answers(model: Model, ids: list[int], settings: dict[str, Any]) -> list[GenerationResult]:
    with Session(model, None, OpenGate(), RequestTimes(), lambda: None) as session:  # type: ignore[arg-type]
        request = session.add(ids, max_new_tokens=MAX_NEW, n_return=RETURNED, **settings)
        for _ in session:
            pass
    return [request.answer.result, *request.answer.others]


def check(name: str, settings: dict[str, Any], count: int, tiny: Tiny) -> None:
    source, pack = model_folder(name), tiny.reference(name)
    model, reference = open_model(pack, opaque(WideKeys()))[0], Checkpoint.open(source).model(torch.float32)
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    asked = prompts(name, tokenizer, pack.manifest.model.encoder is not None)[:count]
    assert len(asked) == count
    for ids in asked:
        expected, found = expected_answers(reference, ids, **settings), answers(model, ids, settings)
        assert [each.tokens for each in found] == [tokens for tokens, _ in expected], tokenizer.decode(ids)
        scores = pytest.approx([score for _, score in expected], abs=1e-3)  # 4e-4 was seen without AVX-512
        assert [each.score for each in found] == scores


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", ["g2p", "wiki"])
def test_a_few_answers_equal_those_of_transformers(name: str, settings: str, tiny: Tiny) -> None:
    check(name, SETTINGS[settings], FEW, tiny)


@pytest.mark.slow
@pytest.mark.parametrize("settings", ["plain", "penalty"])
@pytest.mark.parametrize("name", ["g2p", "wiki"])
def test_many_answers_equal_those_of_transformers(name: str, settings: str, tiny: Tiny) -> None:
    check(name, SETTINGS[settings], MANY, tiny)
