"""Choosing tokens, streaming text and stopping, with a scripted model in the place of a real one."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from grammar_packs import byte_fallback, byte_level
from hypothesis import given
from hypothesis import strategies as st
from tiny_packs import DECODER_SHAPE
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from moert.engine import generation
from moert.engine.generation import Generation, GenerationResult, GenerationSettings, TextSource
from moert.engine.session import Session
from moert.engine.text import Detokenizer
from moert.errors import InputInvalid, SettingInvalid
from moert.models.kv import State
from moert.pack.codec import F32
from moert.pack.model_spec import ModelSpec
from moert.stats import RequestTimes
from tests.open_gate import OpenGate
from tests.refusing import one_line

EOS, VOCAB = 256, 257


@pytest.fixture(scope="module")
def byte_tokenizer() -> Tokenizer:
    """One token per byte, so that most characters beyond ASCII take several tokens; 256 is the end."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


@dataclass
class Script:
    """A model that writes the tokens it is given, whatever the prompt."""

    tokens: list[int]
    max_positions: int | None = None
    steps: int = -1
    spec: ModelSpec = field(init=False)

    def __post_init__(self) -> None:
        self.spec = DECODER_SHAPE.but(vocab_size=VOCAB, eos=(EOS,), max_positions=self.max_positions).spec

    def begin(self, prompts: list[list[int]]) -> Any:
        return [(State([]), ids) for ids in prompts]

    def read(self, states: list[State], sequences: list[list[int]]) -> F32:
        assert self.steps < 0 or sequences == [[self.tokens[self.steps]]]
        self.steps += 1
        return np.eye(VOCAB, dtype=np.float32)[self.tokens[self.steps]][None]


@dataclass
class Texts:
    """The prompt is one token, whatever it says."""

    source: Detokenizer | None

    def encode(self, prompt: str, aside: object = None) -> list[int]:
        return [1]

    def detokenizer(self) -> TextSource | None:
        return self.source


def generate(
    model: Any, ids: list[int], settings: GenerationSettings, pieces: list[str] | None = None,
    detokenizer: Detokenizer | None = None,
) -> GenerationResult:  # fmt: skip
    with Session(model, Texts(detokenizer), OpenGate(), RequestTimes(), lambda: None) as session:  # type: ignore[arg-type]
        request = session.add("text" if detokenizer else ids, settings)
        for _, piece in session:
            if pieces is not None:
                pieces.append(piece.text)
    return request.answer.result


def run(tokenizer: Tokenizer, text: str, **settings: Any) -> tuple[list[str], Any]:
    """The model writes `text`, then the end token → the pieces, the result."""
    script = Script([*tokenizer.encode(text).ids, EOS])
    pieces: list[str] = []
    result = generate(script, [1], GenerationSettings(**settings), pieces, Detokenizer(tokenizer))
    assert "".join(pieces) == result.text
    return pieces, result


@pytest.mark.parametrize(
    ("text", "settings", "written", "reason", "tokens"),
    [
        ("hello", {}, "hello", "eos", 6),  # with the end token
        ("hello", {"max_new_tokens": 2}, "he", "max_new_tokens", 2),
        ("naïve 🙂!", {}, "naïve 🙂!", "eos", 13),
        ("a🙂", {"max_new_tokens": 3}, "a\ufffd", "max_new_tokens", 3),  # half a character is replaced
        ("one two END three", {"stop": ("END", "never")}, "one two ", "stop_string", 11),
        ("abcd", {"stop": ("cd", "bcd")}, "a", "stop_string", 4),  # the earliest
        ("ENENDING. EN", {"stop": ("ENDS", "EN!")}, "ENENDING. EN", "eos", 13),  # it only began like one
    ],
)
def test_where_text_ends(
    byte_tokenizer: Tokenizer, text: str, settings: dict[str, Any], written: str, reason: str, tokens: int
) -> None:
    pieces, result = run(byte_tokenizer, text, **settings)
    assert (result.text, result.stop_reason, len(result.tokens)) == (written, reason, tokens)
    assert (result.tokens[-1] == EOS) == (reason == "eos")
    assert all(len(piece) <= 1 for piece in pieces) or "stop" in settings, "whole characters"
    assert "E" in written or not any("E" in piece for piece in pieces)


