"""Grammars of calls: they allow each family's calls, and all that they allow is calls that obey the schemas."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from grammar_packs import byte_level, write_grammar_pack
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from transcripts import TOOLS, TRANSCRIPTS

from moert.beside.grammar import Matchers
from moert.engine.constraint import Constrained, Grammar
from moert.engine.engine import Engine
from moert.errors import SettingInvalid
from moert.serve.calls import FORMATS, CallReader, Format, schemas_of
from moert.serve.forcing import FORMS, Choice, forced
from moert.serve.scanning import Arguments, CallBegins, CallEnds, Text

END = 1
BY_NAME = {each.name: each for each in FORMATS}
STRICT: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "strict": True, "parameters": {
        "type": "object", "additionalProperties": False, "required": ["city", "days"],
        "properties": {
            "city": {"enum": ["Köln", "Paris"]}, "days": {"type": "integer", "minimum": 0, "maximum": 9},
            "metric": {"type": "boolean"}, "at": {"type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 2},
        },
        "$defs": {"n": {"type": "boolean"}},
    }}},
    {"type": "function", "function": {"name": "now", "parameters": {
        "type": "object", "properties": {}, "additionalProperties": False}}},
]  # fmt: skip
SCHEMAS = schemas_of(STRICT)


def tokenizer_of(form: Format, special: bool) -> Tokenizer:
    """One token a byte, and the form's marks as special tokens, or none."""
    tokenizer = byte_level()
    marks = [*form.special, "<|START_THINKING|>", "<|END_THINKING|>", "<|start|>", "<|end|>", "<|channel|>"]
    if special:
        tokenizer.add_special_tokens([AddedToken(each, special=True) for each in marks])
    return tokenizer


def specials(tokenizer: Tokenizer) -> dict[str, int]:
    return {each.content: number for number, each in tokenizer.get_added_tokens_decoder().items() if each.special}


def constrained(tokenizer: Tokenizer, grammar: Grammar) -> Constrained:
    matchers = Matchers(lambda: tokenizer, tokenizer.get_vocab_size(), [END])
    return Constrained(matchers.of(grammar, lambda nbytes, purpose: nullcontext()), frozenset({END}))


def written_by_chance(tokenizer: Tokenizer, grammar: Grammar, seed: int) -> str | None:
    """A text that the grammar allows; None where it has no end after some hundred tokens."""
    place, rng, ids = constrained(tokenizer, grammar), np.random.default_rng(seed), []
    while len(ids) < 500:
        scores = rng.normal(size=tokenizer.get_vocab_size()).astype(np.float32)
        token = int(place.masked(scores).argmax())
        if token == END:
            return str(tokenizer.decode(ids, skip_special_tokens=False))
        ids.append(token)
        place.take(token, "")
        assert not place.stuck or place.complete
        if place.stuck:
            break
    return None


def allows(tokenizer: Tokenizer, grammar: Grammar, text: str) -> bool:
    """Whether a text may be a whole answer."""
    place = constrained(tokenizer, grammar)
    for token in tokenizer.encode(text, add_special_tokens=False).ids:
        if not place.allowed[token]:
            return False
        place.take(token, "")
    return bool(place.allowed[END])


def calls(form: Format, text: str) -> list[tuple[str, dict[str, Any]]]:
    """The calls of a text in which there is nothing else."""
    reader = CallReader(form, SCHEMAS)
    events = [*reader.push(text), *reader.flush()]
    assert all(each.whole for each in events if isinstance(each, CallEnds))
    if not form.whole_reply:
        assert not [each for each in events if isinstance(each, Text)]
    names = [each.name for each in events if isinstance(each, CallBegins)]
    texts = ["" for _ in names]
    for each in events:
        if isinstance(each, Arguments):
            texts[each.index] += each.text
    return [(name, json.loads(arguments)) for name, arguments in zip(names, texts, strict=True)]


