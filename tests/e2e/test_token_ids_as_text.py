"""A family whose tokenizer no tokenizer.json can stand for: its text is token ids, from calibration to answers."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from conversions import Done, settings_for

from moeconv.errors import SettingsError
from moert.engine.engine import Engine
from moert.errors import InputInvalid
from tests import gptsan


def numbers(chance: random.Random, lines: int) -> str:
    rows = [" ".join(str(chance.randrange(2, 96)) for _ in range(40)) for _ in range(lines)]
    return "".join(json.dumps({"text": row}) + "\n" for row in rows)


def test_a_checkpoint_without_a_tokenizer_is_converted_and_run_on_numbers(tmp_path: Path) -> None:
    source, chance = gptsan.write(tmp_path / "hf", separator_token_id=gptsan.SEPARATOR), random.Random(0)
    for name in ("calibration.jsonl", "heldout.jsonl"):
        (tmp_path / name).write_text(numbers(chance, 60))
    sources = {"gptsan": source, "text": tmp_path / "calibration.jsonl"}
    heldout = str(tmp_path / "heldout.jsonl")
    done = Done(settings_for(sources, "gptsan", tmp_path, heldout=heldout, bits=(2,), loss=0.9, quantizer="group"))
    assert any("text is token ids, as numbers with spaces between" in line for line in done.said)
    assert any("spout vector are left out" in line for line in done.said)
    ids = [17, 30, 8, gptsan.SEPARATOR]
    with Engine.open(done.settings.out) as engine:
        by_ids = engine.generate(ids, max_new_tokens=6).result.tokens
        answer = engine.generate(" ".join(map(str, ids)), max_new_tokens=6).result
        assert answer.tokens == by_ids
        assert answer.text.split() == [str(token) for token in by_ids]
        with pytest.raises(InputInvalid, match="outside the model's vocabulary of 96"):
            engine.generate("17 neko", max_new_tokens=6)


def test_words_are_refused(tmp_path: Path) -> None:
    source = gptsan.write(tmp_path / "hf")
    rows = [json.dumps({"text": f"words of row {row} " * 9}) + "\n" for row in range(40)]
    (tmp_path / "words.jsonl").write_text("".join(rows))
    settings = settings_for({"gptsan": source, "text": tmp_path / "words.jsonl"}, "gptsan", tmp_path, loss=0.9)
    with pytest.raises(SettingsError, match=r"makes token 96 of the text"):
        Done(settings)
