"""Model files of SentencePiece: read without its library, and made into a tokenizer.json with the same tokens."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from moert.pack.text import BYTES, TokenizerUnfit

# The file: a message of protocol buffers. Only the fields that decide tokens are read; sentencepiece_model.proto of
# https://github.com/google/sentencepiece has their numbers.

_VARINT, _BYTES, _FLOAT = 0, 2, 5
_SKIPPED = {1: 8, 5: 4}  # wire type → bytes of a number of fixed size
_MODEL = {1: _BYTES, 2: _BYTES, 3: _BYTES, 5: _BYTES}
_PIECE = {1: _BYTES, 2: _FLOAT, 3: _VARINT}
_TRAINER = {3: _VARINT, 24: _VARINT, 35: _VARINT, 41: _VARINT, 42: _VARINT}
_NORMALIZER = {2: _BYTES, 3: _VARINT, 4: _VARINT, 5: _VARINT}
_UNIGRAM, _BPE = 1, 2
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_LONGEST, _MOST_PIECES = 512, 1 << 20  # bytes of a piece; all ways to cut it are tried
_SPACE = "▁"


class TokenizerDamaged(TokenizerUnfit):
    """A damaged tokenizer file, as a part of a line behind the name of the file. Fetch it again."""


class Piece(NamedTuple):
    """A piece of text, its score, and its kind as a number."""

    text: str
    score: float
    kind: int


@dataclass(frozen=True)
class Pieces:
    """The content of a model file. `ends`: the ids of the first and the last token of a text. `prefix`: a space is put
    before a text; `strips`: spaces at both ends go, and of several spaces one stays."""

    pieces: tuple[Piece, ...]
    unigram: bool
    byte_fallback: bool
    ends: tuple[int, int]
    charsmap: bytes
    prefix: bool
    strips: bool


def read_pieces(body: bytes) -> Pieces:
    """Returns the content of a model file. Raises TokenizerDamaged, or TokenizerUnfit for a kind of model that no
    tokenizer.json can replace."""
    if body and body[0] != 1 << 3 | _BYTES:
        raise TokenizerUnfit("can't be made: the tokenizer's file does not begin as SentencePiece's do")
    try:
        return _pieces(body)
    except (ValueError, struct.error) as error:
        if isinstance(error, TokenizerUnfit):
            raise
        raise TokenizerDamaged(f"is no whole model file of SentencePiece ({error}): fetch it again") from None


def _pieces(body: bytes) -> Pieces:
    found, others = list[Piece](), dict[int, Any]()
    for number, value in _fields(body, _MODEL):
        if number == 1:
            found.append(_piece(value))
        else:
            others[number] = value
    if not others.keys() >= {2, 3}:
        raise ValueError("its end is not there")
    trainer, normalizer = dict(_fields(others[2], _TRAINER)), dict(_fields(others[3], _NORMALIZER))
    _check_pieces(found)
    model = trainer.get(3, _UNIGRAM)
    unread = {
        "its model is neither Unigram nor BPE": model not in (_UNIGRAM, _BPE),
        "it puts spaces behind words": trainer.get(24, 0),
        "it leaves spaces as they are": not normalizer.get(5, 1),
        "it has rules for its output": any(value for _, value in _fields(others.get(5, b""), {2: _BYTES})),
        "some of its pieces are not used": any(piece.kind == 5 for piece in found),
    }
    for why, holds in unread.items():
        if holds:
            raise TokenizerUnfit(f"can't be made: {why}")
    byte_fallback = bool(trainer.get(35, 0))
    if byte_fallback and not {piece.text for piece in found if piece.kind == _BYTE}.issuperset(BYTES):
        raise ValueError("it has no piece for some bytes")
    return Pieces(
        tuple(found), model == _UNIGRAM, byte_fallback, (trainer.get(41, 1), trainer.get(42, 2)),
        bytes(normalizer.get(2, b"")), bool(normalizer.get(3, 1)), bool(normalizer.get(4, 1)),
    )  # fmt: skip


def _piece(body: memoryview) -> Piece:
    found = dict(_fields(body, _PIECE))
    text = str(found.get(1, b""), "utf-8") if found.get(1) else ""
    if not text or len(found[1]) > _LONGEST:
        raise ValueError(f"a piece should have 1 to {_LONGEST} bytes of text")
    return Piece(text, struct.unpack("<f", found.get(2, bytes(4)))[0], found.get(3, _NORMAL))


def _check_pieces(pieces: Sequence[Piece]) -> None:
    if len(pieces) > _MOST_PIECES:
        raise ValueError(f"it has {len(pieces):,} pieces, at most {_MOST_PIECES:,} are read")
    if len({piece.text for piece in pieces}) < len(pieces):
        raise ValueError("it has a piece twice")
    if sum(piece.kind == _UNKNOWN for piece in pieces) != 1:
        raise ValueError("it should have one piece for unknown text")
    if not all(math.isfinite(piece.score) and 1 <= piece.kind <= _BYTE for piece in pieces):
        raise ValueError("a piece has no finite score, or a kind that is not known")


def _fields(body: bytes | memoryview, kinds: Mapping[int, int]) -> Iterator[tuple[int, Any]]:
    """Yields the number and the value of each field of a message that `kinds` has: number → wire type. A value is a
    whole number or bytes. Raises ValueError."""
    view, at = memoryview(body), 0
    while at < len(view):
        key, at = _whole(view, at)
        number, kind = key >> 3, key & 7
        if kinds.get(number, kind) != kind:
            raise ValueError(f"field {number} has another type")
        value: Any
        if kind == _VARINT:
            value, at = _whole(view, at)
        else:
            nbytes, at = _whole(view, at) if kind == _BYTES else (_SKIPPED.get(kind, len(view)), at)
            value, at = view[at : at + nbytes], at + nbytes
            if at > len(view):
                raise ValueError("it ends too early")
        if number in kinds:
            yield number, value


def _whole(view: memoryview, at: int) -> tuple[int, int]:
    """Returns the whole number that begins at a place, and the place behind it. Raises ValueError."""
    found = 0
    for place in range(10):
        if at + place >= len(view):
            break
        found |= (view[at + place] & 0x7F) << 7 * place
        if view[at + place] < 0x80:
            return found, at + place + 1
    raise ValueError("it ends too early, or has a number that is too long")


# The tokenizer.json. Ids, and the tokens around a text, are those of the class of transformers that reads the file.

_LLAMA, _GEMMA, _T5, _NLLB = "LlamaTokenizer", "GemmaTokenizer", "T5Tokenizer", "NllbTokenizer"
_GENERIC = ("", "PreTrainedTokenizer", "TokenizersBackend", "SentencePieceBackend")
_FAMILIES = {"switch_transformers": _T5, "nllb-moe": _NLLB, "gemma4": _GEMMA, "gemma4_text": _GEMMA}
_FAIRSEQ = ("<s>", "<pad>", "</s>", "<unk>")  # NLLB's first ids
_MOST_ADDED, _MOST_MERGES = 1 << 16, 1 << 20  # Gemma 3 has half as many pairs

Table = Mapping[str, Any]


def tokenizer_json(found: Pieces, config: Table, family: str, added: Mapping[int, Table]) -> dict[str, Any]:
    """Returns a tokenizer.json as a JSON object. The file's rules for spaces hold, which transformers' classes do not
    always heed. `config`: tokenizer_config.json; `family`: the model's type; `added`: id → token with its content, that
    the checkpoint adds. Raises TokenizerUnfit for a class of tokenizer that is not known here, or for tokens that can't
    be added."""
    kind = _class(config, family)
    pieces = _numbered(found, kind)
    tokens = _added(pieces, {**dict(enumerate(_usual(kind, config), len(pieces))), **added})
    for number, token in tokens.items():
        if number < len(pieces) and token["content"] != pieces[number].text:  # it replaces the piece
            pieces[number] = Piece(token["content"], pieces[number].score, _CONTROL)
    ids = {piece.text: number for number, piece in enumerate(pieces)}
    ids.update({token["content"]: number for number, token in tokens.items()})
    if len(ids) < max(len(pieces), *(number + 1 for number in tokens)) or "" in ids:
        raise TokenizerUnfit("can't be made: two of its tokens have the same text, or one has none")
    prefix = found.prefix if config.get("add_prefix_space") is None else bool(config["add_prefix_space"])
    every = kind in (_T5, _NLLB) or bool(config.get("legacy"))  # transformers' classes have no prefix behind a token
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [tokens[number] for number in sorted(tokens)],
        "normalizer": {"type": "Sequence", "normalizers": list(_normalizers(found, prefix))},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(_cuts(found, prefix, every))},
        "post_processor": template(*_around(found, kind, config), ids),
        "decoder": {"type": "Sequence", "decoders": list(_decoders(found, prefix))},
        "model": _model(found, pieces),
    }


def _class(config: Table, family: str) -> str:
    """Returns the class of transformers that decides ids. Raises TokenizerUnfit."""
    named = str(config.get("tokenizer_class") or "").removesuffix("Fast")
    kind = _FAMILIES.get(family, _LLAMA) if named in _GENERIC else named
    if kind not in (_LLAMA, _GEMMA, _T5, _NLLB):
        raise TokenizerUnfit(f"can't be made: the rules of the class {kind[:60]!r} are not known here")
    return kind


def _numbered(found: Pieces, kind: str) -> list[Piece]:
    """Returns the pieces by their ids in a class."""
    if kind != _NLLB:
        return list(found.pieces)
    first = [Piece(text, 0.0, _UNKNOWN if text == "<unk>" else _CONTROL) for text in _FAIRSEQ]
    return [*first, *found.pieces[3:]]


def _usual(kind: str, config: Table) -> list[dict[str, Any]]:
    """Returns the tokens that a class adds behind the pieces."""
    if kind == _T5:
        count = int(config.get("extra_ids", 100))
        texts = [f"<extra_id_{number}>" for number in reversed(range(min(count, _MOST_ADDED + 1)))]
    elif kind == _NLLB:
        from transformers.models.nllb.tokenization_nllb import FAIRSEQ_LANGUAGE_CODES

        texts = [*map(text_of, config.get("additional_special_tokens") or FAIRSEQ_LANGUAGE_CODES)]
        texts = [*(text for text in texts if text != "<mask>"), "<mask>"]
    else:
        texts = []
    return [{"content": text, "special": True, "lstrip": text == "<mask>"} for text in texts]


def _added(pieces: Sequence[Piece], others: Mapping[int, Table]) -> dict[int, dict[str, Any]]:
    """Returns id → added token: pieces that no merge makes, and `others`. A gap between ids is filled. Raises
    TokenizerUnfit."""
    last = max(others, default=-1)
    if last >= len(pieces) + _MOST_ADDED or min(others, default=0) < 0:
        raise TokenizerUnfit(f"can't be made: it adds a token with the id {last:,} to {len(pieces):,} pieces")
    tokens: dict[int, Table] = {
        number: {
            "content": piece.text, "special": piece.kind != _USER_DEFINED,
            "normalized": piece.kind == _USER_DEFINED and _SPACE in piece.text,
        }
        for number, piece in enumerate(pieces) if piece.kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    }  # fmt: skip
    for number in range(len(pieces), last + 1):
        tokens[number] = {"content": f"<|reserved_token_{number}|>", "special": True}
    tokens.update(others)
    sides = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return {
        number: {
            "id": number, "content": text_of(token), **{side: bool(token.get(side, False)) for side in sides},
        }
        for number, token in tokens.items()
    }  # fmt: skip


def text_of(token: Any) -> str:
    """Returns the text of a token, which is text or an object with its content."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")