FORCED = [each for each in FORMATS if each.name in FORMS]


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("form", FORCED, ids=lambda each: each.name)
def test_all_that_is_allowed_is_calls(form: Format, special: bool) -> None:
    tokenizer = tokenizer_of(form, special)
    choices: Sequence[Choice] = (Choice(), Choice("now"), Choice(parallel=False))
    for choice in choices:
        found = forced(form, STRICT, choice, specials(tokenizer) if special else {})
        assert found is not None
        assert found.opening is not form.whole_reply
        ended = 0
        for seed in range(4):
            text = written_by_chance(tokenizer, found.grammar, seed)
            made = [] if text is None else calls(form, text)
            assert made or text is None
            ended += text is not None
            for name, arguments in made:
                jsonschema.validate(arguments, SCHEMAS[name])
                assert choice.name in (None, name)
            assert choice.parallel or len(made) < 2
        assert ended or form.whole_reply


@pytest.mark.parametrize(
    "name",
    [
        "hermes", "qwen3-coder", "seed", "glm 4.5", "deepseek v3", "deepseek v3.1", "deepseek v3.2", "kimi", "minimax",
        "mistral, names", "functiongemma", "nemotron", "hunyuan", "granite 3", "cohere", "gpt-oss",
    ],
)  # fmt: skip
@pytest.mark.parametrize("special", [False, True])
def test_what_each_family_writes_is_allowed(name: str, special: bool) -> None:
    """Without the text around it, which only a choice of the model allows."""
    transcript = TRANSCRIPTS[name]
    form = BY_NAME[transcript.form]
    tokenizer = tokenizer_of(form, special)
    text = transcript.written[transcript.written.index(form.opens[0]) :].removesuffix("<|call|>")
    for other, plain in (("['x', \"y\"]", '["x", "y"]'), ("\\u00f6", "ö"), ("[CALL_ID]abc", "")):
        text = text.replace(other, plain)  # other ways to write the same
    known = specials(tokenizer) if special else {}
    required, optional = (forced(form, TOOLS, each, known) for each in (Choice(), Choice(optional=True)))
    assert required is not None
    assert optional is not None
    assert allows(tokenizer, required.grammar, text)
    assert allows(tokenizer, optional.grammar, text)
    assert allows(tokenizer, optional.grammar, "Hello, I call nothing.")
    assert not allows(tokenizer, required.grammar, "Hello, I call nothing.")
    assert not allows(tokenizer, required.grammar, text.replace("get_weather", "get_whether")) or "get_" not in text
    if form.name != "harmony":  # where text is a message of its own
        assert allows(tokenizer, optional.grammar, f"Let me see. {text}")


def test_thinking_that_stands_outside_answers() -> None:
    harmony, cohere = (tokenizer_of(BY_NAME[name], True) for name in ("harmony", "cohere"))
    found = forced(BY_NAME["harmony"], STRICT, Choice(), specials(harmony))
    assert found is not None
    call = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"
    assert allows(harmony, found.grammar, f"<|channel|>analysis<|message|>Hm, I call.<|end|><|start|>assistant{call}")
    assert not allows(harmony, found.grammar, "<|channel|>final<|message|>No.")
    action = '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>'
    for thinks, before in ((False, "<|START_THINKING|>"), (True, "")):
        found = forced(BY_NAME["cohere"], STRICT, Choice(thinks=thinks), specials(cohere))
        assert found is not None
        assert allows(cohere, found.grammar, f"{before}I plan.<|END_THINKING|>{action}")


def test_texts_between_tags_end_with_their_tag() -> None:
    form = BY_NAME["qwen_coder"]
    tokenizer = tokenizer_of(form, False)
    found = forced(form, TOOLS, Choice(), {})
    assert found is not None
    text = "<tool_call>\n<function=get_weather>\n<parameter=city>\nA\n<b>\n</parameter>\n{}</function>\n</tool_call>"
    assert allows(tokenizer, found.grammar, text.format(""))
    assert allows(tokenizer, found.grammar, text.format("<parameter=days>\n3\n</parameter>\n"))
    assert not allows(tokenizer, found.grammar, text.format("<parameter=days>\nthree\n</parameter>\n"))
    assert not allows(tokenizer, found.grammar, text.format("<parameter=mode>\nsoon\n</parameter>\n"))
    assert allows(tokenizer, found.grammar, text.format("<parameter=mode>\nlater\n</parameter>\n"))


