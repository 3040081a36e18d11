"""How large the files of a pack may be, by what they are for, and what reading them takes: known before they are read.

A pack comes from anyone. What is in it is counted against these numbers first, then against the room that there is.
SPEC.md, section 11, says which real models each of them lets pass.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from moert.pack.errors import SizeOverflow

Room = Callable[[int, str], None]
"""Is told, before they are taken, of bytes that reading a file of this name will take at once; raises an error of its
own where there are not so many."""

HEADER_BYTES = 1 << 23
HEADER_MARKS = 1 << 20
"""Of a safetensors file's header: that of 14,848 experts with checksums has a tenth of either."""
_MARK_BYTES = 128
"""What each value and each name of JSON takes in memory at most, beside its letters (119 measured)."""
_TEXT_BYTES, _WIDE_TEXT_BYTES = 6, 9
"""And each byte of the text: itself, decoded, and in the values, where a letter has up to four; decoded too, if the
text has others than ASCII."""

TEXT_BYTES = 640
"""What turning a text into tokens takes for each byte that it has, or has once it is normalised: at most, where each is
a token (600 measured)."""
TOKENIZER = "tokenizer.json"
_TREE = re.compile(b'"(Unigram|unk_id)"')  # older files do not name it
_WORDS = re.compile(rb'\[\s*"([^"\\]*(?:\\.[^"\\]*)*)"', re.DOTALL)
_NODE_BYTES, _NAME_BYTES, _TOKENIZER_MARK_BYTES = 330, 400, 170  # see tokenizer_takes
_MOST_DEPTH = 256  # letters that words may share: of more each counts as a node
_MOST_WORDS, _MOST_BYTES = 1 << 19, 1 << 25  # that are kept to count nodes: of more each letter counts as one
COVERED_BYTES = 8 << 20
"""What the margin of every budget has room for: of so little nobody is told."""


def unbounded(nbytes: int, name: str) -> None:
    """The Room of those who have no limit."""


class Bound(NamedTuple):
    """Of a file: the most bytes, the most marks of its JSON, and how many times its bytes are taken at once to make
    what is read of it."""

    most_bytes: int
    times: float = 1.0
    most_marks: int | None = None


class Taken(NamedTuple):
    """What reading a file takes at most at one time, its own bytes among it, and what is kept of it."""

    peak_bytes: int
    kept_bytes: int


NOTHING = Taken(0, 0)


_BOUNDS = {
    "manifest.json": Bound(1 << 25, most_marks=1 << 21),
    TOKENIZER: Bound(1 << 26, most_marks=1 << 22),
    "chat.json": Bound(1 << 20, most_marks=1 << 18),
    "config.json": Bound(1 << 22, most_marks=1 << 18),
    "generation_config.json": Bound(1 << 22, most_marks=1 << 18),
    "report.json": Bound(1 << 26, most_marks=1 << 21),
    "trace.safetensors": Bound(1 << 21, times=2.0),
    "paths.safetensors": Bound(1 << 28, times=1.5),
    "neurons.safetensors": Bound(1 << 28, times=1.5),
    "hash.safetensors": Bound(1 << 30, times=1.5),
    "order.safetensors": Bound(1 << 28, times=2.5),
    "predictor.safetensors": Bound(1 << 33, times=2.5),
}
_OTHER = Bound(1 << 28)
"""Of what a pack may hold beside these, and somebody reads as a whole."""


def bound_of(name: str) -> Bound:
    """Of a file of the pack that is read as a whole, by its name."""
    return _BOUNDS.get(name, _OTHER)


def known_bounds() -> dict[str, int]:
    """The most bytes of each file that has a use, by its name."""
    return {name: bound.most_bytes for name, bound in _BOUNDS.items()}


def check_size(name: str, nbytes: int) -> None:
    """Raises SizeOverflow for a file of this name that is larger than any is."""
    most = bound_of(name).most_bytes
    if nbytes > most:
        raise SizeOverflow(f"{name} has {nbytes} bytes, none is larger than {most}: this is no pack of a model")


def marks(text: bytes) -> int:
    """At least as many as JSON text has values and names: what opens, joins or divides."""
    return sum(map(text.count, (b"[", b"{", b",", b":")))


def json_bytes(name: str, text: bytes, most_marks: int) -> int:
    """What reading the text as JSON takes at most. Raises SizeOverflow where it has more values than `most_marks`."""
    count = marks(text)
    if count > most_marks:
        raise SizeOverflow(
            f"{name} has {count} values and names, none has more than {most_marks}: this is no pack of a model"
        )
    return _MARK_BYTES * count + (_TEXT_BYTES if text.isascii() else _WIDE_TEXT_BYTES) * len(text)


def take_room(name: str, body: bytes, room: Room) -> None:
    """Asks for the room that making something of a file takes, all of whose bytes were read. Raises SizeOverflow, or
    what `room` does."""
    bound = bound_of(name)
    if name.endswith(".safetensors"):
        header = body[8 : 8 + min(HEADER_BYTES, int.from_bytes(body[:8], "little"))]
        room(int((bound.times - 1) * len(body)) + json_bytes(name, header, HEADER_MARKS), name)
    elif bound.most_marks is not None:
        needed = json_bytes(name, body, bound.most_marks)
        room(tokenizer_takes([body]).peak_bytes - len(body) if name == TOKENIZER else needed, name)


def tokenizer_takes(parts: Iterable[bytes]) -> Taken:
    """Returns what the library takes that reads a tokenizer.json, whose bytes come in parts: of one part never less.

    Measured on vocabularies of 2,000 to 250,000 tokens: beside the file and its small parts 70 to 140 bytes for each
    mark at the peak, and 290 to 365 for each name at the end; of Unigram, which keeps a tree of all tokens, 300 for
    each token and for each node. In parts, tokens before the part with the model's type are not counted.
    """
    nbytes = count = names = whole = 0
    words, tree = list[bytes](), False
    for part in parts:
        nbytes, count, names = nbytes + len(part), count + marks(part), names + part.count(b":")
        tree = tree or _TREE.search(part) is not None
        few = part.count(b"[") <= _MOST_WORDS
        found = _WORDS.findall(part) if tree and few else []
        whole += len(part) if tree and not few else 0
        if len(words) + len(found) <= _MOST_WORDS and nbytes <= _MOST_BYTES:
            words += found
        else:
            whole += sum(map(len, found)) + len(found)
    kept = max(_NAME_BYTES * names, _NODE_BYTES * (whole + len(words) + _nodes(words)) if tree else 0)
    return Taken(3 * nbytes + max(kept, 0 if tree else _TOKENIZER_MARK_BYTES * count), kept)


def vocabulary_takes(tokens: int) -> Taken:
    """Returns what a tokenizer.json with so many tokens takes, about, where it can't be looked at."""
    return Taken(_NAME_BYTES * tokens, _NAME_BYTES * tokens)


def _nodes(words: list[bytes]) -> int:
    """Returns how many nodes a tree of these words has, one for each beginning of a word."""
    words = sorted(words)
    text, lengths = np.frombuffer(b"".join(words), np.uint8), np.array([*map(len, words)], np.int64)
    starts, alike, depth = np.cumsum(lengths) - lengths, np.arange(1, len(words)), 0
    nodes = len(text)
    while len(alike) and depth < _MOST_DEPTH:
        alike = alike[np.minimum(lengths[alike - 1], lengths[alike]) > depth]
        alike = alike[text[starts[alike - 1] + depth] == text[starts[alike] + depth]]
        nodes, depth = nodes - len(alike), depth + 1
    return nodes
