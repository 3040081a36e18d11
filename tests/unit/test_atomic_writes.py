"""A file is written whole or not at all, and nothing is left beside it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from moert.pack.files import atomic_write, write_atomically, write_in_order


def test_what_is_written_takes_the_place(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_bytes(b"old")
    with atomic_write(path) as fresh:
        assert fresh.parent == path.parent
        fresh.write_bytes(b"new")
        assert path.read_bytes() == b"old"
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == {"state": b"new"}


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt(), ValueError("bad")])
def test_a_block_that_fails_leaves_what_was_there(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "state"
    path.write_bytes(b"old")

    def write() -> None:
        with atomic_write(path) as fresh:
            fresh.write_bytes(b"half of the n")
            raise error

    with pytest.raises(type(error)):
        write()
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == {"state": b"old"}


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_so_does_a_system_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match="full"):
        write_atomically(tmp_path / "state", b"new")
    assert list(tmp_path.iterdir()) == []


def test_bytes_are_durable_before_the_name_is_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *given, name=name, real=real: (calls.append(name), real(*given)))
    write_in_order([(tmp_path / "a", b"1"), (tmp_path / "b", b"2")])
    assert calls == ["fsync", "fsync", "replace", "replace"]
