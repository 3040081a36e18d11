"""Checkpoints without tokenizer.json: one is made of the files of tiktoken or GPT-2, and says the same of hard text."""

from __future__ import annotations

import base64
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_olmoe
from tokenizers import Tokenizer

from moeconv.source.checkpoint import Checkpoint
from moeconv.tokenizers import chat_tokenizer, made
from moert.pack.text import TokenizerUnfit, check_tokenizer

WORDS = ("the", " cat", "'s", "日本", "東京", " Мос", "ква", "  ", "\n\n", "123", "é", "🙂")
# Whole words of Han, words, up to three digits, and all else: Kimi's pattern, shorter.
PATTERN = r"[\p{Han}]+|[\p{L}\p{M}&&[^\p{Han}]]+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"
CODE = '''
raise SystemExit("this must not run")


class Tokenizer:
    pat_str: str = "|".join([
        r"""[\\p{Han}]+""", r"""[\\p{L}\\p{M}&&[^\\p{Han}]]+""", r"""\\p{N}{1,3}""", r""" ?[^\\s\\p{L}\\p{N}]+""",
        r"""\\s+""",
    ])
'''.replace("\\\\", "\\")
CONFIG: dict[str, Any] = {
    "auto_map": {"AutoTokenizer": ["tokenization_own.Tokenizer", None]}, "tokenizer_class": "OwnTokenizer",
    "bos_token": "[BOS]", "eos_token": "[EOS]", "chat_template": "{{ bos_token }}{{ messages[0].content }}",
}  # fmt: skip


def ranks() -> dict[bytes, int]:
    """All bytes, and what the words grow through, a byte at a time."""
    pieces = {word.encode()[:end]: None for word in WORDS for end in range(2, len(word.encode()) + 1)}
    return {piece: rank for rank, piece in enumerate([*(bytes([byte]) for byte in range(256)), *pieces])}


def write(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    lines = (f"{base64.b64encode(piece).decode()} {rank}\n" for piece, rank in ranks().items())
    (folder / "tiktoken.model").write_text("".join(lines))
    first = len(ranks())
    added = {"added_tokens_decoder": {str(first): {"content": "[BOS]"}, str(first + 2): {"content": "[EOS]"}}}
    (folder / "tokenizer_config.json").write_text(json.dumps({**CONFIG, **added, **changes}))
    (folder / "tokenization_own.py").write_text(CODE)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("tiktoken") / "hf")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    body = made(folder)
    assert body is not None
    check_tokenizer(body.encode())
    return Tokenizer.from_str(body)


def merged(word: bytes) -> list[int]:
    """As tiktoken does it: of all neighbours the pair with the smallest rank becomes one."""
    known, parts = ranks(), [bytes([byte]) for byte in word]
    if word in known:
        return [known[word]]
    while True:
        pairs = [known.get(one + other, 1 << 30) for one, other in pairwise(parts)]
        if not pairs or min(pairs) == 1 << 30:
            return [known[part] for part in parts]
        at = pairs.index(min(pairs))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def in_words(text: str) -> list[str]:
    """What the pattern makes of these letters, without a library that knows scripts."""
    return re.findall(
        r"[日本東京測]+|[a-zA-Zé\u0301МосквaА-я]+|[0-9²]{1,3}| ?[^\s日本東京測a-zA-Zé\u0301А-я0-9²]+|\s+", text
    )


@given(st.text(st.sampled_from("the cats'日本東京測Москваé\u0301 \n\t\r123²🙂_.\u200d\x00"), max_size=40))
def test_text_becomes_the_same_tokens(tokenizer: Tokenizer, text: str) -> None:
    found = tokenizer.encode(text, add_special_tokens=False).ids
    assert found == [token for word in in_words(text) for token in merged(word.encode())]
    assert tokenizer.decode(found, skip_special_tokens=False) == text


def test_the_library_itself_says_the_same(folder: Path, tokenizer: Tokenizer) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    own = tiktoken.Encoding("own", pat_str=PATTERN, mergeable_ranks=ranks(), special_tokens={})
    for text in ("The cats' 日本の東京 12345", "naïve\r\n\t  Москва\u0301s", "🙂🙂 _x ǅʰ가①² \x85\u3000", ""):
        assert tokenizer.encode(text, add_special_tokens=False).ids == own.encode(text)


