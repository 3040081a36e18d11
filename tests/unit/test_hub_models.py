"""Models of a hub on loopback: the files that are fetched, and those whose bytes are not the hub's."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from tiny import tiny_olmoe

from moeconv.source import hub as hub_module
from moeconv.source.outline import CheckpointError

COMMIT = "c" * 40
FIND = """
import sys
from moeconv.errors import ConversionError
from moeconv.source.hub import find
for name in sys.argv[1:]:
    try:
        print(find(name))
    except ConversionError as error:
        print(error)
"""


class ModelHub:
    """A hub with one model, owner/name. `wrong`: the faults of files, by name; `asked`: the names of files whose bytes
    were sent."""

    def __init__(self, model: Path) -> None:
        self.model, self.wrong, self.asked = model, dict[str, str](), list[str]()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self, True)

            def do_HEAD(self) -> None:
                hub.answer(self, False)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def answer(self, to: BaseHTTPRequestHandler, whole: bool) -> None:
        files = {path.relative_to(self.model).as_posix(): path for path in self.model.rglob("*") if path.is_file()}
        name = re.sub(rf"^/owner/name/resolve/({COMMIT}|main)/", "", to.path)
        if to.path.startswith(f"/api/models/owner/name/tree/{COMMIT}"):
            self.send(to, json.dumps([
                {"type": "file", "path": name, "size": path.stat().st_size, "oid": "0" * 40}
                for name, path in files.items()
            ]).encode())  # fmt: skip
        elif to.path.startswith("/api/models/owner/name"):
            self.send(to, json.dumps({"id": "owner/name", "sha": COMMIT, "siblings": []}).encode())
        elif name in files:
            self.send_file(to, name, files[name].read_bytes(), whole)
        else:
            to.send_response(404)
            to.send_header("X-Error-Code", "EntryNotFound")
            to.send_header("Content-Length", "0")
            to.end_headers()

    def send(self, to: BaseHTTPRequestHandler, body: bytes) -> None:
        to.send_response(200)
        to.send_header("Content-Length", str(len(body)))
        to.end_headers()
        to.wfile.write(body)

    def send_file(self, to: BaseHTTPRequestHandler, name: str, body: bytes, whole: bool) -> None:
        large = name.endswith((".safetensors", ".gguf"))
        named = hashlib.sha256(body) if large else hashlib.sha1(b"blob %d\0" % len(body) + body)
        start = int(to.headers["Range"].removeprefix("bytes=").partition("-")[0]) if to.headers["Range"] else 0
        to.send_response(206 if start else 200)
        to.send_header("ETag", f'"{named.hexdigest()}"')
        to.send_header("X-Repo-Commit", COMMIT)
        to.send_header("Content-Length", str(len(body) - start))
        if start:
            to.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        to.end_headers()
        if not whole:
            return
        self.asked.append(name)
        wrong = self.wrong.get(name)
        if wrong == "other bytes":
            body = body[:-1] + bytes([body[-1] ^ 1])
        elif wrong == "breaks off":
            del self.wrong[name]
            body = body[: len(body) // 2]
            to.close_connection = True
        to.wfile.write(body[start:])


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[ModelHub]:
    model = tiny_olmoe(tmp_path / "model")
    for name in ("pytorch_model.bin", "README.md", "model.fp32.safetensors", "onnx/model.onnx", "small.gguf"):
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_bytes(b"many bytes")
    found = ModelHub(model)
    yield found
    found.server.shutdown()
    found.server.server_close()


def find(hub: ModelHub, tmp_path: Path, *names: str) -> list[str]:
    """Returns the path of each model, or why there is none, of a process of its own: the library reads the environment
    when it is imported."""
    environment = os.environ | {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server.server_port}", "HF_HOME": str(tmp_path / "hf"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1",
    }  # fmt: skip
    command = [sys.executable, "-c", FIND, *(names or ("owner/name",))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


READ = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"}


def test_what_is_read_is_fetched_once_also_where_a_transfer_breaks_off(hub: ModelHub, tmp_path: Path) -> None:
    hub.wrong = {"model.safetensors": "breaks off"}
    first, second = find(hub, tmp_path, "owner/name", "owner/name")
    assert first == second
    assert set(hub.asked) == READ
    for name in READ:
        assert (Path(first) / name).read_bytes() == (hub.model / name).read_bytes()
    asked = len(hub.asked)
    assert find(hub, tmp_path) == [first]
    assert len(hub.asked) == asked


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_file_with_another_hash_is_deleted_and_fetched_again(name: str, hub: ModelHub, tmp_path: Path) -> None:
    hub.wrong = {name: "other bytes"}
    differs = f"{name} is not the file that the hub has (its hash differs)"
    said = f"owner/name: {differs}, and was deleted: run the same again, with a connection"
    assert find(hub, tmp_path, "owner/name", "owner/name") == [said, said]
    hub.wrong = {}
    [path] = find(hub, tmp_path)
    assert (Path(path) / name).read_bytes() == (hub.model / name).read_bytes()
    with (Path(path) / name).open("r+b") as file:  # a drive that forgets, or a hand
        file.write(b"?")
    assert find(hub, tmp_path, "owner/name", "owner/name") == [said, path]


@pytest.mark.parametrize(("unit", "desc", "shown"), [
    ("B", "Reconstructing (incomplete total...)", True), ("B", "Downloading bytes", False),
    ("B", "model.gguf: downloading bytes", False), ("it", "Fetching 4 files", False),
])  # fmt: skip
def test_one_bar_is_shown_on_a_terminal(unit: str, desc: str, shown: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr(written, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", written)
    with hub_module._bars() as bars:
        bars(total=100, unit=unit, desc=desc, name="of the library", bar_format="{bar}", position=3).update(50)
    assert ("fetching" in written.getvalue()) == shown


def test_a_cache_that_can_not_be_changed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blob = tmp_path / "blobs" / hashlib.sha256(b"right").hexdigest()
    blob.parent.mkdir()
    blob.write_bytes(b"wrong")
    (tmp_path / "m.gguf").symlink_to(blob)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def refused(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refused)
    with pytest.raises(CheckpointError) as caught:
        hub_module.check_hashes("owner/name", [tmp_path / "m.gguf"])
    said = "its hash differs), and can't be deleted (Permission denied): delete"
    assert said in str(caught.value)
    assert str(blob) in str(caught.value)


def test_gguf_files_too(hub: ModelHub, tmp_path: Path) -> None:
    hub.wrong = {"small.gguf": "other bytes"}
    [said] = find(hub, tmp_path, "owner/name/small.gguf")
    assert "small.gguf is not the file that the hub has" in said
    hub.wrong = {}
    [path] = find(hub, tmp_path, "owner/name/small.gguf")
    assert Path(path).read_bytes() == b"many bytes"


def test_a_pack_is_no_model() -> None:
    pack = Path(__file__).resolve().parents[1] / "golden" / "tiny.pack"
    for weights in (True, False):
        with pytest.raises(CheckpointError, match=r"tiny\.pack is a pack, and no model: give the model that it was"):
            hub_module.find(str(pack), weights)
