"""How large the files of a pack may be, by what they are for, and what reading them takes: known before they are read.

A pack comes from anyone. What is in it is counted against these numbers first, then against the room that there is.
SPEC.md, section 11, says which real models each of them lets pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

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
COVERED_BYTES = 8 << 20
"""What the margin of every budget has room for: of so little nobody is told."""


def unbounded(nbytes: int, name: str) -> None:
    """The Room of those who have no limit."""


class Bound(NamedTuple):
    """Of a file: the most bytes, the most marks of its JSON, and how many times its bytes, and bytes for each mark, are
    taken at once to make what is read of it."""

    most_bytes: int
    times: float = 1.0
    most_marks: int | None = None
    mark_bytes: int = 0


_BOUNDS = {
    "manifest.json": Bound(1 << 25, most_marks=1 << 21),
    "tokenizer.json": Bound(1 << 26, times=3.0, most_marks=1 << 22, mark_bytes=170),
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
    return len(text) - len(text.translate(None, b"[{,:"))


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
        if bound.mark_bytes:  # another program reads it
            needed = int(bound.times * len(body)) + bound.mark_bytes * marks(body)
        room(needed, name)