@given(text=st.text(max_size=30))
def test_pieces_join_to_the_whole_text(byte_tokenizer: Tokenizer, text: str) -> None:
    detokenizer = Detokenizer(byte_tokenizer)
    ids = byte_tokenizer.encode(text).ids
    joined = "".join(detokenizer.push(token) for token in ids) + detokenizer.flush()
    assert joined == byte_tokenizer.decode(ids)


@pytest.mark.parametrize("tokenizer", [byte_level(), byte_fallback()], ids=["level", "fallback"])
def test_half_a_character_behind_a_whole_one_is_one_replacement(tokenizer: Tokenizer) -> None:
    detokenizer, ids = Detokenizer(tokenizer), tokenizer.encode("\N{EURO SIGN}\N{EURO SIGN}a").ids
    assert "".join(map(detokenizer.push, ids[:3])) == "\N{EURO SIGN}"
    assert (detokenizer.piece(ids[3]), detokenizer.push(ids[3])) == ("\ufffd", "")
    cut_short = copy.copy(detokenizer)
    assert cut_short.flush() == "\ufffd"
    assert detokenizer.push(ids[6]) == "\ufffda"


def test_words_joined_by_spaces() -> None:
    tokenizer = Tokenizer(models.WordLevel({"AH": 0, "B": 1, "<s>": 2}, unk_token="<s>"))
    tokenizer.add_special_tokens(["<s>"])
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push(token) for token in (2, 0, 2, 1, 0)] == ["", "AH", "", " B", " AH"]


def test_full_context_and_prompts_that_do_not_fit() -> None:
    result = generate(Script([5, 6, 7, 8], max_positions=5), [1, 2], GenerationSettings())
    assert (result.tokens, result.stop_reason) == ([5, 6, 7], "context_full")
    for prompt, words in (([], "no tokens"), ([1] * 5, "5 tokens"), ([VOCAB], "vocabulary")):
        with pytest.raises(InputInvalid, match=words):
            generate(Script([5], max_positions=5), prompt, GenerationSettings())


def test_a_run_left_early_is_interrupted() -> None:
    script: Any = Script([5, 6, EOS])
    generation = Generation(script.spec, [1], GenerationSettings(), None)
    generation.draw(script.read([], []))
    generation.piece()
    assert (generation.results[0].tokens, generation.stop_reason) == ([5], "interrupted")


def test_stop_strings_need_a_text() -> None:
    with pytest.raises(SettingInvalid, match="give the prompt as text"):
        generate(Script([5]), [1], GenerationSettings(stop=("x",)))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_new_tokens": 0}, "max_new_token"), ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"), ({"temperature": math.inf}, "temperature"),
        ({"top_k": -1}, "top_k"), ({"top_p": 0.0}, "top_p"), ({"top_p": 1.1}, "top_p"), ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"seed": -1}, "seed"), ({"stop": ("",)}, "stop"),
        ({"repeat_penalty": 0.0}, "repeat_penalty is 0.0: it should be from 0.1 to 10.0, 1 for none"),
        ({"repeat_penalty": math.nan}, "repeat_penalty is nan"),
        ({"presence_penalty": 2.1}, "presence_penalty is 2.1: it should be from -2.0 to 2.0, 0 for none"),
        ({"frequency_penalty": math.inf}, "frequency_penalty is inf"),
        ({"logit_bias": {3: 101.0}}, "logit_bias has 3: 101.0: give ids of tokens with values from -100.0 to 100.0"),
        ({"logprobs": 21}, "logprobs is 21: it should be between 0 and 20"),
        ({"logprobs": 2, "beams": 2}, "logprobs does not go with beam search"),
        ({"beams": 0}, "beams is 0: it should be between 1 and 64"),
        ({"beams": 65}, "beams is 65"),
        ({"beams": 4, "n_return": 5}, "n_return is 5: it should be between 1 and the 4 beam"),
        ({"n_return": 2}, "n_return is of beam search: give the number of beams"),
        ({"beams": 4, "temperature": 0.5}, "temperature does not go with beam search"),
        ({"beams": 4, "stop": ("a",)}, "stop does not go with beam search"),
        ({"length_penalty": 2.0}, "length_penalty is of beam search"),
        ({"early_stopping": True}, "early_stopping is of beam search"),
        ({"beams": 4, "early_stopping": "always"}, "early_stopping is 'always': it should be True or False or 'never'"),
        ({"beams": 4, "length_penalty": math.nan}, "length_penalty is nan"),
        ({"beams": 4, "length_penalty": 400.0}, "length_penalty is 400.0: it should be from -4 to 4"),
        ({"beams": 2, "early_stopping": 1}, "early_stopping is 1: it should be True or False or 'never'"),
    ],
)  # fmt: skip
def test_settings_that_can_not_be_are_named(settings: dict[str, Any], said: str) -> None:
    with one_line(SettingInvalid, said):
        GenerationSettings(**settings)


