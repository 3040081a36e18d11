"""Checkpoints with a file of SentencePiece and no tokenizer.json: the one that is made has the same tokens."""

from __future__ import annotations

import base64
import json
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from charsmaps import charsmap
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_olmoe
from tokenizers import Tokenizer, models
from transformers.utils import sentencepiece_model_pb2_new as proto

from moeconv.command.cli import _exit_code
from moeconv.sentencepiece import TokenizerDamaged, read_pieces
from moeconv.source.checkpoint import Checkpoint
from moeconv.tokenizers import chat_tokenizer, made
from moert.pack.text import TokenizerUnfit, check_tokenizer

BPE, UNIGRAM = 2, 1
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
FIRST = (("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL))
BYTES = tuple((f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256))
OWN = (("<code>", 0.0, USER), ("▁▁▁", 0.0, USER), ("\n\n", 0.0, USER))
MERGED = ("th", "▁t", "the", "▁the", "ca", "▁c", "cat", "▁cat", "he", "日本", "▁日本", "x4", "0x", "▁▁")
LETTERS = ("▁", *"thecaxsr014<>\n日本é")
NORMAL_PIECES = tuple((text, -1.0 - number, NORMAL) for number, text in enumerate((*MERGED, *LETTERS)))
TEXT = st.text(st.sampled_from("thecaxsr014<>日本é 🙂\n\tq"), max_size=30)
SPELLED = st.sampled_from(["<code>", "   ", "\n\n", "<0x41>", " the cat", "日本", "</s"])
TEXTS = st.lists(TEXT | SPELLED, max_size=6).map("".join)

Pieces = Sequence[tuple[str, float, int]]


def scored(pieces: Pieces) -> Pieces:
    """The same pieces with scores as Unigram has them: logarithms of how often a piece is."""
    chosen = random.Random(1)
    return [(text, round(-2 - 6 * chosen.random(), 4) if kind == NORMAL else 0.0, kind) for text, _, kind in pieces]


def model(pieces: Pieces, kind: int = BPE, **changes: Any) -> bytes:
    """A model file as SentencePiece writes it."""
    made_of = {"byte_fallback": True, "add_dummy_prefix": True, "remove_extra_whitespaces": False, **changes}
    file = proto.ModelProto()
    for text, score, of in pieces:
        file.pieces.add(piece=text, score=score, type=of)
    file.trainer_spec.model_type, file.trainer_spec.vocab_size = kind, len(pieces)
    for name, value in made_of.items():
        if name != "denormalizer":
            part = file.trainer_spec if hasattr(file.trainer_spec, name) else file.normalizer_spec
            setattr(part, name, value)
    file.denormalizer_spec.precompiled_charsmap = made_of.get("denormalizer", b"")
    return bytes(file.SerializeToString())


def write(folder: Path, body: bytes, name: str = "tokenizer.model", family: str = "mixtral", **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(body)
    (folder / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False, **config}))
    if not (folder / "config.json").exists():
        (folder / "config.json").write_text(json.dumps({"model_type": family}))
    return folder


def tokenizer(folder: Path) -> Tokenizer:
    body = made(folder)
    assert body is not None
    check_tokenizer(body.encode())
    return Tokenizer.from_str(body)


# SentencePiece in plain words: https://github.com/google/sentencepiece, normalizer.cc, bpe_model.cc, unigram_model.cc.


def parts(text: str, pieces: Pieces) -> Iterator[tuple[str, bool]]:
    """Cuts a text at user-defined pieces, of which the longest counts."""
    own = sorted((piece for piece, _, kind in pieces if kind == USER), key=len, reverse=True)
    at = begin = 0
    while at < len(text):
        found = next((piece for piece in own if text.startswith(piece, at)), None)
        if found is None:
            at += 1
            continue
        yield text[begin:at], False
        yield found, True
        at = begin = at + len(found)
    yield text[begin:], False


def merged(text: str, pieces: Pieces) -> list[str]:
    """Of all neighbours those become one whose whole has the highest score, the first of equals."""
    scores = {piece: score for piece, score, kind in pieces if kind == NORMAL}
    symbols = list(text)
    while True:
        wholes = [scores.get(one + other, -math.inf) for one, other in pairwise(symbols)]
        if not wholes or max(wholes) == -math.inf:
            return symbols
        at = wholes.index(max(wholes))
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]


