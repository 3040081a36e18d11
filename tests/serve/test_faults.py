"""Bad requests, clients that leave, packs that break: one line each, and others are served."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import http.client
import json
import socket
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from chat_packs import ENDLESS, write_chat_pack
from serving import Running, serving, until
from tiny_packs import write_pack

from moert.engine.engine import Engine
from moert.engine.generation import GenerationSettings
from moert.engine.settings import EngineSettings
from moert.errors import NotFinite
from moert.serve.fields import Refused
from moert.serve.forms import Ended, Wish
from moert.serve.worker import PART_TOKENS, Worker

HELLO = [{"role": "user", "content": "hello"}]
PATHS = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 2},
    "/v1/completions": {"prompt": "hello", "max_tokens": 2},
    "/v1/responses": {"input": "hello", "max_output_tokens": 2},
    "/v1/messages": {"messages": HELLO, "max_tokens": 2},
    "/api/chat": {"model": "tiny", "messages": HELLO, "stream": False, "options": {"num_predict": 2}},
    "/api/generate": {"model": "tiny", "prompt": "hello", "stream": False, "options": {"num_predict": 2}},
}


def message_of(path: str, found: httpx.Response) -> str:
    error = found.json()["error"]
    text: str = error if path.startswith("/api") else error["message"]
    assert "\n" not in text
    return text


@pytest.mark.parametrize("path", PATHS)
def test_what_is_not_known_is_refused_by_name(path: str, client: httpx.Client) -> None:
    assert client.post(path, json=PATHS[path]).status_code == 200
    found = client.post(path, json={**PATHS[path], "colour": 1})
    assert (found.status_code, message_of(path, found)) == (400, "colour is not supported: leave it out")
    found = client.post(path, json={**PATHS[path], "model": "other"})
    assert (found.status_code, message_of(path, found)) == (404, "there is no model 'other': this server has tiny")
    assert (
        client.post(path, json={**PATHS[path], "model": None if path.startswith("/v1") else "tiny"}).status_code == 200
    )


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "the body is not JSON"),
        (b"[1]", "the body should be a JSON object"),
        (b'{"a": NaN}', "the body is not JSON: NaN"),
        (b"[" * 100_000, "nested too deep"),
        (b'{"messages": "\xff"}', "the body is not JSON"),
        (b'{"messages": ' + b"1" * 5000 + b"}", ""),
    ],
    ids=["empty", "a list", "NaN", "deep", "bad UTF-8", "a long number"],
)
def test_a_body_that_is_none_is_one_line(path: str, body: bytes, words: str, client: httpx.Client) -> None:
    found = client.post(path, content=body)
    assert found.status_code == 400
    assert words in message_of(path, found)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"temperature": "warm"}, "temperature"), ({"temperature": -1}, "temperature"), ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"), ({"n": True}, "n"), ({"n": 1000}, "n"), ({"stop": [1]}, "stop"), ({"stop": [""]}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"), ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"stream": "yes"}, "stream"),
        ({"top_logprobs": 3}, "top_logprobs"), ({"messages": []}, "messages"),
        ({"messages": [{"role": "x"}]}, "messages"), ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"), ({"messages": None}, "messages"),
        ({"stream_options": {"x": 1}, "stream": True}, "x"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ],
)  # fmt: skip
def test_wrong_values_are_named(changes: dict[str, Any], field: str | None, client: httpx.Client) -> None:
    found = client.post("/v1/chat/completions", json={**PATHS["/v1/chat/completions"], **changes})
    assert found.status_code == 400
    assert found.json()["error"]["param"] == field
    assert "\n" not in found.json()["error"]["message"]


def test_bodies_are_bounded(client: httpx.Client) -> None:
    found = client.post("/v1/chat/completions", content=b" " * (9 << 20))
    assert found.status_code == 413

    found = client.post("/v1/chat/completions", content=(b" " * 65536 for _ in range(200)))
    assert found.status_code == 413, "nor without a length before"
    assert client.get("/health").status_code == 200


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 10_000 + b"\r\n", b"\x16\x03\x01\x02\x00\x01\x00", b"GET\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 99\r\n\r\nhalf",
        b"GET /../../etc/passwd HTTP/1.1\r\nhost: a\r\n\r\n",
        b"GET /v1/models/%2e%2e%2f%2e%2e HTTP/1.1\r\nhost: a\r\n\r\n",
    ],
    ids=["headers", "TLS", "a word", "a length", "half", "a path", "a name"],
)  # fmt: skip
def test_others_are_served_beside_nonsense(sent: bytes, server: Running, client: httpx.Client) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        found = connection.recv(65536)
    assert not found or found.startswith((b"HTTP/1.1 400", b"HTTP/1.1 404"))
    assert client.post("/v1/completions", json=PATHS["/v1/completions"]).status_code == 200


def test_who_leaves_ends_the_answer(server: Running) -> None:
    body = {"prompt": "hello", "max_tokens": 1 << 20, "stream": True}
    worker = server.host.there["tiny"]
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
        pieces = answer.iter_text()
        next(pieces)
        assert worker.unfinished == 1
    until(lambda: worker.unfinished == 0)


def test_nothing_is_left_of_those_who_leave(server: Running, client: httpx.Client) -> None:
    (worker,) = server.host.there.values()
    body = {"prompt": "who leaves", "max_tokens": 300, "temperature": 0.8, "seed": 5}

    def objects_after(leaving: int) -> Counter[str]:
        for _ in range(leaving):
            with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
                next(answer.iter_bytes())
        until(lambda: worker.unfinished == 0 and worker._open is None)
        gc.collect()
        found = Counter(f"{type(each).__module__}.{type(each).__name__}" for each in gc.get_objects())
        return Counter({name: count for name, count in found.items() if name.startswith(("moert.", "starlette."))})

    client.post("/v1/completions", json=body)  # all that any of them can read
    assert objects_after(5) == objects_after(20)


def test_who_leaves_before_the_answer_ends_it_too(server: Running) -> None:
    worker, body = server.host.there["tiny"], json.dumps({"prompt": "a", "max_tokens": 1 << 20})
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", body)
        until(lambda: worker.unfinished == 1)
    until(lambda: worker.unfinished == 0)


def test_a_long_prompt_is_left_in_the_middle(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = [0]

    async def leave(worker: Worker) -> None:
        ticket = worker.submit(Wish([[5] * (400 * PART_TOKENS)], [GenerationSettings()]), asyncio.get_running_loop())
        await ticket.accepted()
        while not read[0]:
            await asyncio.sleep(0.001)
        worker.leave(ticket)
        while worker.unfinished:
            await asyncio.sleep(0.001)

    with Engine.open(pack) as engine:
        sound = engine.model.read

        def counted(states: Any, ids: Any) -> Any:
            read[0] += sum(map(len, ids))
            time.sleep(0.01)  # as a large model would take
            return sound(states, ids)

        monkeypatch.setattr(engine.model, "read", counted)
        worker = Worker(engine)
        asyncio.run(leave(worker))
        assert read[0] < 200 * PART_TOKENS
        assert isinstance(asyncio.run(_answer(worker, [3, 4]))[-1], Ended)
        worker.close(1)


async def _answer(worker: Worker, ids: list[int]) -> list[Any]:
    ticket = worker.submit(Wish([ids], [GenerationSettings(max_new_tokens=3)]), asyncio.get_running_loop())
    await ticket.accepted()
    return [event async for event in ticket.events()]


def test_too_many_are_sent_away(pack: Path) -> None:
    async def crowd(worker: Worker) -> None:
        loop, wish = asyncio.get_running_loop(), Wish(["hello"], [GenerationSettings(max_new_tokens=1 << 20)])
        tickets = [worker.submit(wish, loop) for _ in range(2)]
        with pytest.raises(Refused, match="2 requests wait or run already") as refused:
            worker.submit(wish, loop)
        assert refused.value.status == 429
        for ticket in tickets:
            worker.leave(ticket)
        while worker.unfinished:
            await asyncio.sleep(0.001)
        assert isinstance((await _answer(worker, [3, 4]))[-1], Ended)

    with Engine.open(pack) as engine:
        worker = Worker(engine, most_waiting=2)
        asyncio.run(crowd(worker))
        worker.close(1)


def test_a_fault_is_told_to_those_it_met_and_others_go_on(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine.open(pack) as engine:
        worker = Worker(engine)
        sound = engine.model.read
        monkeypatch.setattr(engine.model, "read", lambda states, ids: (_ for _ in ()).throw(NotFinite("damaged")))
        with pytest.raises(NotFinite):
            asyncio.run(_answer(worker, [3, 4]))
        monkeypatch.setattr(engine.model, "read", sound)
        assert isinstance(asyncio.run(_answer(worker, [3, 4]))[-1], Ended)
        worker.close(1)


def test_the_end_cuts_what_runs(pack: Path) -> None:
    async def answer(worker: Worker) -> Any:
        wish = Wish(["hello"], [GenerationSettings(max_new_tokens=1 << 20)])
        ticket = worker.submit(wish, asyncio.get_running_loop())
        await ticket.accepted()
        ending = asyncio.get_running_loop().run_in_executor(None, worker.close, 0.2)
        last = [event async for event in ticket.events()][-1]
        await ending
        with pytest.raises(Refused, match="the server ends, or another model"):
            worker.submit(wish, asyncio.get_running_loop())
        return last

    with Engine.open(pack) as engine:
        last = asyncio.run(answer(Worker(engine)))
    assert isinstance(last, Ended)
    assert last.reason == "cancelled"


def test_keys_are_asked_for(pack: Path) -> None:
    with serving(pack, api_key="secret") as running, httpx.Client(base_url=running.url) as client:
        for path, body in PATHS.items():
            assert client.post(path, json=body).status_code == 401
            assert client.post(path, json=body, headers={"authorization": "Bearer secreT"}).status_code == 401
            assert client.post(path, json=body, headers={"authorization": "Bearer secret"}).status_code == 200
            assert client.post(path, json=body, headers={"x-api-key": "secret"}).status_code == 200
        assert client.get("/health").status_code == 200
        assert client.get("/v1/models").status_code == 401


def test_pages_of_others_are_let_in_only_if_named(pack: Path, client: httpx.Client) -> None:
    asked = {"origin": "https://a.example", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in client.get("/health", headers=asked).headers
    with serving(pack, origins=["https://a.example"]) as running:
        found = httpx.options(f"{running.url}/v1/models", headers=asked)
        assert found.headers["access-control-allow-origin"] == "https://a.example"


def test_models_come_and_go_by_name(pack: Path, tmp_path: Path) -> None:
    other = write_chat_pack(tmp_path / "other.pack", ENDLESS)
    with serving(pack, other) as running, httpx.Client(base_url=running.url, timeout=60) as client:
        assert [each["id"] for each in client.get("/v1/models").json()["data"]] == ["tiny", "other"]
        body = {"prompt": "hello", "max_tokens": 4}
        for name in ("other", "tiny", "other"):
            found = client.post("/v1/completions", json={**body, "model": name})
            assert found.json()["model"] == name
            assert client.get("/health").json()["model"] == name


def test_a_model_that_leaves_ends_its_answers_first(pack: Path, tmp_path: Path) -> None:
    other = write_chat_pack(tmp_path / "other.pack", ENDLESS)
    with serving(pack, other) as running, httpx.Client(base_url=running.url, timeout=60) as client:
        body = {"prompt": "hello", "max_tokens": 3000, "model": "tiny"}
        with httpx.stream("POST", f"{running.url}/v1/completions", json={**body, "stream": True}, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            found = client.post("/v1/completions", json={**body, "max_tokens": 4, "model": "other"})
            assert found.json()["model"] == "other"
            text = "".join(lines)
        assert text.endswith("[DONE]")
        assert text.count('"finish_reason":"length"') == 1


def test_a_damaged_model_is_one_line_and_the_other_is_served(pack: Path, tmp_path: Path) -> None:
    other = write_chat_pack(tmp_path / "other.pack", ENDLESS)
    (other / "backbone.safetensors").write_bytes(b"")
    with serving(pack, other) as running, httpx.Client(base_url=running.url, timeout=60) as client:
        found = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2, "model": "other"})
        assert found.status_code == 500
        assert "log" in found.json()["error"]["message"]
        found = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2, "model": "tiny"})
        assert found.status_code == 200


def test_figures_are_there_for_prometheus(client: httpx.Client) -> None:
    text = client.get("/metrics").text
    samples = [line.split() for line in text.splitlines() if not line.startswith("#")]
    assert all(len(each) == 2 and float(each[1]) >= 0 for each in samples)
    names = {name for name, _ in samples}
    assert {'moert_new_tokens_total{model="tiny"}', 'moert_clients{model="tiny"}', "moert_held_bytes"} <= names
    assert json.loads(client.get("/props").text)["stats"]["requests"] >= 0


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"prompt": "hello", "response_format": {"type": "json_schema", "json_schema": {
            "schema": {"type": "no type"}}}}, "response_format"),
        ("/v1/completions", {"prompt": "hello", "grammar": "start: nothing"}, "grammar"),
        ("/v1/completions", {"prompt": [99999]}, "prompt"),
        ("/v1/completions", {"prompt": ""}, "prompt"),
        ("/v1/embeddings", {"input": [99999]}, "input"),
        ("/v1/responses", {"input": "hello", "text": {"format": {
            "type": "json_schema", "schema": {"type": "no type"}}}}, "text"),
        ("/v1/responses", {"input": [{"role": "tool", "content": "a"}]}, "input"),
        ("/v1/chat/completions", {"messages": [{"role": "tool", "content": "a"}]}, "messages"),
        ("/v1/chat/completions", {"messages": [*HELLO, {"role": "assistant", "content": "a"}],
                                  "grammar": 'start: "a"', "continue_final_message": True}, "grammar"),
    ],
)  # fmt: skip
def test_the_field_at_fault_is_named(path: str, body: dict[str, Any], field: str, client: httpx.Client) -> None:
    found = client.post(path, json=body)
    assert (found.status_code, found.json()["error"]["param"]) == (400, field)


def test_no_error_tells_the_servers_paths(pack: Path, tmp_path: Path) -> None:
    mute = write_pack(tmp_path / "mute.pack", ENDLESS, paths=False)
    silent = write_pack(tmp_path / "silent.pack", ENDLESS, paths=False, tokenizer=False)
    spoilt, broken = (write_chat_pack(tmp_path / f"{name}.pack", ENDLESS) for name in ("spoilt", "broken"))
    (spoilt / "chat.json").write_text("{}")
    (broken / "manifest.json").write_text("{}")
    with serving(pack, mute, silent, spoilt, broken) as running:
        for path, body in PATHS.items():
            for name in ("mute", "silent", "spoilt", "broken"):
                found = httpx.post(running.url + path, json={**body, "model": name}, timeout=60)
                assert str(tmp_path) not in found.text, found.text
                assert found.status_code in (200, 400, 500)


def test_a_setting_of_the_server_is_not_the_clients(pack: Path, tmp_path: Path) -> None:
    other = write_chat_pack(tmp_path / "other.pack", ENDLESS)
    template = tmp_path / "form.jinja"
    template.write_text("{{ messages }}")
    with serving(pack, other, engine=EngineSettings(template=str(template))) as running:
        template.unlink()
        found = httpx.post(f"{running.url}/v1/completions", json={"prompt": "a", "model": "other"}, timeout=60)
        assert found.status_code == 500
        assert found.json()["error"]["message"] == "the model other can't be loaded: the server's log says why"