LOGITS: F32 = 3 * np.random.default_rng(3).standard_normal(97, np.float32)


@pytest.mark.parametrize(
    "settings",
    [
        GenerationSettings(temperature=0.7),
        GenerationSettings(temperature=1.0, top_k=5),
        GenerationSettings(temperature=1.0, top_k=10_000),
        GenerationSettings(temperature=1.3, top_p=0.6),
        GenerationSettings(temperature=1.0, top_p=1e-6),
        GenerationSettings(temperature=0.9, min_p=0.2),
        GenerationSettings(temperature=0.8, top_k=20, top_p=0.9, min_p=0.05),
    ],
)
def test_filters_equal_those_of_transformers(settings: GenerationSettings) -> None:
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    expected = TemperatureLogitsWarper(settings.temperature)(None, torch.from_numpy(LOGITS)[None])
    if settings.top_k:
        expected = TopKLogitsWarper(settings.top_k)(None, expected)
    if settings.top_p < 1:
        expected = TopPLogitsWarper(settings.top_p)(None, expected)
    if settings.min_p:
        expected = MinPLogitsWarper(settings.min_p)(None, expected)
    np.testing.assert_array_equal(generation.filtered(LOGITS, settings), expected[0].numpy())
    chance, n = np.random.default_rng(11), 4000
    drawn = [generation.choose(LOGITS, settings, chance) for _ in range(n)]
    shares, wanted = np.bincount(drawn, minlength=len(LOGITS)) / n, expected[0].double().softmax(-1).numpy()
    assert (shares[wanted == 0] == 0).all()
    assert (np.abs(shares - wanted) <= 5 * np.sqrt(wanted * (1 - wanted) / n) + 1e-3).all()


class Fixed:
    """A generator of one number."""

    def __init__(self, number: float) -> None:
        self.number = number

    def random(self) -> float:
        return self.number


@pytest.mark.parametrize(("number", "token"), [(0.0, 1), (0.5, 2), (np.nextafter(1.0, 0.0), 3)])
def test_no_number_draws_what_a_filter_refused(number: float, token: int) -> None:
    logits = np.array([-5, 1, 1.5, 1, -5], np.float32)
    settings = GenerationSettings(temperature=1.0, top_k=3)
    assert generation.choose(logits, settings, Fixed(number)) == token  # type: ignore[arg-type]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("temperature", [1e-30, 1e-40, 1e-320])
@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_the_coldest_draws_are_the_likeliest(temperature: float, filters: dict[str, Any]) -> None:
    settings = GenerationSettings(temperature=temperature, **filters)
    assert generation.choose(LOGITS, settings, np.random.default_rng(1)) == int(LOGITS.argmax())


@pytest.mark.filterwarnings("error")
def test_the_hottest_draws_are_all_alike() -> None:
    settings, chance = GenerationSettings(temperature=1e300), np.random.default_rng(1)
    assert len({generation.choose(LOGITS, settings, chance) for _ in range(2000)}) == len(LOGITS)


def test_the_seed_decides_what_is_drawn() -> None:
    def draw(seed: int) -> list[int]:
        class Flat(Script):
            def read(self, states: list[State], sequences: list[list[int]]) -> F32:
                return np.zeros((1, VOCAB), np.float32)

        settings = GenerationSettings(temperature=1.0, seed=seed, max_new_tokens=8)
        return generate(Flat([0]), [1], settings).tokens

    assert draw(1) == draw(1) != draw(2)
