"""Tokenizers that are meant well pass the checks; what these read of a file is what the library reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    BertWordPieceTokenizer,
    ByteLevelBPETokenizer,
    CharBPETokenizer,
    SentencePieceBPETokenizer,
    SentencePieceUnigramTokenizer,
    Tokenizer,
    normalizers,
)

from moert.pack import documents as module
from moert.pack.documents import skim
from moert.pack.fence import Broken, Unfinished, fenced, left_behind, unbroken
from moert.pack.text import charsmap_growth, check_tokenizer
from tests.charsmaps import charsmap

ROOT = Path(__file__).resolve().parents[2]
WORDS = {"type": "WordLevel", "vocab": {"[UNK]": 0}, "unk_token": "[UNK]"}
TABLE = charsmap({"ﷺ".encode(): "صلى الله عليه وسلم".encode(), "é".encode(): b"e", b"\t": b" "})
META = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
SPLIT = {
    "type": "Split", "behavior": "Isolated", "invert": False,
    "pattern": {"Regex": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|\s+(?!\S)|\s+"},
}  # fmt: skip
SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
EOS = {"SpecialToken": {"id": "</s>", "type_id": 0}}
A, B = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")


def sequence(kind: str, *parts: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", kind: list(parts)}


def template(*single: Mapping[str, Any]) -> dict[str, Any]:
    special = {"id": "</s>", "ids": [0], "tokens": ["[UNK]"]}
    return {"type": "TemplateProcessing", "single": single, "pair": [A, B], "special_tokens": {"</s>": special}}


def precompiled() -> dict[str, Any]:
    return {"type": "Precompiled", "precompiled_charsmap": TABLE}


BACK = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
FAMILIES: dict[str, dict[str, Any]] = {
    "T5 and Switch": {
        "normalizer": precompiled(), "pre_tokenizer": sequence("pretokenizers", {"type": "WhitespaceSplit"}, META),
        "post_processor": template(A, EOS), "decoder": META,
    },
    "NLLB": {
        "normalizer": sequence(
            "normalizers", precompiled(), {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
        ),
        "pre_tokenizer": META, "post_processor": template(EOS, A, EOS), "decoder": META,
    },
    "ALBERT": {
        "normalizer": sequence(
            "normalizers", {"type": "Replace", "pattern": {"String": "``"}, "content": '"'}, {"type": "NFKD"},
            {"type": "StripAccents"}, {"type": "Lowercase"}, precompiled(),
            {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
        ),
        "pre_tokenizer": sequence("pretokenizers", {"type": "WhitespaceSplit"}, META), "decoder": META,
    },
    "Gemma": {
        "normalizer": SPACES,
        "pre_tokenizer": {**SPLIT, "pattern": {"String": " "}, "behavior": "MergedWithPrevious"},
        "post_processor": template(EOS, A),
        "decoder": sequence("decoders", BACK, {"type": "ByteFallback"}, {"type": "Fuse"}),
    },
    "Llama 2 and Mixtral": {
        "normalizer": sequence("normalizers", {"type": "Prepend", "prepend": "▁"}, SPACES),
        "post_processor": template(EOS, A),
        "decoder": sequence("decoders", BACK, {"type": "ByteFallback"}, {"type": "Fuse"}, STRIP),
    },
    "Llama 3, Qwen and DeepSeek": {
        "normalizer": {"type": "NFC"}, "pre_tokenizer": sequence("pretokenizers", SPLIT, SPLIT, BYTES),
        "post_processor": sequence("processors", BYTES, template(EOS, A)), "decoder": BYTES,
    },
    "GPT-2 and OPT": {
        "pre_tokenizer": {**BYTES, "use_regex": True},
        "post_processor": {"type": "RobertaProcessing", "sep": ["</s>", 2], "cls": ["<s>", 0], "trim_offsets": True,
                           "add_prefix_space": False},
        "decoder": BYTES,
    },
    "BERT": {
        "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
                       "strip_accents": None, "lowercase": True},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
    },
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_those_of_known_models_pass(family: str) -> None:
    body = json.dumps({"version": "1.0", "added_tokens": [], "model": WORDS, **FAMILIES[family]}).encode()
    growth = check_tokenizer(body)
    Tokenizer.from_buffer(body).encode("one")
    growth.check(100_000 if growth.times < 100 else 1000)


@pytest.mark.parametrize("kind", [
    BertWordPieceTokenizer, ByteLevelBPETokenizer, CharBPETokenizer, SentencePieceBPETokenizer,
    SentencePieceUnigramTokenizer,
])  # fmt: skip
def test_those_that_the_library_trains_pass(kind: Any) -> None:
    made = kind()
    made.train_from_iterator(["the quick brown fox, the lazy dog"] * 20, vocab_size=90, show_progress=False)
    for pretty in (False, True):
        check_tokenizer(made.to_str(pretty).encode()).check(100_000)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "recipes/models").glob("*/tokenizer.json")), ids=lambda path: path.parent.name
)
def test_those_of_the_recipes_pass(path: Path) -> None:
    assert check_tokenizer(path.read_bytes()).times <= 8


@given(
    st.dictionaries(
        st.binary(min_size=1, max_size=4).filter(lambda key: 0 not in key), st.text("aé☃", max_size=9).map(str.encode),
        min_size=1, max_size=6,
    )
)  # fmt: skip
def test_no_text_grows_more_than_a_table_says(texts: dict[bytes, bytes]) -> None:
    texts = {key: text for key, text in texts.items() if text}
    if not texts:
        return
    table = charsmap(texts)
    growth = charsmap_growth(table)
    exact = max(len(text) / len(key) for key, text in texts.items())
    assert max(1.0, exact) <= growth <= max(1.0, exact, max(map(len, texts.values())) / 8)
    body = {"version": "1.0", "model": WORDS, "normalizer": {"type": "Precompiled", "precompiled_charsmap": table}}
    made = Tokenizer.from_str(json.dumps(body)).normalizer
    assert isinstance(made, normalizers.Precompiled)
    text = "".join(key.decode("utf-8", "ignore") for key in texts) + "aé"
    assert len(made.normalize_str(text).encode()) <= growth * len(text.encode())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('ab"\\{}[],:é\n', max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('ab"\\{[', max_size=4), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


def emptied(value: Any) -> Any:
    """Without what is in the lists and objects that it holds."""

    def inside(each: Any) -> Any:
        return type(each)() if isinstance(each, (list, dict)) else each

    if isinstance(value, list):
        return list(map(inside, value))
    return {name: inside(each) for name, each in value.items()} if isinstance(value, dict) else value


@given(
    st.dictionaries(st.sampled_from(["model", "x", 'a"model', "normalizer"]), JSON, max_size=4),
    st.sampled_from([2, 7, 50]), st.booleans(), st.sampled_from([None, 1]),
)  # fmt: skip
def test_skimming_leaves_out_what_one_field_holds(
    document: Any, part: int, ascii_only: bool, indent: int | None
) -> None:
    """However the text is cut into parts."""
    body = json.dumps(document, ensure_ascii=ascii_only, indent=indent).encode()
    before = module._PART
    module._PART = part
    try:
        found = skim(body, "model", 3)
    finally:
        module._PART = before
    wanted = {name: emptied(value) if name == "model" else value for name, value in document.items()}
    assert json.loads(found.text) == wanted


@given(st.binary(max_size=60) | st.text('{}[]"\\ ,:model', max_size=60).map(str.encode))
def test_skimming_never_fails(body: bytes) -> None:
    skim(body, "model", 3)


def test_long_tokens_are_counted() -> None:
    body = json.dumps({"model": {"vocab": {"a" * 50: 0, "b": 1}, "unk_token": "c" * 60}, "other": "d" * 70}).encode()
    assert skim(body, "model", 40).long == [50]
    assert skim(body, "model", 50).long == []


def test_work_of_another_thread() -> None:
    def breaks() -> None:
        raise type("PanicException", (BaseException,), {})("a\nb")

    def fails() -> None:
        raise ValueError("x")

    assert fenced(lambda: 3, 60) == 3
    assert unbroken(lambda: 3) == 3
    for does in (lambda work: fenced(work, 60), unbroken):
        with pytest.raises(Broken, match=r"^a b$"):
            does(breaks)
        with pytest.raises(ValueError, match=r"^x$"):
            does(fails)
    assert not left_behind()


def test_work_that_is_not_done_in_time_is_left_behind() -> None:
    from threading import Event

    goes_on = Event()
    try:
        with pytest.raises(Unfinished, match="is not done after 0 s"):
            fenced(goes_on.wait, 0.1)
        assert left_behind()
    finally:
        goes_on.set()