def test_special_tokens_have_the_ids_of_its_config_and_gaps_are_filled(tokenizer: Tokenizer) -> None:
    first = len(ranks())
    ids = tokenizer.encode("[BOS]the[EOS]", add_special_tokens=False).ids
    assert ids == [first, ranks()[b"the"], first + 2]
    assert tokenizer.id_to_token(first + 1) == f"<|reserved_token_{first + 1}|>"


def test_the_chat_template_is_used_with_it(folder: Path) -> None:
    found = chat_tokenizer(folder)
    assert found.apply_chat_template([{"role": "user", "content": "the"}], tokenize=False) == "[BOS]the"
    assert found.special_tokens_map["eos_token"] == "[EOS]"


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"eos_token": "[END]"}, r"no id for its eos_token '\[END\]'"), ({"added_tokens_decoder": 3}, "can't be made")],
)
def test_what_would_not_be_the_same_is_not_made(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(TokenizerUnfit, match=named):
        made(write(tmp_path / "hf", **changes))


def test_a_long_token_is_refused_at_once(tmp_path: Path) -> None:
    with open(write(tmp_path / "hf") / "tiktoken.model", "a") as file:
        file.write(f"{base64.b64encode(bytes(1 << 22)).decode()} {len(ranks())}\n")
    with pytest.raises(TokenizerUnfit, match="has more than 512 bytes"):
        made(tmp_path / "hf")


def test_without_the_pattern_none_is_made(tmp_path: Path) -> None:
    (write(tmp_path / "hf") / "tokenization_own.py").write_text("pat_str = load('pattern')")
    with pytest.raises(TokenizerUnfit, match="the pattern that cuts text into words stands in no"):
        made(tmp_path / "hf")


def test_a_checkpoint_is_packed_with_what_was_made(tmp_path: Path) -> None:
    source = tiny_olmoe(tmp_path / "m")
    (source / "tokenizer.json").unlink()
    assert Checkpoint.open(source).spelled is None
    write(source)
    checkpoint = Checkpoint.open(source)
    assert checkpoint.spelled == made(source)
    assert checkpoint.notes == []
    (source / "tokenization_own.py").unlink()
    unmade = Checkpoint.open(source)
    assert unmade.spelled is None
    assert [note[:30] for note in unmade.notes] == ["tokenizer.json can't be made: "]


# GPT-2's two files.


def write_merges(folder: Path, **config: Any) -> Tokenizer:
    """Writes the vocabulary and the merges of the wiki model in place of its tokenizer.json, which is returned."""
    whole = Path("recipes/models/wiki/tokenizer.json").read_text()
    table = json.loads(whole)["model"]
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps(table["vocab"]))
    pairs = (each if isinstance(each, str) else " ".join(each) for each in table["merges"])
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *pairs]) + "\n")
    (folder / "config.json").write_text(json.dumps({"model_type": "opt"}))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.from_str(whole)


def test_vocabulary_and_merges_make_the_tokenizer_that_they_are_of(tmp_path: Path) -> None:
    whole = write_merges(tmp_path / "hf", tokenizer_class="GPT2Tokenizer", eos_token="</s>")
    body = made(tmp_path / "hf")
    assert body is not None
    found = Tokenizer.from_str(body)
    for text in ("Hello world, it's 12.", "  日本 \n\n\tdéjà 🙂 vu", "a</s>b", ""):
        assert found.encode(text).ids == whole.encode(text).ids


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("LlamaTokenizer", "made of merges.txt: tokenizer_config.json names a class"),
        ("PreTrainedTokenizerFast", "can't be made"),
    ],
)
def test_merges_of_another_class_are_refused(tmp_path: Path, name: str, why: str) -> None:
    write_merges(tmp_path / "hf", tokenizer_class=name)
    with pytest.raises(TokenizerUnfit, match=why):
        made(tmp_path / "hf")


def test_a_special_token_that_the_vocabulary_lacks_gets_the_id_behind_it(tmp_path: Path) -> None:
    write_merges(tmp_path / "hf", tokenizer_class="GPT2Tokenizer", bos_token="<never>", unk_token="<pad>")
    found = Tokenizer.from_str(made(tmp_path / "hf") or "")
    assert found.token_to_id("<never>") == len(json.loads((tmp_path / "hf" / "vocab.json").read_text()))
