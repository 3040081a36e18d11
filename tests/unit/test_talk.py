"""`make talk`: the model comes from the pinned wheel alone, is converted once, and then talks."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from calib_data import wheels
from moeconv.command import cli
from recipes import talk


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "wheels" / f"{talk.WHEEL.stem}py3-none-any.whl"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(talk.MEMBER, b"GGUF of a test")
    monkeypatch.setattr(wheels, "WHEEL_DIR", path.parent)
    monkeypatch.setattr(wheels.fetch, "__defaults__", (path.parent,))
    return path


def test_the_model_is_the_one_of_the_pinned_wheel(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(wheels.DataError, match="sha256"):
        talk.model(tmp_path)
    assert not list(tmp_path.glob("*.gguf"))
    monkeypatch.setattr(talk, "WHEEL", replace(talk.WHEEL, sha256=hashlib.sha256(wheel.read_bytes()).hexdigest()))
    found = talk.model(tmp_path)
    assert found.read_bytes() == b"GGUF of a test"
    wheel.unlink()
    assert talk.model(tmp_path) == found


def test_a_pack_is_made_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / Path(talk.MEMBER).name).write_bytes(b"GGUF")
    convert, chat = talk.commands(tmp_path, None)
    assert Path(convert[0]).name == "moeconv"
    assert cli._exit_code([*convert[1:], "--help"]) == 0  # its options are known
    assert "Usage: moeconv quantize" in capsys.readouterr().out
    assert [Path(chat[0]).name, chat[1]] == ["moert", "chat"]
    pack = Path(convert[convert.index("--out") + 1])
    pack.mkdir()
    (pack / "manifest.json").write_text("{}")
    (answer,) = talk.commands(tmp_path, "Who are you?")
    assert answer[1:] == ["run", str(pack), "--memory", "300MB", "Who are you?", "--chat"]