def likeliest(text: str, pieces: Pieces) -> list[str]:
    """The cut with the highest sum of scores; a letter without a piece costs ten more than the worst piece."""
    scores = {piece: score for piece, score, kind in pieces if kind == NORMAL}
    worst = min(score for _, score, kind in pieces if kind != USER) - 10
    best: list[tuple[float, list[str]]] = [(0.0, [])]
    for end in range(1, len(text) + 1):
        ways = [
            (best[at][0] + scores.get(text[at:end], worst), [*best[at][1], text[at:end]])
            for at in range(end)
            if text[at:end] in scores or at == end - 1
        ]
        best.append(max(ways, key=lambda way: way[0]))
    return best[-1][1]


def ids(text: str, pieces: Pieces, kind: int, byte_fallback: bool = True) -> list[int]:
    numbers = {piece: number for number, (piece, _, _) in enumerate(pieces)}
    found = list[int]()
    for part, own in parts(text, pieces):
        for symbol in [part] if own else (merged if kind == BPE else likeliest)(part, pieces):
            if own or (symbol in numbers and pieces[numbers[symbol]][2] == NORMAL):
                found.append(numbers[symbol])
            elif byte_fallback:
                found += [numbers[f"<0x{byte:02X}>"] for byte in symbol.encode()]
            elif not found or found[-1] != 0:
                found.append(0)
    return found


ALL = (*FIRST, *BYTES, *OWN, *NORMAL_PIECES)
WITHOUT_BYTES = (*FIRST, *OWN, *NORMAL_PIECES)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer(write(tmp_path_factory.mktemp("bpe"), model(ALL)))