def _normalizers(found: Pieces, prefix: bool) -> Iterator[dict[str, Any]]:
    if found.charsmap:
        yield {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(found.charsmap).decode()}
    if found.strips:  # with a prefix, a space at the beginning is the prefix
        yield {"type": "Strip", "strip_left": not prefix, "strip_right": True}
        yield {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
    yield {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}


def _cuts(found: Pieces, prefix: bool, every: bool) -> Iterator[dict[str, Any]]:
    """Yields the steps that put the prefix before a text, or before `every` part of it, and cut it into words."""
    inner = any(_SPACE in piece.text[1:] for piece in found.pieces if piece.kind == _NORMAL)
    scheme = ("always" if every else "first") if prefix else "never"
    yield {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": scheme, "split": not inner}
    if found.unigram and found.byte_fallback:  # text that spells a byte's name is not the byte
        name = {"Regex": "<(?=0x[0-9A-F]{2}>)"}
        yield {"type": "Split", "pattern": name, "behavior": "MergedWithPrevious", "invert": False}


def _decoders(found: Pieces, prefix: bool) -> Iterator[dict[str, Any]]:
    yield {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    if found.byte_fallback:
        yield {"type": "ByteFallback"}
    yield {"type": "Fuse"}
    if prefix or found.strips:
        yield {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def _around(found: Pieces, kind: str, config: Table) -> tuple[list[str], list[str]]:
    """Returns the tokens before and behind each text."""
    first, last = (
        text_of(config.get(name)) or (found.pieces[number].text if 0 <= number < len(found.pieces) else "")
        for name, number in zip(("bos_token", "eos_token"), found.ends, strict=True)
    )
    if kind == _T5:
        return [], ["</s>"]
    if kind == _NLLB:
        language = str(config.get("src_lang") or "eng_Latn")
        return ([], ["</s>", language]) if config.get("legacy_behaviour") else ([language], ["</s>"])
    before = [first] if first and config.get("add_bos_token", True) else []
    return before, [last] if last and config.get("add_eos_token") else []


def template(before: Iterable[str], behind: Iterable[str], ids: Mapping[str, int]) -> dict[str, Any] | None:
    """Returns the rule of a tokenizer.json that puts tokens around each text; None without any. `ids`: of all tokens.
    Raises TokenizerUnfit."""

    def around(text: str) -> list[dict[str, Any]]:
        special = lambda name: {"SpecialToken": {"id": name, "type_id": 0}}  # noqa: E731
        return [*map(special, before), {"Sequence": {"id": text, "type_id": 0}}, *map(special, behind)]

    names = {*before, *behind}
    if not names:
        return None
    if not names <= ids.keys():
        raise TokenizerUnfit(
            f"can't be made: it has no id for {min(names - ids.keys())[:60]!r}, which is put around texts"
        )
    specials = {name: {"id": name, "ids": [ids[name]], "tokens": [name]} for name in sorted(names)}
    return {
        "type": "TemplateProcessing",
        "single": around("A"),
        "pair": [*around("A"), *around("B")],
        "special_tokens": specials,
    }


def _model(found: Pieces, pieces: Sequence[Piece]) -> dict[str, Any]:
    unknown = next(number for number, piece in enumerate(pieces) if piece.kind == _UNKNOWN)
    if found.unigram:
        vocabulary = [[piece.text, piece.score] for piece in pieces]
        return {"type": "Unigram", "unk_id": unknown, "vocab": vocabulary, "byte_fallback": found.byte_fallback}
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": pieces[unknown].text,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": found.byte_fallback,
        "ignore_merges": False,
        "vocab": {piece.text: number for number, piece in enumerate(pieces)},
        "merges": _merges(pieces),
    }


def _merges(pieces: Sequence[Piece]) -> list[list[str]]:
    """Returns the pairs of pieces that become one piece, the best first: SentencePiece merges the two neighbours whose
    whole has the highest score, wherever it is cut."""
    scores = {piece.text: piece.score for piece in pieces if piece.kind == _NORMAL}
    pairs = (
        (score, cut, text)
        for text, score in scores.items()
        for cut in range(1, len(text))
        if text[:cut] in scores and text[cut:] in scores
    )
    found = list(islice(pairs, _MOST_MERGES + 1))
    if len(found) > _MOST_MERGES:
        raise TokenizerUnfit(f"can't be made: over {_MOST_MERGES:,} pairs of its pieces become one")
    found.sort(key=lambda each: (-each[0], -each[1]))  # of equal ones the smaller id
    return [[text[:cut], text[cut:]] for _, cut, text in found]
