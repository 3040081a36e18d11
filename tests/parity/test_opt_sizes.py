"""OPT at the size of its smallest published model, with random weights of which few neurons fire: the same logits and
tokens as transformers, alone and in batches."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packs import greedy, open_model, pack_of
from tiny import transformers_model

from moert.kernels import AUTO_KERNELS, open_backend
from moert.kernels.backend import opaque
from moert.models.model import Model
from moert.pack.reader import Pack
from recipes.bench.shapes import write_weights
from recipes.bench.virtual import VirtualTensors
from tests.kept_keys import WideKeys
from tests.published import PUBLISHED

pytestmark = pytest.mark.slow
CONFIG = PUBLISHED["OPT-125m"]
LENGTHS, NEW = (1, 9, 40, 130), 16


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("opt") / "hf"
    path.mkdir()
    for name, said in (("config.json", CONFIG), ("generation_config.json", {"eos_token_id": CONFIG["eos_token_id"]})):
        (path / name).write_text(json.dumps(said))
    write_weights(VirtualTensors(CONFIG, CONFIG["num_hidden_layers"]), path)
    return path


@pytest.fixture(scope="module")
def pack(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Pack:
    return pack_of(source, tmp_path_factory.mktemp("packs") / "model.pack")


@pytest.fixture(scope="module")
def reference(source: Path) -> Any:
    return transformers_model(source)


def prompts() -> list[list[int]]:
    chance = random.Random(5)
    return [[2, *(chance.randrange(4, CONFIG["vocab_size"]) for _ in range(length))] for length in LENGTHS]


def written(reference: Any) -> list[list[int]]:
    """By transformers, in one batch, filled up on the left."""
    longest = max(map(len, prompts()))
    ids = torch.full((len(LENGTHS), longest), CONFIG["pad_token_id"])
    for row, prompt in zip(ids, prompts(), strict=True):
        row[longest - len(prompt) :] = torch.tensor(prompt)
    mask = (torch.arange(longest) >= longest - torch.tensor([len(each) for each in prompts()])[:, None]).long()
    with torch.inference_mode():
        rows = reference.generate(ids, attention_mask=mask, do_sample=False, num_beams=1, max_new_tokens=NEW)
    return [ended(row[longest:].tolist()) for row in rows]


def ended(tokens: list[int]) -> list[int]:
    end = CONFIG["eos_token_id"]
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens


def together(model: Model) -> list[list[int]]:
    """By moert, each step for all prompts at once."""
    begun = model.prefill_many(prompts())
    states, found = [state for state, _ in begun], [[int(logits.argmax())] for _, logits in begun]
    for _ in range(NEW - 1):
        logits = model.read(states, [tokens[-1:] for tokens in found])
        for tokens, row in zip(found, logits, strict=True):
            tokens.append(int(row.argmax()))
    return [ended(tokens) for tokens in found]


def test_logits_and_tokens_are_those_of_transformers(pack: Pack, reference: Any) -> None:
    model, _ = open_model(pack, opaque(WideKeys()))
    for ids in prompts():
        with torch.inference_mode():
            expected = reference(torch.tensor([ids])).logits[0].numpy()
        np.testing.assert_allclose(model.forward_all(ids), expected, atol=2e-4, rtol=1e-4)
    tokens = written(reference)
    assert together(model) == tokens
    assert [greedy(model, ids, NEW) for ids in prompts()] == tokens
    assert len({tuple(each) for each in tokens}) == len(LENGTHS)


def test_native_kernels_are_off_by_their_rounding(pack: Pack, reference: Any) -> None:
    model, _ = open_model(pack, open_backend(AUTO_KERNELS))
    for ids in prompts():
        with torch.inference_mode():
            expected = reference(torch.tensor([ids])).logits[0].numpy()
        apart = np.abs(model.forward_all(ids) - expected).max(-1) / np.abs(expected).max(-1)
        assert apart.max() < 0.02
