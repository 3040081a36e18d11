"""Constrained answers: schemas, grammars and expressions over several kinds of tokenizers, and refusals."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from command_line import Moert
from grammar_packs import SPEC, TOKENIZERS, VOCAB, byte_level, unigram, words, write_grammar_pack
from tiny_packs import DECODER, write_pack
from tokenizers import Tokenizer
from tokenizers.models import Unigram

from moert.beside import grammar as grammars
from moert.beside.grammar import Matchers, token_bytes
from moert.chat.conversation import opening_of
from moert.engine.constraint import Constrained, Grammar, Opening
from moert.engine.engine import Engine
from moert.engine.generation import GenerationSettings
from moert.errors import SettingInvalid
from moert.pack.text import ChatFormat
from tests.refusing import one_line

NEW = {"max_new_tokens": 300, "temperature": 1.0}
SCHEMAS: Mapping[str, Any] = {
    "integer": {"type": "integer", "minimum": -20, "maximum": 300},
    "number": {"type": "number", "minimum": 0, "maximum": 1},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "string": {"type": "string", "maxLength": 8},
    "pattern": {"type": "string", "pattern": "^[a-f]{2,4}$"},
    "const": {"const": {"a": [1, "é"]}},
    "enum": {"enum": ["red", "grün", "日本", 3, None, {"x": 1}]},
    "array": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    "tuple": {"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "null"}], "items": False, "minItems": 2},
    "object": {
        "type": "object", "properties": {"näme": {"type": "string", "maxLength": 4}, "b": {"type": "boolean"}},
        "required": ["näme", "b"], "additionalProperties": False,
    },
    "optional": {"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": False},
    "nested": {
        "type": "object", "required": ["a"], "additionalProperties": False,
        "properties": {"a": {"type": "object", "required": ["b"], "additionalProperties": False, "properties": {
            "b": {"type": "array", "maxItems": 2, "items": {"enum": ["x", "y"]}}}}},
    },
    "anyOf": {"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"type": "null"}, "maxItems": 2}]},
    "types": {"type": ["boolean", "null"]},
    "refs": {
        "$defs": {"leaf": {"type": "boolean"}}, "type": "array", "maxItems": 2, "items": {"$ref": "#/$defs/leaf"},
    },
    "true": True,
}  # fmt: skip


@pytest.fixture(scope="module", params=TOKENIZERS)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    pack = write_grammar_pack(tmp_path_factory.mktemp("grammar") / "p", TOKENIZERS[request.param]())
    with Engine.open(pack, predict="none", threads=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def bytes_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    pack = write_grammar_pack(tmp_path_factory.mktemp("grammar") / "p", byte_level())
    with Engine.open(pack, predict="none", threads=1) as opened:
        yield opened


@pytest.mark.parametrize("name", SCHEMAS)
def test_sampled_answers_are_what_the_schema_allows(engine: Engine, name: str) -> None:
    """A model with random weights ends each of them that is bounded; unbounded ones may be cut."""
    if name in ("enum", "object") and isinstance(engine.text.tokenizer.model, Unigram):
        pytest.skip("this tokenizer has no letters ä and ü")
    schema = SCHEMAS[name]
    ended = 0
    for seed in range(12):
        answer = engine.generate("ab", json_schema=schema, seed=seed, **NEW)
        if answer.stop_reason == "eos":
            jsonschema.validate(json.loads(answer.text), schema)
            ended += 1
        else:
            assert name == "true"
            assert answer.stop_reason == "max_new_tokens"
    assert ended >= (2 if name == "true" else 12)


def test_greedy_answers_end_where_the_grammar_does(engine: Engine) -> None:
    answer = engine.generate("ab", json_schema={"enum": ["red", "reduced"]}, max_new_tokens=40)
    assert json.loads(answer.text) in ("red", "reduced")
    assert answer.stop_reason == "eos"
    assert answer.tokens[-1] in SPEC.tokens.eos


def test_a_letter_that_the_tokenizer_lacks_ends_an_answer(tmp_path: Path) -> None:
    with Engine.open(write_grammar_pack(tmp_path / "p", unigram()), predict="none", threads=1) as engine:
        answer = engine.generate("ab", json_schema={"const": "grün"}, max_new_tokens=40)
        assert (answer.text, answer.stop_reason) == ('"gr', "grammar")


def test_any_object(bytes_engine: Engine) -> None:
    found = [bytes_engine.generate("ab", grammar=Grammar("json_object"), seed=seed, **NEW) for seed in range(8)]
    whole = [each for each in found if each.stop_reason == "eos"]
    assert whole
    assert all(isinstance(json.loads(each.text), dict) for each in whole)
    assert all(each.text.startswith("{") for each in found)


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (Grammar("regex", "[0-9]{2}-(a|b)+c"), "[0-9]{2}-(a|b)+c"),
        ('start: "x" number\nnumber: /[1-9]/ | "(" number ")"', r"x\(*[1-9]\)*"),
        ("start: /[ab]{3}/", "[ab]{3}"),
    ],
)
def test_expressions_and_grammars(engine: Engine, grammar: Any, pattern: str) -> None:
    for seed in range(10):
        answer = engine.generate("ab", grammar=grammar, seed=seed, **NEW)
        assert answer.stop_reason == "eos"
        assert re.fullmatch(pattern, answer.text)


def test_requests_together_and_apart_answer_alike(bytes_engine: Engine) -> None:
    """Each with a grammar of its own, or none."""
    asked: list[dict[str, Any]] = [
        {"json_schema": SCHEMAS["array"]},
        {},
        {"grammar": "start: /[ab]{9}/"},
        {"json_schema": SCHEMAS["nested"]},
    ]
    alone = [bytes_engine.generate("ab", seed=3, **NEW, **each) for each in asked]
    with bytes_engine.session() as session:
        requests = [session.add("ab", seed=3, **NEW, **each) for each in asked]
        for _ in session:
            pass
    assert [each.answer.tokens for each in requests] == [each.tokens for each in alone]


def test_a_fork_goes_on_by_itself(bytes_engine: Engine) -> None:
    with bytes_engine.session() as session:
        first = session.add("ab", grammar="start: /[a-z]{12}/", seed=1, **NEW)
        for _ in range(4):
            session.turn()
        twins = [session.fork(first, seed=seed) for seed in (2, 3)]
        with pytest.raises(SettingInvalid, match="can't change"):
            session.fork(first, grammar="start: /a/")
        for _ in session:
            pass
    texts = [each.answer.text for each in (first, *twins)]
    assert all(re.fullmatch("[a-z]{12}", each) for each in texts)
    assert {each[:4] for each in texts} == {texts[0][:4]}
    assert len({*texts}) == 3


def test_stop_strings_logprobs_and_penalties_go_with_grammars(bytes_engine: Engine) -> None:
    grammar = "start: /[a-c]{30}/"
    answer = bytes_engine.generate("ab", grammar=grammar, stop="b", seed=1, **NEW)
    assert answer.stop_reason == "stop_string"
    assert {*answer.text} <= {*"ac"}
    noted = bytes_engine.generate("ab", grammar=grammar, logprobs=2, seed=1, frequency_penalty=2.0, **NEW)
    plain = bytes_engine.generate("ab", logprobs=2, max_new_tokens=1)
    assert noted.logprobs is not None
    assert plain.logprobs is not None
    assert noted.logprobs[0].likeliest == plain.logprobs[0].likeliest  # the model's own
    assert re.fullmatch("[a-c]{30}", noted.text)
    biased = bytes_engine.generate("ab", grammar=grammar, logit_bias=dict.fromkeys(range(VOCAB), -100.0))
    assert re.fullmatch("[a-c]{30}", biased.text)


def test_token_ids_are_answered_by_a_grammar_too(bytes_engine: Engine) -> None:
    ids = bytes_engine.encode("ab")
    answer = bytes_engine.generate(ids, json_schema={"type": "boolean"}, max_new_tokens=9)
    assert bytes_engine.text.tokenizer.decode(answer.tokens) in ("true", "false")


def test_special_tokens_never_stand_in_an_answer(bytes_engine: Engine) -> None:
    """Their names are texts like others, which other tokens spell."""
    for seed in range(8):
        answer = bytes_engine.generate("ab", grammar='start: ("<think>" | "</s>") /[^a]{2}/', seed=seed, **NEW)
        assert min(answer.tokens[:-1]) >= 6
        assert answer.text.startswith(("<think>", "</s>"))


def test_a_model_without_end_tokens_ends_with_the_grammar(tmp_path: Path) -> None:
    with Engine.open(write_grammar_pack(tmp_path / "p", byte_level(), eos=()), predict="none", threads=1) as engine:
        answer = engine.generate("ab", grammar="start: /[ab]{3}/")
        assert (len(answer.text), answer.stop_reason) == (3, "eos")


def test_a_grammar_in_which_nothing_can_come_next(bytes_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    matcher = bytes_engine._matching(Grammar("regex", "ab"), lambda nbytes, purpose: nullcontext())
    matcher.take_text("x")
    assert Constrained(matcher, frozenset({1})).stuck
    monkeypatch.setattr(grammars.TokenMatcher, "take", lambda self, token: self.take_text("?"))
    answer = bytes_engine.generate("ab", grammar="start: /xy/")
    assert (answer.stop_reason, answer.text) == ("grammar", "x")


def test_others_run_while_an_answer_goes_on_in_its_grammar(bytes_engine: Engine) -> None:
    """Python takes its lock away from nobody here, so that another thread runs only where a step gives it up."""
    ambiguous = Grammar("lark", 'start: a\na: a a | "a"')
    matcher = bytes_engine.matcher(ambiguous, lambda nbytes, purpose: nullcontext())
    token, begin, ran, interval = int(matcher.allowed.argmax()), threading.Event(), list[int](), sys.getswitchinterval()
    other = threading.Thread(target=lambda: ran.append(begin.wait(60)))
    other.start()
    sys.setswitchinterval(1000)
    try:
        begin.set()
        steps = sum(not ran and matcher._steps.consume(matcher._matcher, token) for _ in range(400))
        found = bool(ran)
    finally:
        sys.setswitchinterval(interval)
        other.join()
    assert found, f"{steps} steps gave nobody else a turn"


# What is refused ------------------------------------------------------------------------------------------------------

HOSTILE = {
    "deep": '{"items":' * 400 + "{}" + "}" * 400,
    "very deep": '{"items":' * 20000 + "{}" + "}" * 20000,
    "huge": json.dumps({"enum": ["x" * 300_000]}),
    "no JSON": "{'type': 'object'}",
    "list": "[]",
    "number": "12",
    "text": '"object"',
    "empty": "",
    "wrong type": '{"type": "objekt"}',
    "type of a type": '{"type": 12}',
    "properties": '{"type": "object", "properties": []}',
    "never": "false",
    "remote": '{"$ref": "http://127.0.0.1:1/schema.json"}',
    "missing": '{"$ref": "#/$defs/none"}',
    "circle": '{"$ref": "#"}',
    "circle of two": '{"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}',
    "expression": '{"type": "string", "pattern": "(a"}',
    "not": '{"not": {"type": "string"}}',
    "unique": '{"type": "array", "uniqueItems": true}',
    "contradiction": '{"type": "integer", "minimum": 3, "maximum": 1}',
    "many ways": json.dumps({"allOf": [{"anyOf": [
        {"type": "object", "properties": {f"{letter}{at}": {"type": "string"}}} for letter in "ab"]} for at in range(18)
    ]}),
    "NaN": '{"const": NaN}',
    "surrogate": '{"const": "\\ud800"}',
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_schemas_are_one_line(bytes_engine: Engine, name: str) -> None:
    before, used_s = bytes_engine.times.new_tokens, sum(os.times()[:4])
    with one_line(SettingInvalid, "^json_schema .{,400}$"):
        bytes_engine.generate("ab", json_schema=HOSTILE[name])
    assert bytes_engine.times.new_tokens == before
    assert sum(os.times()[:4]) - used_s < 20
    assert bytes_engine.generate("ab", json_schema={"type": "boolean"}).text in ("true", "false")


def test_a_schema_without_end_is_cut(bytes_engine: Engine) -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    answer = bytes_engine.generate("ab", json_schema=schema, max_new_tokens=60)
    assert (answer.stop_reason, answer.text.replace(" ", "")[:12]) == ("max_new_tokens", '{"a":{"a":{"')


@pytest.mark.parametrize(
    "grammar",
    [
        "",
        "start",
        'start: "a',
        "begin: /a/",
        "start: other",
        "start: /(/",
        "start: <|none|>",
        "start: start",
        "start: <[9999]>",
        "a\ud800",
    ],
)
def test_hostile_grammars_are_one_line(bytes_engine: Engine, grammar: str) -> None:
    with one_line(SettingInvalid, "^grammar "):
        bytes_engine.generate("ab", grammar=grammar)


@pytest.mark.parametrize("text", ["(", "a{2,1}", "(?<=a)b", "[z-a]"])
def test_hostile_expressions_are_one_line(bytes_engine: Engine, text: str) -> None:
    with one_line(SettingInvalid, "^grammar "):
        bytes_engine.generate("ab", grammar=Grammar("regex", text))


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGXCPU)", "compiling it takes more than 2 s"),
        ("import os; os.abort()", "compiling it takes too much memory"),
        ("raise SystemExit(3)", "the process that compiles it ended with status 3"),
        ("import time; time.sleep(60)", "is not done after 0 s"),
    ],
)
def test_a_process_that_compiles_says_how_it_ended(
    body: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ends.py").write_text(body)
    monkeypatch.setattr(grammars, "_PROCESS", tmp_path / "ends.py")
    monkeypatch.setattr(grammars, "_LONGEST_S", 60.0 if "sleep" not in body else 0.5)
    with pytest.raises(SettingInvalid, match=re.escape(says)):
        grammars.check_apart(Grammar("lark", 'start: "a"'))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"json_schema": True, "grammar": "start: /a/"}, "json_schema and grammar exclude each other"),
        ({"json_schema": True, "beams": 2}, "json_schema does not go with beam search"),
        ({"grammar": "start: /a/", "beams": 2}, "grammar does not go with beam search"),
        ({"json_schema": True, "ignore_eos": True}, "ignore_eos does not go with json_schema"),
        ({"json_schema": 3}, "json_schema is 3"),
        ({"grammar": 3}, "grammar is 3"),
        ({"json_schema": {"const": {1}}}, "json_schema is not JSON"),
    ],
)
def test_settings_that_exclude_each_other(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingInvalid, match=says):
        GenerationSettings(**changes)
    with pytest.raises(SettingInvalid, match="kind"):
        Grammar("ebnf", "x")  # type: ignore[arg-type]


def test_tokenizers_that_can_not_spell_it(tmp_path: Path) -> None:
    pack = write_grammar_pack(tmp_path / "w", words())
    with Engine.open(pack, predict="none", threads=1) as engine, one_line(SettingInvalid, "whose decoder is WordPiece"):
        engine.generate("a", json_schema=True)
    with Engine.open(write_pack(tmp_path / "letters", DECODER, paths=False), predict="none", threads=1) as engine:
        with pytest.raises(SettingInvalid, match="can't be written with the tokens"):
            engine.generate("a", json_schema={"type": "object"})
        assert engine.generate("a", grammar="start: /[ab]{3}/").stop_reason == "eos"


def test_without_the_package(bytes_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "find_spec", lambda name: None)
    with pytest.raises(SettingInvalid, match=r"json_schema needs the package llguidance: pip install 'moert\[serve\]'"):
        bytes_engine.generate("ab", json_schema=True)


# Tokenizers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TOKENIZERS)
def test_bytes_of_tokens_are_the_text_of_an_answer(name: str) -> None:
    tokenizer: Tokenizer = TOKENIZERS[name]()
    bodies = token_bytes(tokenizer, VOCAB)
    rng = np.random.default_rng(0)
    count = tokenizer.get_vocab_size()
    for _ in range(300):
        ids = [int(each) for each in rng.integers(6, count, 12)]
        text = b"".join(bodies[each] for each in ids).decode("utf-8", "replace")
        assert tokenizer.decode(ids) in (text, text.removeprefix(" ")) or "\ufffd" in text
    assert bodies[count:] == [b""] * (VOCAB - count)


def test_a_tokenizer_with_more_tokens_than_the_model() -> None:
    matchers = Matchers(byte_level, 200, [1])
    matcher = matchers.of(Grammar("regex", "ab"), lambda nbytes, purpose: nullcontext())
    assert len(matcher.allowed) == 200


# Where it begins ------------------------------------------------------------------------------------------------------


def test_the_opening_is_free() -> None:
    tokenizer = byte_level()
    matchers = Matchers(lambda: tokenizer, VOCAB, [1])
    ids, newlines = tokenizer.encode, tokenizer.encode("\n\n").ids

    def constrained(**changes: Any) -> Constrained:
        matcher = matchers.of(Grammar("regex", "[0-9]{2}"), lambda nbytes, purpose: nullcontext())
        return Constrained(matcher, frozenset({1}), Opening(("</think>",), breaks=frozenset(newlines), **changes))

    found = constrained(begins=True)
    assert found.allowed.sum() == VOCAB - 1  # all but the end
    for token in ids("hm 12</think>").ids:
        found.take(token, tokenizer.decode([token], skip_special_tokens=False))
    assert found.allowed[newlines[0]]
    found.take(newlines[0], "\n\n")
    assert not found.allowed[newlines[0]]
    assert {tokenizer.decode([int(each)]) for each in found.allowed.nonzero()[0]} == {*"0123456789", "12"}
    for letter in "12":
        found.take(ids(letter).ids[0], letter)
    assert (found.complete, found.allowed.nonzero()[0].tolist()) == (True, [1])

    spelt = constrained(begins=True)  # the mark, and the answer's beginning in the same token
    spelt.take(7, "</thi")
    spelt.take(8, "nk>\n3")
    assert not spelt.complete
    spelt.take(ids("4").ids[0], "4")
    assert spelt.complete
    wrong = constrained(begins=True)
    wrong.take(8, "</think>\nno")
    assert wrong.stuck

    thinks = constrained(openers=frozenset({4}))
    assert thinks.allowed[4]
    thinks.take(4, "<think>")
    assert thinks.allowed.sum() == VOCAB - 1
    answers = constrained(openers=frozenset({4}))
    answers.take(ids("1").ids[0], "1")
    assert not answers.allowed[4]
    assert constrained(begins=True, ends=True).allowed[1]


@pytest.mark.parametrize(
    ("template", "prompt", "expected"),
    [
        ("no thinking", "user\nassistant\n", None),
        ("<think>", "assistant\n<think>\n", Opening(("</think>",), True)),
        ("<think>", "assistant\n<think>\n\n</think>\n\n", None),
        ("<think>", "assistant\n", Opening(("</think>",), False, frozenset({4}))),
        ("<|channel|>analysis", "<|start|>assistant", Opening(("<|channel|>final<|message|>",), True)),
        ("<|channel|>", "<|start|>assistant<|channel|>final<|message|>", None),
        ("<|END_THINKING|>", "<|CHATBOT_TOKEN|>", Opening(("<|START_RESPONSE|>",), True)),
        ("[THINK][/THINK]", "[/INST]", None),  # no token for the mark
    ],
)
def test_openings_of_chats(bytes_engine: Engine, template: str, prompt: str, expected: Opening | None) -> None:
    text = bytes_engine.text
    breaks = frozenset(text.tokenizer.token_to_id(name) for name in ("Ċ", "ĊĊ"))
    found = opening_of(prompt, ChatFormat(template, {}), text)
    assert found == (expected and replace(expected, breaks=breaks))
    called = opening_of(prompt, ChatFormat(template, {}), text, calls=True)
    assert called == (expected and replace(expected, breaks=breaks, ends=True))


def test_requests_come_from_other_threads_while_one_runs(tmp_path: Path) -> None:
    """The first arranges the vocabulary, in little memory, while the session belongs to this thread."""
    pack = write_grammar_pack(tmp_path / "p", byte_level())
    with Engine.open(pack, predict="none", threads=1, memory="50%") as engine, engine.session() as session:
        session.add("ab", max_new_tokens=2000)
        added = list[Any]()

        def add(seed: int) -> None:
            added.append(session.add("ab", json_schema=SCHEMAS["nested"], seed=seed, **NEW))

        threads = [threading.Thread(target=add, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads) or session.unfinished:
            session.turn()
        for request in added:
            jsonschema.validate(json.loads(request.answer.text), SCHEMAS["nested"])
        assert len(added) == 4


TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}assistant "
    "{% if thinking %}<think>{% endif %}{% endif %}"
)


def test_a_conversation_thinks_before_it_is_bound(tmp_path: Path) -> None:
    pack = write_grammar_pack(tmp_path / "p", byte_level(), TEMPLATE)
    with Engine.open(pack, predict="none", threads=1) as engine:
        thought = 0
        for seed in range(10):
            talk = engine.conversation(variables={"thinking": seed % 2 == 1})
            for _ in range(2):
                reply = talk.say("ab", json_schema={"type": "boolean"}, seed=seed, temperature=1.0, max_new_tokens=2000)
                assert (reply.text, reply.stop_reason) in (("true", "eos"), ("false", "eos"))
                thought += bool(reply.thinking)
        assert thought >= 8
        kept = talk.say("ab", json_schema={"type": "boolean"})
        assert kept.kept_tokens > 0


# Commands -------------------------------------------------------------------------------------------------------------


def test_commands(moert: Moert, tmp_path: Path) -> None:
    pack = write_grammar_pack(tmp_path / "p", byte_level(), TEMPLATE)
    schema, grammar, lines = tmp_path / "schema.json", tmp_path / "form.lark", tmp_path / "in.jsonl"
    schema.write_text(json.dumps(SCHEMAS["nested"]))
    grammar.write_text("start: /[ab]{4}/")
    lines.write_text('{"prompt": "ab"}\n{"prompt": "ba"}\n')
    assert moert("run", pack, "ab", "--json-schema", schema) == 0
    jsonschema.validate(json.loads(moert.out), SCHEMAS["nested"])
    assert moert("run", pack, "ab", "--grammar", grammar) == 0
    assert re.fullmatch("[ab]{4}\n", moert.out)
    assert moert("run", pack, "--input", lines, "--batch", 2, "--grammar", grammar) == 0
    assert all(re.fullmatch("[ab]{4}", json.loads(line)["output"]) for line in moert.out.splitlines())
    assert moert("chat", pack, "--json-schema", schema, stdin="ab\n") == 0
    jsonschema.validate(json.loads(moert.out), SCHEMAS["nested"])


def test_commands_refuse_in_one_line(moert: Moert, tmp_path: Path) -> None:
    missing, bad = tmp_path / "none.pack", tmp_path / "bad.json"
    bad.write_text('{"type": "objekt"}')
    assert "--json-schema has a schema that can't be followed" in moert.refuses(
        "run", missing, "a", "--json-schema", bad
    )
    assert "can't be read" in moert.refuses("run", missing, "a", "--json-schema", tmp_path / "none.json")
    assert "exclude each other" in moert.refuses("run", missing, "a", "--json-schema", bad, "--grammar", bad)
    assert "--grammar has a grammar" in moert.refuses("chat", missing, "--grammar", bad)
