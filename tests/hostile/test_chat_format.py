"""chat.json believes nothing: each way it can be wrong is one line, and a large one is never read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moeconv.writer import add_to_pack
from moert.pack.errors import ChatInvalid, FormatTooNew, HashMismatch, PackError, SizeOverflow
from moert.pack.files import OpenedFile
from moert.pack.reader import Pack
from moert.pack.text import CHAT, MAX_CHAT_BYTES, ChatFormat, dump_chat, load_chat, parse_chat

WHOLE = ChatFormat("{{ messages }}\n\té", {"bos_token": "<s>", "eos_token": "</s>\n"}, "{{ tools }}")


def changed(**fields: Any) -> bytes:
    document = json.loads(dump_chat(WHOLE)) | fields
    return json.dumps({name: value for name, value in document.items() if value != "gone"}).encode()


def refused(error: type[PackError], words: str, body: bytes) -> None:
    with pytest.raises(PackError, match=words) as caught:
        parse_chat(body)
    assert type(caught.value) is error
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_what_was_written_is_read() -> None:
    for chat in (WHOLE, ChatFormat("x", {})):
        assert parse_chat(dump_chat(chat)) == chat
    assert parse_chat(changed(of_a_later_minor=[1])) == WHOLE
    assert parse_chat(changed(tool_template="gone")).tool_template is None


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 100_000, b'{"a": 1, "a": 1}', b"\xef\xbb\xbf{}"])
def test_no_json(body: bytes) -> None:
    refused(ChatInvalid, "chat.json is not JSON", body)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"format": "gguf"}, "has format 'gguf'"),
        ({"version": "1"}, "version should be 1"),
        ({"version": 0}, "version should be 1"),
        ({"version": True}, "version should be 1"),
        ({"template": "gone"}, "lacks the field 'template'"),
        ({"template": ""}, "template should be a template"),
        ({"template": ["x"]}, "template should be a template, found a JSON array"),
        ({"template": "\udc80"}, "template should be a template"),
        ({"tool_template": 3}, "tool_template should be a template"),
        ({"tokens": "gone"}, "lacks the field 'tokens'"),
        ({"tokens": []}, "tokens should be a JSON object"),
        ({"tokens": {"messages": "x"}}, "a name should be one that .*, found 'messages'"),
        ({"tokens": {"__class__": "x"}}, "a name should be one that .*, found '__class__'"),
        ({"tokens": {"a b": "x"}}, "a name should be one that .*, found 'a b'"),
        ({"tokens": {"bos_token": None}}, "bos_token should be text"),
        ({"tokens": {"bos_token": "x" * 257}}, "bos_token should be text"),
        ({"tokens": {f"t{n}": "x" for n in range(65)}}, "at most 64 tokens, found a JSON object of 65"),
    ],
)
def test_fields_that_are_wrong(fields: dict[str, Any], words: str) -> None:
    refused(ChatInvalid, words, changed(**fields))


def test_something_else_and_something_later() -> None:
    refused(ChatInvalid, "should be a JSON object", b"[]")
    refused(FormatTooNew, "upgrade moert", changed(version=2))


def test_what_no_reader_takes_is_not_written() -> None:
    with pytest.raises(ChatInvalid, match="at most 1048576 go into"):
        dump_chat(ChatFormat("x" * MAX_CHAT_BYTES, {}))
    with pytest.raises(ChatInvalid, match="a name should be one that"):
        dump_chat(ChatFormat("x", {"tools": "x"}))


def test_from_a_pack(pack_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_chat(Pack.open(pack_dir)) is None
    manifest = add_to_pack(pack_dir, Pack.open(pack_dir).manifest, CHAT, dump_chat(WHOLE))
    assert load_chat(Pack.open(pack_dir)) == WHOLE
    body = bytearray((pack_dir / CHAT).read_bytes())
    body[20] ^= 1
    (pack_dir / CHAT).write_bytes(body)
    with pytest.raises(HashMismatch):
        load_chat(Pack.open(pack_dir))
    manifest = add_to_pack(pack_dir, manifest, CHAT, b" " * (MAX_CHAT_BYTES + 1))
    with pytest.raises(SizeOverflow, match="has 1048577 bytes"):
        Pack.open(pack_dir)
    monkeypatch.setattr(OpenedFile, "read", lambda *_: pytest.fail("read"))
    with pytest.raises(SizeOverflow, match="has 1048577 bytes"):
        load_chat(Pack(pack_dir, manifest))
