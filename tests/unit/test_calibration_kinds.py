"""Samples with choices, chat messages, data sets and renamed fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moeconv.calibration import Sample, Splits, load_splits
from moeconv.calibration.apart import read_dataset
from moeconv.calibration.samples import FIELDS
from moeconv.errors import CalibrationError

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}\n{% endfor %}"
)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


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
        with pytest.raises(CalibrationError, match=says) as caught:
            load_splits(path, None, seed=0, tokenizer=folder)
        assert "\n" not in str(caught.value)


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
