"""Checks of tokenizer.json and chat.json, and bounds on how much longer a text becomes."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moert.pack.documents import Fit, check_version, mapping, parsed, plain, read, skim
from moert.pack.errors import ChatInvalid, ManifestInvalid
from moert.pack.reader import Pack
from moert.pack.tensors import bound_of

_MOST_TABLE_BYTES = 1 << 22  # those of T5, XLM-R and NLLB take 0.3 MB
_DEEPEST = 8  # bytes of a key; a letter has four, and longer groups of letters than five bytes are looked up in letters

U32 = NDArray[np.uint32]
I64 = NDArray[np.int64]


def charsmap_growth(table: Any) -> float:
    """Returns the most bytes that a byte of text becomes. Raises ValueError, whose one line names the fault, for a
    table that the library can't read."""
    if not isinstance(table, str) or not table.isascii():
        raise ValueError("its precompiled_charsmap is no text")
    if len(table) > _MOST_TABLE_BYTES:
        raise ValueError(
            f"its precompiled_charsmap has {len(table):,} letters, none is longer than {_MOST_TABLE_BYTES:,}"
        )
    body = base64.b64decode(table, validate=True)
    nbytes = int.from_bytes(body[:4], "little")
    if len(body) <= 4 or not 0 < nbytes <= len(body) - 4 or nbytes % 4:
        raise ValueError(f"its precompiled_charsmap says {nbytes:,} bytes of keys and has {max(0, len(body) - 4):,}")
    units = np.frombuffer(body, "<u4", nbytes // 4, 4)
    texts = body[4 + nbytes :]
    texts.decode("utf-8")
    return _growth(units, np.frombuffer(texts, np.uint8))


def _growth(units: U32, texts: NDArray[np.uint8]) -> float:
    ends = np.append(np.flatnonzero(texts == 0), len(texts))
    places = np.arange(len(units), dtype=np.int64)
    labels, below = (units & 0xFF).astype(np.int64), _below(units, places)
    is_node = (labels != 0) & (units >> 31 == 0)
    above = places ^ labels  # the place that a node which leads here points to
    reached, most = np.zeros(len(units) + 256, bool), 1.0
    leads = below[:1]
    for depth in range(1, _DEEPEST + 1):
        reached[:] = False
        reached[leads[leads < len(units)]] = True
        found = np.flatnonzero(is_node & reached[above])
        is_node[found] = False  # no later key that ends here is shorter
        leads = below[found]
        leaves = leads[(units[found] >> 8) & 1 == 1]
        most = max(most, _longest(units, texts, ends, leaves) / depth)
    return max(most, float(np.diff(ends, prepend=-1).max() - 1) / _DEEPEST)


def _below(units: U32, places: I64) -> I64:
    """Returns the places where the nodes below each unit begin."""
    shift = ((units & 0x200) >> 6).astype(np.int64)
    return places ^ ((units >> 10).astype(np.int64) << shift)


def _longest(units: U32, texts: NDArray[np.uint8], ends: I64, leaves: I64) -> int:
    """Returns the bytes of the longest text that these leaves name."""
    starts = (units[leaves[leaves < len(units)]] & 0x7FFFFFFF).astype(np.int64)
    starts = starts[starts <= len(texts)]
    return int((ends[np.searchsorted(ends, starts)] - starts).max(initial=0))


_MOST_TIMES, _MOST_PLUS = 2048.0, 1 << 16  # text → tokens; BERT 8, T5 and NLLB 44 to 88, ALBERT 1452
_MOST_DECODED = 32.0  # tokens → text; byte-level 3, others 1
_CALM = 8.0  # growth that any text may have
_MOST_BYTES = 1 << 24  # of a text that grows more than that
_USUAL, _LONGEST = 1 << 6, 1 << 13  # bytes of a token
_AFFIX = 256  # letters of a text that is put before or behind many tokens
_FEW = 16  # letters that a pattern may have where a text may be cut anywhere
_NEAR_PATTERNS, _ONE_LETTER = (" {2,}",), re.compile(r"\[[\w-]+\]")
_NEAR = {
    "BertNormalizer", "NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Nmt", "Strip", "StripAccents", "Precompiled",
    "Prepend",
}  # fmt: skip
_CUTS = {"BertPreTokenizer", "Digits", "Metaspace", "Punctuation", "Whitespace", "WhitespaceSplit"}
_KEEPS = _CUTS | {"FixedLength", "Split", "UnicodeScripts"}
"""Pre-tokenizers that keep all of a text but white space."""
_PATTERN = 1 << 14  # letters; the longest in use have some hundreds
_ADDED, _MOST_SPECIALS = 1 << 17, 64
_BESIDE = 1 << 25  # bytes of all but the vocabulary
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
"""The names of tokens of single bytes, where they are not named by the letters of ByteLevel."""

Table = Mapping[str, Any]


def byte_alphabet() -> dict[str, int]:
    """Returns the letters that stand for bytes in vocabularies of bytes (GPT-2's)."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + place): byte for place, byte in enumerate(others)}


def bytes_of(name: str, alphabet: Mapping[str, int]) -> bytes | None:
    """Returns the bytes of a token in that alphabet; None where a letter is no letter of it."""
    return bytes(alphabet[letter] for letter in name) if all(letter in alphabet for letter in name) else None


class TokenizerUnfit(ValueError):
    """A tokenizer.json that can't be used, as a part of a line behind the name of the file. Save the model's own fast
    tokenizer beside it, and convert again."""


Counts = Literal["", "letters", "pieces"]
"""The unit of a text that can be counted: letters that are tokens by themselves, or pieces that the model gets; empty
where neither is sure."""


class Growth(NamedTuple):
    """The most bytes of a text after some steps, of n bytes before: `times` · n + `plus`. Each of them, or behind the
    last step each token, stands for at most `stands` bytes of the text; infinity where the left-out bytes have no
    bound. `counts`: the unit of a text, cut anywhere and normalised, of which a token surely stands for at most `each`.
    `unknown`: the id of the token for unknown letters, where the model names it by an id."""

    times: float = 1.0
    plus: float = 0.0
    stands: float = 1.0
    counts: Counts = ""
    each: int = 1
    unknown: int | None = None

    def then(self, other: Growth) -> Growth:
        return Growth(self.times * other.times, self.plus * other.times + other.plus, self.stands * other.stands)

    def most(self, nbytes: int) -> float:
        """Returns the most bytes that a text of `nbytes` bytes may become."""
        return self.times * nbytes + self.plus

    def check(self, nbytes: int) -> None:
        """Raises TokenizerUnfit for a text of `nbytes` bytes that might become too long."""
        most = self.most(nbytes)
        if self.times > _CALM and most > _MOST_BYTES:
            raise TokenizerUnfit(
                f"might make {most:,.0f} bytes of a text of {nbytes:,}, at most {_MOST_BYTES:,} are tried: give a "
                "shorter one"
            )


def check_tokenizer(body: bytes) -> Growth:
    """Returns how much longer the tokenizer may make a text before it cuts it into tokens, and how much text each token
    stands for if each letter becomes at least one. Raises TokenizerUnfit for a file that the library does not read, or
    should not."""
    try:
        return _checked(body)
    except RecursionError:
        raise TokenizerUnfit("is nested too deep") from None


def _checked(body: bytes) -> Growth:
    table, longest = _beside_vocabulary(body)
    if longest > _LONGEST:
        raise TokenizerUnfit(f"has a token of {longest:,} bytes, none is longer than {_LONGEST:,}")
    _check_model(table.get("model"))
    normalizer = _part(table, "normalizer", _NORMALIZERS)
    growth = normalizer.then(_part(table, "pre_tokenizer", _PRE_TOKENIZERS))
    if growth.times > _MOST_TIMES or growth.plus > _MOST_PLUS:
        raise TokenizerUnfit(
            f"may make {_short(growth.times)} times as much of a text as it has, and {_short(growth.plus)} bytes more: "
            f"at most {_MOST_TIMES:,.0f} times and {_MOST_PLUS:,} bytes are taken"
        )
    _check_added(table.get("added_tokens"), normalizer)
    specials = _part(table, "post_processor", _POST_PROCESSORS).plus
    if specials > _MOST_SPECIALS:
        raise TokenizerUnfit(f"adds {_short(specials)} tokens to each text, at most {_MOST_SPECIALS} are taken")
    decoded = _part(table, "decoder", _DECODERS).times
    if decoded > _MOST_DECODED:
        raise TokenizerUnfit(
            f"may make text of {_short(decoded)} times its length of a token: at most {_MOST_DECODED:.0f} times are "
            "taken"
        )
    added = max((_nbytes(each["content"]) for each in table.get("added_tokens") or []), default=1)
    counts = _counts(table)
    each = max(1, added, longest if counts == "letters" else 1)
    return growth.then(Growth(stands=_token_stands(table, longest)))._replace(
        counts=counts, each=each, unknown=table["model"].get("unk_id")
    )  # fmt: skip


def _counts(table: Table) -> Counts:
    """Returns the unit that may be counted. Normalizers that change a letter by its neighbours alone lose a few letters
    at most where a text is cut; a piece that is unknown is one token, and a letter that is a token is never unknown."""
    model, normalizers = table["model"], list(_flat(table.get("normalizer"), "normalizers"))
    pieces = list(_flat(table.get("pre_tokenizer"), "pretokenizers"))
    if not all(each["type"] in _NEAR or (each["type"] == "Replace" and _is_near(each)) for each in normalizers):
        return ""
    kind = model.get("type")
    if kind in ("WordLevel", "WordPiece"):
        cuts = all(each["type"] in _CUTS or (each["type"] == "Split" and _is_near(each)) for each in pieces)
        return "pieces" if cuts else ""
    whole = not any(model.get(name) for name in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"))
    kept = all(each["type"] in _KEEPS and each.get("behavior") != "Removed" for each in pieces)
    return "letters" if kind in ("BPE", "Unigram") and whole and kept else ""


def _flat(part: Any, name: str) -> Iterator[Table]:
    """Yields the parts of a sequence, which may hold further sequences."""
    if isinstance(part, dict) and part.get("type") == "Sequence":
        for each in part[name]:
            yield from _flat(each, name)
    elif part is not None:
        yield part


def _is_near(table: Table) -> bool:
    """Returns whether a pattern is found by a few letters, wherever the text before and behind them ends."""
    pattern = table["pattern"]
    if "String" in pattern:
        return len(pattern["String"]) <= _FEW
    return pattern["Regex"] in _NEAR_PATTERNS or _ONE_LETTER.fullmatch(pattern["Regex"]) is not None


def _token_stands(table: Table, longest: int) -> float:
    """Returns the most bytes that a token stands for, where the longest token of the vocabulary has `longest` bytes:
    infinity where a token may stand for a whole word that is not known, or for the spaces beside it."""
    added = table.get("added_tokens") or []
    if table["model"].get("type") != "BPE" or any(each.get("lstrip") or each.get("rstrip") for each in added):
        return inf
    return max(longest, *(_nbytes(each["content"]) for each in added), 0)


def _short(number: float) -> str:
    return f"{number:,.0f}" if number < 1e12 else f"{number:.0e}"


def _beside_vocabulary(body: bytes) -> tuple[dict[str, Any], int]:
    """Returns the document without the vocabulary, and a number of bytes that no token of the vocabulary exceeds."""
    small = skim(body, "model", _USUAL)
    if len(small.text) > _BESIDE:
        raise TokenizerUnfit(f"has {len(small.text):,} bytes beside its vocabulary, at most {_BESIDE:,} are read")
    try:
        table = parsed(small.text)
    except ValueError as error:
        raise TokenizerUnfit(f"is not JSON: {error}") from None
    if not isinstance(table, dict):
        raise TokenizerUnfit("should be a JSON object")
    return table, max(small.long, default=_USUAL)


def _part(table: Table, role: str, kinds: Mapping[str, Callable[[Table], Growth]]) -> Growth:
    """Returns the growth by one of the four parts, which may be a sequence of others."""
    part = table.get(role)
    if part is None:
        return Growth()
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "Sequence":
        growth = Growth()
        for each in _list(part, _SEQUENCES[role]):
            if each is not None:
                growth = growth.then(_part({role: each}, role, kinds))
        return growth
    if not isinstance(kind, str) or kind not in kinds:
        raise TokenizerUnfit(f"has a {role} of a kind that this program does not know, {str(kind)[:60]!r}: upgrade it")
    try:
        return kinds[kind](part)
    except TokenizerUnfit:
        raise
    except ValueError as error:
        raise TokenizerUnfit(f"has a {role} {kind} that can't be: {error}") from None


_SEQUENCES = {
    "normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "post_processor": "processors",
    "decoder": "decoders",
}  # fmt: skip


def _list(table: Table, name: str) -> list[Any]:
    found = table.get(name)
    if not isinstance(found, list):
        raise TokenizerUnfit(f"has no list of {name} where one should be")
    return found


def _text(table: Table, name: str, longest: int = _AFFIX) -> str:
    """Returns the text in a field. Raises ValueError for anything else, or a longer text."""
    found = table.get(name)
    if not isinstance(found, str) or len(found) > longest:
        raise ValueError(f"{name} should be text of at most {longest:,} letters")
    return found


def _nbytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def _pattern(table: Table) -> tuple[int, bool]:
    """Returns the bytes of the text that a pattern looks for, one for an expression; and whether it is one. Raises
    ValueError."""
    pattern = table.get("pattern")
    if not isinstance(pattern, dict) or len(pattern) != 1 or not pattern.keys() <= {"String", "Regex"}:
        raise ValueError("pattern should be a String or a Regex")
    if "Regex" in pattern:
        _text(pattern, "Regex", _PATTERN)
        return 1, True
    return _nbytes(_text(pattern, "String", _PATTERN)), False


def _replace(table: Table) -> Growth:
    """Returns the growth by a replacement. An expression may also match the empty text between any two letters; an
    empty pattern does."""
    nbytes, expression = _pattern(table)
    content = _nbytes(_text(table, "content", _PATTERN))
    if expression or not nbytes:
        return Growth(content + 1.0, content, inf)
    return Growth(max(1.0, content / nbytes), stands=max(1.0, nbytes / content) if content else inf)


def _replace_text(table: Table) -> Growth:
    if _pattern(table)[1]:
        raise ValueError("pattern should be a String")
    return _replace(table)


def _prepend(table: Table) -> Growth:
    return Growth(1.0, _nbytes(_text(table, "prepend", _PATTERN)))


def _precompiled(table: Table) -> Growth:
    return Growth(charsmap_growth(table.get("precompiled_charsmap")), stands=inf)


def _split(table: Table) -> Growth:
    _pattern(table)
    return _isolated(table)


def _isolated(table: Table) -> Growth:
    return Growth(stands=inf if table.get("behavior") == "Removed" else 1.0)


def _byte_level(table: Table) -> Growth:
    """Returns the growth by ByteLevel: a byte becomes a letter of two; a space may come before each piece."""
    return Growth(3.0, 2.0)


def _metaspace(table: Table) -> Growth:
    """Returns the growth by Metaspace: a letter for each space, and one before each piece."""
    nbytes = _nbytes(_text({"replacement": "▁", **table}, "replacement", 1))
    return Growth(1.0 + nbytes, nbytes)


def _fixed_length(table: Table) -> Growth:
    length = table.get("length", 5)
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise ValueError("length should be at least 1")
    return Growth()


def _template(table: Table) -> Growth:
    """Returns the growth by a template; `plus` counts tokens."""
    specials = table.get("special_tokens")
    if not isinstance(specials, dict):
        raise ValueError("special_tokens should be an object")
    added = {name: _special(each, name) for name, each in specials.items()}
    return Growth(1.0, max(_template_tokens(_list(table, name), added) for name in ("single", "pair")))


def _template_tokens(pieces: list[Any], added: Mapping[str, int]) -> int:
    count, sequences = 0, list[Any]()
    for piece in pieces:
        kind, each = next(iter(piece.items()), (None, None)) if isinstance(piece, dict) else (None, None)
        name = each.get("id") if isinstance(each, dict) else None
        if kind == "Sequence":
            sequences.append(name)
        elif kind == "SpecialToken" and isinstance(name, str) and name in added:
            count += added[name]
        else:
            raise ValueError(f"it names a token that it does not have, {str(name)[:60]!r}")
    if len(set(map(str, sequences))) != len(sequences):
        raise ValueError("it has a text twice")
    return count


def _special(table: Any, name: str) -> int:
    if not isinstance(table, dict):
        raise ValueError(f"the special token {name[:60]!r} should be an object")
    ids, tokens = _list(table, "ids"), _list(table, "tokens")
    if len(ids) != len(tokens) or not all(isinstance(each, str) and len(each) <= _LONGEST for each in tokens):
        raise ValueError(f"the special token {name[:60]!r} should have a text for each id")
    return len(ids)


def _two_tokens(table: Table) -> Growth:
    for name in ("sep", "cls"):
        pair = _list(table, name)
        if len(pair) != 2 or not isinstance(pair[0], str) or len(pair[0]) > _LONGEST:
            raise ValueError(f"{name} should be a token and its id")
    return Growth(1.0, 4.0)


def _strip(table: Table) -> Growth:
    """Returns no growth. Raises ValueError for a `stop` that is not 0: the library breaks where it has to take more
    from the end than is there."""
    _text(table, "content", 1)
    if table.get("stop") != 0:
        raise ValueError("stop should be 0")
    return Growth()


def _fixed(times: float, stands: float = 1.0) -> Callable[[Table], Growth]:
    def growth(table: Table) -> Growth:
        return Growth(times, stands=stands)

    return growth


_SAME, _LESS = _fixed(1.0), _fixed(1.0, inf)
_NORMALIZERS: Mapping[str, Callable[[Table], Growth]] = {
    "BertNormalizer": _fixed(7.5, inf), "NFC": _fixed(3.0, 4.0), "NFD": _fixed(3.0, 4.0), "NFKC": _fixed(11.0, 8.0),
    "NFKD": _fixed(11.0, 8.0), "Lowercase": _fixed(1.5, 4.0), "Nmt": _LESS, "Strip": _LESS, "StripAccents": _LESS,
    "ByteLevel": _fixed(2.0), "Precompiled": _precompiled, "Prepend": _prepend, "Replace": _replace,
}  # fmt: skip
"""The growth by each normalizer; by Unicode's forms: the most bytes that a byte becomes in UTF-8 (its technical report
15), and the most bytes that become one."""
_PRE_TOKENIZERS: Mapping[str, Callable[[Table], Growth]] = {
    **dict.fromkeys(("BertPreTokenizer", "CharDelimiterSplit", "Whitespace", "WhitespaceSplit"), _LESS),
    **dict.fromkeys(("Digits", "UnicodeScripts"), _SAME), "Punctuation": _isolated,
    "ByteLevel": _byte_level, "FixedLength": _fixed_length, "Metaspace": _metaspace, "Split": _split,
}  # fmt: skip
_POST_PROCESSORS: Mapping[str, Callable[[Table], Growth]] = {
    "BertProcessing": _two_tokens, "RobertaProcessing": _two_tokens, "ByteLevel": _SAME,
    "TemplateProcessing": _template,
}  # fmt: skip
_DECODERS: Mapping[str, Callable[[Table], Growth]] = {
    "BPEDecoder": _fixed(2.0), "ByteFallback": _SAME, "ByteLevel": _fixed(3.0), "CTC": _fixed(2.0), "Fuse": _SAME,
    "Metaspace": _SAME, "Replace": _replace_text, "Strip": _strip, "WordPiece": _fixed(2.0),
}  # fmt: skip


def _check_model(model: Any) -> None:
    if not isinstance(model, dict):
        raise TokenizerUnfit("has no model")
    for name in ("unk_token", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name) is not None:
            try:
                _text(model, name)
            except ValueError as error:
                raise TokenizerUnfit(f"has a model that can't be: {error}") from None


def _check_added(tokens: Any, normalizer: Growth) -> None:
    if tokens is None:
        return
    if not isinstance(tokens, list) or len(tokens) > _ADDED:
        raise TokenizerUnfit(f"should have a list of at most {_ADDED:,} added_tokens")
    normalized = 0.0
    for each in tokens:
        content = each.get("content") if isinstance(each, dict) else None
        if not isinstance(content, str) or len(content) > _LONGEST:
            raise TokenizerUnfit(f"has an added token that is no text of at most {_LONGEST:,} letters")
        if each.get("normalized", True):
            normalized += normalizer.times * _nbytes(content) + normalizer.plus
    if normalizer.times > _CALM and normalized > _MOST_BYTES:
        raise TokenizerUnfit(f"might make {_short(normalized)} bytes of its added tokens")


CHAT = "chat.json"
MAX_CHAT_BYTES = bound_of(CHAT).most_bytes
GIVEN = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""The names that every template gets values for, so that no token has them."""
_FORMAT, _VERSION = "model.pack chat", 1
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_MOST_TOKENS, _LONGEST_TOKEN = 64, 256


