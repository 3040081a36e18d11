"""What holds for every training on a finished pack."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moeconv.errors import SettingsError
from moert.pack.errors import WriteFailed

Train = Callable[..., Any]
"""Of a pack, with what is asked by name."""


def check_work_folders(trained: Train, pack: Path, other: Path) -> None:
    """An empty folder for the work is removed when training is done, and one with other things is refused."""
    other.mkdir()
    trained(pack, epochs=1, work=other)
    assert not other.exists()
    for names in (("lock", "thesis.txt"), ("mine.pt",)):
        other.mkdir(exist_ok=True)
        for name in names:
            (other / name).write_text("hours of work")
        with pytest.raises(SettingsError, match=rf"other holds {names[-1]}, which is not of a training .* --work"):
            trained(pack, epochs=1, work=other)
        assert {path.name for path in other.iterdir()} == set(names)
        shutil.rmtree(other)
    before = sorted(pack.rglob("*"))
    for folder in (pack, pack.parent):
        with pytest.raises(SettingsError, match=r"would be lost: give another --work"):
            trained(pack, epochs=1, work=folder)
    assert sorted(pack.rglob("*")) == before


def check_read_only(trained: Train, pack: Path, ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pack that nothing can be added to is refused before any work."""
    monkeypatch.setattr("moeconv.writer.os.access", lambda path, mode: False)
    with pytest.raises(WriteFailed, match=r"nothing can be added to .*, which can't be written to"):
        trained(pack)
    assert not pack.with_name(f"{pack.name}.{ending}").exists()
