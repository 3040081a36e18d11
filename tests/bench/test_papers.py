"""Claims of docs/papers.md: flags, commands, files and rows that they name are there; figures are of kept results."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import replace

import pytest

from moeconv.tuned import TUNED
from moert.command.settings import SETTINGS
from moert.described import Misasked
from recipes.bench import kept
from recipes.bench.blocks import PAPERS, RESULTS, ROOT, RowMissing, names, paper_table
from recipes.bench.blocks import kept as kept_results
from recipes.bench.result import Result, read, write
from recipes.bench.tables.papers import NOT_MEASURED, Claim

CLAIMS = [claim for claims in PAPERS.values() for claim in claims]
HELP = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
SETTINGS_OF = {each.called: each for each in (*SETTINGS, *TUNED) if not each.usual}


@pytest.fixture(scope="module")
def results() -> Mapping[str, Result]:
    return kept_results()


def is_there(said: str) -> bool:
    """Returns whether a flag, command, module, target of make or file exists, with the options behind it."""
    if tuned := re.fullmatch(r"--tune ([a-z-]+)=(\S+)", said):
        SETTINGS_OF[tuned[1]].parsed(tuned[2])
        return True
    first, *rest = said.split()
    if said.startswith("python -m"):
        module = importlib.util.find_spec(rest[1])
        return module is not None and {*rest[2:]} <= {*re.findall(r"--[a-z-]+", HELP)}
    if first in ("moert", "moeconv"):
        help_of = re.search(rf"<!-- help: {first} {rest[0]} -->(.*?)<!-- end -->", HELP, re.DOTALL)
        return help_of is not None and {*rest[1:]} <= {*re.findall(r"--[a-z-]+", help_of[1])}
    if first == "make":
        return re.search(rf"^{rest[0]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE) is not None
    return first in re.findall(r"--[a-z-]+", HELP) if first.startswith("--") else (ROOT / said).exists()


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.mechanism)
def test_what_a_claim_names_is_there(claim: Claim, results: Mapping[str, Result]) -> None:
    for said in re.findall(r"`([^`]*)`", f"{claim.ours} {claim.differs}"):
        assert is_there(said), said
    rows = {name for cell in claim.line for name in names(cell)}
    assert bool(rows) is bool(claim.result), "a claim names rows and their result, or neither"
    assert claim.out != NOT_MEASURED or not claim.result
    assert claim.result or not re.search(r"\d", claim.out), "a figure that is no row"
    if claim.result and claim.result not in results:
        pytest.skip(f"{claim.result} is not kept yet: WAITING of tests/rules/test_tables.py")
    assert rows <= set(results[claim.result].by_name if claim.result else ())


def test_other_names_are_missed() -> None:
    there = [
        is_there(each) for each in ("--layot", "make bench-hsh", "moeconv train-hush", "python -m recipes.bench.x")
    ]
    assert there == [False] * 4
    with pytest.raises(Misasked, match="is not one of"):
        is_there("--tune eviction=fifo")


@pytest.mark.parametrize("name", PAPERS)
def test_a_changed_result_changes_its_cells(name: str, results: Mapping[str, Result]) -> None:
    if lacking := {claim.result for claim in PAPERS[name]} - {"", *results}:
        pytest.skip(f"not kept yet: {', '.join(lacking)}")
    claim = next(claim for claim in PAPERS[name] if claim.result)
    changed = next(names(claim.out))
    rows = [replace(row, value=row.value + 20, spread=None) if row.name == changed else row
            for row in results[claim.result].rows]  # fmt: skip
    before = paper_table(PAPERS[name], results)
    after = paper_table(PAPERS[name], {**results, claim.result: Result(results[claim.result].context, rows)})
    assert before
    assert after
    lines = zip(before.splitlines(), after.splitlines(), strict=True)
    assert claim.mechanism in {old.split(" | ")[0].removeprefix("| ") for old, new in lines if old != new}
    assert f"{claim.result} of commit {results[claim.result].context['commit'][:7]}" in " ".join(after.split())
    assert paper_table(PAPERS[name], {key: each for key, each in results.items() if key != claim.result}) is None


def test_a_result_without_a_row_of_a_claim_is_not_kept(tmp_path) -> None:
    found = read(RESULTS / "beforehand.json")
    rows = [row for row in found.rows if not (row.name.startswith("wiki") and row.name.endswith("with hash"))]
    with pytest.raises(RowMissing, match="with hash"):
        kept.keep(write("beforehand", found.context, rows, tmp_path / "build"), tmp_path / "docs")
    assert not (tmp_path / "docs").exists()
