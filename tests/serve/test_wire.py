"""Faults that users found in other servers, and that programs of others found in this one: the bytes must be right."""

from __future__ import annotations

import itertools
import json
import re
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from chat_packs import ENDLESS, SPEC, THINKING, write_chat_pack
from grammar_packs import byte_level, write_grammar_pack
from serving import Running, serving, until
from tiny_packs import EOS, MIXERS_SHAPE

from moert.engine.generation import GenerationSettings
from moert.pack.model_spec import ModelSpec
from moert.serve import answers, server

TOOLS = (
    "{{ tools | tojson }}{% for m in messages %}{{ m.role }} {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}</s>{% endfor %}"
)
HELLO = [{"role": "user", "content": "hello"}]
FINE: Any = {
    "type": "object", "properties": {"fine": {"type": "boolean"}}, "required": ["fine"], "additionalProperties": False,
}  # fmt: skip
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": FINE}}
MOST = 400


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a model that writes calls, and then ends."""
    pack = write_grammar_pack(tmp_path_factory.mktemp("wire") / "calls.pack", byte_level(), TOOLS)
    with (
        serving(pack, defaults=GenerationSettings(logit_bias={EOS: 3.0}, max_new_tokens=MOST)) as running,
        httpx.Client(base_url=running.url, timeout=60) as client,
    ):
        yield client


def chunks(found: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in found.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def test_several_calls_are_numbered_in_their_order(calling: httpx.Client) -> None:
    most = 0
    for seed in range(4):
        body = {
            "messages": HELLO, "tools": [TOOL], "tool_choice": "required", "temperature": 1.0, "seed": seed,
            "logit_bias": {str(each): -9.0 * (seed % 2) for each in (EOS, 3)},  # one and many
            "max_tokens": 200,
        }  # fmt: skip
        whole = calling.post("/v1/chat/completions", json=body).json()["choices"][0]
        pieces = [
            each["choices"][0] for each in chunks(calling.post("/v1/chat/completions", json={**body, "stream": True}))
        ]
        assert [each["finish_reason"] for each in pieces if each["finish_reason"]] == [whole["finish_reason"]]
        deltas = [call for each in pieces for call in each["delta"].get("tool_calls", ())]
        begun = [call["index"] for call in deltas if "id" in call]
        calls = whole["message"].get("tool_calls", [])
        assert begun == [*range(len(calls))], "each call begins once, with the next number"
        texts = [
            "".join(call["function"]["arguments"] for call in of)
            for _, of in itertools.groupby(deltas, lambda call: call["index"])
        ]
        assert texts == [call["function"]["arguments"] for call in calls], "no piece comes under another's number"
        assert all(call["function"]["name"] == "weather" for call in deltas if "id" in call)
        if whole["finish_reason"] != "length":
            assert whole["finish_reason"] == "tool_calls"
        most = max(most, len(calls))
    assert most > 1


def test_each_interface_ends_once(calling: httpx.Client) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    body = {"messages": HELLO, "tools": [TOOL], "tool_choice": named, "parallel_tool_calls": False, "stream": True}
    text = calling.post("/v1/chat/completions", json=body).text
    assert text.endswith("data: [DONE]\n\n")
    assert (text.count("[DONE]"), text.count('"finish_reason":"tool_calls"')) == (1, 1)
    tool = {"name": "weather", "input_schema": FINE}
    body = {"messages": HELLO, "tools": [tool], "tool_choice": {"type": "any"}, "max_tokens": MOST, "stream": True}
    kinds = [each["type"] for each in chunks(calling.post("/v1/messages", json=body))]
    assert [kinds.count(each) for each in ("message_start", "message_delta", "message_stop")] == [1, 1, 1]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop")
    asked = {"input": "hello", "stream": True, "tools": [{"type": "function", "name": "weather", "parameters": FINE}]}
    kinds = [each["type"] for each in chunks(calling.post("/v1/responses", json=asked))]
    assert [kinds.count(each) for each in ("response.created", "response.completed")] == [1, 1]
    lines = calling.post("/api/chat", json={"model": "calls", "messages": HELLO}).text.splitlines()
    assert [json.loads(line)["done"] for line in lines].count(True) == 1


def test_anthropic_counts_the_prompt_at_once(client: httpx.Client) -> None:
    body = {"messages": HELLO, "max_tokens": 2, "stream": True}
    count = client.post("/v1/messages/count_tokens", json={"messages": HELLO}).json()["input_tokens"]
    found = {each["type"]: each for each in chunks(client.post("/v1/messages", json=body))}
    assert found["message_start"]["message"]["usage"]["input_tokens"] == count
    last = found["message_delta"]["usage"]
    assert last["input_tokens"] + last["cache_read_input_tokens"] == count


def test_anthropic_signs_what_was_thought(tmp_path: Path) -> None:
    pack = write_chat_pack(tmp_path / "thinks.pack", ENDLESS, THINKING, {20: "</think>", 21: "<think>"})
    likely = GenerationSettings(logit_bias={20: 4.0}, max_new_tokens=60)
    with serving(pack, defaults=likely) as running, httpx.Client(base_url=running.url, timeout=60) as client:
        body = {"messages": HELLO, "max_tokens": 60, "stream": True, "temperature": 1.0}
        for _ in range(20):
            found = chunks(client.post("/v1/messages", json=body))
            begun = [(each["index"], each["content_block"]["type"]) for each in found if "content_block" in each]
            if len(begun) == 2 and begun[0][1] == "thinking":
                break
    assert begun == [(0, "thinking"), (1, "text")]
    kinds = [each["delta"]["type"] for each in found if each.get("index") == 0 and "delta" in each]
    assert kinds[-1] == "signature_delta"
    assert set(kinds[:-1]) == {"thinking_delta"}


@pytest.mark.parametrize("schema", [FINE, 5, {"type": "hiccup"}])
def test_a_schema_of_a_json_object_is_not_overlooked(schema: Any, calling: httpx.Client) -> None:
    body = {"messages": HELLO, "response_format": {"type": "json_object", "schema": schema}}
    found = calling.post("/v1/chat/completions", json=body)
    if schema is not FINE:
        assert found.status_code == 400
        return
    jsonschema.validate(json.loads(found.json()["choices"][0]["message"]["content"]), FINE)


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_beyond_the_context_is_refused_before_a_stream_begins(stream: bool, tmp_path: Path) -> None:
    pack = write_chat_pack(tmp_path / "short.pack", SPEC)
    with serving(pack) as running, httpx.Client(base_url=running.url, timeout=60) as client:
        talk = [{"role": "user", "content": "hello " * 100}]
        for path, field in (("/v1/chat/completions", "max_tokens"), ("/v1/messages", "max_tokens")):
            found = client.post(path, json={"messages": talk, field: 4, "stream": stream})
            assert (found.status_code, "the model can take" in found.json()["error"]["message"]) == (400, True)


def test_pieces_of_tokens_are_the_text(client: httpx.Client) -> None:
    found = client.post("/tokenize", json={"content": "hello world", "with_pieces": True}).json()
    assert "".join(each["piece"] for each in found["tokens"]) == "hello world"
    assert len(found["tokens"]) == found["count"]


def test_anthropic_binds_an_answer(calling: httpx.Client) -> None:
    body: Any = {"messages": HELLO, "max_tokens": MOST, "temperature": 1.0}
    body["output_config"] = {"effort": "low", "format": {"type": "json_schema", "schema": FINE}}
    found = calling.post("/v1/messages", json=body).json()
    assert found["stop_reason"] == "end_turn"
    jsonschema.validate(json.loads(found["content"][0]["text"]), FINE)


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"output_config": {"format": {"type": "json_schema"}}}, 400, "schema is missing"),
        ({"output_config": {"colour": 1}}, 400, "colour is not supported"),
        ({"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}, 200, ""),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, 400, "whose edits clear nothing"),
        ({"thread": {"type": "create"}}, 200, ""),
        ({"thread": {"type": "continue", "previous_message_id": "msg_1"}}, 404, "send all messages"),
    ],
)
def test_anthropics_newer_fields(changes: Any, status: int, words: str, calling: httpx.Client) -> None:
    found = calling.post("/v1/messages", json={"messages": HELLO, "max_tokens": 2, **changes})
    assert found.status_code == status
    assert words in found.text
    if status == 404:  # by which its clients send the whole conversation
        assert found.json()["error"]["details"] == {"error_code": "thread_not_found"}


def test_who_asks_is_no_part_of_the_answer(calling: httpx.Client) -> None:
    body = {"input": "hello", "client_metadata": {"session": "1"}, "include": ["reasoning.encrypted_content"]}
    assert calling.post("/v1/responses", json=body).status_code == 200


def test_calls_of_ollama_that_are_none(calling: httpx.Client) -> None:
    for calls in (5, [5], [{"function": 5}], [{}]):
        talk = [{"role": "assistant", "content": "a", "tool_calls": calls}]
        found = calling.post("/api/chat", json={"model": "calls", "messages": talk})
        assert (found.status_code, "tool_calls should be" in found.json()["error"]) == (400, True)


def windowed(spec: ModelSpec) -> ModelSpec:
    kinds = tuple(replace(kind, mixer=replace(kind.mixer, window=16)) for kind in spec.decoder.kinds)  # type: ignore[type-var]
    return replace(spec, decoder=replace(spec.decoder, kinds=kinds))


@pytest.mark.parametrize(
    "spec", [MIXERS_SHAPE.but(eos=(), max_positions=None).spec, windowed(ENDLESS)], ids=["states", "windows"]
)
def test_a_conversation_of_a_hybrid_model_goes_on_without_reading_its_past(spec: ModelSpec, tmp_path: Path) -> None:
    pack = write_chat_pack(tmp_path / "mixers.pack", spec)
    with serving(pack) as running, httpx.Client(base_url=running.url, timeout=60) as client:
        talk: list[Any] = [{"role": "user", "content": "hello world " * 40}]
        body, before = {"max_tokens": 6, "messages": talk}, 0
        for _ in range(3):
            found = client.post("/v1/chat/completions", json=body).json()
            used, said = found["usage"], found["choices"][0]["message"]["content"]
            assert used["prompt_tokens_details"]["cached_tokens"] >= before, "a turn reads its new tokens alone"
            before = used["prompt_tokens"]
            talk += [{"role": "assistant", "content": said}, {"role": "user", "content": "more"}]


def test_a_conversation_is_kept_while_others_share_its_beginning(pack: Path) -> None:
    with serving(pack) as running, httpx.Client(base_url=running.url, timeout=60) as client:

        def read(prompt: str) -> tuple[int, int]:
            used = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2}).json()["usage"]
            return used["prompt_tokens"], used["prompt_tokens_details"]["cached_tokens"]

        first = "one small step " * 20 + "and silver fish"
        tokens, kept = read(first)
        assert kept == 0
        read("zigzag " * 40)
        assert read("one small step " * 20 + "but storm clouds")[1] > 0, "they begin alike"
        assert read(first + " and more")[1] >= tokens - 2


def test_text_may_come_in_parts(client: httpx.Client) -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    for path, field in (("/v1/chat/completions", "messages"), ("/v1/messages", "messages"), ("/v1/responses", "input")):
        most = "max_output_tokens" if field == "input" else "max_tokens"
        asked = [{field: [{"role": "user", "content": content}], most: 6} for content in ("hello", parts)]
        one, other = (client.post(path, json=body).json() for body in asked)
        found = [each.get("choices") or each.get("content") or each["output"][0]["content"] for each in (one, other)]
        assert found[0] == found[1]


def test_a_stop_string_is_in_no_piece(client: httpx.Client) -> None:
    body = {"messages": HELLO, "max_tokens": 30}
    said = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    stop = said[12:15]
    found = chunks(client.post("/v1/chat/completions", json={**body, "stop": stop, "stream": True}))
    assert "".join(each["choices"][0]["delta"].get("content", "") for each in found) == said[: said.index(stop)]


def test_a_template_may_read_json(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ (m.content | fromjson).a }}{% endfor %}"
    pack = write_chat_pack(tmp_path / "reads.pack", ENDLESS, template)
    with serving(pack) as running, httpx.Client(base_url=running.url, timeout=60) as client:
        body = {"max_tokens": 1, "messages": [{"role": "user", "content": '{"a": "hello"}'}]}
        assert client.post("/v1/chat/completions", json=body).status_code == 200
        body["messages"] = HELLO
        found = client.post("/v1/chat/completions", json=body)
        assert (found.status_code, "\n" in found.json()["error"]["message"]) == (400, False)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_server_without_its_engine_does_not_seem_well(pack: Path) -> None:
    with serving(pack) as running, httpx.Client(base_url=running.url, timeout=60) as client:
        (worker,) = running.host.there.values()
        worker._inbox.put(lambda: (_ for _ in ()).throw(SystemExit))  # as a fault of our own would
        until(lambda: not worker.alive)
        assert client.get("/health").status_code == 503
        assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 503


# Hostile --------------------------------------------------------------------------------------------------------------


def connect(running: Running) -> socket.socket:
    host, port = running.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


@pytest.mark.parametrize("sent", [b"", b"POST /v1/completions HTTP/1.1\r\nhost: a\r\na: "], ids=["nothing", "a head"])
def test_a_place_is_not_held_without_a_request(sent: bytes, pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "IDLE_S", 0.3)
    with serving(pack) as running, connect(running) as connection:
        connection.sendall(sent)
        connection.settimeout(0.05)
        for _ in range(400):
            try:
                if connection.recv(100) == b"":
                    break
                connection.send(b"b" if sent else b"")  # bytes that trickle in give no more time
            except TimeoutError:
                continue
            except OSError:
                break
        else:
            raise AssertionError("it holds its place")


def test_an_answer_may_take_longer_than_a_place_is_held(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connections = list[server._Connection]()
    monkeypatch.setattr(server._Connection, "_wait", lambda connection: connections.append(connection))
    body = {"prompt": "hello", "max_tokens": 2000, "stream": True}
    with (
        serving(pack) as running,
        httpx.stream("POST", f"{running.url}/v1/completions", json=body, timeout=60) as answer,
    ):
        pieces = answer.iter_text()
        next(pieces)
        connections[0].loop.call_soon_threadsafe(connections[0]._close)  # as when its time is over
        assert '"finish_reason":"length"' in "".join(pieces)


def test_a_slow_body_is_not_waited_for(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "BODY_S", 0.2)
    with connect(server) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 99\r\n\r\n{")
        assert connection.recv(65536).startswith(b"HTTP/1.1 408")


def test_who_sends_no_more_gets_an_answer_or_a_closed_connection(server: Running, client: httpx.Client) -> None:
    body = b'{"prompt": "a", "max_tokens": 2}'
    with connect(server) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        connection.shutdown(socket.SHUT_WR)
        found = connection.recv(65536)
    assert not found or found.startswith(b"HTTP/1.1 ")
    worker = server.host.there[server.host.names[0]]
    assert client.post("/v1/completions", content=body).status_code == 200
    until(lambda: worker.unfinished == 0)


def test_a_gigabyte_is_not_read(server: Running, client: httpx.Client) -> None:
    with connect(server) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n{" % (1 << 30))
        assert connection.recv(65536).startswith(b"HTTP/1.1 413")
    assert client.get("/health").status_code == 200


def test_a_path_is_one_line_of_the_log(
    server: Running, client: httpx.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server.host, "check", lambda name: 1 / 0)
    assert client.get("/v1/models/a%0d%e2%80%a8forged").status_code == 500
    (record,) = [each for each in caplog.records if each.name == "moert.serve"]
    assert record.getMessage().splitlines() == [record.getMessage()]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "\ud800"}]}),
        ("/v1/completions", {"prompt": "\ud800"}),
        ("/v1/responses", {"input": "\ud800"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "\ud800"}], "max_tokens": 2}),
        ("/api/generate", {"model": "tiny", "prompt": "\ud800", "stream": False}),
        ("/tokenize", {"content": "\ud800"}),
        ("/v1/completions", {"prompt": "a", "grammar": "start: /" + "(" * 20_000 + "a" + ")" * 20_000 + "/"}),
        ("/v1/completions", {"prompt": "a", "grammar": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000}),
    ],
)
def test_texts_that_are_none_and_grammars_without_an_end(path: str, body: Any, client: httpx.Client) -> None:
    found = client.post(path, content=json.dumps(body))
    assert found.status_code == 400
    assert client.get("/health").status_code == 200


def test_a_deep_schema_is_refused(calling: httpx.Client) -> None:
    schema: Any = {"type": "boolean"}
    for _ in range(400):
        schema = {"type": "array", "items": schema}
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    found = calling.post("/v1/chat/completions", json={"messages": HELLO, "response_format": form})
    assert (found.status_code, "schema" in found.text) == (400, True)


# The description ------------------------------------------------------------------------------------------------------


def test_the_description_is_of_what_is_taken(client: httpx.Client) -> None:
    described = client.get("/openapi.json").json()
    schema = described["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    jsonschema.Draft202012Validator.check_schema(schema)
    right = {"model": "tiny", "messages": HELLO, "max_tokens": 2, "stop": None, "user": "a"}
    jsonschema.validate(right, schema)
    assert client.post("/v1/chat/completions", json=right).status_code == 200
    for wrong in ({"colour": 1}, {"temperature": -1}, {"messages": None}, {"stop": [1]}, {"logit_bias": {"x": 1}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**right, **wrong}, schema)
        assert client.post("/v1/chat/completions", json={**right, **wrong}).status_code == 400


def test_all_paths_are_described_and_say_their_methods(client: httpx.Client) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    assert {"/v1/messages", "/v1/responses", "/api/chat", "/tokenize", "/health"} <= paths.keys()
    for path, methods in paths.items():
        (method,) = methods
        found = client.request("DELETE", path.replace("{name}", "tiny"))
        assert found.status_code == 405
        assert method.upper() in found.headers["allow"]
        assert method == "get" or "requestBody" in methods[method]


def test_the_checklist_names_tests_that_there_are() -> None:
    root = Path(__file__).parents[2]
    named = re.findall(r"`(test_\w+)`", (root / "docs/server.md").read_text(encoding="utf-8"))
    there = "".join(each.read_text(encoding="utf-8") for each in Path(__file__).parent.glob("test_*.py"))
    assert [each for each in named if f"def {each}(" not in there] == []
    assert len(named) > 40


def test_answers_on_a_connection_that_stays_wait_for_no_acknowledgement(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head and the body of an answer are two packets: with Nagle's algorithm the second one waits for the first."""
    made, seen = server._Connection.connection_made, list[int]()

    def begun(self: Any, transport: Any) -> None:
        own = transport.get_extra_info("socket")
        seen.append(own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        made(self, transport)

    monkeypatch.setattr(server._Connection, "connection_made", begun)
    assert client.get("/health").status_code == 200
    assert seen == [1]
