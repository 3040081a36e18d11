"""The form in which benches hand over their figures."""

from __future__ import annotations

import json
import math
import subprocess

import pytest

from recipes.bench.result import Result, Row, context, read, row_of_runs, table, write


def test_aims_say_whether_they_are_met():
    row = Row("bytes", 0.6, "share")
    assert (row.at_most(0.6).aim, row.at_most(0.6).met, row.at_most(0.5).met) == ("≤ 0.6", True, False)
    assert (row.at_least(0.6).aim, row.at_least(0.6).met, row.at_least(0.7).met) == ("≥ 0.6", True, False)
    assert not row.at_least(math.nextafter(0.6, 1)).met, "an aim is met at its limit and not near it"
    assert not row.at_most(math.nextafter(0.6, 0)).met


def test_repeated_runs_give_their_median_and_the_distance_of_the_quartiles():
    row = row_of_runs("time", [4.0, 1.0, 2.0, 3.0, 100.0], "s")
    assert (row.value, row.spread, row.runs) == (3.0, 2.0, 5)
    assert row_of_runs("time", [4.0], "s").spread is None
    with pytest.raises(ValueError, match="time: no runs"):
        row_of_runs("time", [], "s")


def test_an_aim_and_an_interval_keep_what_was_measured():
    row = row_of_runs("time", [1.0, 2.0, 3.0], "s").within(1.1, 2.9, 3).at_most(5)
    assert (row.name, row.value, row.unit, row.spread, row.runs) == ("time", 2.0, "s", 1.0, 3)
    assert (row.low, row.high, row.n, row.met) == (1.1, 2.9, 3, True)


def test_the_file_has_the_context_and_what_is_known_of_every_row(tmp_path):
    rows = [Row("a", 1.5, "s", 0.1, 3).at_most(1), Row("b", 2.0, "bytes")]
    path = write("some", context({"seed": 0}, ["safetensors"]), rows, tmp_path / "new")
    assert path == tmp_path / "new" / "some.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    assert set(found) == {"context", "rows"}
    where = found["context"]
    assert set(where) == {"commit", "changed", "date", "seconds", "hardware", "versions", "settings"}
    assert set(where["hardware"]) == {"processor", "cores", "memory_gib", "isa"}
    assert where["settings"] == {"seed": 0}
    assert {"python", "numpy", "torch", "safetensors"} <= set(where["versions"])
    assert found["rows"][0] == {
        "name": "a", "value": 1.5, "unit": "s", "spread": 0.1, "runs": 3, "aim": "≤ 1", "met": False,
    }  # fmt: skip
    assert found["rows"][1] == {"name": "b", "value": 2.0, "unit": "bytes", "runs": 1}
    assert [file.name for file in path.parent.iterdir()] == ["some.json"]


def test_what_was_written_is_read_again(tmp_path):
    rows = [Row("a", 1.5, "s").within(1, 2, 9).at_least(1), Row("b", 2.0, "bytes")]
    result = read(write("some", {"commit": "abc"}, rows, tmp_path))
    assert result == Result({"commit": "abc"}, rows)
    assert result.by_name["b"] == rows[1]


@pytest.mark.parametrize("text", ["", "{}", '{"context": {}, "rows": [{"nam": 1}]}', '{"context": {}, "rows": 1}'])
def test_what_is_no_result_is_refused_by_name(tmp_path, text):
    path = tmp_path / "some.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"some\.json is no result file"):
        read(path)


def test_two_rows_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two rows are called 'a'"):
        _ = Result({}, [Row("b", 1, ""), Row("a", 1, ""), Row("a", 2, "")]).by_name


def git(*command):
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *author, *command], check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for variable in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(variable, raising=False)
    git("init")
    (tmp_path / "code.py").write_text("1")
    (tmp_path / "README.md").write_text("1")
    git("add", ".")
    git("commit", "-m", "first")
    return tmp_path


def test_a_checkout_without_changes_is_named_by_its_commit(checkout):
    where = context({})
    assert not where["changed"]
    assert len(where["commit"]) == 12
    (checkout / "README.md").write_text("2")
    (checkout / "docs").mkdir()
    (checkout / "docs" / "some.json").write_text("2")
    assert context({}) | {"date": 0, "seconds": 0} == where | {"date": 0, "seconds": 0}


@pytest.mark.parametrize("file", ["code.py", "new.py"])
def test_changed_and_new_files_are_told(checkout, file):
    clean = context({})["commit"]
    (checkout / file).write_text("2")
    assert (context({})["commit"], context({})["changed"]) == (f"{clean}+", True)


def test_a_row_that_came_to_no_number_costs_no_other(tmp_path, capsys):
    path = write("some", context({}), [Row("a", float("nan"), "s"), Row("b", 2.0, "s")], tmp_path)
    found = read(path)
    assert ([row.name for row in found.rows], found.context["no number"]) == (["b"], ["a"])
    assert capsys.readouterr().err == "no number: a\n"


def test_a_context_that_json_cannot_hold_is_refused_and_leaves_the_old_file(tmp_path):
    write("some", context({}), [Row("a", 1.0, "s")], tmp_path)
    with pytest.raises(ValueError, match="JSON"):
        write("some", context({"wrong": float("nan")}), [Row("a", 2.0, "s")], tmp_path)
    assert json.loads((tmp_path / "some.json").read_text())["rows"][0]["value"] == 1.0


def test_the_table_has_a_line_for_each_row_and_counts_the_aims():
    rows = [Row("a", 1.5, "s").at_most(1), Row("long name", 1234567.0, "bytes").at_least(1), Row("c", 0.012345, "s")]
    lines = table(rows).splitlines()
    assert len(lines) == 5
    assert lines[1].endswith("NO")
    assert lines[2].split() == ["long", "name", "1,234,567", "bytes", "1", "≥", "1", "yes"]
    assert "0.01235" in lines[3] or "0.01234" in lines[3]
    assert lines[-1] == "1 of 2 aims met"
