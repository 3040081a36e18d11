"""The figures in the text are those of the kept result files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from recipes.bench import picture
from recipes.bench.blocks import (
    BLOCKS,
    MISSED,
    PAPERS,
    RESULTS,
    ROOT,
    block_names,
    documents,
    kept,
    regenerated,
    waiting,
)
from recipes.bench.kept import MOST_BYTES, refusal

KEPT = kept()
# Blocks whose benches have not run since tables are made from files: `make keep-results` and `make tables`, then take
# the name away here.
WAITING = {"quant_smollm2"}
# Figures that were not measured here: what is asked for, promised, imitated, or said of the paper's models.
SAID = {
    "Promised at 95%", "a probability of 95%", "a confidence of 95%", "throttled to 100 and 500 MB/s",
    "Intervals are of 95%", "(over 99% of tokens on the 20% most frequent paths, 87% of next experts guessed)",
    "at 95% needs 30 documents", "at 90% needs 15", "at a loss of 5%",
    "95% interval where there is one", "needs 32 MB in its control group and 160 MB of addresses",
    "192 MB and 1,000 MB",
}  # fmt: skip
FIGURE = re.compile(r"\d[\d.,]*(?:e-?\d+)? ?(?:%|×|times\b|tokens/s|[kMG]i?B\b|ms\b|µs|s\b|seconds|minutes|nats)")
TABLE_FIGURE = re.compile(r"^\|.*\d.*\|$", re.MULTILINE)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", documents(), ids=name_of)
def test_blocks_show_what_the_files_hold(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert regenerated(text, KEPT) == text, "run make tables"


def test_the_picture_shows_what_the_files_hold() -> None:
    assert picture.PICTURE.read_text(encoding="utf-8") == picture.drawn(KEPT), "run make tables"


def test_every_result_that_the_text_quotes_is_kept() -> None:
    missing = {name for path in documents() for name in waiting(path.read_text(encoding="utf-8"), KEPT)}
    assert missing == WAITING, "keep the results of these blocks, or take the name from WAITING"


def test_every_block_has_its_place() -> None:
    names = [name for path in documents() for name in block_names(path.read_text(encoding="utf-8"))]
    assert sorted(names) == sorted([*BLOCKS, *PAPERS, MISSED])


def test_what_is_kept_is_small_and_of_one_commit() -> None:
    refused = {name: reason for name, result in KEPT.items() if (reason := refusal(result))}
    assert refused == {}
    assert [path.name for path in RESULTS.glob("*.json") if path.stat().st_size >= MOST_BYTES] == []


def sentences(text: str) -> str:
    """A text without what is generated and without code."""
    text = re.sub(r"<!-- (?:table|help|reckoned): .*?<!-- end -->", "", text, flags=re.DOTALL)
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^    .*$", "", text, flags=re.MULTILINE)
    return " ".join(re.sub(r"`[^`]*`", "", text).split(" "))


@pytest.mark.parametrize("path", documents(), ids=name_of)
def test_figures_stand_in_blocks_only(path: Path) -> None:
    text = sentences(path.read_text(encoding="utf-8"))
    assert TABLE_FIGURE.findall(text) == []
    text = " ".join(text.split())
    for said in SAID:
        text = text.replace(said, "")
    assert FIGURE.findall(text) == [], "a figure in a sentence belongs into a block: recipes/bench/tables"


def test_what_may_be_said_is_said() -> None:
    texts = " ".join(" ".join(sentences(path.read_text(encoding="utf-8")).split()) for path in documents())
    assert {said for said in SAID if said not in texts} == set(), "take it from SAID"


def test_a_figure_in_a_sentence_is_seen() -> None:
    text = "It takes 5.1 times less. <!-- table: a -->\n1.2 ×\n<!-- end --> `12 MB` and 3 MB."
    assert FIGURE.findall(sentences(text)) == ["5.1 times", "3 MB"]
