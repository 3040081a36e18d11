"""Reading calibration text: the same samples from every format, and what is refused, with its line."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trials import write_rows

from moeconv.calibration import Sample, Splits, load, load_splits, samples_digest
from moeconv.calibration import Sample as S
from moeconv.calibration.apart import read_dataset
from moeconv.calibration.samples import FIELDS
from moeconv.errors import CalibrationError
from tests.refusing import one_line


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


def test_plain_text_without_blank_lines_is_told_how_to_be_divided(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("a paragraph on each line\n" * 99)
    assert refusal(path).endswith("or held-out text of its own; blank lines divide it into samples")


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
        ('{"text": "all in one"}\n', "give more, or held-out text of its own"),
        (f'{{"text": "{"twice " * 20}"}}\n' * 2, "give more, or held-out text of its own"),
        ('input,target\n"a\nb",c\nd,\n', "a.csv:4: the field 'target' is empty"),
        ("input,target\na,b,c\n", "a.csv:2: more cells than the header names"),
        ("input,target\na\n", "a.csv:2: expected the fields .* found 'input'"),
        ('input,target\n"a,b\n', "a.csv:2: not CSV"),
        ("question,answer\na,b\n", "a.csv:2: expected the fields .* found 'question', 'answer'"),
        ("input,target\n", "a.csv: holds no samples"),
    ],
)
def test_bad_text_is_refused_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / f"a.{'csv' if 'a.csv' in says else 'jsonl'}"
    path.write_text(text, encoding="utf-8")
    found = refusal(path)
    assert str(path) in found
    assert re.search(says, found)


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "txt"])
def test_text_that_is_not_utf8_is_refused_with_its_line(tmp_path: Path, suffix: str) -> None:
    latin = tmp_path / f"latin.{suffix}"
    latin.write_bytes('text\n\n{"text": "caf\xe9"}\n'.encode("latin-1"))
    assert refusal(latin).startswith(f"{latin}:3: not UTF-8 text at byte 19")


PIECES = st.sampled_from(
    [b'{"text": "a"}', b'{"input": ', b'"b"', b"input,target", b",", b"\n", b"\r", b"\0", b"\xff", b"1e999", b"[["]
)


@settings(max_examples=30)
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
    calibration, heldout = tmp_path / "c.jsonl", tmp_path / "h.jsonl"
    write_rows(calibration, pairs(9))
    write_rows(heldout, pairs(9, 9))
    manifest = 'builder = "b.py"\nmetric = "rouge2"\n' + "".join(
        f'[splits.{name}]\nfile = "{path}"\nsha256 = "{hashlib.sha256(path.read_bytes()).hexdigest()}"\n'
        for name, path in (("calibration", calibration), ("heldout", heldout))
    )
    (tmp_path / "tiny.toml").write_text(manifest)
    splits = load_splits("tiny", None, seed=0)
    assert (splits.name, splits.metric, len(splits.heldout)) == ("tiny", "rouge2", 9)
    assert "leave held-out text out" in refusal("tiny", heldout)
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


# Samples with choices, chat messages, data sets and renamed fields

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}\n{% endfor %}"
)


def all_samples(splits: Splits) -> set[Sample]:
    return {*splits.calibration, *splits.heldout}


def labelled(count: int) -> list[dict[str, Any]]:
    return [{"input": f"sentence {i}", "choices": ["no", "yes"], "label": i % 2} for i in range(count)]


def test_labels_are_places_or_texts(tmp_path: Path) -> None:
    places = labelled(20)
    texts = [row | {"label": row["choices"][row["label"]]} for row in places]
    cells = "".join(f'{row["input"]},"[""no"", ""yes""]",{row["label"]}\n' for row in places)
    (tmp_path / "c.csv").write_text("input,choices,label\n" + cells, encoding="utf-8")
    files = [write_rows(tmp_path / "a.jsonl", places), write_rows(tmp_path / "b.jsonl", texts), str(tmp_path / "c.csv")]
    first, *others = (load_splits(file, None, seed=0) for file in files)
    assert Sample("sentence 3", "yes", ("no", "yes"), 1) in all_samples(first)
    assert first.seq2seq
    assert first.choices
    assert all(other.digest("heldout") == first.digest("heldout") for other in others)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"label": 2}, "the label 2 is none of the choices 'no, yes', nor a place from 0 to 1"),
        ({"label": -1}, "the label -1 is none"),
        ({"label": "maybe"}, "the label 'maybe' is none"),
        ({"label": True}, "the label True is none"),
        ({"choices": ["no"]}, "1 choices: give at least two"),
        ({"choices": "no, yes"}, "expected a list of texts in the field 'choices'"),
        ({"choices": ["no", ""]}, "the field 'choices' is empty"),
        ({"choices": ["no", "no"]}, "two of the choices are the same"),
    ],
)
def test_bad_choices_are_refused_with_their_line(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    rows = labelled(20)
    rows[4] |= change
    path = write_rows(tmp_path / "a.jsonl", rows)
    with pytest.raises(CalibrationError) as caught:
        load_splits(path, None, seed=0)
    assert str(caught.value).startswith(f"{path}:5: {says}")


def test_fields_are_renamed_and_others_left_aside(tmp_path: Path) -> None:
    rows = [{"text": "ignored", "question": f"q {i}", "answer": f"a {i}"} for i in range(20)]
    path = write_rows(tmp_path / "a.jsonl", rows)
    splits = load_splits(path, None, seed=0, fields={"input": "question", "target": "answer"})
    assert Sample("q 3", "a 3") in all_samples(splits)
    with pytest.raises(CalibrationError, match=r"a.jsonl:1: no field 'reply'; there are text, question, answer"):
        load_splits(path, None, seed=0, fields={"input": "question", "target": "reply"})
    with pytest.raises(CalibrationError, match="source is no field; there are text, messages, input"):
        load_splits(path, None, seed=0, fields={"source": "question"})


def write_tokenizer(folder: Path, template: str | None) -> Path:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def test_chat_messages_become_running_text(tmp_path: Path) -> None:
    turns = [
        [{"role": "user", "content": f"question {i}"}, {"role": "assistant", "content": "answer"}] for i in range(4)
    ]
    path = write_rows(tmp_path / "a.jsonl", [{"messages": messages} for messages in turns])
    splits = load_splits(path, None, seed=0, tokenizer=write_tokenizer(tmp_path / "model", TEMPLATE))
    assert not splits.seq2seq
    assert splits.calibration[0] == Sample("<user>question 0\n<assistant>answer\n")
    bare = write_tokenizer(tmp_path / "bare", None)
    for folder, says in ((bare, "bare has no chat template"), (None, "no model here"), (tmp_path, "can't be loaded")):
        with one_line(CalibrationError, says):
            load_splits(path, None, seed=0, tokenizer=folder)


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([{"role": "robot", "content": "x"}], r"a\.jsonl:2: the model's chat template refuses .*no robots"),
        ([{"role": "user"}], r"a\.jsonl:2: expected a list of \{role, content\}"),
        ([], r"a\.jsonl:2: expected a list of \{role, content\}"),
        ("hello", r"a\.jsonl:2: expected a list of \{role, content\}"),
    ],
)
def test_bad_messages_are_refused_with_their_line(tmp_path: Path, messages: object, says: str) -> None:
    good = [{"role": "user", "content": "a"}]
    path = write_rows(tmp_path / "a.jsonl", [{"messages": good}, {"messages": messages}])
    with pytest.raises(CalibrationError, match=says):
        load_splits(path, None, seed=0, tokenizer=write_tokenizer(tmp_path / "model", TEMPLATE))


def test_saved_data_set_is_read_with_the_names_of_its_classes(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    kinds = datasets.Features(
        {"sentence": datasets.Value("string"), "label": datasets.ClassLabel(names=["negative", "positive"])}
    )
    parts = {
        name: datasets.Dataset.from_dict(
            {"sentence": [f"{name} {i}" for i in range(10)], "label": [i % 2 for i in range(10)]}, features=kinds
        )
        for name in ("train", "test")
    }
    folder = str(tmp_path / "saved")
    datasets.DatasetDict(parts).save_to_disk(folder)
    fields = {"input": "sentence", "label": "label"}
    splits = load_splits(f"{folder}@train", f"{folder}@test", seed=0, fields=fields)
    assert splits.calibration[3] == Sample("train 3", "positive", ("negative", "positive"), 1)
    assert splits.heldout[0].source == "test 0"
    with pytest.raises(CalibrationError, match=r"there are the splits train, test: name one as .*saved@SPLIT"):
        load_splits(folder, None, seed=0, fields=fields)
    with pytest.raises(CalibrationError, match=r"saved@train: row 1: the same as .*saved@train: row 1; .* share 10"):
        load_splits(f"{folder}@train", f"{folder}@train", seed=0, fields=fields)


def test_name_on_the_hub_without_a_network_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def unreachable(*names: str) -> None:
        raise ConnectionError(f"no network for {names}\nand more")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(CalibrationError) as caught:
        list(read_dataset("hf:owner/name/config@train", FIELDS))
    assert str(caught.value) == (
        "hf:owner/name/config@train: the data set can't be loaded (no network for ('owner/name', 'config'))"
    )


@pytest.mark.parametrize("name", ["hf:", "hf:owner/", "hf:/name", "hf:@test"])
def test_a_data_set_without_a_name_is_one_line(name: str) -> None:
    with pytest.raises(CalibrationError, match="expected hf:OWNER/NAME"):
        load_splits(name, None, seed=0)