@pytest.fixture(scope="module")
def unigram(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer(write(tmp_path_factory.mktemp("unigram"), model(scored(ALL), UNIGRAM)))


@given(TEXTS)
def test_bpe_makes_the_same_tokens(bpe: Tokenizer, text: str) -> None:
    found = bpe.encode(f"t{text}").ids
    assert found == ids(f"▁t{text}".replace(" ", "▁"), ALL, BPE)
    assert bpe.decode(found) == f"t{text}"


@given(TEXTS)
def test_unigram_makes_the_same_tokens(unigram: Tokenizer, text: str) -> None:
    found = unigram.encode(f"t{text}").ids
    assert found == ids(f"▁t{text}".replace(" ", "▁"), scored(ALL), UNIGRAM)
    assert unigram.decode(found) == f"t{text}"


@pytest.mark.parametrize("kind", [BPE, UNIGRAM])
@pytest.mark.parametrize("inner", [True, False], ids=["across words", "word by word"])
def test_without_bytes_unknown_letters_are_one_token_and_spaces_are_stripped(
    kind: int, inner: bool, tmp_path: Path
) -> None:
    pieces = [each for each in (*FIRST, *NORMAL_PIECES) if inner or each[0] != "▁▁"]
    pieces = list(scored(pieces)) if kind == UNIGRAM else pieces
    body = model(pieces, kind, byte_fallback=False, remove_extra_whitespaces=True)
    found = tokenizer(write(tmp_path / "hf", body))
    for text in ("", "  ", " the   cat ", "🙂🙂the q🙂 q", "日本 thecat  x4🙂", "q", " 🙂 "):
        plain = " ".join(text.split(" ")).split()
        expected = ids("".join(f"▁{word}" for word in plain), pieces, kind, byte_fallback=False)
        assert found.encode(text).ids == expected, text


def test_a_table_of_letters_is_applied_before_anything_else(tmp_path: Path) -> None:
    table = base64.b64decode(charsmap({"é".encode(): b"e", b"\n": b" "}))
    body = model(ALL, UNIGRAM, precompiled_charsmap=table, remove_extra_whitespaces=True)
    found = tokenizer(write(tmp_path / "hf", body))
    assert found.encode("th\u00e9\ncat").tokens == found.encode("the cat").tokens


def test_the_model_itself_is_the_librarys_own(tmp_path: Path) -> None:
    """Without the steps around it: a model of the library, built by hand of all pairs in the order of their scores."""
    own = made(write(tmp_path / "hf", model(ALL)))
    texts = [text for text, _, kind in ALL if kind == NORMAL]
    pairs = [(text[:cut], text[cut:]) for text in texts for cut in range(len(text) - 1, 0, -1)]
    known = [pair for pair in pairs if set(pair) <= set(texts)]
    vocabulary = {text: number for number, (text, _, _) in enumerate(ALL)}
    by_hand = models.BPE(vocabulary, known, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    assert own is not None
    of_file = Tokenizer.from_str(own).model
    for word in ("▁the", "▁cat", "thecat日本", "▁▁▁", "cath4x4", "qé🙂"):
        assert [token.id for token in of_file.tokenize(word)] == [token.id for token in by_hand.tokenize(word)]


def test_the_reader_finds_what_the_librarys_own_reader_finds() -> None:
    body = model(scored(ALL), UNIGRAM, precompiled_charsmap=b"abc", remove_extra_whitespaces=True, eos_id=7)
    file, found = proto.ModelProto.FromString(body), read_pieces(body)
    assert [tuple(piece) for piece in found.pieces] == [(each.piece, each.score, each.type) for each in file.pieces]
    assert (found.unigram, found.byte_fallback, found.ends) == (True, True, (1, 7))
    assert (found.charsmap, found.prefix, found.strips) == (b"abc", True, True)


# Classes of transformers: which ids, and which tokens around a text.


def test_llama_puts_its_tokens_around_a_text(tmp_path: Path) -> None:
    config = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": True, "eos_token": "</s>"}
    found = tokenizer(write(tmp_path / "hf", model(ALL), **config))
    assert found.encode("the</s>cat").tokens == ["<s>", "▁the", "</s>", "cat", "</s>"]
    assert found.decode(found.encode("the cat").ids) == "the cat"
    every = tokenizer(write(tmp_path / "hf", model(ALL), **config, legacy=True))
    assert every.encode("the</s>cat").tokens == ["<s>", "▁the", "</s>", "▁cat", "</s>"]
    (tmp_path / "hf" / "tokenizer_config.json").unlink()
    assert tokenizer(tmp_path / "hf").encode("the").tokens == ["<s>", "▁the"]


def test_gemma_puts_no_space_before_a_text(tmp_path: Path) -> None:
    from transformers import GemmaTokenizer

    first = [("<pad>", 0.0, CONTROL), ("<eos>", 0.0, CONTROL), ("<bos>", 0.0, CONTROL), ("<unk>", 0.0, UNKNOWN)]
    pieces = [*first, *BYTES, *NORMAL_PIECES]
    body = model(pieces, add_dummy_prefix=False, eos_id=1, bos_id=2, unk_id=3, pad_id=0)
    found = tokenizer(write(tmp_path / "hf", body, tokenizer_class="GemmaTokenizer", add_bos_token=True))
    merges = [tuple(pair) for pair in json.loads(found.to_str())["model"]["merges"]]
    theirs = GemmaTokenizer({text: number for number, (text, _, _) in enumerate(pieces)}, merges, add_bos_token=True)
    for text in ("the cat", " the   cat", "", "日本🙂\n"):
        assert found.encode(text).ids == theirs(text).input_ids
        assert found.decode(found.encode(text).ids) == text


def test_switch_has_extra_ids_behind_its_pieces_and_an_end(tmp_path: Path) -> None:
    from transformers import T5Tokenizer

    pieces = list(scored([("<pad>", 0.0, CONTROL), ("</s>", 0.0, CONTROL), ("<unk>", 0.0, UNKNOWN), *NORMAL_PIECES]))
    pieces = [piece for piece in pieces if piece[0] != "▁▁"]
    body = model(pieces, UNIGRAM, byte_fallback=False, remove_extra_whitespaces=True, unk_id=2, pad_id=0, eos_id=1)
    found = tokenizer(write(tmp_path / "hf", body, "spiece.model", "switch_transformers"))
    vocabulary = [(piece.text, piece.score) for piece in read_pieces(body).pieces]
    extra = [(f"<extra_id_{number}>", 0.0) for number in reversed(range(100))]
    theirs = T5Tokenizer([*vocabulary, *extra])
    for text in ("the  cat<extra_id_0> the<extra_id_99>", " 日本 cat ", "", "🙂q the🙂"):
        assert found.encode(text).ids == theirs(text).input_ids
    assert found.token_to_id("<extra_id_0>") == len(pieces) + 99


def test_nllb_has_its_own_first_ids_and_languages(tmp_path: Path) -> None:
    from transformers import NllbTokenizer
    from transformers.models.nllb.tokenization_nllb import FAIRSEQ_LANGUAGE_CODES

    table = base64.b64decode(charsmap({b"\n": b" "}))
    changes: dict[str, Any] = {"byte_fallback": False, "remove_extra_whitespaces": True, "precompiled_charsmap": table}
    body = model((*FIRST, *NORMAL_PIECES), **changes)
    found = tokenizer(write(tmp_path / "hf", body, "sentencepiece.bpe.model", "nllb-moe", src_lang="fra_Latn"))
    texts = ["<s>", "<pad>", "</s>", "<unk>", *(text for text, _, _ in NORMAL_PIECES)]
    merges = [tuple(pair) for pair in json.loads(found.to_str())["model"]["merges"]]
    vocabulary = {text: number for number, text in enumerate(texts)}
    theirs = NllbTokenizer(vocabulary, merges, src_lang="fra_Latn", _spm_precompiled_charsmap=table)
    for text in ("the  cat", "日本🙂 the\ncat", ""):  # it has the same names, but languages behind the mask
        assert found.encode(text).tokens == theirs(text).tokens()
    codes = FAIRSEQ_LANGUAGE_CODES
    assert [found.token_to_id(name) for name in (codes[0], codes[-1], "<mask>")] == [
        len(texts), len(texts) + len(codes) - 1, len(texts) + len(codes),
    ]  # fmt: skip


@pytest.mark.parametrize("file", ["tokenizer_config.json", "added_tokens.json"])
def test_added_tokens_have_their_ids_rename_pieces_and_gaps_are_filled(file: str, tmp_path: Path) -> None:
    added = {7: "[INST]", len(ALL): "<|im_end|>", len(ALL) + 2: "<tool>"}
    decoder = {str(number): {"content": text, "special": number != len(ALL) + 2} for number, text in added.items()}
    folder = write(tmp_path / "hf", model(ALL))
    if file == "tokenizer_config.json":
        write(folder, model(ALL), added_tokens_decoder=decoder, eos_token="<|im_end|>")
    else:
        write(folder, model(ALL), eos_token="<|im_end|>", additional_special_tokens=["[INST]"])
        (folder / file).write_text(json.dumps({text: number for number, text in added.items()}))
    found = tokenizer(folder)
    ids = found.encode("the[INST]<|im_end|><tool>").ids
    assert ids[1:] == list(added)
    assert found.decode(ids) == "the<tool>"
    assert found.id_to_token(len(ALL) + 1) == f"<|reserved_token_{len(ALL) + 1}|>"
    assert chat_tokenizer(folder)("the<tool>").input_ids == found.encode("the<tool>").ids


# Files that are refused.


@pytest.mark.parametrize(
    ("body", "config", "named"),
    [
        (model(ALL, 3), {}, "neither Unigram nor BPE"),
        (model(ALL, treat_whitespace_as_suffix=True), {}, "spaces behind words"),
        (model(ALL, escape_whitespaces=False), {}, "leaves spaces as they are"),
        (model(ALL, denormalizer=b"abc"), {}, "rules for its output"),
        (model((*ALL, ("zz", 0.0, UNUSED))), {}, "not used"),
        (b"IQ== 0\nIg== 1\n", {}, "does not begin as SentencePiece's do"),
        (model(ALL), {"tokenizer_class": "XLMRobertaTokenizer"}, "the class 'XLMRobertaTokenizer' are not known"),
        (model(ALL), {"eos_token": "<end>"}, "no id for its eos_token '<end>'"),
        (model(ALL), {"bos_token": "<x>", "add_bos_token": True}, "no id for '<x>'"),
        (model(ALL), {"added_tokens_decoder": {"999999": {"content": "x"}}}, "the id 999,999"),
        (model(ALL), {"added_tokens_decoder": {"-1": {"content": "x"}}}, "can't be made"),
        (model(ALL), {"added_tokens_decoder": {"700": {"content": "the"}}}, "the same text"),
        (model(ALL), {"added_tokens_decoder": [1]}, "can't be made"),
        (model(ALL), {"tokenizer_class": "T5Tokenizer", "extra_ids": 1 << 40}, "can't be made"),
        (model(ALL, precompiled_charsmap=b"\x10\0\0\0abc"), {}, "precompiled_charsmap"),
    ],
)
def test_what_would_not_be_the_same_is_not_made(body: bytes, config: Any, named: str, tmp_path: Path) -> None:
    with pytest.raises(TokenizerUnfit, match=named):
        made(write(tmp_path / "hf", body, **config))


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"", "its end is not there"),
        (model((*ALL, ALL[-1])), "a piece twice"),
        (model(ALL[1:]), "one piece for unknown text"),
        (model((*ALL, ("zz", math.nan, NORMAL))), "no finite score"),
        (model(ALL[:200]), "no piece for some bytes"),
        (model((*ALL, ("z" * 513, -1.0, NORMAL))), "1 to 512 bytes"),
        (model((*ALL, ("", -1.0, NORMAL))), "1 to 512 bytes"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f", "ends too early"),
        (b"\x0a" + b"\xff" * 30, "too long"),
        (b"\x0a\x03\x08\x01\x08", "another type"),
    ],
)
def test_a_damaged_file_is_named(body: bytes, named: str, tmp_path: Path) -> None:
    with pytest.raises(TokenizerDamaged, match=rf"tokenizer.model can't be used as a tokenizer, it .*{named}"):
        made(write(tmp_path / "hf", body))


