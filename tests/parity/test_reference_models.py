"""The trained reference models in 16 bits: greedy tokens of 100 held-out prompts equal those of transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from packs import pack_of_16_bits, reference_greedy
from tokenizers import Tokenizer

from moeconv.checkpoint import Checkpoint
from moert.engine import Engine
from moert.generation.settings import GenerationSettings

ROOT = Path(__file__).resolve().parents[2]
PROMPTS, MAX_NEW, PROMPT_TOKENS = 100, 24, 48


def heldout_texts(name: str, field: str) -> list[str]:
    """The held-out texts of a reference model; its builder makes the file if it isn't there."""
    path = ROOT / "build" / "data" / name / "heldout.jsonl"
    if not path.is_file():
        subprocess.run([sys.executable, ROOT / "calib_data" / f"{name}.py"], cwd=ROOT, check=True)
    with open(path, encoding="utf-8") as lines:
        return [json.loads(line)[field] for line in lines]


def prompts(name: str, tokenizer: Tokenizer, is_seq2seq: bool) -> list[list[int]]:
    """Whole inputs of a sequence-to-sequence model; of a language model pieces of articles, two from each."""
    if is_seq2seq:
        return [tokenizer.encode(text).ids for text in heldout_texts(name, "input")[:PROMPTS]]
    pieces = []
    for text in heldout_texts(name, "text"):
        ids = tokenizer.encode(text).ids
        pieces += [ids[:PROMPT_TOKENS], ids[PROMPT_TOKENS : 2 * PROMPT_TOKENS]]
    return [ids for ids in pieces if len(ids) == PROMPT_TOKENS][:PROMPTS]


@pytest.mark.parametrize("name", ["g2p", "wiki"])
def test_greedy_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    source = ROOT / "recipes" / "models" / name
    if not source.is_dir():
        pytest.skip(f"the model {name} is not there yet: train it with recipes/train")
    pack = pack_of_16_bits(source, tmp_path / "model.pack")
    reference = Checkpoint.open(source).arch.load(source, torch.float32)
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    settings = GenerationSettings(max_new_tokens=MAX_NEW)
    asked = prompts(name, tokenizer, pack.manifest.model.encoder is not None)
    assert len(asked) == PROMPTS
    expected = reference_greedy(reference, asked, MAX_NEW)
    with Engine.open(pack.root, predictor="none") as engine:
        for ids, tokens in zip(asked, expected, strict=True):
            assert engine.generate_ids(ids, settings).result.tokens == tokens, tokenizer.decode(ids)
    assert len({tuple(tokens) for tokens in expected}) > PROMPTS // 2
