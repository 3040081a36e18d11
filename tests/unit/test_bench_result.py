"""The form in which benches hand over their figures."""

from __future__ import annotations

import json

import pytest

from tests.bench.result import Row, context, row_of_runs, table, write


def test_aims_say_whether_they_are_met():
    row = Row("bytes", 0.6, "share")
    assert (row.at_most(0.6).aim, row.at_most(0.6).met, row.at_most(0.5).met) == ("≤ 0.6", True, False)
    assert (row.at_least(0.6).aim, row.at_least(0.6).met, row.at_least(0.7).met) == ("≥ 0.6", True, False)


def test_repeated_runs_give_their_median_and_the_distance_of_the_quartiles():
    row = row_of_runs("time", [4.0, 1.0, 2.0, 3.0, 100.0], "s")
    assert (row.value, row.spread, row.runs) == (3.0, 2.0, 5)
    assert row_of_runs("time", [4.0], "s").spread is None
    with pytest.raises(ValueError, match="time: no runs"):
        row_of_runs("time", [], "s")


def test_an_aim_keeps_what_was_measured():
    row = row_of_runs("time", [1.0, 2.0, 3.0], "s").at_most(5)
    assert (row.name, row.value, row.unit, row.spread, row.runs) == ("time", 2.0, "s", 1.0, 3)


def test_the_file_has_the_context_and_every_field_of_every_row(tmp_path):
    rows = [Row("a", 1.5, "s", 0.1, 3).at_most(1), Row("b", 2.0, "bytes")]
    path = write("some", context({"seed": 0}, ["safetensors"]), rows, tmp_path / "new")
    assert path == tmp_path / "new" / "some.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    assert set(found) == {"context", "rows"}
    assert set(found["context"]) == {"commit", "hardware", "versions", "settings"}
    assert found["context"]["settings"] == {"seed": 0}
    assert {"python", "numpy", "torch", "safetensors"} <= set(found["context"]["versions"])
    assert found["rows"][0] == {
        "name": "a", "value": 1.5, "unit": "s", "spread": 0.1, "runs": 3, "aim": "≤ 1", "met": False,
    }  # fmt: skip
    assert found["rows"][1]["met"] is None
    assert [file.name for file in path.parent.iterdir()] == ["some.json"]


def test_figures_that_json_cannot_hold_are_refused_and_leave_the_old_file(tmp_path):
    write("some", context({}), [Row("a", 1.0, "s")], tmp_path)
    with pytest.raises(ValueError, match="JSON"):
        write("some", context({}), [Row("a", float("nan"), "s")], tmp_path)
    assert json.loads((tmp_path / "some.json").read_text())["rows"][0]["value"] == 1.0


def test_the_table_has_a_line_for_each_row_and_counts_the_aims():
    rows = [Row("a", 1.5, "s").at_most(1), Row("long name", 1234567.0, "bytes").at_least(1), Row("c", 0.012345, "s")]
    lines = table(rows).splitlines()
    assert len(lines) == 5
    assert lines[1].endswith("NO")
    assert lines[2].split() == ["long", "name", "1,234,567", "bytes", "1", "≥", "1", "yes"]
    assert "0.01235" in lines[3] or "0.01234" in lines[3]
    assert lines[-1] == "1 of 2 aims met"