def test_too_many_pieces_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moeconv.sentencepiece._MOST_PIECES", 200)
    with pytest.raises(TokenizerDamaged, match=f"it has {len(ALL)} pieces, at most 200 are read"):
        read_pieces(model(ALL))


def test_too_many_pairs_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("moeconv.sentencepiece._MOST_MERGES", 9)
    with pytest.raises(TokenizerUnfit, match="over 9 pairs of its pieces become one"):
        made(write(tmp_path / "hf", model(ALL)))


def test_every_file_that_ends_too_early_is_refused() -> None:
    body = model((*FIRST, *NORMAL_PIECES), byte_fallback=False, precompiled_charsmap=b"abc")
    for nbytes in range(len(body) - 4):  # the last field need not be there
        with pytest.raises(TokenizerDamaged):
            read_pieces(body[:nbytes])


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_changed_file_is_read_or_refused(changes: list[tuple[int, int]]) -> None:
    body = bytearray(model((*FIRST, *NORMAL_PIECES[:20]), byte_fallback=False))
    for at, byte in changes:
        body[at % len(body)] = byte
    with suppress(TokenizerUnfit):
        read_pieces(bytes(body))


def test_a_huge_file_is_refused_unread(tmp_path: Path) -> None:
    folder = write(tmp_path / "hf", b"")
    with open(folder / "tokenizer.model", "r+b") as file:
        file.truncate(1 << 33)
    with pytest.raises(TokenizerDamaged, match=r"at most \d+ are read"):
        made(folder)


