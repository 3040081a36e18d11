"""The tokenizer of a pack: every token of a text and no others, or one line that says why not."""

from __future__ import annotations

from pathlib import Path

import pytest
from random_packs import write_pack
from tokenizers import Tokenizer, models, pre_tokenizers

from moert.backbone import load_tokenizer
from moert.errors import TokenizerMissing
from moert.pack.errors import HashMismatch
from moert.pack.reader import Pack
from moert.pack.writer import add_to_pack

TEXT = "a b c d e f"


def words() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"[pad]": 0, **{word: at + 1 for at, word in enumerate(TEXT.split())}}))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def pack_with(path: Path, body: bytes) -> Pack:
    write_pack(path)
    add_to_pack(path, Pack.open(path).manifest, "tokenizer.json", body)
    return Pack.open(path)


def test_stored_truncation_and_padding_have_no_effect(tmp_path: Path) -> None:
    stored = words()
    stored.enable_truncation(4)
    stored.enable_padding(length=9, pad_token="[pad]")
    tokenizer = load_tokenizer(pack_with(tmp_path / "model.pack", stored.to_str().encode()))
    assert tokenizer.encode(TEXT).ids == words().encode(TEXT).ids == [1, 2, 3, 4, 5, 6]
    assert tokenizer.encode("b").ids == [2]


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"[]", b"\xff\xfe", b'{"version": "1.0",\n "model": {"type": "None"}}'], ids=repr
)
def test_a_tokenizer_that_is_none_is_one_line(tmp_path: Path, body: bytes) -> None:
    pack = pack_with(tmp_path / "model.pack", body)
    with pytest.raises(
        TokenizerMissing, match=r"tokenizer\.json in .* can't be read .*convert the model again"
    ) as caught:
        load_tokenizer(pack)
    assert "\n" not in str(caught.value)


def test_a_damaged_tokenizer_is_noticed(tmp_path: Path) -> None:
    """It would still load, and split texts differently."""
    pack = pack_with(tmp_path / "model.pack", words().to_str().encode())
    path = pack.root / "tokenizer.json"
    path.write_text(path.read_text().replace('"a":1', '"g":1'))
    with pytest.raises(HashMismatch, match=r"tokenizer\.json: checksum differs"):
        load_tokenizer(pack)
