"""Packs of a hub on loopback, which answers rightly, slowly, wrongly, or with malice."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote

import pytest
from tiny_packs import SPECS, write_pack

from moert.command import cli
from moert.errors import RunError
from moert.hub.catalogue import home, listed, located, pull, removed
from moert.hub.client import PackId, parse_id
from moert.pack.errors import PackError
from moert.pack.reader import Pack
from tests.refusing import one_line

ASKED = PackId("owner/name", "main")
COMMIT = "a" * 40


class FakeHub:
    """A hub with one pack. `wrong`: its fault for a file whose path ends so; `log`: path, range and token of every
    request."""

    def __init__(self, pack: Path) -> None:
        self.pack, self.commit = pack, COMMIT
        self.wrong: dict[str, str] = {}
        self.log: list[tuple[str, str | None, str | None]] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.answer(self)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    @property
    def asked(self) -> list[str]:
        """The files that were asked for."""
        return [path.split("/", 5)[5] for path, _, _ in self.log if "/resolve/" in path]

    def answer(self, to: BaseHTTPRequestHandler) -> None:
        path = unquote(to.path)
        self.log.append((path, to.headers["Range"], to.headers["Authorization"]))
        if path.startswith("/api/models/"):
            known = path == "/api/models/owner/name/revision/main"
            self.send(to, json.dumps({"sha": self.commit}).encode() if known else None)
            return
        relative = path.split("/", 5)[5] if path.startswith(f"/owner/name/resolve/{self.commit}/") else "../none"
        file = self.pack / relative
        body = file.read_bytes() if ".." not in relative and file.is_file() else None
        wrong = next((how for ending, how in self.wrong.items() if relative.endswith(ending)), None)
        if body is None or wrong is None:
            self.send(to, body)
        elif wrong == "in a circle":
            to.send_response(302)
            to.send_header("Location", to.path)
            to.end_headers()
        elif wrong == "to a file":
            to.send_response(302)
            to.send_header("Location", "file:///etc/passwd")
            to.end_headers()
        elif wrong == "elsewhere":
            to.send_response(302)
            to.send_header("Location", f"http://localhost:{self.server.server_port}{to.path}")
            to.end_headers()
            self.wrong.clear()
        elif wrong == "other bytes":
            self.send(to, bytes([body[0] ^ 1]) + body[1:])
        elif wrong == "endless":
            to.send_response(200)
            to.end_headers()
            try:
                while True:
                    to.wfile.write(body)
            except OSError:
                pass
        elif wrong == "breaks off":
            to.send_response(200)
            to.send_header("Content-Length", str(len(body)))
            to.end_headers()
            to.wfile.write(body[: len(body) // 2])
            self.wrong.clear()
        elif wrong == "short":
            self.send(to, body[:-1])
        else:
            to.send_error(int(wrong))

    def send(self, to: BaseHTTPRequestHandler, body: bytes | None) -> None:
        if body is None:
            to.send_error(404)
            return
        start = int(to.headers["Range"].removeprefix("bytes=").rstrip("-")) if to.headers["Range"] else 0
        to.send_response(206 if start else 200)
        to.send_header("Content-Length", str(len(body) - start))
        to.end_headers()
        to.wfile.write(body[start:])


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    found = FakeHub(write_pack(tmp_path / "model.pack", SPECS["decoder"]))
    monkeypatch.setenv("HF_ENDPOINT", found.address)
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("MOERT_HOME", str(tmp_path / "home"))
    for name in ("HF_HUB_OFFLINE", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    yield found
    found.server.shutdown()
    found.server.server_close()


def quiet(_: str) -> None:
    pass


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_pack_comes_whole_and_only_once(hub: FakeHub) -> None:
    (hub.pack / "README.md").write_text("# A model card\n")
    found = pull(ASKED, quiet)
    expected = files_of(hub.pack)
    del expected["README.md"]
    assert files_of(found.folder) == expected
    assert sorted(hub.asked) == sorted(expected)
    assert all(token == "Bearer secret" for _, _, token in hub.log)
    assert listed() == [found]
    assert found.nbytes == sum(map(len, expected.values())) - len(expected["manifest.json"])
    assert (found.id, found.commit) == (ASKED, COMMIT)
    assert located("hf:owner/name", quiet) == found.folder
    assert pull(ASKED, quiet) == found
    assert sorted(hub.asked) == sorted(expected)
    assert located("some/folder", quiet) == Path("some/folder")


def test_nothing_is_fetched_offline(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with one_line(RunError, "HF_HUB_OFFLINE is set, so that nothing is fetched from a hub: unset it"):
        located("hf:owner/name", quiet)
    assert hub.asked == []
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    found = pull(ASKED, quiet)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert located("hf:owner/name", quiet) == found.folder


def test_a_newer_commit_takes_the_place_of_the_old_one(hub: FakeHub, tmp_path: Path) -> None:
    before = pull(ASKED, quiet)
    hub.pack, hub.commit = write_pack(tmp_path / "other.pack", SPECS["decoder"], bits=(8,)), "b" * 40
    found = pull(ASKED, quiet)
    assert found.folder == before.folder
    assert files_of(found.folder) == files_of(hub.pack)
    assert [each.commit for each in listed()] == ["b" * 40]


def test_a_transfer_goes_on_where_it_ended(hub: FakeHub) -> None:
    hub.wrong = {"backbone.safetensors": "breaks off"}
    with pytest.raises(RunError, match=r"backbone.safetensors (has \d+ bytes, its manifest says|can't be fetched)"):
        pull(ASKED, quiet)
    assert listed() == []
    before = len(hub.log)
    pull(ASKED, quiet)
    again = [(path, asked) for path, asked, _ in hub.log[before:] if path.endswith("backbone.safetensors")]
    half = (hub.pack / "backbone.safetensors").stat().st_size // 2
    assert [asked for _, asked in again] == [f"bytes={half}-"]
    assert files_of(listed()[0].folder) == files_of(hub.pack)


def test_the_token_stays_with_the_hub(hub: FakeHub) -> None:
    hub.wrong = {"backbone.safetensors": "elsewhere"}
    pull(ASKED, quiet)
    tokens = [token for path, _, token in hub.log if path.endswith("backbone.safetensors")]
    assert tokens == ["Bearer secret", None]


@pytest.mark.parametrize(
    ("ending", "wrong", "named"),
    [
        (".safetensors", "other bytes", "is not the file that the manifest describes"),
        ("backbone.safetensors", "endless", "more than"),
        ("manifest.json", "endless", "more than"),
        ("backbone.safetensors", "short", "bytes, its manifest says"),
        ("backbone.safetensors", "in a circle", "can't be fetched"),
        ("backbone.safetensors", "to a file", "the hub answers 302"),
        ("backbone.safetensors", "401", "asks for a token"),
        ("backbone.safetensors", "404", "no such pack, revision or file"),
        ("backbone.safetensors", "500", "the hub answers 500"),
    ],
)
def test_wrong_answers_are_one_line_and_no_pack(
    ending: str, wrong: str, named: str, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moert.hub.catalogue.most_of_a_manifest", lambda: 1 << 16)
    hub.wrong = {ending: wrong}
    with pytest.raises((RunError, PackError), match=named) as caught:
        pull(ASKED, quiet)
    assert "\n" not in str(caught.value)
    assert listed() == []
    hub.wrong = {}
    assert files_of(pull(ASKED, quiet).folder) == files_of(hub.pack)


@pytest.mark.parametrize("path", ["../../evil", "/tmp/evil", "a/../../evil"])
def test_a_manifest_that_names_places_outside_is_refused(path: str, hub: FakeHub) -> None:
    manifest = json.loads((hub.pack / "manifest.json").read_text())
    manifest["files"][path] = next(iter(manifest["files"].values()))
    (hub.pack / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(PackError) as caught:
        pull(ASKED, quiet)
    assert str(caught.value).startswith(f"{ASKED}, as {hub.address} gives it: manifest.json ")
    assert hub.asked == ["manifest.json"]


def test_too_little_room_is_said_before_anything_comes(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moert.hub.catalogue.shutil.disk_usage", lambda _: type("Usage", (), {"free": 5})())
    with pytest.raises(RunError, match="free some space, or set MOERT_HOME"):
        pull(ASKED, quiet)
    assert hub.asked == ["manifest.json"]


def test_two_do_not_fetch_one_pack_at_once(hub: FakeHub) -> None:
    hub.wrong = {"backbone.safetensors": "500"}
    with pytest.raises(RunError):
        pull(ASKED, quiet)
    (part,) = (home() / "packs" / "owner").glob("*.part")
    hub.wrong = {}
    with open_folder(part) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(RunError, match="is being fetched by another process"):
            pull(ASKED, quiet)
    assert pull(ASKED, quiet).folder.is_dir()


@contextmanager
def open_folder(folder: Path) -> Iterator[int]:
    held = os.open(folder, os.O_RDONLY)
    yield held
    os.close(held)


def test_removing(hub: FakeHub) -> None:
    with pytest.raises(RunError, match="has no owner/name; it has: none"):
        removed(ASKED)
    found = pull(ASKED, quiet)
    with pytest.raises(RunError, match="has no owner/other; it has: owner/name"):
        removed(PackId("owner/other", "main"))
    assert removed(ASKED) == found
    assert listed() == []
    assert [path for path in home().rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("text", ["name", "a/b/c", "../b", "a/..", "a/b:", "a/b:../c", "a b/c", "-a/b", "a/b\n", "hf:"])
def test_names_that_are_none(text: str) -> None:
    with pytest.raises(RunError, match="names no pack of a hub"):
        parse_id(text)


def test_names() -> None:
    assert parse_id("hf:Owner/Name-1.5:refs/pr/3") == PackId("Owner/Name-1.5", "refs/pr/3")
    assert str(parse_id("a/b")) == "a/b"
    assert str(parse_id("a/b:c")) == "a/b:c"


def test_a_folder_with_a_line_break_is_one_line(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOERT_HOME", str(tmp_path / "a\nb"))
    for command in (["list"], ["pull", "owner/name"], ["pull", "owner/name"], ["list"]):
        assert cli._exit_code(command) == 0
        assert all("a<U+000A>b" in each for each in capsys.readouterr().out.splitlines() if "/a" in each)
    (pulled,) = listed()
    assert cli._exit_code(["info", str(pulled.folder)]) == 0
    assert "a<U+000A>b" in capsys.readouterr().out.splitlines()[0]


def test_commands(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._exit_code(["info", "hf:owner/name"]) == 0
    assert str(home()) in capsys.readouterr().err
    assert cli._exit_code(["list", "--json"]) == 0
    assert [each["id"] for each in json.loads(capsys.readouterr().out)] == ["owner/name"]
    assert cli._exit_code(["list"]) == 0
    assert capsys.readouterr().out.startswith("hf:owner/name  ")
    assert cli._exit_code(["pull", "owner/name", "--json"]) == 0
    assert Pack.open(json.loads(capsys.readouterr().out)["folder"])
    assert cli._exit_code(["rm", "owner/name"]) == 0
    assert cli._exit_code(["list"]) == 0
    assert "is empty" in capsys.readouterr().out
    assert cli._exit_code(["pull", "owner/name:none"]) == 2
    assert "no such pack, revision or file" in capsys.readouterr().err
