"""The trained reference models in 16 bits: greedy tokens of held-out prompts equal those of transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from packs import Tiny, reference_greedy
from tokenizers import Tokenizer

from moeconv.source.checkpoint import Checkpoint
from moert.engine.engine import Engine
from moert.engine.generation import GenerationSettings

ROOT = Path(__file__).resolve().parents[2]
PROMPTS, FEW, MAX_NEW, PROMPT_TOKENS = 40, 10, 24, 48


def model_folder(name: str) -> Path:
    """Where the reference model lies; it belongs to the repository, so a missing one fails the test."""
    folder = ROOT / "recipes" / "models" / name
    if not (folder / "config.json").is_file():
        pytest.fail(f"the reference model {name} is missing: nothing shows that its tokens are those of transformers")
    return folder


def heldout_texts(name: str, field: str) -> list[str]:
    """The held-out texts of a reference model; its builder makes the file if it isn't there, or says why it can't."""
    path = ROOT / "build" / "data" / name / "heldout.jsonl"
    if not path.is_file():
        command = [sys.executable, str(ROOT / "calib_data" / f"{name}.py")]
        built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if built.returncode or not path.is_file():
            pytest.fail(f"calib_data/{name}.py did not build the held-out texts: {built.stderr.strip()}")
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


@pytest.mark.parametrize("count", [FEW, pytest.param(PROMPTS, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["g2p", "wiki"])
def test_greedy_tokens_equal_transformers(name: str, count: int, tiny: Tiny) -> None:
    source = model_folder(name)
    pack = tiny.reference(name)
    reference = Checkpoint.open(source).family.load(source, torch.float32)
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    settings = GenerationSettings(max_new_tokens=MAX_NEW)
    asked = prompts(name, tokenizer, pack.manifest.model.encoder is not None)[:: PROMPTS // count]
    assert len(asked) == count
    expected = reference_greedy(reference, asked, MAX_NEW)
    with Engine.open(pack.root, predict="none", kernels="reference") as engine:
        for ids, tokens in zip(asked, expected, strict=True):
            assert engine.generate(ids, settings).result.tokens == tokens, tokenizer.decode(ids)
    assert len({tuple(tokens) for tokens in expected}) > count // 2


def test_a_missing_model_is_a_failure(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    with pytest.raises(pytest.fail.Exception, match="wiki is missing"):
        test_greedy_tokens_equal_transformers("wiki", FEW, tiny)


@pytest.mark.parametrize(
    ("builder", "message"), [("import sys; sys.exit('error: no wheel')", "error: no wheel"), ("", "did not build")]
)
def test_missing_texts_are_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, builder: str, message: str
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    (tmp_path / "calib_data").mkdir()
    (tmp_path / "calib_data" / "g2p.py").write_text(builder)
    with pytest.raises(pytest.fail.Exception, match=message):
        heldout_texts("g2p", "input")


def test_missing_texts_are_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    (tmp_path / "calib_data").mkdir()
    (tmp_path / "calib_data" / "g2p.py").write_text(
        "from pathlib import Path; out = Path('build/data/g2p'); out.mkdir(parents=True)\n"
        "(out / 'heldout.jsonl').write_text('{\"input\": \"hello\"}\\n')"
    )
    assert heldout_texts("g2p", "input") == ["hello"]