@pytest.mark.parametrize(
    ("form", "tools", "choice"),
    [
        ("gemma4", [{"function": {"name": "a", "parameters": {"properties": {"b": {}}, "required": ["b"]}}}], Choice()),
        ("hermes", STRICT, Choice("other")),
        ("hermes", [], Choice()),
        ("hermes", [{"function": {"name": 'a"b'}}], Choice()),
        ("qwen_coder", [{"function": {"name": "a", "parameters": {"properties": {"b>": {}}}}}], Choice()),
        ("lfm2", [{"function": {"name": "a", "parameters": {"properties": {"b-c": {}}}}}], Choice()),
        ("hermes", [{"function": {"name": "a", "parameters": {"description": "x" * 300_000}}}], Choice()),
    ],
)
def test_where_there_is_no_grammar(form: str, tools: list[dict[str, Any]], choice: Choice) -> None:
    assert forced(BY_NAME[form], tools, choice, {}) is None


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from(["string", "object", "a", "#", "#/$defs/a", ""]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(
            ["type", "properties", "required", "enum", "anyOf", "items", "$ref", "$defs", "allOf", "const", "a"]
        ),
        inner, max_size=4,
    ),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(FORMATS), _VALUES, st.sampled_from(sorted(TRANSCRIPTS)), st.booleans())
def test_tools_of_any_kind_raise_no_error(form: Format, schema: Any, name: str, optional: bool) -> None:
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": schema}}]
    forced(form, tools, Choice(optional=optional), {})
    reader = CallReader(BY_NAME[TRANSCRIPTS[name].form], schemas_of(tools))
    reader.push(TRANSCRIPTS[name].written)
    reader.flush()


def test_references_are_followed() -> None:
    """As pydantic writes enums and models inside of models."""
    schema = {
        "type": "object", "required": ["a"],
        "properties": {"a": {"$ref": "#/$defs/A"}, "b": {"allOf": [{"$ref": "#/$defs/B"}]}},
        "$defs": {"A": {"enum": ["12", "x"]}, "B": {"type": "object", "properties": {"c": {"type": "integer"}}}},
    }  # fmt: skip
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    for name, text in (
        (
            "qwen_coder",
            '<tool_call>\n<function=f>\n<parameter=a>\n12\n</parameter>\n<parameter=b>\n{"c": 3}\n</parameter>\n'
            "</function>\n</tool_call>",
        ),
        ("gemma4", '<|tool_call>call:f{a:<|"|>12<|"|>,b:{c:3}}<tool_call|>'),
    ):  # fmt: skip
        form = BY_NAME[name]
        tokenizer = tokenizer_of(form, False)
        found = forced(form, tools, Choice(), {})
        assert found is not None
        assert allows(tokenizer, found.grammar, text)
        assert not allows(tokenizer, found.grammar, text.replace("12", "13"))
        reader = CallReader(form, schemas_of(tools))
        texts = [each.text for each in [*reader.push(text), *reader.flush()] if isinstance(each, Arguments)]
        assert json.loads("".join(texts)) == {"a": "12", "b": {"c": 3}}


def test_a_model_is_made_to_call(tmp_path: Path) -> None:
    with Engine.open(write_grammar_pack(tmp_path / "p", byte_level()), predict="none", threads=1) as engine:
        found = forced(BY_NAME["hermes"], STRICT, Choice(), engine.text.special)
        assert found is not None
        for seed in range(6):
            answer = engine.generate("ab", grammar=found.grammar, max_new_tokens=600, temperature=1.0, seed=seed)
            if answer.stop_reason == "eos":
                assert calls(BY_NAME["hermes"], answer.text)
        tools = [{"function": {"name": "a", "parameters": {"type": "object", "not": {}}}}]
        refused = forced(BY_NAME["hermes"], tools, Choice(), engine.text.special)
        assert refused is not None
        with pytest.raises(SettingInvalid, match="grammar has a grammar that can't be followed"):
            engine.generate("ab", grammar=refused.grammar)