def _encodable(text: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _is_token(text: str) -> bool:
    return len(text) <= _LONGEST_TOKEN and _encodable(text)


_Template = Annotated[str, Fit(lambda text: text and _encodable(text), "a template")]
_Name = Annotated[
    str, Fit(lambda name: _NAME.fullmatch(name) and name not in GIVEN, "one that a template can call a token by")
]
_Token = Annotated[str, Fit(_is_token, f"text of at most {_LONGEST_TOKEN} letters")]
_FEW_TOKENS = Fit(lambda tokens: len(tokens) <= _MOST_TOKENS, f"at most {_MOST_TOKENS} tokens")


@dataclass(frozen=True)
class ChatFormat:
    """A model's chat format: `template` is in the language of Jinja; `tool_template`, if any, takes its place where
    tools are given. `tokens`: special tokens by the names that templates call them by, as bos_token."""

    template: _Template
    tokens: Annotated[Mapping[_Name, _Token], _FEW_TOKENS]
    tool_template: _Template | None = None

    @property
    def ends(self) -> list[str]:
        """Returns the tokens that end a reply, beside those that end any text of the model: the tokenizer's own end."""
        return [token for token in (self.tokens.get("eos_token"),) if token]


def dump_chat(chat: ChatFormat) -> bytes:
    """Returns the file's content. Raises ChatInvalid for a format that no reader takes."""
    body = json.dumps({"format": _FORMAT, "version": _VERSION, **plain(chat)}, ensure_ascii=True, indent=1) + "\n"
    if len(body) > MAX_CHAT_BYTES:
        raise ChatInvalid(f"the chat template takes {len(body)} bytes, at most {MAX_CHAT_BYTES} go into {CHAT}")
    parse_chat(body.encode())
    return body.encode()


def load_chat(pack: Pack) -> ChatFormat | None:
    """Returns the chat format of a pack; None where the pack has no such file. Raises ChatInvalid, FormatTooNew,
    SizeOverflow, or as `read_file` does."""
    return parse_chat(pack.read_file(CHAT)) if CHAT in pack.manifest.files else None


def parse_chat(body: bytes) -> ChatFormat:
    """Returns the chat format that a file's content holds. Raises ChatInvalid or FormatTooNew."""
    try:
        raw = parsed(body)
    except ValueError as error:
        raise ChatInvalid(f"{CHAT} is not JSON ({error}); convert the model again") from None
    try:
        document = mapping(raw, CHAT)
        check_version(document, CHAT, _FORMAT, _VERSION)
        return read(ChatFormat, document, CHAT)
    except ManifestInvalid as error:
        raise ChatInvalid(str(error)) from None
