"""Two workers beside one: what they are told, and the rows that come of it."""

from __future__ import annotations

from recipes.bench.size import FITTED
from recipes.bench.size_run import Ran
from recipes.bench.workers import arguments, rows_of


def ran(wall_s: float) -> Ran:
    return Ran(wall_s, wall_s, 0, 0, 0, {"sweep": wall_s / 2})


def test_less_text_is_divided_as_all_of_it_is() -> None:
    told = arguments(8)
    names = ("--samples", "--sweep-samples", "--heldout-samples")
    assert [told[told.index(name) + 1] for name in names] == ["6", "2", "2"]
    assert len(told) == len(FITTED)
    assert "--loss" not in told, "there are too few documents to promise one by"


def test_the_ratio_is_of_runs_that_followed_each_other() -> None:
    rows = rows_of("m", {1: [ran(10.0), ran(30.0)], 2: [ran(5.0), ran(20.0)]})
    found = {row.name: row for row in rows}
    assert found["m, 1 worker(s): time"].value == 20.0
    assert found["m, 2 worker(s): sweep"].value == 10.0
    ratio = found["m: one worker's time, of that of two"]
    assert (ratio.value, ratio.runs, ratio.met) == (1.75, 2, False)
