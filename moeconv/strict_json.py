"""Strict reading of JSON that others wrote: limits on its size and depth, and readers of single fields."""

from __future__ import annotations

import json
import math
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from moert.pack.documents import brief, mapping
from moert.pack.errors import ManifestInvalid

# Reading JSON within limits: its size, its depth, no name twice in one object, whole characters.

MOST_VALUES = 1 << 22
"""Values in one document: a report of 30,000 experts, each probed in a dozen ways, has a third as many."""
MOST_DEPTH = 64
_MOST_DIGITS = 30
_HALF = re.compile(r"\\u[dD][89a-fA-F]")  # of a pair of characters, maybe without the other


class NotJson(ValueError):
    """Text that is not JSON, or JSON beyond the limits; the message is a part of a line. Write the file anew, or
    correct it."""


def bounded(path: Path, most_bytes: int) -> bytes:
    """Returns the bytes of a file. Raises OSError, or NotJson if it is larger than `most_bytes` or no regular file."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise NotJson("it is not a regular file")
    with open(path, "rb") as handle:
        body = b"" if found.st_size > most_bytes else handle.read(most_bytes + 1)
    if max(found.st_size, len(body)) > most_bytes:
        raise NotJson(f"it has {max(found.st_size, len(body))} bytes, at most {most_bytes} are read")
    return body


def parse(body: bytes | str, finite: bool = True, most_values: int = MOST_VALUES) -> Any:
    """Returns the value of a JSON document. With `finite`, numbers are finite and have at most thirty digits; without,
    all numbers that Python reads pass.

    Raises NotJson.
    """
    try:
        text = body if isinstance(body, str) else body.decode("utf-8")
        if sum(text.count(mark) for mark in "[{,") > most_values:
            raise NotJson(f"it has over {most_values} values")
        numbers: dict[str, Any] = {"parse_int": _whole, "parse_float": _real, "parse_constant": _real} if finite else {}
        value = json.loads(text, object_pairs_hook=_unique, **numbers)
    except RecursionError:
        raise NotJson("it is nested too deeply") from None
    except ValueError as error:
        raise NotJson(" ".join(str(error).split())[:200]) from None
    _check(value, halves=_HALF.search(text) is not None)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise NotJson(f"it names {twice[:60]!r} twice in one object")
    return table


def _whole(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise NotJson(f"it has a number of {len(digits)} digits")
    return int(digits)


def _real(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise NotJson(f"it has the number {digits[:20]}, which is not finite")
    return value


def _check(value: Any, halves: bool) -> None:
    """Raises NotJson if a value is nested too deeply or, with `halves`, holds half of a character pair. It goes level
    by level, since values may be nested deeper than calls of functions can be."""
    level: list[Any] = [value]
    for _ in range(MOST_DEPTH):
        if halves and not all(map(_is_text, _texts(level))):
            raise NotJson("it holds half of a character pair, which is not text")
        level = [
            item for each in level if isinstance(each, (dict, list)) for item in _items(each)
            if halves or isinstance(item, (dict, list))
        ]  # fmt: skip
        if not level:
            return
    raise NotJson("it is nested too deeply")


def _items(value: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def _texts(level: list[Any]) -> Iterable[str]:
    for each in level:
        if isinstance(each, str):
            yield each
        elif isinstance(each, dict):
            yield from each


def _is_text(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)


# Readers of single fields: functions for moert.pack.documents.Read.

MOST = 10**24
T = TypeVar("T")
Reader = Callable[[Any, str], T]


def text(value: Any, where: str) -> str:
    """Returns text of any number of lines. Raises ManifestInvalid, as all readers of fields do."""
    if not isinstance(value, str):
        raise ManifestInvalid(f"{where} should be text, found {brief(value)}")
    return value


def number(value: Any, where: str) -> float:
    """Returns a finite number without other limits: a perplexity, and with it a loss, may be very large."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ManifestInvalid(f"{where} should be a finite number, found {brief(value)}")
    return float(value)


def amount(value: Any, where: str) -> int:
    """Returns a count (of bytes, operations or tokens), 0 or more."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST:
        raise ManifestInvalid(f"{where} should be a whole number from 0 on, found {brief(value)}")
    return value


def positive(value: Any, where: str) -> int:
    if amount(value, where) == 0:
        raise ManifestInvalid(f"{where} should be a whole number from 1 on, found 0")
    return int(value)


def share(value: Any, where: str) -> float:
    """Returns a number between 0 and 1, both excluded."""
    if not 0 < number(value, where) < 1:
        raise ManifestInvalid(f"{where} should lie between 0 and 1, found {brief(value)}")
    return float(value)


def maybe(reader: Reader[T]) -> Reader[T | None]:
    """Returns a reader that accepts None as well."""
    return lambda value, where: None if value is None else reader(value, where)


def named(reader: Reader[T]) -> Reader[Mapping[str, T]]:
    """Returns a reader of an object whose values `reader` reads, each under its name."""
    return lambda value, where: {
        name: reader(each, f"{where}: {name[:60]!r}") for name, each in mapping(value, where).items()
    }


def among(*words: str) -> Reader[str]:
    """Returns a reader that accepts these words only."""

    def read(value: Any, where: str) -> str:
        if not isinstance(value, str) or value not in words:
            raise ManifestInvalid(f"{where} should be one of {', '.join(words)}, found {brief(value)}")
        return value

    return read


def listed(reader: Reader[T]) -> Reader[tuple[T, ...]]:
    """Returns a reader of a list whose items `reader` reads."""

    def read(value: Any, where: str) -> tuple[T, ...]:
        if not isinstance(value, list):
            raise ManifestInvalid(f"{where} should be a list, found {brief(value)}")
        return tuple(reader(each, where) for each in value)

    return read
