"""Reading calibration text: the same samples from every format, and what is refused, with its line."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeconv.calibration import Sample as S
from moeconv.calibration import load, load_splits, samples_digest
from moeconv.errors import CalibrationError


def write_rows(path: Path, rows: list[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def pairs(count: int, start: int = 0) -> list[dict[str, str]]:
    return [{"input": f"word {i}", "target": f"W {i}"} for i in range(start, start + count)]


def refusal(calib: Path | str, heldout: Path | str | None = None) -> str:
    with pytest.raises(CalibrationError) as caught:
        load_splits(str(calib), None if heldout is None else str(heldout), seed=0)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_split_is_disjoint_repeatable_and_follows_the_seed(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", pairs(40))
    first, again, other = (load_splits(str(path), None, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first.digest("calibration") != other.digest("calibration")
    assert not set(first.calibration) & set(first.heldout)
    assert len(first.calibration) + len(first.heldout) == 40
    assert first.seq2seq
    assert not first.choices


def test_csv_parquet_and_jsonl_hold_the_same_samples(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = pairs(20)
    jsonl = write_rows(tmp_path / "a.jsonl", rows)
    csv = tmp_path / "a.csv"
    csv.write_text("input,target\n" + "".join(f"{r['input']},{r['target']}\n" for r in rows), encoding="utf-8")
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    digests = {load_splits(str(p), None, seed=0).digest("heldout") for p in (jsonl, csv, tmp_path / "a.parquet")}
    assert len(digests) == 1


def test_second_file_is_the_heldout_split(tmp_path: Path) -> None:
    a, b = write_rows(tmp_path / "a.jsonl", pairs(10)), write_rows(tmp_path / "b.jsonl", pairs(10, start=10))
    splits = load_splits(str(a), str(b), seed=0)
    assert [sample.source for sample in splits.heldout] == [f"word {i}" for i in range(10, 20)]


def test_paragraphs_of_plain_text_join_to_the_file(tmp_path: Path) -> None:
    text = "\n\n" + "".join(f"  First line {i}.\nSecond line.\n \n\n" for i in range(6)) + "End without a newline"
    path = tmp_path / "a.txt"
    path.write_bytes(text.replace("\n", "\r\n").encode())
    splits = load_splits(str(path), None, seed=0)
    assert not splits.seq2seq
    assert len(splits.calibration) + len(splits.heldout) == 7
    assert "".join(sample.source for sample in (*splits.calibration, *splits.heldout)) == text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"input": "a"}\n', "a.jsonl:1: expected the fields"),
        ('{"input": "a", "target": "b"}\nnot json\n', "a.jsonl:2: not JSON .Expecting value at column 1."),
        ('{"input": "a", "target": 3}\n', "a.jsonl:1: expected text in the field 'target', found 3"),
        ('{"input": " ", "target": "b"}\n', "a.jsonl:1: the field 'input' is empty"),
        ('\n{"input": "a", "target": ""}\n', "a.jsonl:2: the field 'target' is empty"),
        ('{"text": "x"}\n{"input": "a", "target": "b"}\n', "a.jsonl:2: holds input and target, but"),
        ("[1]\n", "a.jsonl:1: expected the fields"),
        ("\n", "holds no samples"),
        ("", "holds no samples"),
        ('{"text": " "}\n{"text": ""}\n', "holds no samples"),
        ('{"input": "a", "target": "b"}\n', "needs at least 16"),
        ('{"text": "caf\ufffd"}\n', "a.jsonl:1: the field 'text' holds the character U\\+FFFD"),
        ('{"text": "a\\u0000b"}\n', "a.jsonl:1: the field 'text' holds the character NUL"),
        ('{"text": "a\\ud800"}\n', "a.jsonl:1: holds half of a character pair"),
        ('{"text": "all in one"}\n', "give more, or --heldout"),
        (f'{{"text": "{"twice " * 20}"}}\n' * 2, "give more, or --heldout"),
    ],
)
def test_bad_text_is_refused_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(CalibrationError, match=says):
        load_splits(str(path), None, seed=0)
    assert str(path) in refusal(path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('input,target\n"a\nb",c\nd,\n', "a.csv:4: the field 'target' is empty"),
        ("input,target\na,b,c\n", "a.csv:2: more cells than the header names"),
        ("input,target\na\n", "a.csv:2: expected the fields .* found 'input'"),
        ('input,target\n"a,b\n', "a.csv:2: not CSV"),
        ("question,answer\na,b\n", "a.csv:2: expected the fields .* found 'question', 'answer'"),
        ("input,target\n", "a.csv: holds no samples"),
    ],
)
def test_bad_csv_is_refused_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(CalibrationError, match=says):
        load_splits(str(path), None, seed=0)


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "txt"])
def test_text_that_is_not_utf8_is_refused_with_its_line(tmp_path: Path, suffix: str) -> None:
    latin = tmp_path / f"latin.{suffix}"
    latin.write_bytes('text\n\n{"text": "caf\xe9"}\n'.encode("latin-1"))
    assert refusal(latin).startswith(f"{latin}:3: not UTF-8 text at byte 19")


PIECES = st.sampled_from(
    [b'{"text": "a"}', b'{"input": ', b'"b"', b"input,target", b",", b"\n", b"\r", b"\0", b"\xff", b"1e999", b"[["]
)


@given(st.lists(PIECES | st.binary(max_size=3), max_size=12), st.sampled_from(["jsonl", "csv", "txt", "parquet"]))
def test_any_bytes_are_read_or_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes], suffix: str
) -> None:
    path = tmp_path_factory.getbasetemp() / f"any.{suffix}"
    path.write_bytes(b"".join(pieces))
    try:
        said = load_splits(str(path), None, seed=0).name
    except CalibrationError as error:
        said = str(error)
    assert str(path) in said
    assert len(said.splitlines()) == 1


def test_long_cells_and_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    wide = tmp_path / "wide.csv"
    wide.write_text("text\n" + "y" * 200_000 + "\nother\n", encoding="utf-8-sig")
    assert len(load_splits(str(wide), None, seed=0).calibration[0].source) == 200_000


def test_damaged_and_missing_files_are_refused(tmp_path: Path) -> None:
    broken = tmp_path / "a.parquet"
    broken.write_bytes(b"PAR1 no")
    assert "not a readable parquet file" in refusal(broken)
    assert "no such file" in refusal(tmp_path / "none.jsonl")
    assert "nor a name in calib_data" in refusal("unheard-of")


def test_overlap_is_refused_with_both_lines(tmp_path: Path) -> None:
    first = write_rows(tmp_path / "a.jsonl", pairs(10))
    other = write_rows(tmp_path / "b.jsonl", [*pairs(10, 20), {"input": " word  7", "target": "W 7 "}])
    assert "share 10 samples" in refusal(first, first)
    assert refusal(first, other).startswith(f"{other}:11: the same as {first}:8; ")
    lines = write_rows(tmp_path / "t.jsonl", [{"text": f"line {i} " + "x" * 90} for i in range(20)])
    assert "share 20 samples" in refusal(lines, lines)
    headings = write_rows(tmp_path / "h.jsonl", [{"text": "= Plot ="}, {"text": ""}, {"text": "its own words " * 9}])
    more = write_rows(tmp_path / "m.jsonl", [{"text": "= Plot ="}, {"text": ""}, {"text": "other words " * 9}])
    assert len(load_splits(str(headings), str(more), seed=0).heldout) == 3
    assert "different kinds" in refusal(first, lines)


def test_catalogue_refuses_what_differs_from_its_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "CATALOGUE", tmp_path)
    calibration, heldout = write_rows(tmp_path / "c.jsonl", pairs(9)), write_rows(tmp_path / "h.jsonl", pairs(9, 9))
    manifest = 'builder = "b.py"\nmetric = "rouge2"\n' + "".join(
        f'[splits.{name}]\nfile = "{path}"\nsha256 = "{hashlib.sha256(path.read_bytes()).hexdigest()}"\n'
        for name, path in (("calibration", calibration), ("heldout", heldout))
    )
    (tmp_path / "tiny.toml").write_text(manifest)
    splits = load_splits("tiny", None, seed=0)
    assert (splits.name, splits.metric, len(splits.heldout)) == ("tiny", "rouge2", 9)
    assert "leave --heldout out" in refusal("tiny", heldout)
    write_rows(heldout, pairs(8, 9))
    assert "h.jsonl differs from its manifest" in refusal("tiny")
    heldout.unlink()
    assert "h.jsonl is not there: build it with `python b.py`" in refusal("tiny")
    (tmp_path / "tiny.toml").write_text('builder = "b.py"\n')
    assert "tiny.toml: needs a builder" in refusal("tiny")
    for wrong in (
        manifest.replace("b.py", r"b\npy"),
        manifest.replace("c.jsonl", r"c\u001b[31m"),
        manifest.replace('"rouge2"', "1"),
    ):
        (tmp_path / "tiny.toml").write_text(wrong)
        refusal("tiny")
    (tmp_path / "tiny.toml").write_text(manifest.replace("c.jsonl", "c" * 300))
    assert "can't be read (File name too long)" in refusal("tiny")


def test_digest_depends_on_order_fields_and_choices() -> None:
    several = [[S("a", "b"), S("ab")], [S("ab"), S("a", "b")], [S("a", "b")], [S("ab")], [S("a", "b", ("b", "c"), 0)]]
    assert len({samples_digest(samples) for samples in several}) == len(several)
