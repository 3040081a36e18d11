"""How likely a text is: by the engine in little memory, in windows, and on the command line."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from command_line import Moert
from tiny_packs import EOS, SPECS, VOCAB, with_capacity, with_ends, write_pack

from moert.engine.engine import Engine
from moert.engine.scoring import POOLINGS, Likelihood, windows
from moert.errors import BudgetTooSmall, InputInvalid, PromptTooLong, SettingInvalid
from moert.models.footprint import Footprint, Load

TEXT = "one small step for the quick brown fox"


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("scoring")
    specs = {**SPECS, "switch": with_capacity("switch", 1000)}  # one pass may fill an expert, one token never does
    return {name: write_pack(root / name, with_ends(spec, ()), paths=False) for name, spec in specs.items()}


@pytest.fixture(scope="module")
def engines(packs: dict[str, Path]) -> dict[str, Engine]:
    return {name: Engine.open(path, threads=1, cache="40%") for name, path in packs.items()}


def test_windows_cover_a_text() -> None:
    assert windows(10, None) == windows(10, 10) == windows(10, 99) == [(0, 10, 9)]
    assert windows(10, 5) == [(0, 5, 4), (5, 10, 4)]
    assert windows(11, 5) == [(0, 5, 4), (5, 10, 4), (6, 11, 1)]


@pytest.mark.parametrize("name", ["decoder", "mixers"])
def test_a_text_is_as_likely_as_when_it_is_written(engines: dict[str, Engine], name: str) -> None:
    """Bit for bit, whatever lay in memory; so a score is that of the model that answers."""
    engine = engines[name]
    prompt = engine.encode(TEXT)
    answer = engine.generate(prompt, max_new_tokens=12, logprobs=0)
    found = engine.score([*prompt, *answer.tokens])
    assert answer.logprobs is not None
    assert found.logprobs[len(prompt) :] == pytest.approx([each.chosen.logprob for each in answer.logprobs], abs=2e-6)
    assert found.logprobs[0] is None
    assert found.log_likelihood == pytest.approx(math.fsum(each or 0 for each in found.logprobs))
    with Engine.open(engine.pack.root, threads=2) as other:
        assert other.score([*prompt, *answer.tokens]) == found


def test_behind_an_encoder_a_target_is_scored(engines: dict[str, Engine]) -> None:
    engine = engines["switch"]
    answer = engine.generate(TEXT, max_new_tokens=9, logprobs=0)
    found = engine.score(TEXT, answer.tokens)
    assert answer.logprobs is not None
    assert found.logprobs == pytest.approx([each.chosen.logprob for each in answer.logprobs], abs=2e-6)
    assert engine.score(TEXT, "two words").words == 2
    with pytest.raises(InputInvalid, match="give a target"):
        engine.score(TEXT)
    with pytest.raises(SettingInvalid, match="context has no effect behind an encoder"):
        engine.score(TEXT, "x", 8)


def test_words_end_where_white_space_begins(engines: dict[str, Engine]) -> None:
    """The tokens are letters: of the first word, all but its first letter."""
    found = engines["decoder"].score(TEXT)
    assert (found.words, found.scored) == (8, len(found.tokens) - 1)
    assert found.token_perplexity == pytest.approx(math.exp(-found.log_likelihood / found.scored))
    assert found.word_perplexity == pytest.approx(math.exp(-found.log_likelihood / 8))
    assert engines["decoder"].score("small").words == 1
    assert Likelihood(-5.0, 2, 0).word_perplexity is None
    assert Likelihood(-1e6, 2, 1).word_perplexity == pytest.approx(math.exp(600))
    assert Likelihood(-1.0, 2, 1) + Likelihood(-2.0, 3, 4) == Likelihood(-3.0, 5, 5)


@pytest.mark.parametrize("name", ["decoder", "mixers"])
def test_an_embedding_depends_on_its_text_alone(engines: dict[str, Engine], name: str) -> None:
    engine = engines[name]
    mean, last = engine.embed(TEXT), engine.embed(TEXT, "last")
    assert np.linalg.norm(mean) == pytest.approx(1, abs=1e-6)
    assert mean.dtype == np.float32
    assert not np.allclose(mean, last)
    assert np.array_equal(engine.embed(TEXT[:1]), engine.embed(TEXT[:1], "last"))
    with Engine.open(engine.pack.root, threads=2, memory="auto") as other:
        other.embed(TEXT[::-1])
        assert np.array_equal(other.embed(other.encode(TEXT)), mean)
        assert np.array_equal(other.embed(TEXT, "last"), last)
    with pytest.raises(SettingInvalid, match="pooling is 'cls': it should be one of mean, last"):
        engine.embed(TEXT, "cls")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["decoder", "mixers"])
def test_embeddings_of_one_pass_are_those_of_each_text(engines: dict[str, Engine], name: str) -> None:
    """Bit for bit, also of a text that is longer than a piece of rows; each expert is read once for all of them."""
    engine = engines[name]
    texts = [TEXT, [5, 9] * 150, TEXT[:1], TEXT]
    for pooling in POOLINGS:
        assert np.array_equal(engine.embed_many(texts, pooling), [engine.embed(text, pooling) for text in texts])
    before = engine.counters.requests
    engine.embed_many([TEXT] * 5)
    together, before = engine.counters.requests - before, engine.counters.requests
    engine.embed(TEXT)
    assert together == engine.counters.requests - before
    assert engine.embed_many([]) == []
    with pytest.raises(InputInvalid, match="give a list"):
        engine.embed_many(TEXT)


def test_embeddings_that_do_not_fit_together_take_several_passes(
    packs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, passes = [[5, 9 + at] * 20 for at in range(7)], list[int]()
    with Engine.open(packs["decoder"], threads=1) as engine:
        wanted, hidden = engine.embed_many(texts), engine.model.hidden
        monkeypatch.setattr(engine._admission, "together", lambda running, waiting: min(3, len(waiting)))
        monkeypatch.setattr(engine.model, "hidden", lambda prompts: (passes.append(len(prompts)), hidden(prompts))[1])
        assert np.array_equal(engine.embed_many(texts), wanted)
    assert passes == [3, 3, 1]


def test_an_embedding_fits_into_the_memory_or_is_refused(packs: dict[str, Path]) -> None:
    """What the process holds is given here: in one that has run other tests it falls when freed memory is returned."""
    with Engine.open(packs["decoder"], threads=1, memory="4GB") as engine:
        regulator = engine._regulator
        regulator._measure = lambda: 100_000_000 + engine._streaming.cache.held_bytes
        regulator._idle_at_first = None
        regulator.limit_bytes = engine.smallest_memory(1, 1) + (1 << 20)
        engine.embed([5])
        with pytest.raises(BudgetTooSmall):
            engine.embed([5] * 400)


def test_each_window_stands_by_itself(engines: dict[str, Engine]) -> None:
    engine = engines["decoder"]
    ids = engine.text.encode(TEXT, whole=True)
    found = engine.score(TEXT, context=10)
    parts = [engine.score(ids[start:stop]).logprobs[-fresh:] for start, stop, fresh in windows(len(ids), 10)]
    scored = [each for each in found.logprobs if each is not None]
    assert scored == [each for part in parts for each in part]
    assert found.windows == len(parts)


def test_what_can_not_be_scored(engines: dict[str, Engine]) -> None:
    engine = engines["decoder"]
    long = "x" * 500
    with pytest.raises(PromptTooLong, match=r"tokens, the model can take 400: give context=400 to score it in windows"):
        engine.score(long)
    assert engine.score(long, context=400).windows == 2
    assert engine.score([5] * 400).scored == 399
    for context in (0, 1, 401):
        with pytest.raises(SettingInvalid, match=f"context is {context}: it should be from 2 to the 400 tokens"):
            engine.score(TEXT, context=context)
    for ids, words in (([], "no tokens"), ([VOCAB], "outside the model's vocabulary"), ([5], "has only one token")):
        with pytest.raises(InputInvalid, match=words):
            engine.score(ids)
    with pytest.raises(InputInvalid, match="a target is for models with an encoder"):
        engine.score(TEXT, "x")


def test_logits_count_as_memory(packs: dict[str, Path]) -> None:
    footprint = Footprint(SPECS["decoder"], False)
    more = footprint.prompt([Load(50, 1, scored=20)]) - footprint.prompt([Load(50, 1)])
    assert more == 19 * 3 * 4 * VOCAB
    with Engine.open(packs["decoder"]) as engine:
        engine._regulator.limit_bytes = 10 << 20
        with pytest.raises(BudgetTooSmall, match="this request needs"):
            engine.score(TEXT)


def test_on_the_command_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, packs: dict[str, Path],
    engines: dict[str, Engine], tmp_path: Path,
) -> None:  # fmt: skip
    moert, pack, expected = Moert(capsys, monkeypatch), packs["decoder"], engines["decoder"].score(TEXT)
    (tmp_path / "text").write_text(TEXT + "\n")
    for given in ((TEXT,), ("--file", tmp_path / "text"), ()):
        assert moert("score", pack, *given, stdin=TEXT) == 0
        assert moert.out.splitlines() == [
            f"log-likelihood  {expected.log_likelihood:.4f} nats",
            f"perplexity      {expected.token_perplexity:.4f} a token, over {expected.scored} tokens",
            f"                {expected.word_perplexity:.4f} a word, over 8 words",
        ]
    assert moert("score", pack, TEXT, "--json") == 0
    found = json.loads(moert.out)
    assert (found["log_likelihood"], found["tokens"]) == (expected.log_likelihood, expected.tokens)
    assert found["logprobs"] == expected.logprobs
    assert (found["perplexity_a_word"], found["words"]) == (expected.word_perplexity, 8)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(f'{{"text": "{TEXT}", "id": 7}}\n{{"text": "small"}}\n')
    assert moert("score", pack, "--input", rows, "--json") == 0
    first, second, total = map(json.loads, moert.out.splitlines())
    assert (first["id"], first["log_likelihood"]) == (7, expected.log_likelihood)
    assert total["texts"] == 2
    assert total["log_likelihood"] == pytest.approx(first["log_likelihood"] + second["log_likelihood"])
    assert (total["scored_tokens"], total["words"]) == (expected.scored + 4, 9)
    assert moert("score", pack, "--input", rows) == 0
    assert moert.out.startswith("texts           2\nlog-likelihood")
    assert moert("score", packs["switch"], TEXT, "--target", "a b", "--json") == 0
    assert json.loads(moert.out)["words"] == 2
    rows.write_text('{"input": "one", "target": "a b"}\n{"input": "one"}\n')
    assert "text 2 of" in moert.refuses("score", packs["switch"], "--input", rows)
    for wrong, words in (
        ((TEXT, "--file", "x"), "exclude each other"),
        (("--input", rows, "--target", "x"), "--target goes with one text"),
        (("x" * 500,), "give --context 400 to score it in windows"),
        (("a", "--context", 1), "--context is 1"),
    ):
        assert words in moert.refuses("score", pack, *wrong)


def test_numbers_are_logarithms_of_probabilities(engines: dict[str, Engine]) -> None:
    engine = engines["decoder"]
    ids = engine.encode("abc")
    total = sum(math.exp(engine.score([*ids, token]).logprobs[-1] or 0) for token in range(VOCAB))
    assert total == pytest.approx(1, abs=1e-4)
    assert np.isfinite(engine.score([*ids, EOS]).log_likelihood)
