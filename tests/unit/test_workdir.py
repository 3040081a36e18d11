"""The work directory: one run at a time, artefacts whole or not at all, refusals in one line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from moeconv.artifacts import SCHEMA
from moeconv.errors import ConversionError, SettingsError
from moeconv.measure.workdir import INPUTS, WorkDir, finished_work


def test_artefacts_come_back(tmp_path: Path) -> None:
    with WorkDir(tmp_path / "a" / "b") as work:
        work.save("x.json", {"value": (1, 2)})
        assert work.load("x.json") == {"schema": SCHEMA, "value": [1, 2]}
        assert work.load("y.json") is None
        assert sorted(path.name for path in work.path.iterdir()) == ["lock", "x.json"]
        work.journal("s").add("n", {"value": 1})
        assert work.journal("s").get("n") == {"value": 1}


def test_two_runs_do_not_share_it(tmp_path: Path) -> None:
    with (
        WorkDir(tmp_path / "w"),
        pytest.raises(ConversionError, match="another run is using"),
        WorkDir(tmp_path / "w"),
    ):
        pass
    with WorkDir(tmp_path / "w") as again:
        again.save("x.json", {})


def test_a_damaged_artefact_is_named(tmp_path: Path) -> None:
    with WorkDir(tmp_path) as work:
        (tmp_path / "x.json").write_text("{")
        with pytest.raises(ConversionError, match=r"x\.json can't be read.*delete it") as caught:
            work.load("x.json")
    assert "\n" not in str(caught.value)


def test_an_artefact_that_is_no_object_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[1]")
    with pytest.raises(ConversionError, match=r"x\.json can't be read .*expected an object, found a list.*: delete it"):
        WorkDir(tmp_path).load("x.json")


def test_finished_work_is_found_from_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with WorkDir(tmp_path / "one") as work:
        journal = work.journal("one")
        work.save(INPUTS, {"name": "one"}, journal)
        journal.add("n", {"value": 1})
    monkeypatch.chdir(tmp_path / "one")
    for path in (".", "..", "../one"):
        found, journal, _ = finished_work(Path(path))
        assert (found["name"], journal.get("n")) == ("one", {"value": 1})


@pytest.mark.parametrize("schema", [SCHEMA - 1, SCHEMA + 1, None])
def test_finished_work_of_another_version_is_refused(tmp_path: Path, schema: int | None) -> None:
    (tmp_path / INPUTS).write_text(json.dumps({"schema": schema}))
    says = f"has schema {schema!r}, this version of moeconv reads {SCHEMA}: run `moeconv quantize` again"
    with pytest.raises(SettingsError, match=says) as caught:
        finished_work(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "w").write_text("")
    with pytest.raises(ConversionError, match=r"can't use the work directory .*--work"), WorkDir(tmp_path / "w"):
        pass


def test_a_save_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with WorkDir(tmp_path) as work:
        work.save("x.json", {"value": 1})
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", full)
            with pytest.raises(ConversionError, match="No space left"):
                work.save("x.json", {"value": 2})
        assert work.load("x.json") == {"schema": SCHEMA, "value": 1}
        assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "x.json"]


def test_the_latest_finished_work_is_found(tmp_path: Path) -> None:
    for place, name in enumerate(("one", "two")):
        with WorkDir(tmp_path / name) as work:
            journal = work.journal(name)
            work.save(INPUTS, {"name": name}, journal)
            journal.add("n", {"value": name})
        os.utime(tmp_path / name / INPUTS, (1000 - place, 1000 - place))
    (tmp_path / "three").mkdir()
    found, journal, _ = finished_work(tmp_path)
    assert found["name"] == "one"
    assert journal.get("n") == {"value": "one"}
    assert finished_work(tmp_path / "two")[0]["name"] == "two"
    for path in (tmp_path / "three", tmp_path / "nowhere"):
        with pytest.raises(SettingsError, match=r"holds no finished sweep: give the --work"):
            finished_work(path)
