"""Calibration text from strangers: no file takes more memory or time than files of people do; each is one line."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from limited import Limited

from moeconv.calibration import Sample, apart, load_splits, samples
from moeconv.calibration.apart import USUAL, rows_apart
from moeconv.calibration.rendering import LIMITS, RenderFailed, Rendering
from moeconv.calibration.samples import FIELDS, MAX_ROWS, with_documents
from moeconv.errors import CalibrationError

MIB = 1 << 20
HI = [{"role": "user", "content": "hi"}]
DATA_BYTES = 2 << 30  # of the process in `limited`


def refusal(path: Path | str) -> str:
    with pytest.raises(CalibrationError) as caught:
        load_splits(str(path), None, seed=0)
    check_line(str(caught.value), path)
    return str(caught.value)


def check_line(said: str, path: Path | str) -> None:
    assert len(said.splitlines()) == 1
    assert len(said) < 600
    assert str(path) in said


def refused(limited: Limited, path: Path, says: str, most_bytes: int = 400 * MIB) -> None:
    """In a process that holds little more than before."""
    before = limited.load_splits(path.parent / "none.txt").held_bytes
    done = limited.load_splits(path)
    assert says in done.complaint
    assert str(path) in done.complaint
    assert done.held_bytes - before < most_bytes


# Rows of text ---------------------------------------------------------------------------------------------------------


def test_a_label_of_5000_digits(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('input,choices,label\nx,"[""no"", ""yes""]",' + "1" * 5000 + "\n")
    assert "a.csv:2: the label '1111" in refusal(path)
    path = tmp_path / "a.jsonl"
    path.write_text('{"input": "x", "choices": ["no", "yes"], "label": ' + "1" * 5000 + "}\n")
    assert "a.jsonl:1: not JSON" in refusal(path)


@pytest.mark.parametrize("brackets", ["[" * 100_000, "[" * 100_000 + "]" * 100_000, '{"a":' * 100_000])
def test_a_hundred_thousand_brackets(tmp_path: Path, brackets: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text('input,choices,label\nx,"' + brackets.replace('"', '""') + '",0\n')
    assert "a.csv:2: expected a list of texts" in refusal(path)
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": {brackets}}}\n')
    assert "a.jsonl:1: not JSON" in refusal(path)


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "txt"])
def test_a_line_of_a_gigabyte(tmp_path: Path, suffix: str, limited: Limited) -> None:
    path = tmp_path / f"a.{suffix}"
    path.write_text('text\n{"text": "')
    with path.open("r+b") as stream:
        stream.truncate(1 << 30)
    refused(limited, path, "has 1024 MiB, at most 512 are read: give a part of it", 50 * MIB)
    with path.open("r+b") as stream:
        stream.truncate(300 * MIB)
    refused(limited, path, f"{path}:2: a row of over 64 MiB: cut the text into shorter ones", 300 * MIB)


def test_a_row_of_many_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "MAX_ROW_BYTES", 1000)
    (tmp_path / "a.csv").write_text("text\n" + '"' + "line\n" * 300 + '"\n')
    assert "a row of over 0 MiB" in refusal(tmp_path / "a.csv")
    (tmp_path / "a.txt").write_text("line\n" * 300)
    assert "a.txt:1: a row of over 0 MiB" in refusal(tmp_path / "a.txt")


def test_a_row_of_many_values(tmp_path: Path, limited: Limited) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": [' + "[]," * (20 * MIB) + "0]}\n")
    refused(limited, path, "a.jsonl:1: not JSON (over 4194304 values)", 350 * MIB)


def test_too_many_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moeconv.calibration.load.MAX_ROWS", 100)
    path = tmp_path / "a.txt"
    path.write_text("a paragraph\n\n" * 101)
    assert f"{path}:201: over 100 rows" in refusal(path)


def test_blank_lines_without_end_are_counted_once() -> None:
    started = time.process_time()
    texts = [Sample("a" + "\n" * 300_000 + "b"), Sample("x\n \n \n"), Sample("y")] * 2
    found, _ = with_documents(texts, running=True)
    assert [sample.document for sample in found] == ["part 1", "part 1", "part 2", "part 2", "part 2", "part 3"]
    assert time.process_time() - started < 5


PIECES = [b'{"text": "a b"}\n', b'{"input": "', b'"', b",", b"[", b"{", b"9" * 5000, b"\r", b"\r\n", b"\n\n", b"\xff",
          b"\xef\xbb\xbf", b"text\n", b"input,choices,label\n", b"\\ud800", b"1e999", b"NaN", b"\0"]  # fmt: skip


@given(st.lists(st.sampled_from(PIECES) | st.binary(max_size=4), max_size=14), st.sampled_from(["jsonl", "csv", "txt"]))
def test_any_text_is_read_or_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes], suffix: str
) -> None:
    path = tmp_path_factory.getbasetemp() / f"any-text.{suffix}"
    path.write_bytes(b"".join(pieces))
    try:
        load_splits(str(path), None, seed=0)
    except CalibrationError as error:
        check_line(str(error), path)


# Parquet and data sets ------------------------------------------------------------------------------------------------


def parquet(path: Path, table: Any, **options: Any) -> Path:
    pq = pytest.importorskip("pyarrow.parquet")
    pq.write_table(table, path, compression="zstd", **options)
    return path


def repeated(value: str, times: int) -> Any:
    """A column of one text, stored once."""
    pa = pytest.importorskip("pyarrow")
    return pa.DictionaryArray.from_arrays(pa.array([0] * times, pa.int32()), pa.array([value]))


def test_a_small_parquet_file_of_three_gigabytes(tmp_path: Path, limited: Limited) -> None:
    import pyarrow as pa

    path = parquet(tmp_path / "a.parquet", pa.table({"text": repeated("wörd " * 200_000, 3000)}))
    assert path.stat().st_size < MIB // 2
    refused(limited, path, "far more text than a file of its size has")


def test_the_same_in_lists(tmp_path: Path) -> None:
    """Where each text is in memory as often as it is there."""
    import pyarrow as pa

    turn = pa.StructArray.from_arrays([repeated("word " * 20_000, 2000).cast(pa.string())], ["content"])
    path = parquet(tmp_path / "a.parquet", pa.table({"messages": pa.ListArray.from_arrays([0, 2000], turn)}))
    assert path.stat().st_size < MIB
    with pytest.raises(CalibrationError, match="takes more than 150 MiB of memory to read"):
        list(rows_apart(str(path), FIELDS, replace(USUAL, data_bytes=150 * MIB)))


def test_rows_without_number(tmp_path: Path) -> None:
    import pyarrow as pa

    path = parquet(tmp_path / "a.parquet", pa.table({"text": repeated("", MAX_ROWS + 1)}))
    assert "has 4194305 rows, at most 4194304 are read" in refusal(path)


def test_what_the_reader_may_not_have(tmp_path: Path) -> None:
    """Time, and silence: where it ends, the row before is named."""
    import pyarrow as pa

    path = parquet(tmp_path / "a.parquet", pa.table({"text": repeated("word " * 1000, 20_000)}))
    with pytest.raises(CalibrationError, match=r"a\.parquet.*: can't be read on from here \(nothing came of it"):
        list(rows_apart(str(path), FIELDS, replace(USUAL, idle_s=0.001)))
    with pytest.raises(CalibrationError, match=r"a\.parquet.*: can't be read on from here|takes more than 10 MiB"):
        list(rows_apart(str(path), FIELDS, replace(USUAL, data_bytes=10 * MIB)))
    with pytest.raises(CalibrationError, match="a row of it has over 100 bytes"):
        list(rows_apart(str(path), FIELDS, replace(USUAL, line_bytes=100)))


def test_a_process_that_takes_too_much_time_is_ended(tmp_path: Path) -> None:
    import pyarrow as pa

    path = parquet(tmp_path / "a.parquet", pa.table({"text": repeated("word " * 10, MAX_ROWS)}))
    with pytest.raises(CalibrationError, match="more than 1 s of the processor"):
        list(rows_apart(str(path), FIELDS, replace(USUAL, cpu_s=1)))


def test_parquet_is_read_as_before(tmp_path: Path) -> None:
    """Rows, nothing in them, other columns and nested ones."""
    import pyarrow as pa

    table = pa.table({
        "text": ["a", None, "ü€\U0001f600", ""], "other": [1, 2, 3, 4], "choices": [["x", "y"], None, [], ["z"]],
        "messages": [[{"role": "user", "content": "hi"}], None, None, []], "label": [0, 1, None, 2],
    })  # fmt: skip
    path = parquet(tmp_path / "a.parquet", table)
    wanted = [{**row, "other": ""} for row in table.to_pylist()]
    assert list(rows_apart(str(path), FIELDS)) == [(f"{path}: row {n}", row) for n, row in enumerate(wanted, 1)]
    named = parquet(tmp_path / "b.parquet", pa.table({"date": pa.array([0], pa.date32())}))
    assert [row for _, row in rows_apart(str(named), {"date"})] == [{"date": ["datetime.date(1970, 1, 1)"]}]


def test_damaged_parquet_is_one_line(tmp_path: Path) -> None:
    import pyarrow as pa

    whole = parquet(tmp_path / "whole.parquet", pa.table({"text": [f"word {n}" for n in range(500)]})).read_bytes()
    path = tmp_path / "a.parquet"
    for at in (0, 4, 60, len(whole) // 2, len(whole) - 200, len(whole) - 6):
        body = bytearray(whole)
        body[at : at + 3] = b"\xff\xff\xff"
        path.write_bytes(body)
        try:
            load_splits(str(path), None, seed=0)
        except CalibrationError as error:
            check_line(str(error), path)


def test_a_saved_data_set_of_another_kind_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / "state.json").write_text("[" * 100_000)
    (folder / "dataset_info.json").write_text("{}")
    assert "the data set can't be loaded" in refusal(folder)


# Templates ------------------------------------------------------------------------------------------------------------

NO_END = {
    "a long text": "{{ 'a' * 10 ** 10 }}",
    "nested ranges": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a long answer": "{% for a in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
    "deep": "{{ " + "[" * 100_000 + "]" * 100_000 + " }}",
}


@pytest.mark.parametrize("case", NO_END)
def test_a_template_without_end_is_ended(case: str) -> None:
    rendering = Rendering(NO_END[case], {}, replace(LIMITS, cpu_s=2, idle_s=60))
    with pytest.raises(RenderFailed) as caught:
        rendering.render(HI)
    assert len(str(caught.value).splitlines()) == 1
    rendering.close()


def test_a_template_that_does_not_answer_is_ended() -> None:
    rendering = Rendering(NO_END["nested ranges"], {}, replace(LIMITS, idle_s=1.0))
    with pytest.raises(RenderFailed, match="it is not done after 1 s"):
        rendering.render(HI)
    rendering.close()


def test_a_template_reaches_nothing_and_its_words_are_one_line() -> None:
    for template in (
        "{% include '/etc/passwd' %}", "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception('a\\n\\x1b[2J') }}",
    ):  # fmt: skip
        rendering = Rendering(template, {})
        with pytest.raises(RenderFailed) as caught:
            rendering.render(HI)
        assert str(caught.value).isprintable()
        rendering.close()


def test_a_template_renders_as_transformers_does(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    template = (
        "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% if m.name is defined %}"
        "({{ m.name }}){% endif %}{{ m.thinking }}{{ tools }}{{ m | tojson }}\n{% endfor %}\n{% generation %}x"
        "{% endgeneration %}{% if add_generation_prompt %}!{% endif %}"
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")), bos_token="a", eos_token="a"
    )
    tokenizer.chat_template = template
    talks: list[list[dict[str, Any]]] = [
        [{"role": "user", "content": " hï\n "}, {"role": "assistant", "content": "€", "reasoning": "so", "name": None}],
        [{"role": "system", "content": "x", "name": "y"}],
    ]
    rendering = Rendering(template, tokenizer.special_tokens_map)
    assert [rendering.render(talk) for talk in talks] == [
        tokenizer.apply_chat_template(talk, tokenize=False) for talk in talks
    ]
    rendering.close()
    tokenizer.save_pretrained(tmp_path / "m")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    splits = load_splits(str(tmp_path / "a.jsonl"), None, seed=0, tokenizer=tmp_path / "m")
    assert splits.calibration[0].source == tokenizer.apply_chat_template(talks[0], tokenize=False)


def test_processes_end_with_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where not all rows were taken."""
    import pyarrow as pa

    path = parquet(tmp_path / "a.parquet", pa.table({"text": [f"word {n}" for n in range(5000)]}))
    started = []
    process = apart.Process

    def noted(*arguments: Any, **options: Any) -> Any:
        started.append(process(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(apart, "Process", noted)
    found = rows_apart(str(path), FIELDS)
    assert next(found) == (f"{path}: row 1", {"text": "word 0"})
    found.close()  # type: ignore[attr-defined]
    assert started[0]._process.returncode is not None
