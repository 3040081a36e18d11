"""Tools through the server: calls come whole and in pieces in each interface, and results go back into the template."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import jsonschema
import ollama
import openai
import pytest
from grammar_packs import byte_level, write_grammar_pack
from serving import Running, serving

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role }} {{ m.content }}"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{% endif %}"
    "</s>{% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
)
NO_TOOLS = "{% for m in messages %}{{ m.role }} {{ m.content }}</s>{% endfor %}"
SCHEMA: Any = {
    "type": "object", "additionalProperties": False, "required": ["city", "days"],
    "properties": {"city": {"enum": ["Rome", "日"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
}  # fmt: skip
TOOL: Any = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": SCHEMA}}
OTHER: Any = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
HELLO: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    root = tmp_path_factory.mktemp("tools")
    packs = [
        write_grammar_pack(root / f"{name}.pack", byte_level(), template)
        for name, template in (("hermes", TEMPLATE), ("plain", NO_TOOLS))
    ]
    with serving(*packs) as running:
        yield running


def test_openai_gets_calls_that_obey_the_schema(server: Running) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    asked: Any = {"model": "hermes", "messages": HELLO, "tools": [OTHER, TOOL], "temperature": 1.0, "max_tokens": 300}
    named: Any = {"type": "function", "function": {"name": "weather"}}
    for seed in range(4):
        whole = client.chat.completions.create(**asked, tool_choice=named, parallel_tool_calls=False, seed=seed)
        (choice,) = whole.choices
        (call,) = choice.message.tool_calls or []
        assert choice.finish_reason == "tool_calls"
        assert call.function.name == "weather"
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
        pieces = client.chat.completions.create(
            **asked, tool_choice=named, parallel_tool_calls=False, seed=seed, stream=True
        )
        deltas = [each.choices[0].delta.tool_calls for each in pieces if each.choices[0].delta.tool_calls]
        assert [each[0].index for each in deltas] == [0] * len(deltas)
        assert [each[0].id is not None for each in deltas] == [True] + [False] * (len(deltas) - 1)
        assert "".join(each[0].function.arguments or "" for each in deltas) == call.function.arguments
    several = client.chat.completions.create(**asked, tool_choice="required", seed=1)
    calls = several.choices[0].message.tool_calls or []
    assert calls
    assert len({each.id for each in calls}) == len(calls)
    assert {each.function.name for each in calls} <= {"weather", "clock"}


def test_results_go_back_into_the_template(server: Running) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Rome", "days": 2}'},
    }
    talk: Any = [
        *HELLO, {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]  # fmt: skip
    body = {"model": "hermes", "messages": talk}
    tokens = httpx.post(f"{server.url}/tokenize", json=body).json()["tokens"]
    text = httpx.post(f"{server.url}/detokenize", json={"tokens": tokens}).json()["content"]
    assert '<tool_call>{"name": "weather", "arguments": {"city": "Rome", "days": 2}}</tool_call>' in text
    assert text.endswith("tool sunny</s>assistant ")
    found = client.chat.completions.create(model="hermes", messages=talk, tools=[TOOL], max_tokens=4)
    assert found.choices[0].finish_reason == "length"


def test_anthropic_gets_blocks(server: Running) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    tool: Any = {"name": "weather", "input_schema": SCHEMA}
    asked: Any = {
        "model": "hermes", "messages": HELLO, "tools": [tool], "max_tokens": 300,
        "tool_choice": {"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
    }  # fmt: skip
    whole = client.messages.create(**asked)
    (block,) = [each for each in whole.content if each.type == "tool_use"]
    assert whole.stop_reason == "tool_use"
    jsonschema.validate(block.input, SCHEMA)
    with client.messages.stream(**asked) as pieces:
        (streamed,) = [each for each in pieces.get_final_message().content if each.type == "tool_use"]
    assert streamed.input == block.input
    result = {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "sunny"}]}
    talk: Any = [*HELLO, {"role": "assistant", "content": [block.model_dump()]}, {"role": "user", "content": [result]}]
    assert client.messages.create(model="hermes", messages=talk, tools=[tool], max_tokens=4).stop_reason is not None


def test_responses_have_items(server: Running) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    tool: Any = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
    asked: Any = {"model": "hermes", "tools": [tool], "parallel_tool_calls": False, "max_output_tokens": 300}
    choice: Any = {"type": "function", "name": "weather"}
    first = client.responses.create(input="hello", tool_choice=choice, **asked)
    (call,) = [each for each in first.output if each.type == "function_call"]
    jsonschema.validate(json.loads(call.arguments), SCHEMA)
    result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    second = client.responses.create(input=result, previous_response_id=first.id, model="hermes", max_output_tokens=4)
    assert second.status == "incomplete"
    with client.responses.stream(input="hello", tool_choice=choice, **asked) as pieces:
        kinds = [each.type for each in pieces]
    assert "response.function_call_arguments.delta" in kinds
    assert kinds[-1] == "response.completed"


def test_ollama_gets_tables(server: Running) -> None:
    client = ollama.Client(host=server.url)
    found = client.chat("hermes", messages=HELLO, tools=[TOOL], options={"num_predict": 4})
    assert found.message.role == "assistant"
    call: Any = {"function": {"name": "weather", "arguments": {"city": "Rome", "days": 2}}}
    talk: Any = [
        *HELLO, {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_name": "weather", "content": "sunny"},
    ]  # fmt: skip
    assert client.chat("hermes", messages=talk, tools=[TOOL], options={"num_predict": 4}).done


@pytest.mark.parametrize(
    ("model", "changes", "words"),
    [
        ("plain", {"tools": [TOOL]}, "the model's chat template has no tools"),
        ("hermes", {"tools": [{"type": "web_search"}]}, "should be of type function"),
        ("hermes", {"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice should be"),
        (
            "hermes",
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "a function of tools",
        ),
        ("hermes", {"tool_choice": "required"}, "there are none"),
        (
            "hermes",
            {"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}},
            "one of both",
        ),
        ("hermes", {"response_format": {"type": "json_schema"}}, "schema is missing"),
        ("hermes", {"response_format": {"type": "sound"}}, "response_format.type"),
        (
            "hermes",
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "hiccup"}}}},
            "schema",
        ),
        ("hermes", {"grammar": "start: ("}, "grammar"),
    ],
)
def test_what_can_not_be_followed_is_refused(model: str, changes: Any, words: str, server: Running) -> None:
    body = {"model": model, "messages": HELLO, "max_tokens": 2, **changes}
    found = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert found.status_code == 400
    assert words in found.json()["error"]["message"]
    assert "\n" not in found.json()["error"]["message"]


def test_no_tools_are_shown_where_none_may_be_called(server: Running) -> None:
    body = {"model": "hermes", "messages": HELLO, "max_tokens": 1}
    counts = [
        httpx.post(f"{server.url}/v1/chat/completions", json={**body, **more}, timeout=60).json()["usage"][
            "prompt_tokens"
        ]
        for more in ({}, {"tools": [TOOL], "tool_choice": "none"}, {"tools": [TOOL]})
    ]
    assert counts[0] == counts[1] < counts[2]


def test_answers_follow_their_form(server: Running, tmp_path: Path) -> None:
    body = {"model": "hermes", "messages": HELLO, "max_tokens": 300}
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    for form in (schema, {"type": "json_object"}):
        found = httpx.post(
            f"{server.url}/v1/chat/completions", json={**body, "response_format": form}, timeout=60
        ).json()
        if found["choices"][0]["finish_reason"] == "stop":
            assert isinstance(json.loads(found["choices"][0]["message"]["content"]), dict)
    found = httpx.post(f"{server.url}/v1/chat/completions", json={**body, "grammar": 'start: "yes" | "no"'}).json()
    assert found["choices"][0]["message"]["content"] in ("yes", "no")
