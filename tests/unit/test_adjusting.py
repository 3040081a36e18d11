"""Penalties, bias and logprobs: as transformers and OpenAI define them, and of each request by itself."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chat_packs import write_chat_pack
from command_line import Moert
from tiny_packs import SPECS, VOCAB, with_ends, write_pack
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from moert.engine.engine import Engine
from moert.engine.generation import GenerationSettings, adjusted, log_softmax
from moert.engine.text import Detokenizer
from moert.errors import SettingInvalid
from moert.models.footprint import Footprint, Load
from moert.pack.codec import F32

NEW = 12
ALL: dict[str, Any] = {
    "repeat_penalty": 1.6, "presence_penalty": 0.7, "frequency_penalty": 0.4, "logit_bias": {9: 4.0, 11: -3.5},
}  # fmt: skip


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adjusting")
    return {name: write_pack(root / name, with_ends(SPECS[name], ()), paths=False) for name in ("decoder", "switch")}


@pytest.fixture(scope="module")
def engines(packs: dict[str, Path]) -> dict[str, Engine]:
    return {name: Engine.open(path, threads=1) for name, path in packs.items()}


def logits(seed: int) -> F32:
    return (3 * np.random.default_rng(seed).normal(size=VOCAB)).astype(np.float32)


@pytest.mark.parametrize("penalty", [0.3, 1.3, 9.0])
def test_repetition_and_bias_are_those_of_transformers(penalty: float) -> None:
    read, written, bias = [5, 5, 7, 60], [8, 5, 8], {5: 2.5, 30: -100.0}
    theirs = LogitsProcessorList([
        SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()}),
        RepetitionPenaltyLogitsProcessor(penalty),
    ])  # fmt: skip
    settings = GenerationSettings(repeat_penalty=penalty, logit_bias=bias)
    for seed in range(20):
        before = logits(seed)
        expected = theirs(torch.tensor([[*read, *written]]), torch.from_numpy(before.copy())[None])[0].numpy()
        np.testing.assert_array_equal(adjusted(before, settings, read, written), expected)


def test_presence_and_frequency_count_what_was_written_alone() -> None:
    """c - count · frequency - (count > 0) · presence, as OpenAI has it."""
    settings = GenerationSettings(presence_penalty=0.5, frequency_penalty=-0.25)
    before = logits(0)
    found = adjusted(before, settings, [3, 4], [8, 5, 8])
    expected = before.copy()
    expected[8] -= np.float32(0.5 - 2 * 0.25)
    expected[5] -= np.float32(0.5 - 0.25)
    np.testing.assert_array_equal(found, expected)
    assert adjusted(before, settings, [3, 4], []) is not before
    np.testing.assert_array_equal(adjusted(before, settings, [3, 4], []), before)
    assert adjusted(before, GenerationSettings(), [3, 4], [8]) is before


@pytest.mark.parametrize(("name", "read"), [("decoder", None), ("switch", 0)])
def test_an_answer_is_what_its_adjusted_logits_say(engines: dict[str, Engine], name: str, read: int | None) -> None:
    """Step by step, from the model's own logits. Behind an encoder the start token was read, the prompt was not."""
    engine, settings = engines[name], GenerationSettings(max_new_tokens=NEW, **ALL)
    ids = engine.encode("one small step")
    answer = engine.generate(ids, settings).result.tokens
    state, row = engine.model.prefill(ids)
    for at, token in enumerate(answer):
        scores = adjusted(row, settings, ids if read is None else [read], answer[:at])
        assert token == int(scores.argmax())
        row = engine.model.step(state, token)
    assert answer != engine.generate(ids, max_new_tokens=NEW).result.tokens


def test_a_bias_of_100_bans_and_forces(engines: dict[str, Engine]) -> None:
    engine = engines["decoder"]
    plain = engine.generate("zigzag", max_new_tokens=NEW).result.tokens
    banned = engine.generate("zigzag", max_new_tokens=NEW, logit_bias=dict.fromkeys(plain, -100)).result.tokens
    assert not set(plain) & set(banned)
    assert engine.generate("zigzag", max_new_tokens=3, logit_bias={7: 100}, beams=2).result.tokens == [7, 7, 7]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("name", ["decoder", "switch"])
def test_answers_do_not_depend_on_what_runs_beside(engines: dict[str, Engine], name: str, temperature: float) -> None:
    """Nor do logprobs; and a fork goes on as its request does."""
    wanted = {"max_new_tokens": NEW, "temperature": temperature, "logprobs": 3, **ALL}
    engine = engines[name]
    alone = [engine.generate(prompt, **wanted).result for prompt in ("zigzag", "hello world")]
    with engine.session() as session:
        first = session.add("zigzag", **wanted)
        session.turn()
        session.turn()
        session.add("a", max_new_tokens=NEW)
        second = session.add("hello world", **wanted)
        session.turn()
        twin, other = session.fork(first), session.fork(first, repeat_penalty=1.0, logit_bias={7: 100.0})
        for _ in session:
            pass
    assert [first.answer.result, second.answer.result] == alone
    assert twin.answer.result == first.answer.result
    assert other.answer.result.tokens == [*first.answer.result.tokens[:3], *[7] * (NEW - 3)]
    assert engine.generate("zigzag", **wanted).result == alone[0]


