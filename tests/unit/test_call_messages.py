"""Conversations with calls and results, as chat templates of several families take them."""

from __future__ import annotations

import json
from typing import Any

import jinja2
import pytest
from transcripts import TOOLS

from moert.serve.calls import FORMATS, CallReader, schemas_of
from moert.serve.forcing import FORMS
from moert.serve.messages import arguments_of, for_template, written
from moert.serve.scanning import Arguments, CallBegins, Event

BY_NAME = {each.name: each for each in FORMATS}
TALK: list[dict[str, Any]] = [
    {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant", "content": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Köln"}'}},
            {"id": "call_2", "type": "function", "function": {"name": "now", "arguments": ""}},
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "noon"}]},
]  # fmt: skip
HERMES = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}{% endfor %}"
)
DEEPSEEK = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m['tool_calls'] %}"
    "{{ '<｜tool▁call▁begin｜>' + c['function']['name'] + '<｜tool▁sep｜>' + c['function']['arguments'] + '<end>' }}"
    "{% endfor %}{% endfor %}"
)
GLM = (
    "{% for m in messages %}<{{ m.role }}{{ m.name }}>{{ m.content }}{% for tc in m.tool_calls %}{{ tc.function.name }}"
    "{% for k, v in tc.function.arguments.items() %}<arg_key>{{ k }}</arg_key>{{ v }}{% endfor %}"
    "{% endfor %}{% endfor %}"
)


def rendered(template: str, form: str | None) -> str:
    messages = for_template(TALK, template, None if form is None else BY_NAME[form])
    return jinja2.Environment(undefined=jinja2.Undefined).from_string(template).render(messages=messages)


def test_arguments_as_a_table_or_as_text() -> None:
    assert rendered(HERMES, "hermes") == (
        '<system>Be brief.<user>Weather?<assistant><tool_call>{"name": "get_weather", "arguments": {"city": '
        '"K\\u00f6ln"}}</tool_call><tool_call>{"name": "now", "arguments": {}}</tool_call><tool>rain<tool>noon'
    )
    assert rendered(DEEPSEEK, "deepseek").count('get_weather<｜tool▁sep｜>{"city": "Köln"}<end>') == 1
    assert "now<｜tool▁sep｜>{}<end>" in rendered(DEEPSEEK, "deepseek")
    assert "<assistant>get_weather<arg_key>city</arg_key>Kölnnow<toolget_weather>rain<toolnow>noon" in rendered(
        GLM, "glm"
    )


def test_templates_that_know_no_calls_get_them_as_text() -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %} <|tool_list_start|>"
    assert '<assistant><|tool_call_start|>[get_weather(city="Köln"), now()]<|tool_call_end|><tool>rain' in rendered(
        template, "lfm2"
    )


def test_results_by_another_role() -> None:
    template = "{% if message['role'] == 'tool_response' %}"
    assert [each["role"] for each in for_template(TALK, template, BY_NAME["granite"])[3:]] == ["tool_response"] * 2


def test_ids_that_families_know() -> None:
    kimi = for_template(TALK, "tool_calls", BY_NAME["kimi"])
    assert [each["id"] for each in kimi[2]["tool_calls"]] == ["functions.get_weather:0", "functions.now:1"]
    assert [each["tool_call_id"] for each in kimi[3:]] == ["functions.get_weather:0", "functions.now:1"]
    mistral = for_template(TALK, "tool_calls", BY_NAME["mistral"])
    ids = [each["id"] for each in mistral[2]["tool_calls"]]
    assert all(len(each) == 9 and each.isalnum() for each in ids)
    assert [each["tool_call_id"] for each in mistral[3:]] == ids
    other = for_template(TALK, "tool_calls developer", None)
    assert other[2]["tool_calls"][0]["id"] == "call_1"
    assert other[0]["role"] == "developer"


def test_the_conversation_itself_does_not_change() -> None:
    before = json.dumps(TALK)
    for_template(TALK, HERMES, BY_NAME["hermes"])
    assert json.dumps(TALK) == before


@pytest.mark.parametrize(
    ("given", "table"),
    [
        ('{"a": 1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        (None, {}),
        (" ", {}),
        ("[1]", {"arguments": "[1]"}),
        ('{"a": ', {"arguments": '{"a": '}),
        (3, {"arguments": 3}),
    ],
)
def test_arguments_of_any_kind(given: Any, table: dict[str, Any]) -> None:
    assert arguments_of(given) == table


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "tool_calls": None},
        {"role": "assistant", "tool_calls": "x"},
        {"role": "assistant", "tool_calls": [3, {}, {"function": 3}]},
        {"role": "tool", "content": "x"},
        {"role": "user", "content": [{"type": "image_url"}]},
    ],
)
def test_messages_of_any_kind(message: dict[str, Any]) -> None:
    for form in (None, *FORMATS):
        for template in ("", "tool_calls"):
            assert len(for_template([message], template, form)) == 1


@pytest.mark.parametrize("form", FORMS)
def test_written_calls_are_read_again(form: str) -> None:
    message = {"tool_calls": [
        {"function": {"name": "get_weather", "arguments": '{"city": "Köln", "days": 3, "tags": ["a"]}'}},
        {"function": {"name": "now", "arguments": "{}"}},
    ]}  # fmt: skip
    calls = 1 if FORMS[form].single else 2
    message["tool_calls"] = message["tool_calls"][:calls]
    reader = CallReader(BY_NAME[form], schemas_of(TOOLS))
    events: list[Event] = [*reader.push(written(BY_NAME[form], message)), *reader.flush()]
    assert [each.name for each in events if isinstance(each, CallBegins)] == ["get_weather", "now"][:calls]
    texts = "".join(each.text for each in events if isinstance(each, Arguments) and each.index == 0)
    assert json.loads(texts) == {"city": "Köln", "days": 3, "tags": ["a"]}
