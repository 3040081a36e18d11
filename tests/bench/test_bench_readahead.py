"""The drive's read-ahead while programs race: the usual one, and afterwards as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.bench import readahead
from recipes.bench.readahead import USUAL_KB, read_ahead


def test_the_usual_read_ahead_holds_inside_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readahead, "disk_of", lambda path: "8:0")
    setting = tmp_path / "8:0/queue/read_ahead_kb"
    setting.parent.mkdir(parents=True)
    setting.write_text("8192\n")
    with read_ahead(tmp_path, root=tmp_path) as holds:
        assert holds == USUAL_KB
        assert setting.read_text() == f"{USUAL_KB}\n"
    assert setting.read_text() == "8192\n"
    with pytest.raises(KeyboardInterrupt), read_ahead(tmp_path, root=tmp_path):
        raise KeyboardInterrupt
    assert setting.read_text() == "8192\n"


def test_what_can_not_be_changed_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(self: Path, text: str) -> int:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(readahead, "disk_of", lambda path: "8:0")
    setting = tmp_path / "8:0/queue/read_ahead_kb"
    setting.parent.mkdir(parents=True)
    setting.write_text("8192\n")
    monkeypatch.setattr(Path, "write_text", refused)
    with read_ahead(tmp_path, root=tmp_path) as holds:
        assert holds == 8192
    assert "stays at 8192 (Read-only file system)" in capsys.readouterr().err


def test_what_lies_on_no_disk_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readahead, "disk_of", lambda path: "0:42")
    with read_ahead(tmp_path, root=tmp_path) as holds:
        assert holds is None
        assert not list(tmp_path.iterdir())