@pytest.mark.parametrize("beams", [1, 2])
def test_only_ids_of_the_model_have_a_bias(engines: dict[str, Engine], beams: int) -> None:
    with pytest.raises(SettingInvalid, match=f"logit_bias has the id {VOCAB}: there are ids below {VOCAB}"):
        engines["decoder"].generate("a", logit_bias={VOCAB: 1.0}, beams=beams)
    with engines["decoder"].session() as session:
        request = session.add("a")
        with pytest.raises(SettingInvalid, match="logit_bias has the id 99"):
            session.fork(request, logit_bias={99: 1.0})
        session.turn()
        with pytest.raises(SettingInvalid, match="logprobs can't change: the request has written its first token"):
            session.fork(request, logprobs=2)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_logprobs_are_those_of_the_model_itself(engines: dict[str, Engine], temperature: float) -> None:
    """Before penalties, bias and temperature."""
    engine = engines["decoder"]
    answer = engine.generate("zigzag", max_new_tokens=NEW, temperature=temperature, logprobs=4, **ALL)
    rows = engine.model.forward_all([*engine.encode("zigzag"), *answer.result.tokens[:-1]])[-NEW:]
    for row, token, told in zip(rows, answer.result.tokens, answer.logprobs, strict=True):
        expected = log_softmax(row)
        best = np.argsort(-expected, kind="stable")[:4].tolist()
        assert [each.id for each in told.likeliest] == best
        assert [each.logprob for each in told.likeliest] == [float(expected[each]) for each in best]
        assert (told.chosen.id, told.chosen.logprob) == (token, float(expected[token]))
    text = "".join(each.chosen.text for each in answer.logprobs)
    assert text.replace("</s>", "").replace("<pad>", "") == answer.text
    assert engine.generate("zigzag", max_new_tokens=NEW).logprobs is None
    for prompt, many, texts, others in (("zigzag", 0, None, 0), (engine.encode("zigzag"), 1, {""}, 1)):
        found = engine.generate(prompt, max_new_tokens=2, logprobs=many).logprobs
        assert [len(each.likeliest) for each in found] == [others, others]
        assert texts in (None, {each.chosen.text for each in found})


def test_a_token_by_itself_has_text() -> None:
    """Spaces at word starts stay, half a character is replaced, and a special token has its name."""
    words = Tokenizer(models.WordLevel({"AH": 0, "B": 1, "<s>": 2}, unk_token="<s>"))
    words.add_special_tokens(["<s>"])
    source = Detokenizer(words)
    assert source.piece(0) == "AH"
    source.push(1)
    before = copy.copy(source)
    assert [source.piece(token) for token in (0, 2)] == [" AH", " <s>"]
    assert source.push(0) == before.push(0) == " AH"
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    source, ids = Detokenizer(tokenizer), tokenizer.encode("é!").ids
    for token, text in zip(ids, ("\ufffd", "\ufffd", "!"), strict=True):
        assert source.piece(token) == text
        source.push(token)


def test_what_is_told_counts_as_memory() -> None:
    footprint, load = Footprint(SPECS["decoder"], False), Load(10, 1000, written=7)
    noted = Load(10, 1000, written=7, noted_bytes=600)
    assert footprint.written([noted]) - footprint.written([load]) == 600 * 1000
    assert footprint.next_block([noted]) - footprint.next_block([load]) == 600 * (7 + 128)


def test_on_the_command_line(moert: Moert, packs: dict[str, Path], engines: dict[str, Engine], tmp_path: Path) -> None:
    pack = packs["decoder"]
    options = ("--tune", "repeat-penalty=1.6", "--tune", "presence-penalty=0.7", "--tune", "frequency-penalty=0.4")
    options += ("--tune", "logit-bias=9=4", "--tune", "logit-bias=11=-3.5", "--tune", "threads=1")
    options += ("--max-new-tokens", str(NEW))
    expected = engines["decoder"].generate("zigzag", max_new_tokens=NEW, logprobs=2, **ALL)
    assert moert("run", pack, "zigzag", *options, "--tune", "logprobs=2", "--json") == 0
    found = json.loads(moert.out)
    assert found["tokens"] == expected.result.tokens
    assert found["logprobs"] == [
        {**each.chosen._asdict(), "likeliest": [one._asdict() for one in each.likeliest]} for each in expected.logprobs
    ]
    (tmp_path / "in.jsonl").write_text('{"prompt": "zigzag"}\n')
    assert moert("run", pack, "--input", tmp_path / "in.jsonl", *options, "--tune", "logprobs=2", "--json") == 0
    assert json.loads(moert.out)["logprobs"] == found["logprobs"]
    talk = write_chat_pack(tmp_path / "talk")
    for command in (("run", talk, "hello", "--chat"), ("chat", talk)):
        assert moert(*command, *options, "--tune", "logprobs=1", "--json", stdin="hello\n") == 0
        answer = json.loads(moert.out)
        assert [each["id"] for each in answer["logprobs"]] == answer["tokens"]
    assert "--tune logprobs goes with --json" in moert.refuses("run", pack, "zigzag", "--tune", "logprobs=2")
    assert "--tune logprobs goes with --json" in moert.refuses("chat", talk, "--tune", "logprobs=2")
    for wrong in ("9", "x=1", "9=much"):
        assert f"--tune logit-bias={wrong}: give ID=VALUE" in moert.refuses(
            "run", pack, "zigzag", "--tune", f"logit-bias={wrong}"
        )
    assert "--tune logit-bias has the id 64" in moert.refuses("run", pack, "zigzag", "--tune", "logit-bias=64=1")
