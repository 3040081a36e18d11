"""The journal: what was added is there again, and nothing else."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from moeconv.errors import ConversionError
from moeconv.measure.workdir import Journal, identity
from tests.refusing import one_line


@pytest.fixture
def path(tmp_path: Path) -> Path:
    journal = Journal(tmp_path / "journal.jsonl", "this")
    for number in range(3):
        journal.add(f"n{number}", {"value": number})
    return journal.path


def test_what_was_added_is_read_again(path: Path) -> None:
    journal = Journal(path, "this")
    assert len(journal) == 3
    assert journal.get("n1") == {"value": 1}
    assert journal.get("n9") is None
    assert list(journal.entries()) == [{"value": number} for number in range(3)]
    record: dict[str, Any] = {"scores": [[0.1234567, 1.0]], "widths": [[2, 4]], "text": "é\n"}
    journal.add("a", record)
    assert Journal(path, "this").get("a") == record


def test_identity_depends_on_everything_and_its_order() -> None:
    names = [identity("a", 1), identity("a", 2), identity(1, "a"), identity("a", [1]), identity("a", None)]
    assert len(set(names)) == len(names)
    assert identity("a", (2, 4)) == identity("a", [2, 4])


@pytest.mark.parametrize("line", ["{", "[]", "3", '{"id": "x"}', '{"subject": "this"}', "é"])
def test_a_damaged_line_is_named_and_kept(path: Path, line: str) -> None:
    lines = path.read_text().splitlines()
    lines.insert(1, line)
    path.write_text("\n".join(lines) + "\n", encoding="latin-1")
    before = path.read_bytes()
    with one_line(ConversionError, r"journal\.jsonl:2 is damaged"):
        Journal(path, "this")
    assert path.read_bytes() == before


def test_a_line_about_another_subject_is_refused(path: Path) -> None:
    with pytest.raises(ConversionError, match=r":1 is about another model"):
        Journal(path, "other")


def test_a_line_cut_off_by_a_crash_is_measured_again(path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[:-4])
    journal = Journal(path, "this")
    assert len(journal) == 2
    assert path.read_bytes() == whole[:-4], "reading must not change a journal that another run may be writing"
    journal.add("n2", {"value": 2})
    assert path.read_bytes() == whole


def test_a_full_disk_leaves_no_half_line(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, before = Journal(path, "this"), path.read_bytes()

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(ConversionError, match=r"No space left.*free some space"):
            journal.add("n3", {"value": 3})
    assert path.read_bytes() == before
    assert journal.get("n3") is None
    journal.add("n3", {"value": 3})
    assert [json.loads(line)["id"] for line in path.read_text().splitlines()] == ["n0", "n1", "n2", "n3"]


def test_a_write_that_stops_in_the_middle_leaves_no_half_line(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    signal = pytest.importorskip("signal")
    journal, before = Journal(path, "this"), path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 100, hard))
    try:
        with pytest.raises(ConversionError, match="can't write"):
            journal.add("long", {"values": list(range(10_000))})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, old)
    assert path.read_bytes() == before
    assert len(Journal(path, "this")) == 3


def test_a_journal_that_cannot_be_opened_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").mkdir()
    with one_line(ConversionError, r"can't read .*--work"):
        Journal(tmp_path / "journal.jsonl", "this")


def test_a_file_is_finished_when_it_is_sealed_and_one_that_was_changed_is_refused(tmp_path: Path) -> None:
    journal, file = Journal(tmp_path / "journal.jsonl", "this"), tmp_path / "moments.safetensors"
    assert not journal.sealed(file)
    file.write_bytes(b"figures")
    assert not journal.sealed(file), "a run was killed before it was finished"
    journal.seal(file)
    journal.seal(file)
    assert len(journal.path.read_bytes().splitlines()) == 1
    assert all(each.sealed(file) for each in (journal, Journal(journal.path, "this")))
    file.write_bytes(b"Figures")
    with pytest.raises(ConversionError, match=r"moments.safetensors was changed since it was made: delete it"):
        journal.sealed(file)
    file.unlink()
    assert not journal.sealed(file)
    file.write_bytes(b"others")
    journal.seal(file)
    assert Journal(journal.path, "this").sealed(file)


def test_files_of_one_name_in_two_folders_have_seals_of_their_own(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl", "this")
    files = [tmp_path / folder / "E000-4" for folder in ("D00", "D01")]
    for file in files:
        file.parent.mkdir()
        file.write_text(file.parent.name)
    journal.seal(files[0])
    assert [journal.sealed(file) for file in files] == [True, False]
    journal.seal(files[1])
    shutil.copy(files[0], files[1])
    with pytest.raises(ConversionError, match="was changed"):
        journal.sealed(files[1])


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("at", ["fsync", "replace"])
def test_a_run_killed_while_it_writes_a_file_again_leaves_a_sealed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str, after: bool
) -> None:
    real = getattr(os, at)

    def killed(*given: Any) -> None:
        if after:
            real(*given)
        raise KeyboardInterrupt

    journal, file = Journal(tmp_path / "journal.jsonl", "this"), tmp_path / "planning.json"
    journal.write(file, b"before")
    with monkeypatch.context() as patched:
        patched.setattr(os, at, killed)
        with pytest.raises(KeyboardInterrupt):
            journal.write(file, b"after")
    assert file.read_bytes() == (b"after" if after and at == "replace" else b"before")
    assert Journal(journal.path, "this").sealed(file)
    journal.write(file, b"after")
    assert file.read_bytes() == b"after"
    assert Journal(journal.path, "this").sealed(file)
