"""Reading and splitting calibration text: what is refused, and that the halves share nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeconv.calibration import Sample as S
from moeconv.calibration import _split, load_splits, samples_digest
from moeconv.errors import CalibrationError


def write_rows(path: Path, rows: list[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def pairs(count: int, start: int = 0) -> list[object]:
    return [{"input": f"word {i}", "target": f"W {i}"} for i in range(start, start + count)]


def test_split_is_disjoint_repeatable_and_follows_the_seed(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", pairs(40))
    first, again, other = (load_splits(str(path), None, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first.digest("calibration") != other.digest("calibration")
    assert not set(first.calibration) & set(first.heldout)
    assert len(first.calibration) + len(first.heldout) == 40
    assert first.seq2seq


@given(st.lists(st.integers(0, 5).map(lambda i: S(str(i), "t")), min_size=2, max_size=40), st.booleans())
def test_equal_samples_never_land_in_both_halves(samples: list[S], seq2seq: bool) -> None:
    first, second = _split(tuple(samples), seq2seq, 3)
    assert not set(first) & set(second)
    assert set(first) | set(second) == set(samples)


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


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"input": "a"}\n', "a.jsonl:1"),
        ('{"input": "a", "target": "b"}\nnot json\n', "a.jsonl:2"),
        ('{"input": "a", "target": 3}\n', "a.jsonl:1"),
        ('{"input": " ", "target": "b"}\n', "a.jsonl:1"),
        ('{"text": "x"}\n{"input": "a", "target": "b"}\n', "use one kind"),
        ("[1]\n", "a.jsonl:1"),
        ("\n", "holds no samples"),
        ('{"input": "a", "target": "b"}\n', "needs at least"),
    ],
)
def test_bad_text_is_refused_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(CalibrationError, match=says) as caught:
        load_splits(str(path), None, seed=0)
    assert "\n" not in str(caught.value)


def test_wrong_encoding_overlap_and_absence_are_refused(tmp_path: Path) -> None:
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes('{"text": "caf\xe9"}\n'.encode("latin-1"))
    with pytest.raises(CalibrationError, match="not UTF-8"):
        load_splits(str(latin), None, seed=0)
    same = write_rows(tmp_path / "a.jsonl", pairs(10))
    with pytest.raises(CalibrationError, match="share 10 samples"):
        load_splits(str(same), str(same), seed=0)
    with pytest.raises(CalibrationError, match="no such file"):
        load_splits(str(tmp_path / "none.jsonl"), None, seed=0)
    with pytest.raises(CalibrationError, match="nor a name in calib_data"):
        load_splits("unheard-of", None, seed=0)
    lines = write_rows(tmp_path / "t.jsonl", [{"text": f"line {i} " + "x" * 90} for i in range(20)])
    with pytest.raises(CalibrationError, match="share 20 samples"):
        load_splits(str(lines), str(lines), seed=0)
    half = write_rows(tmp_path / "h.jsonl", [{"text": "a\ud800"}])
    with pytest.raises(CalibrationError, match=r"h\.jsonl:1"):
        load_splits(str(half), None, seed=0)
    one = write_rows(tmp_path / "one.jsonl", [{"text": "all in one"}])
    with pytest.raises(CalibrationError, match="give more, or --heldout"):
        load_splits(str(one), None, seed=0)
    wide = tmp_path / "wide.csv"
    wide.write_text("text\n" + "y" * 200_000 + "\nother\n", encoding="utf-8-sig")
    assert len(load_splits(str(wide), None, seed=0).calibration[0].source) == 200_000
    broken = tmp_path / "a.parquet"
    broken.write_bytes(b"PAR1 no")
    with pytest.raises(CalibrationError, match="parquet"):
        load_splits(str(broken), None, seed=0)


def test_digest_depends_on_order_and_fields() -> None:
    a, b = S("a", "b"), S("ab", "")
    assert len({samples_digest([a, b]), samples_digest([b, a]), samples_digest([a]), samples_digest([b])}) == 4
