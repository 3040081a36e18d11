"""A last message of the assistant is the beginning of the answer: only the rest is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest
from chat_packs import ENDLESS, THINKING, write_chat_pack
from serving import Running, serving

from moert.engine.engine import Engine

HELLO: Any = [{"role": "user", "content": "hello"}]
NEW = 14
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
ON = {"continue_final_message": True, "add_generation_prompt": False}


def begun(text: str = "so i am") -> list[Any]:
    return [*HELLO, {"role": "assistant", "content": text}]


def test_only_the_rest_is_written_in_each_interface(client: httpx.Client, pack: Path) -> None:
    with Engine.open(pack) as engine:
        prompt = engine.text.encode("user hello</s>assistant so i am", whole=True)
        wanted = engine.text.decode(engine.generate(prompt, max_new_tokens=NEW).tokens)
    body = {"model": "tiny", "messages": begun(), "max_tokens": NEW}
    found = client.post(CHAT, json={**body, **ON}).json()
    assert found["choices"][0]["message"]["content"] == wanted
    assert found["usage"]["prompt_tokens"] == len(prompt)
    assert client.post(CHAT, json={**body, "continue_final_message": True}).json()["choices"] == found["choices"]
    closed = client.post(CHAT, json=body).json()
    assert closed["usage"]["prompt_tokens"] > len(prompt), "unasked, the template closes it"
    text = client.post(MESSAGES, json=body).json()
    assert (text["content"], text["usage"]["output_tokens"]) == ([{"type": "text", "text": wanted}], NEW)
    blocks = [*HELLO, {"role": "assistant", "content": [{"type": "text", "text": "so i am"}]}]
    assert client.post(MESSAGES, json={**body, "messages": blocks}).json()["content"] == text["content"]
    counted = client.post(f"{MESSAGES}/count_tokens", json={"messages": begun()}).json()
    assert counted == {"input_tokens": len(prompt)}
    lines = client.post(MESSAGES, json={**body, "stream": True}).text.splitlines()
    pieces = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert "".join(each["delta"]["text"] for each in pieces if each["type"] == "content_block_delta") == wanted


def test_ollama_continues(server: Running, client: httpx.Client) -> None:
    wanted = client.post(MESSAGES, json={"messages": begun(), "max_tokens": NEW}).json()["content"][0]["text"]
    body = {"model": "tiny", "messages": begun(), "options": {"num_predict": NEW}}
    found = client.post("/api/chat", json={**body, "stream": False}).json()
    assert found["message"] == {"role": "assistant", "content": wanted}
    pieces = [json.loads(line) for line in client.post("/api/chat", json=body).text.splitlines()]
    assert "".join(each["message"]["content"] for each in pieces) == wanted
    local = ollama.Client(host=server.url).chat("tiny", begun(), options={"num_predict": NEW})
    assert (local.message.content, local.prompt_eval_count) == (wanted, found["prompt_eval_count"])
    call = {"function": {"name": "a", "arguments": {}}}
    called = {"messages": [*HELLO, {"role": "assistant", "content": "", "tool_calls": [call]}]}
    for changes, words in ((called, "the last message calls tools"), ({"format": "json"}, "leave it out")):
        refused = client.post("/api/chat", json={**body, **changes})
        assert refused.status_code == 400
        assert words in refused.json()["error"]


def test_responses_close_a_last_message(client: httpx.Client) -> None:
    """OpenAI's newer interface has no words for an answer that goes on: an item of the assistant is over."""
    body = {"max_output_tokens": NEW, "store": False}
    begin = client.post("/v1/responses", json={**body, "input": begun()}).json()
    closed = client.post(CHAT, json={"messages": begun(), "max_tokens": NEW}).json()
    assert begin["output"][0]["content"][0]["text"] == closed["choices"][0]["message"]["content"]
    assert begin["usage"]["input_tokens"] == closed["usage"]["prompt_tokens"]


def test_clients_continue(server: Running, client: httpx.Client) -> None:
    body = {"messages": begun(), "max_tokens": NEW}
    wanted = client.post(MESSAGES, json=body).json()["content"][0]["text"]
    theirs = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    found = theirs.messages.create(model="tiny", messages=begun(), max_tokens=NEW)
    assert [each.text for each in found.content if each.type == "text"] == [wanted]
    other = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    answer = other.chat.completions.create(
        model="tiny", messages=begun(), max_tokens=NEW, extra_body=ON
    )  # fmt: skip
    assert answer.choices[0].message.content == wanted


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"add_generation_prompt": True}, "add_generation_prompt should be false where continue_final_message is true"),
        ({"continue_final_message": False}, "add_generation_prompt should be true where"),
        ({"messages": HELLO}, "the last message is not the assistant's"),
        ({"response_format": {"type": "json_object"}}, "leave it out where one is continued"),
        ({"grammar": "start: /a+/"}, "leave it out where one is continued"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "a"}}]}]},
         "the last message calls tools"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(changes: dict[str, Any], words: str, client: httpx.Client) -> None:
    found = client.post(CHAT, json={"messages": begun("Five"), "max_tokens": 2, **ON, **changes})
    assert found.status_code == 400
    assert words in found.json()["error"]["message"]


def test_a_template_that_changes_the_message_is_named(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.role }} {{ m.content | replace('e', 'o') }}</s>{% endfor %}"
    with serving(write_chat_pack(tmp_path / "changes.pack", ENDLESS, template)) as running:
        found = httpx.post(f"{running.url}{MESSAGES}", json={"messages": begun("Five"), "max_tokens": 2}, timeout=60)
        assert found.status_code == 400
        assert "template changes the last message: it can't be continued" in found.json()["error"]["message"]


def test_thinking_that_has_begun_goes_on_as_thinking(tmp_path: Path) -> None:
    pack = write_chat_pack(tmp_path / "thinks.pack", ENDLESS, THINKING, {20: "</think>", 21: "<think>"})
    with serving(pack) as running:
        for text, kind in (("<think>so", "thinking"), ("<think>so</think>so", "text"), ("so", "text")):
            body = {"messages": begun(text), "max_tokens": 3}
            found = httpx.post(f"{running.url}{MESSAGES}", json=body, timeout=60).json()
            assert [each["type"] for each in found["content"]][:1] == [kind], text
