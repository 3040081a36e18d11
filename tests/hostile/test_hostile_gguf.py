"""GGUF files from strangers: each way to lie is one line, before memory or time is spent on the lie."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest
from gguf_files import in_16_bits, write_gguf
from limited import Limited
from tiny import tiny_of

from moeconv.source.checkpoint import Checkpoint
from moeconv.source.outline import CheckpointError

HUGE = 1 << 63
TEXT, ARRAY = 8, 9


def text(value: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(value) if length is None else length) + value


def header(keys: bytes = b"", count: int = 0, tensors: bytes = b"", n: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, n, count) + keys + tensors


def key(name: bytes, kind: int, body: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + body


def tensor(name: bytes, dims: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


LIES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "ends within its header"),
    "another format": (b"PK\3\4" + bytes(40), "does not begin as GGUF files do"),
    "version 1": (header(version=1), "has version 1"),
    "the other byte order": (header(version=3 << 24), "the other byte order"),
    "tensors without end": (header(n=HUGE), "claims 9,223,372,036,854,775,808 tensors"),
    "keys without end": (header(count=HUGE), "claims 9,223,372,036,854,775,808 keys"),
    "a key of gigabytes": (header(text(b"", 1 << 33) + bytes(20), 1), "claims 8,589,934,592 bytes of a key"),
    "a text of gigabytes": (header(key(b"a", TEXT, text(b"", 1 << 33)), 1), "claims 8,589,934,592 bytes of 'a'"),
    "a list without end": (header(key(b"a", ARRAY, struct.pack("<IQ", 4, HUGE)), 1), "values of 'a'"),
    "texts without end": (header(key(b"a", ARRAY, struct.pack("<IQ", TEXT, HUGE)), 1), "texts of 'a'"),
    "a list in a list": (header(key(b"a", ARRAY, struct.pack("<IQ", ARRAY, 1)), 1), "lists inside the list 'a'"),
    "a value of no type": (header(key(b"a", 77, bytes(8)), 1), "the type 77 for 'a'"),
    "a key twice": (header(key(b"a", 4, bytes(4)) * 2, 2), "the key 'a' twice"),
    "text that is none": (header(key(b"a", TEXT, text(b"\xff\xfe")), 1), "not UTF-8"),
    "an odd alignment": (header(key(b"general.alignment", 4, struct.pack("<I", 3)), 1), "has the alignment 3"),
    "five dimensions": (header(tensors=tensor(b"t", (1,) * 5), n=1) + bytes(64), "5 dimensions for 't'"),
    "no dimension": (header(tensors=tensor(b"t", ()), n=1) + bytes(64), "0 dimensions for 't'"),
    "numbers without end": (header(tensors=tensor(b"t", (1 << 40, 1 << 40)), n=1) + bytes(64), "has the shape"),
    "no number": (header(tensors=tensor(b"t", (0, 4)), n=1) + bytes(64), "has the shape"),
    "a type that is none": (header(tensors=tensor(b"t", (4,), 99), n=1) + bytes(64), "the type 99"),
    "half a block": (header(tensors=tensor(b"t", (33,), 2), n=1) + bytes(64), "rows of 33 numbers in blocks of 32"),
    "an offset outside": (header(tensors=tensor(b"t", (4,), 0, 1 << 62), n=1) + bytes(64), "ends before its tensor"),
    "an offset between": (header(tensors=tensor(b"t", (4,), 0, 7), n=1) + bytes(64), "no multiple of 32"),
    "two in one place": (header(tensors=tensor(b"t", (4,)) + tensor(b"u", (4,)), n=2) + bytes(64), "where 't' is"),
    "a tensor twice": (header(tensors=tensor(b"t", (4,)) * 2, n=2) + bytes(64), "the tensor 't' twice"),
    "whole numbers": (header(tensors=tensor(b"t", (4,), 25), n=1) + bytes(128), "'t' is stored as I16"),
    "8 bits with sums": (header(tensors=tensor(b"t", (32,), 9), n=1) + bytes(256), "'t' is stored as Q8_1"),
    "no architecture": (header() + bytes(64), "has no general.architecture"),
    "an architecture that is a number": (
        header(key(b"general.architecture", 4, bytes(4)), 1) + bytes(64), "should be a str"),
    "one of many files": (header(key(b"split.count", 2, struct.pack("<H", 9)), 1), "it is one of 9 files"),
}  # fmt: skip


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("sound")
    tiny_of("mixtral")(folder / "m")
    in_16_bits(folder / "m")
    return write_gguf(folder / "m", folder / "m.gguf").read_bytes()


@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_one_line(name: str, tmp_path: Path, limited: Limited) -> None:
    body, words = LIES[name]
    file = tmp_path / "m.gguf"
    file.write_bytes(body)
    done = limited.moeconv("quantize", str(file), "--bits", "4", "--out", str(tmp_path / "p"))
    assert words in done.complaint
    assert str(file) in done.complaint
    assert done.held_bytes < 1 << 30
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_a_file_cut_anywhere_is_refused(sound: bytes, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    for end in range(0, len(sound), 1 + len(sound) // 97):
        file.write_bytes(sound[:end])
        with pytest.raises(CheckpointError, match=re.escape(str(file))) as error:
            Checkpoint.open(file)
        assert "\n" not in str(error.value)


def test_files_that_do_not_belong_together(sound: bytes, tmp_path: Path) -> None:
    """The second is missing, is the first once more, or is of another model."""
    first, second = tmp_path / "m-00001-of-00002.gguf", tmp_path / "m-00002-of-00002.gguf"
    assert b"split" not in sound

    def part(number: int, count: int, arch: bytes = b"llama") -> bytes:
        keys = key(b"general.architecture", TEXT, text(arch)) + key(b"split.count", 2, struct.pack("<H", count))
        return header(keys + key(b"split.no", 2, struct.pack("<H", number)), 3)

    first.write_bytes(part(0, 2))
    for body, words in (
        (None, "is missing"), (part(0, 2), "is not part 2 of 2"), (part(1, 3), "is not part 2 of 2"),
        (part(1, 2, b"gpt2"), "is not part 2 of 2"), (b"GGUF", "ends within its header"),
    ):  # fmt: skip
        if body is not None:
            second.write_bytes(body)
        with pytest.raises(CheckpointError, match=words):
            Checkpoint.open(first)


def test_a_file_that_becomes_shorter(sound: bytes, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(sound)
    checkpoint = Checkpoint.open(file)
    file.write_bytes(sound[: len(sound) // 2])
    with pytest.raises(CheckpointError, match="can't be read"):
        checkpoint.check_finite()
