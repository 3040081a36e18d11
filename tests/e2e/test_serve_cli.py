"""moert serve as a program: its start, its end, and the mistakes of who starts it."""

from __future__ import annotations

import re
import signal
import socket
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from cgroups import Group, missing
from chat_packs import ENDLESS, write_chat_pack

from moert.engine.engine import Engine
from moert.pack.reader import Pack

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_pack(tmp_path_factory.mktemp("serve") / "tiny.pack", ENDLESS)


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "moert", "serve", *map(str, arguments)]


@contextmanager
def started(*arguments: object, group: Group | None = None) -> Iterator[tuple[subprocess.Popen[str], str]]:
    enter = None if group is None else lambda: group.add(0)
    process = subprocess.Popen(
        command(*arguments, "--port", 0), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=enter
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.match(r"(http://\S+) answers for (.+)\n", line)
        assert found is not None, (line, process.stderr and process.stderr.read())
        yield process, found[1]
    finally:
        process.kill()
        process.communicate()


def accepts(url: str) -> bool:
    host, port = url.removeprefix("http://").split(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_it_answers_and_ends_cleanly(pack: Path, sent: signal.Signals, status: int) -> None:
    with started(pack) as (process, url):
        body = {"model": "tiny", "messages": HELLO, "max_tokens": 8}
        found = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
        with Engine.open(pack) as engine:
            assert found["choices"][0]["message"]["content"] == engine.chat(HELLO, max_new_tokens=8).text
        for wrong, named in (
            ({"stop": [""]}, "stop has an empty"),
            ({"logit_bias": {"9999": 1}}, "logit_bias has the id"),
        ):
            refused = httpx.post(f"{url}/v1/chat/completions", json={**body, **wrong}, timeout=60).json()
            assert refused["error"]["message"].startswith(named), "clients have no options"
        (listed,) = httpx.get(f"{url}/api/tags").json()["models"]
        assert listed["size"] == Pack.open(pack).manifest.nbytes()
        process.send_signal(sent)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == status
        assert "Traceback" not in errors


def test_a_client_that_leaves_in_the_middle_ends_no_server(pack: Path) -> None:
    """What it did not read waits in the server, which sees its half of the connection closed and writes on."""
    with started(pack) as (_, url):
        host, port = url.removeprefix("http://").split(":")
        for _ in range(3):
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
                client.connect((host, int(port)))
                client.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: here\r\n\r\n" * 200)
                assert client.recv(1)
                client.shutdown(socket.SHUT_WR)
                time.sleep(0.2)  # for the server to see it
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset follows
            assert httpx.get(f"{url}/health", timeout=60).json()["status"] == "ok"


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_conversations_are_kept_at_the_end(pack: Path, tmp_path: Path, sent: signal.Signals) -> None:
    folder, found = tmp_path / "new" / "kept", list[int]()
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 8}
    for _ in range(2):
        with started(pack, "--cache-dir", folder, "--cache-size", "1MB") as (process, url):
            usage = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()["usage"]
            found.append(usage["prompt_tokens_details"]["cached_tokens"])
            process.send_signal(sent)
            assert process.communicate(timeout=60)[1].count("\n") <= 1
    assert found == [0, usage["prompt_tokens"] - 1]
    assert {stat.S_IMODE(each.stat().st_mode) for each in (folder, *folder.iterdir())} == {0o700, 0o600}


def test_an_answer_in_the_middle_is_cut_at_the_end(pack: Path) -> None:
    body = {"prompt": "hello", "max_tokens": 1 << 20, "stream": True}
    with (
        started(pack) as (process, url),
        httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        while accepts(url):
            next(lines)
        process.send_signal(signal.SIGTERM)  # the second one does not wait for answers
        text = "".join(lines)
        assert '"finish_reason":"length"' in text
        assert text.endswith("[DONE]")
        assert process.wait(60) == 143


def test_mistakes_are_one_line(pack: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        mistakes = {
            (pack, "--port", taken.getsockname()[1]): "give another --host or --port",
            (pack, "--host", "256.1.1.1"): "give another --host or --port",
            (tmp_path / "no.pack",): "no.pack",
            (pack, pack): "have the same name tiny",
            (pack, "--api-key-file", tmp_path / "empty"): "holds no key",
            (pack, "--api-key-file", tmp_path / "none"): "can't be read",
            (pack, "--memory", "10MB"): "is too small",
            (pack, "--most-waiting", "0"): "most-waiting",
            (pack, "--origin", "https://example.org/"): "is no origin",
            (): "PACK",
        }
        for arguments, words in mistakes.items():
            done = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=60)
            assert done.returncode == 2, arguments
            assert words in done.stderr, arguments
            assert "Traceback" not in done.stderr


def test_who_lets_others_in_is_told(pack: Path) -> None:
    with started(pack, "--host", "0.0.0.0") as (process, _):
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
        assert "anyone who reaches 0.0.0.0 can use this server" in errors


@pytest.mark.slow
def test_the_memory_limit_holds_for_the_whole_server(pack: Path) -> None:
    if reason := missing():
        pytest.skip(reason)
    limit = 120_000_000
    with (
        Group(memory_bytes=limit) as group,
        started(pack, "--memory", limit, group=group) as (process, url),
        httpx.Client(base_url=url, timeout=120) as client,
    ):
        for turn in range(30):
            talk = [{"role": "user", "content": f"hello {turn} " + "word " * 40 * turn}]
            found = client.post("/v1/chat/completions", json={"messages": talk, "max_tokens": 30})
            assert found.status_code == 200, found.text
        assert process.poll() is None, "the system has ended it"
