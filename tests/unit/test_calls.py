"""Calls of tools read from replies: each family's form, broken and cut ones, and text in any pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transcripts import TOOLS, TRANSCRIPTS, Transcript

from moert.chat.conversation import marks_of
from moert.pack.text import ChatFormat
from moert.serve.calls import FORMATS, CallReader, ReplyReader, format_of, schemas_of
from moert.serve.scanning import Arguments, CallBegins, CallEnds, Event, Text, braced_arguments, typed

SCHEMAS = schemas_of(TOOLS)
BY_NAME = {each.name: each for each in FORMATS}


def merged(events: list[Event]) -> list[Event]:
    """Neighbours of one kind as one event."""
    found: list[Event] = []
    for each in events:
        last = found[-1] if found else None
        if isinstance(each, Text) and isinstance(last, Text) and last.part == each.part:
            found[-1] = Text(last.text + each.text, each.part)
        elif isinstance(each, Arguments) and isinstance(last, Arguments) and last.index == each.index:
            found[-1] = Arguments(each.index, last.text + each.text)
        else:
            found.append(each)
    return found


def read(form: str, *pieces: str) -> list[Event]:
    reader = CallReader(BY_NAME[form], SCHEMAS)
    return merged([*(event for piece in pieces for event in reader.push(piece)), *reader.flush()])


def expected(transcript: Transcript) -> list[tuple[str, str]]:
    return [*transcript.calls]


def calls(events: list[Event]) -> list[tuple[str, str]]:
    names = {each.index: each.name for each in events if isinstance(each, CallBegins)}
    texts = {each.index: each.text for each in events if isinstance(each, Arguments)}
    return [(name, texts.get(index, "")) for index, name in names.items()]


def told(events: list[Event]) -> str:
    return "".join(each.text for each in events if isinstance(each, Text))


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_replies_of_each_family(name: str) -> None:
    transcript = TRANSCRIPTS[name]
    events = read(transcript.form, transcript.written)
    assert calls(events) == expected(transcript)
    assert told(events) == transcript.before + transcript.after
    ends = [each for each in events if isinstance(each, CallEnds)]
    assert ends == [CallEnds(index) for index in range(len(transcript.calls))]
    for _, arguments in calls(events):
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_pieces_do_not_matter(name: str) -> None:
    """All pairs of pieces, and pieces of one to five letters."""
    transcript = TRANSCRIPTS[name]
    text, whole = transcript.written, read(transcript.form, transcript.written)
    for place in range(len(text) + 1):
        assert read(transcript.form, text[:place], text[place:]) == whole
    for length in (1, 2, 3, 5):
        assert read(transcript.form, *(text[at : at + length] for at in range(0, len(text), length))) == whole


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_cut_replies(name: str) -> None:
    """Each beginning of a reply is read without an error, in pieces as in one; calls that were whole stay."""
    transcript = TRANSCRIPTS[name]
    for place in range(len(transcript.written)):
        text = transcript.written[:place]
        found = read(transcript.form, text)
        assert read(transcript.form, *text) == found
        indices = [each.index for each in found if isinstance(each, CallEnds)]
        assert indices == [*range(len(calls(found)))]
        for (name, arguments), (right, whole) in zip(calls(found), expected(transcript), strict=False):
            assert name == right
            assert whole.startswith(arguments) or arguments == "{}"


def test_arguments_in_json_come_as_they_are_written() -> None:
    reader = CallReader(BY_NAME["hermes"], SCHEMAS)
    reader.push('<tool_call>\n{"name": "get_weather", "argu')
    assert reader.push('ments": {"ci') == [Arguments(0, '{"ci')]
    assert reader.push('ty": "Par') == [Arguments(0, 'ty": "Par')]
    assert reader.push('is"}') == [Arguments(0, 'is"}')]
    tagged = CallReader(BY_NAME["qwen_coder"], SCHEMAS)
    begun = tagged.push("<tool_call>\n<function=get_weather>\n<parameter=city>\nPar")
    assert begun == [CallBegins(0, "get_weather")]
    assert tagged.push("is\n</parameter>") == [Arguments(0, '{"city": "Paris"')]


def test_text_comes_at_once() -> None:
    reader = CallReader(BY_NAME["hermes"], SCHEMAS)
    assert reader.push("Hello") == [Text("Hello")]
    assert reader.push(" there <tool") == [Text(" there")]
    assert reader.push("s>") == [Text(" <tools>")]
    assert reader.flush() == []


@pytest.mark.parametrize(
    ("form", "written"),
    [
        ("hermes", "a <tool_call> of nothing </tool_call> b"),
        ("hermes", "<tool_call>{}</tool_call>"),
        ("hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
        ("hermes", '<tool_call>{"name": 3}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now'),
        ("hermes", "<tool_call>[]</tool_call>"),
        ("hermes", "text that ends with space \n"),
        ("qwen_coder", "<function=>x</function>"),
        ("glm", "<tool_call>two words\n</tool_call>"),
        ("deepseek", "<｜tool▁calls▁begin｜>nothing<｜tool▁calls▁end｜>"),
        ("kimi", "<|tool_calls_section_begin|><|tool_calls_section_end|>"),
        ("minimax", "<minimax:tool_call>\nwrong\n</minimax:tool_call>"),
        ("mistral", "[TOOL_CALLS] and so on"),
        ("gemma4", "<|tool_call>cal:x{}<tool_call|>"),
        ("lfm2", "<|tool_call_start|>1 + 1<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[f(3)]<|tool_call_end|>"),
        ("llama", '{"answer": 3, "because": {"name": "now"}}'),
        ("llama", '{"name": "nobody", "parameters": {}}'),
        ("llama", "{not JSON"),
        ("pythonic", "[1, 2, 3]"),
        ("pythonic", "[other(a=1)]"),
        ("cohere", "<|START_ACTION|>[]<|END_ACTION|>"),
        ("harmony", "<|channel|>final<|message|>to=functions.now is how one calls"),
    ],
)
def test_no_call_is_text_as_it_was_written(form: str, written: str) -> None:
    assert read(form, written) == [Text(written)]
    assert read(form, *written) == [Text(written)]


@pytest.mark.parametrize(
    ("form", "written", "arguments", "after"),
    [
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": 1}</tool_call> b', '{"a": 1}', "b"),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": oops}}</tool_call>b', '{"a": ', "b"),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": [1}}</tool_call>', '{"a": [1', ""),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "b', '{"a": "b', ""),
        ("qwen_coder", "<function=now><parameter=a>1</parameter><parameter=b>2", '{"a": 1', ""),
        ("minimax", '<minimax:tool_call><invoke name="now"><parameter name="a">1</parameter>x', '{"a": 1', ""),
        ("glm", "<tool_call>now\n<arg_key>a</arg_key><arg_value>1", "", ""),
        ("gemma4", "<|tool_call>call:now{a:<tool_call|>b", "", "b"),
        ("harmony", "<|channel|>commentary to=functions.now<|message|>{", "{", ""),
    ],
)
def test_broken_calls_stay_broken(form: str, written: str, arguments: str, after: str) -> None:
    """No client runs them by mistake."""
    events = read(form, written)
    assert calls(events) == [("now", arguments)]
    assert told(events) == after
    assert CallEnds(0, whole=False) in events
    assert read(form, *written) == events


def test_ids_of_the_model() -> None:
    def ids(name: str) -> list[str | None]:
        found = read(TRANSCRIPTS[name].form, TRANSCRIPTS[name].written)
        return [each.id for each in found if isinstance(each, CallBegins)]

    assert ids("kimi") == ["functions.get_weather:0", "functions.now:1"]
    assert ids("cohere") == ["0", "1"]
    assert ids("mistral, names") == [None, "abc"]
    assert ids("hermes") == [None, None]


@pytest.mark.parametrize(
    ("text", "schema", "made"),
    [
        ("3", {"type": "string"}, '"3"'),
        ("3", {"type": "integer"}, "3"),
        ("3.0", {"type": "integer"}, "3"),
        ("3.5", {"type": "number"}, "3.5"),
        ("x", {"type": "integer"}, '"x"'),
        ("true", {"type": "boolean"}, "true"),
        ("False", {"type": "boolean"}, "false"),
        ("true", {"enum": ["true", "no"]}, '"true"'),
        ("null", {"type": ["string", "null"]}, "null"),
        ("12", {"anyOf": [{"type": "string"}, {"type": "null"}]}, '"12"'),
        ("12", {"type": ["string", "integer"]}, "12"),
        ("{'a': True}", {"type": "object"}, '{"a": true}'),
        ("[1, 2", {"type": "array"}, '"[1, 2"'),
        ("1e999", {"type": "number"}, '"1e999"'),
        ("hello", {}, '"hello"'),
        ('"quoted"', {}, '"quoted"'),
        ("NaN", {"type": "number"}, '"NaN"'),
        ("9" * 5000, {"type": "integer"}, json.dumps("9" * 5000)),
        ("[" * 3000, {"type": "array"}, json.dumps("[" * 3000)),
    ],
)
def test_values_between_tags(text: str, schema: dict[str, Any], made: str) -> None:
    assert typed(f"\n{text}\n", schema) == made


@pytest.mark.parametrize("text", ["", "{", "{a}", "{a:1", "[1]", "{a:1}x", "{a:<q>b}", "{" * 500, "{a:[1,2}"])
def test_braces_that_are_none(text: str) -> None:
    assert braced_arguments(text, "<q>") is None


_FRAGMENTS = sorted(
    {mark for each in FORMATS for mark in each.special}
    | {"<parameter=a>", "</parameter>", "</function>", '<invoke name="now">', "call:now", "[now(a=1)]", "```json"}
    | {
        '{"name": "now", "arguments": {',
        '"a": 1',
        "}}",
        "now",
        "{",
        "}",
        "[",
        "]",
        '"',
        "\\",
        " ",
        "\n",
        "é",
        "functions.",
    }
)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(FORMATS), st.lists(st.sampled_from(_FRAGMENTS), max_size=14), st.integers(1, 7))
def test_anything_is_read_without_an_error(form: Any, fragments: list[str], length: int) -> None:
    text = "".join(fragments)
    whole = read(form.name, text)
    assert read(form.name, *(text[at : at + length] for at in range(0, len(text), length))) == whole
    assert len(calls(whole)) == sum(isinstance(each, CallEnds) for each in whole)


# Replies with thinking ------------------------------------------------------------------------------------------------

_THINKING = marks_of(ChatFormat("<think>", {}))
_HARMONY = marks_of(ChatFormat("<|channel|>", {}))
_COHERE = marks_of(ChatFormat("<|END_THINKING|>", {}))


def replies(form: str | None, marks: Any, first: Any, *pieces: str) -> list[Event]:
    reader = ReplyReader(marks, first, None if form is None else BY_NAME[form], SCHEMAS)
    return merged([*(event for piece in pieces for event in reader.push(piece)), *reader.flush()])


@pytest.mark.parametrize(
    ("form", "marks", "first", "text", "events"),
    [
        (
            "hermes", _THINKING, "thinking",
            'If <tool_call> then\n</think>\n\n<tool_call>{"name": "now", "arguments": {}}</tool_call>',
            [Text("If <tool_call> then\n", "thinking"), CallBegins(0, "now"), Arguments(0, "{}"), CallEnds(0)],
        ),
        (
            "harmony", _HARMONY, "answer",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
            "<|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>",
            [Text("Hm.I look.", "thinking"), CallBegins(0, "now"), Arguments(0, "{}"), CallEnds(0)],
        ),
        (
            "harmony", _HARMONY, "answer",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
            [Text("Hm.", "thinking"), Text("Yes.")],
        ),
        (
            "cohere", _COHERE, "answer",
            '<|START_THINKING|>I plan.<|END_THINKING|><|START_ACTION|>[{"tool_call_id": "0", "tool_name": "now", '
            '"parameters": {}}]<|END_ACTION|>',
            [Text("I plan.", "thinking"), CallBegins(0, "now", "0"), Arguments(0, "{}"), CallEnds(0)],
        ),
        (None, _THINKING, "thinking", "a</think>b<tool_call>", [Text("a", "thinking"), Text("b<tool_call>")]),
    ],
)  # fmt: skip
def test_replies_with_thinking(form: str | None, marks: Any, first: Any, text: str, events: list[Event]) -> None:
    assert replies(form, marks, first, text) == events
    assert replies(form, marks, first, *text) == events
    for place in range(len(text)):
        assert replies(form, marks, first, text[:place], text[place:]) == events


# Which form -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<|channel|>commentary' }} to=functions.{{ name }} <|call|>", "harmony"),
        ("<｜tool▁calls▁begin｜>function<｜tool▁sep｜>{{ n }}\n```json", "deepseek_v3"),
        ("<｜tool▁calls▁begin｜>{{ n }}<｜tool▁sep｜>", "deepseek"),
        ('{% set dsml_token = "｜DSML｜" %}', "dsml"),
        ("<|tool_calls_section_begin|>", "kimi"),
        ("'<minimax:tool_call>'", "minimax"),
        ("<tool_call>{{ name }}<arg_key>", "glm"),
        ("<tool_call>\n<function=", "qwen_coder"),
        ("'<|tool_call>call:' + name", "gemma4"),
        ("<start_function_call>call:", "functiongemma"),
        ("List of tools: <|tool_list_start|>", "lfm2"),
        ("<|START_ACTION|>", "cohere"),
        ("[TOOL_CALLS]{{ name }}[ARGS]", "mistral_names"),
        ("[TOOL_CALLS] [", "mistral"),
        ("<TOOLCALL>", "nemotron"),
        ("<tool_calls>", "tool_calls"),
        ("<|tool_call|>", "granite"),
        ("<tools></tools> <tool_call>", "hermes"),
        ("<|python_tag|>", "llama"),
        ("{{ messages }}", None),
    ],
)
def test_the_form_is_found_by_the_template(template: str, name: str | None) -> None:
    found = format_of(template)
    assert (None if found is None else found.name) == name


def test_schemas_of_tools() -> None:
    assert set(SCHEMAS) == {"get_weather", "now"}
    assert schemas_of(None) == {}
    assert schemas_of([{}, {"function": {"name": 3}}, {"name": "a", "parameters": []}, "x"]) == {"a": {}}  # type: ignore[list-item]