# Checkpoints.


def test_a_checkpoint_is_packed_with_what_was_made(tmp_path: Path) -> None:
    source = tiny_olmoe(tmp_path / "m")
    (source / "tokenizer.json").unlink()
    write(source, model(ALL))
    checkpoint = Checkpoint.open(source)
    assert checkpoint.spelled == made(source) is not None
    assert checkpoint.notes == []
    assert _exit_code(["quantize", str(source), "--bits", "16", "--out", str(tmp_path / "m.pack"), "--json"]) == 0
    assert (tmp_path / "m.pack" / "tokenizer.json").read_text() == made(source)
    write(source, model(ALL), tokenizer_class="OwnTokenizer")
    assert [note[:30] for note in Checkpoint.open(source).notes] == ["tokenizer.json can't be made: "]


@pytest.mark.parametrize("command", ["check", "quantize", "quantize with text"])
def test_a_damaged_file_is_one_line_and_nothing_is_written(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tiny_olmoe(tmp_path / "m")
    (source / "tokenizer.json").unlink()
    write(source, model(ALL)[:-40])
    (tmp_path / "text.txt").write_text("the cat\n" * 100)
    before = sorted(tmp_path.rglob("*"))
    options = {
        "check": ["check", str(source)],
        "quantize": ["quantize", str(source), "--bits", "4", "--out", str(tmp_path / "m.pack")],
        "quantize with text": [
            "quantize", str(source), "--calib", str(tmp_path / "text.txt"), "--out", str(tmp_path / "m.pack"),
        ],
    }  # fmt: skip
    capsys.readouterr()
    assert _exit_code(options[command]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "tokenizer.model can't be used as a tokenizer" in said
    assert sorted(tmp_path.rglob("*")) == before
