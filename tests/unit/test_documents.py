"""Which document a sample comes from: named, told by the text, or a run of rows; and what follows for the division."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trials import write_rows

from moeconv.calibration import Sample, divide, load_splits
from moeconv.calibration.samples import IN_RUNS, RUNS, level, runs, with_documents
from moeconv.errors import CalibrationError

PARAGRAPH = "Some words of prose that go on for a while. "


def documents(rows: list[str], *, running: bool = True) -> list[str]:
    return [sample.document for sample in with_documents([Sample(row) for row in rows], running=running)[0]]


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 99)), min_size=2, max_size=60), st.floats(0.1, 0.9),
    st.booleans(), st.integers(0, 3),
)  # fmt: skip
def test_no_document_is_torn(rows: list[tuple[int, int]], share: float, seq2seq: bool, seed: int) -> None:
    told = [Sample(f"{number} {'x' * 90}", "t" * seq2seq, document=f"d{name}") for name, number in rows]
    samples, _ = with_documents(told, running=not seq2seq)
    if len({sample.document for sample in {sample.key: sample for sample in reversed(samples)}.values()}) < 2:
        return
    try:
        first, second = divide(samples, seq2seq, share, seed)
    except CalibrationError:
        return  # all but copies lay in the first part
    assert not {sample.document for sample in first} & {sample.document for sample in second}


def test_one_sample_and_one_document_can_not_be_divided() -> None:
    samples = [Sample(f"{number}", "t", document="all") for number in range(20)]
    with pytest.raises(CalibrationError, match="20 samples of one document with nothing to divide"):
        divide(samples, True, 0.5, 0)
    for seq2seq in (True, False):
        with pytest.raises(CalibrationError, match=r"2 \w+ \(1 without repeats\) with nothing"):
            divide([Sample("a", "b"), Sample("a ", "b")], seq2seq, 0.5, 0)


@pytest.mark.parametrize("fields", [None, {"document": "title"}])
def test_documents_that_are_named_stay_whole_and_together(tmp_path: Path, fields: dict[str, str] | None) -> None:
    name = "document" if fields is None else "title"
    rows = [{"input": f"q {at}", "target": f"a {at}", name: at % 7} for at in range(70)]
    splits = load_splits(write_rows(tmp_path / "a.jsonl", rows), None, seed=1, fields=fields)
    parts = [{sample.document for sample in part} for part in (splits.calibration, splits.heldout)]
    assert parts[0] | parts[1] == set("0123456")
    assert not parts[0] & parts[1]
    seen = [sample.document for sample in splits.calibration]
    assert [*dict.fromkeys(seen)] == [seen[at] for at in range(len(seen)) if at == 0 or seen[at] != seen[at - 1]]


@pytest.mark.parametrize("own", [False, True])
def test_each_row_may_be_a_document(tmp_path: Path, own: bool) -> None:
    """Unless a field of that name says otherwise."""
    rows = [{"input": f"q {at}", "target": f"a {at}", **({"row": at // 2} if own else {})} for at in range(640)]
    path = write_rows(tmp_path / "a.jsonl", rows)
    splits = load_splits(path, None, seed=1, fields={"document": "row"})
    every = [sample.document for part in (splits.calibration, splits.heldout) for sample in part]
    assert len(set(every)) == (320 if own else 640)
    assert splits.why == "as the field 'document' says"
    assert load_splits(path, None, seed=1).why == IN_RUNS


def test_a_document_is_a_name() -> None:
    from moeconv.calibration.samples import to_sample

    with pytest.raises(CalibrationError, match="expected a name in the field 'document'"):
        to_sample({"text": "a", "document": ["b"]}, "running text", "x:1", lambda *_: "")


@pytest.mark.parametrize(
    ("row", "expected"),
    [(" = Title = \n", 1), (" \n = = Part = = \n", 2), ("# One", 1), ("### Three", 3), ("#no", 0), ("a = b", 0),
     ("== no ==", 0), ("", 0), (" = = = Deep = = = ", 3)],
)  # fmt: skip
def test_levels_of_headings(row: str, expected: int) -> None:
    assert level(row) == expected


def test_headings_of_the_highest_level_that_stands_twice_begin_documents() -> None:
    book = ["# Book\n", "## One\n", PARAGRAPH, "### Part\n", PARAGRAPH, "## Two\n", PARAGRAPH]
    assert documents(book) == ["part 1", *["part 2"] * 4, *["part 3"] * 2]
    wiki = [" = A = \n", "", PARAGRAPH, " = = History = = \n", PARAGRAPH, " = B = \n", PARAGRAPH]
    assert documents(wiki) == [*["part 1"] * 5, *["part 2"] * 2]


def test_a_text_file_shows_documents_by_two_blank_lines(tmp_path: Path) -> None:
    chapter = f"{PARAGRAPH}\n\n{PARAGRAPH}again\n\n\n\n"
    path = tmp_path / "book.txt"
    path.write_text("".join(chapter.replace("words", f"words {at}") for at in range(8)), "utf-8")
    splits = load_splits(str(path), None, seed=0)
    parts = [[sample.document for sample in part] for part in (splits.calibration, splits.heldout)]
    assert [len(set(part)) for part in parts] == [4, 4]
    assert all(part.count(name) == 2 for part in parts for name in part)


def test_long_rows_are_documents_and_short_ones_tell_none() -> None:
    assert documents(["x" * 1500, "", "y" * 1500]) == ["part 1", "part 2", "part 3"]
    assert documents([PARAGRAPH] * 5) == [""] * 5
    rows = [str(at) for at in range(4 * RUNS)]
    found = documents(rows, running=False)  # of other kinds they come in runs
    assert len(set(found)) == RUNS
    assert found == sorted(found, key=lambda name: int(name.split()[1]))
    assert len(set(documents(rows[:50], running=False))) == 50


@given(st.integers(1, 2000), st.integers(1, 200))
def test_runs_are_many_and_alike(count: int, wanted: int) -> None:
    found = runs(count, wanted)
    sizes = [found.count(number) for number in dict.fromkeys(found)]
    assert min(count, wanted) <= len(sizes) < 2 * wanted + 1
    assert set(sizes[:-1]) <= {sizes[0]}


# Dividing: nothing in both parts, nothing lost, running text stays running text

SAMPLES = st.lists(st.integers(0, 5).map(lambda i: Sample(str(i), "t")), min_size=2, max_size=40)


@given(SAMPLES.filter(lambda samples: len(set(samples)) > 1), st.floats(0.1, 0.9))
def test_equal_samples_never_land_in_both_parts(samples: list[Sample], share: float) -> None:
    first, second = divide(samples, True, share, 3)
    assert not set(first) & set(second)
    assert sorted([*first, *second], key=str) == sorted(set(samples), key=str)


@given(st.lists(st.text("ab \n", min_size=1).map(Sample), min_size=2, max_size=40), st.floats(0.1, 0.9))
def test_running_text_is_cut_once(samples: list[Sample], share: float) -> None:
    first, second = divide(samples, False, share, 3)
    assert first
    assert second
    assert [*first, *second] == samples


def test_share_counts_samples_or_characters() -> None:
    pairs = [Sample(f"word {i}", f"w {i}") for i in range(100)]
    first, second = divide(pairs, True, 0.6, 0)
    assert (len(first), len(second)) == (60, 40)
    assert divide(pairs, True, 0.6, 0) == (first, second)
    assert divide(pairs, True, 0.6, 1)[0] != first
    text = [Sample("x" * 600)] + [Sample(f"{i:0100d}") for i in range(4)]
    assert [len(part) for part in divide(text, False, 0.6, 0)] == [1, 4]


def test_copies_with_other_white_space_are_dropped() -> None:
    first, second = divide([Sample("a b", "c"), Sample("a  b ", "c"), Sample("d", "e")], True, 0.5, 0)
    assert {sample.source for sample in (*first, *second)} == {"a b", "d"}
    text = [
        Sample("first " * 20),
        Sample("= Heading ="),
        Sample("second " * 20),
        Sample("= Heading ="),
        Sample("first  " * 20),
    ]
    assert divide(text, False, 0.4, 0)[1] == (text[2], text[3])
