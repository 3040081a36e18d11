"""The tokenizer of a GGUF model as a tokenizer.json."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from moeconv.sentencepiece import Piece, Pieces, template, tokenizer_json
from moeconv.source.gguf.container import Metadata
from moeconv.source.outline import CheckpointError, line
from moert.pack.text import BYTES, TokenizerUnfit, check_tokenizer

KEY = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # as SentencePiece numbers them
_LONGEST = 512  # bytes of a piece of SentencePiece

# Regular expressions that cut text into words, by the names that llama.cpp has for them. They are those of the models'
# own tokenizer.json, not llama.cpp's, which lacks some forms of expressions.

_SHORT = r"'s|'t|'re|'ve|'m|'ll|'d"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASES, _CASES_END = (
    rf"{_WORD}{_UPPER}*{_LOWER}+{end}|{_WORD}{_UPPER}+{_LOWER}*{end}" for end in ("", rf"(?i:{_SHORT})?")
)
_SLASH = _REST.replace(r"[\r\n]*", r"[\r\n/]*")
_LLAMA3 = rf"(?i:{_SHORT})|{_WORD}\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = _LLAMA3.replace("{1,3}", "")
_GPT4O = rf"{_CASES_END}|\p{{N}}{{1,3}}|{_SLASH}"
_DEEPSEEK3 = (
    r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)  # fmt: skip
_AFMOE = (
    r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",  # threes, counted from the last digit
    "[一-鿿㐀-䶿豈-\ufaff぀-ゟ゠-ヿ･-ﾟ⼀-\u2fdfเ-\u0e7f\u0e80-\u0effក-\u17ffက-႟ꩠ-ꩿꧠ-\ua9ff가-\ud7afᄀ-ᇿ]+",
    _DEEPSEEK3[-1],
)  # fmt: skip
_KIMI = "|".join((
    r"[\p{Han}]+",
    *(rf"{_WORD}[{_UPPER[1:-1]}&&[^\p{{Han}}]]{some}[{_LOWER[1:-1]}&&[^\p{{Han}}]]{more}(?i:{_SHORT})?"
      for some, more in (("*", "+"), ("+", "*"))),
    r"\p{N}{1,3}", _REST,
))  # fmt: skip


class _Cuts(NamedTuple):
    """The rules before merges. `patterns`: expressions, one after the other; `words`: GPT-2's own expression is the
    last; `digits`: each digit stands alone; `whole`: a word that is a token is not merged; `first`: texts begin with
    the first token if the file does not say; `composed`: letters are composed (NFC)."""

    patterns: tuple[str, ...] = ()
    words: bool = False
    digits: bool = False
    whole: bool = False
    first: bool = False
    composed: bool = False


_GPT2 = _Cuts(words=True)
_DIGITS = _Cuts(words=True, digits=True)
_OF_LLAMA3 = _Cuts((_LLAMA3,), whole=True, first=True)
CUTS: Mapping[str, _Cuts] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "exaone4", "trillion", "granite-docling", "mellum"), _GPT2),
    "olmo": _Cuts(words=True, composed=True),
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2"), _OF_LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _Cuts((_LLAMA3,))),
    "qwen2": _Cuts((_QWEN2,), composed=True),
    **dict.fromkeys(("deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan", "grok-2", "kormo"), _Cuts((_QWEN2,))),
    "solar-open": _Cuts((_QWEN2,)),
    "qwen35": _Cuts((
        rf"(?i:{_SHORT})|{_WORD}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+",
    ), composed=True),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _Cuts(_DEEPSEEK3)),
    "tekken": _Cuts((rf"{_CASES}|\p{{N}}|{_SLASH}",), whole=True, first=True),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2", "kanana2"), _Cuts((_GPT4O,))),
    "kimi-k2": _Cuts((_KIMI,)),
    "afmoe": _Cuts(_AFMOE),
    **dict.fromkeys(("bailingmoe", "bailingmoe2"), _Cuts((
        rf"'(?i:[sdmt]|ll|ve|re)|{_WORD}+\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    ))),
    "exaone-moe": _Cuts((
        rf"(?i:{_SHORT})|{_WORD}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?"
        r"|\s*[\r\n]|\s+(?!\S)|\s+",
    )),
}  # fmt: skip


class Vocabulary(NamedTuple):
    """The tokens of a model, and the kind of each as a number."""

    tokens: Sequence[str]
    kinds: Sequence[int]


def vocabulary(metadata: Metadata, rows: int) -> Vocabulary | None:
    """Returns the vocabulary of a model whose embedding has this many rows; None if the file has none. Raises
    CheckpointError."""
    tokens = metadata.listed(KEY + "tokens", str)
    if tokens is None or metadata.get(KEY + "model", str) in (None, "none", "no_vocab"):
        return None
    if len(tokens) > rows:
        raise metadata.wrong(KEY + "tokens", f"has {len(tokens):,} tokens, its embedding has {rows:,} rows")
    if len(set(tokens)) < len(tokens):
        raise metadata.wrong(KEY + "tokens", "has a token twice")
    kinds = metadata.listed(KEY + "token_type", int, len(tokens)) or [_NORMAL] * len(tokens)
    return Vocabulary(tokens, kinds)


def special(metadata: Metadata, name: str, tokens: Sequence[str]) -> int | None:
    """Returns the id of a special token; None if there is none. Raises CheckpointError."""
    found = metadata.get(f"{KEY}{name}_token_id", int)
    if found is not None and not 0 <= found < len(tokens):
        raise metadata.wrong(f"{KEY}{name}_token_id", f"is {found}, there are {len(tokens):,} tokens")
    return found


def tokenizer_of(metadata: Metadata, found: Vocabulary) -> str:
    """Returns the text of a tokenizer.json. Raises CheckpointError."""
    kind = metadata.need(KEY + "model", str)
    if kind not in _MAKERS:
        raise metadata.wrong(KEY + "model", f"is {kind[:60]!r}, only {', '.join(_MAKERS)} are known")
    try:
        body = json.dumps(_MAKERS[kind](metadata, found), ensure_ascii=False)
        check_tokenizer(body.encode())
    except TokenizerUnfit as error:
        raise CheckpointError(f"{metadata.file}: the tokenizer {line(error)}") from None
    except UnicodeEncodeError:
        raise metadata.wrong(KEY + "tokens", "has text that is not Unicode") from None
    return body


def begins(metadata: Metadata) -> bool:
    """Returns whether texts begin with the first token."""
    cuts = CUTS.get(metadata.get(KEY + "pre", str) or "")
    usual = metadata.get(KEY + "model", str) in ("llama", "gemma4") or (cuts is not None and cuts.first)
    found = metadata.get(KEY + "add_bos_token", bool)
    return usual if found is None else found


def _around(metadata: Metadata, found: Vocabulary) -> dict[str, Any] | None:
    """Returns the rule of tokens around each text."""
    ends = metadata.get(KEY + "add_eos_token", bool, False)
    first = special(metadata, "bos", found.tokens) if begins(metadata) else None
    last = special(metadata, "eos", found.tokens) if ends else None
    before, behind = ([] if each is None else [found.tokens[each]] for each in (first, last))
    return template(before, behind, {token: number for number, token in enumerate(found.tokens)})


def _merges(metadata: Metadata) -> list[list[str]]:
    pairs = metadata.listed(KEY + "merges", str) or ()
    cut = [(pair, pair.find(" ", 1)) for pair in pairs]
    if (strange := next((pair for pair, at in cut if at < 0), None)) is not None:
        raise metadata.wrong(KEY + "merges", f"has {strange[:60]!r}, which is no pair")
    return [[pair[:at], pair[at + 1 :]] for pair, at in cut]


def _added(found: Vocabulary) -> list[dict[str, Any]]:
    sides = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return [
        {"id": number, "content": token, **sides, "special": kind != _USER_DEFINED}
        for number, (token, kind) in enumerate(zip(found.tokens, found.kinds, strict=True))
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]


def _table(metadata: Metadata, found: Vocabulary, unknown: str | None = None, **parts: Any) -> dict[str, Any]:
    """Returns a tokenizer.json of pairs that merge; `parts`: its normalizer, pre_tokenizer and decoder, and fields of
    its model."""
    model = {
        "type": "BPE", "dropout": None, "unk_token": unknown, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": unknown is not None, "byte_fallback": unknown is not None,
        "ignore_merges": parts.pop("ignore_merges", False),
        "vocab": {token: number for number, token in enumerate(found.tokens)}, "merges": _merges(metadata),
    }  # fmt: skip
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": _added(found), **parts,
        "post_processor": _around(metadata, found), "model": model,
    }  # fmt: skip


def _of_pairs(metadata: Metadata, found: Vocabulary) -> dict[str, Any]:
    name = metadata.get(KEY + "pre", str) or ""
    if name not in CUTS:
        raise metadata.wrong(
            KEY + "pre", f"is {name[:60]!r}: how such a tokenizer cuts text into words is not known here, only "
            f"{', '.join(CUTS)}"
        )  # fmt: skip
    cuts = CUTS[name]
    steps: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": each}, "behavior": "Isolated", "invert": False} for each in cuts.patterns
    ]
    if cuts.digits:
        steps.append({"type": "Digits", "individual_digits": True})
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return _table(
        metadata, found, ignore_merges=cuts.whole, normalizer={"type": "NFC"} if cuts.composed else None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": [*steps, {**level, "use_regex": cuts.words}]},
        decoder={**level, "use_regex": True},
    )  # fmt: skip


def _of_gemma4(metadata: Metadata, found: Vocabulary) -> dict[str, Any]:
    number = special(metadata, "unknown", found.tokens)
    space = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    return _table(
        metadata, found, "<unk>" if number is None else found.tokens[number], pre_tokenizer=None,
        normalizer={"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        decoder={"type": "Sequence", "decoders": [space, {"type": "ByteFallback"}, {"type": "Fuse"}]},
    )  # fmt: skip


def _of_pieces(metadata: Metadata, found: Vocabulary) -> dict[str, Any]:
    """Returns the tokenizer.json of SentencePiece's pieces. Its merges follow from the pieces' scores."""
    scores = metadata.listed(KEY + "scores", float, len(found.tokens))
    if scores is None or not all(map(math.isfinite, scores)):
        raise metadata.wrong(KEY + "scores", "should have a number for each token")
    unknown = special(metadata, "unknown", found.tokens) or 0
    kinds = [
        _UNKNOWN if at == unknown else _CONTROL if kind == _UNKNOWN else kind for at, kind in enumerate(found.kinds)
    ]
    pieces = tuple(map(Piece, found.tokens, scores, kinds))
    normal = {piece.score for piece in pieces if piece.kind == _NORMAL}
    if len(normal) == 1 and len(pieces) > 2:
        raise metadata.wrong(KEY + "scores", "are all alike, so that no order of merges follows from them")
    if not all(piece.text and len(piece.text.encode()) <= _LONGEST for piece in pieces):
        raise metadata.wrong(KEY + "tokens", f"has a piece of no text, or of over {_LONGEST} bytes")
    first, last = (-1 if (at := special(metadata, name, found.tokens)) is None else at for name in ("bos", "eos"))
    unigram = metadata.get(KEY + "model", str) == "t5"
    charsmap = bytes(metadata.listed(KEY + "precompiled_charsmap", int) or ())
    all_bytes = {piece.text for piece in pieces if piece.kind == _BYTE}.issuperset(BYTES)
    whole = Pieces(
        pieces, unigram, all_bytes, (first, last), charsmap,
        bool(metadata.get(KEY + "add_space_prefix", bool, True)),
        bool(metadata.get(KEY + "remove_extra_whitespaces", bool, unigram)),
    )  # fmt: skip
    config = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": begins(metadata)}
    return tokenizer_json(
        whole, {**config, "add_eos_token": metadata.get(KEY + "add_eos_token", bool, unigram)}, "", {}
    )


_MAKERS = {"gpt2": _of_pairs, "llama": _of_pieces, "t5": _of_pieces, "gemma4": _of_gemma4}
