"""JSON of others, bounded before it is believed, and its fields."""

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

# JSON that others wrote, read with bounds: so large, so deep, no name twice in one object, whole characters.

MOST_VALUES = 1 << 22
"""Of one document: a report of 30,000 experts, each probed in a dozen ways, has a third of them."""
MOST_DEPTH = 64
_MOST_DIGITS = 30
_HALF = re.compile(r"\\u[dD][89a-fA-F]")  # of a pair of characters, maybe without the other


class NotJson(ValueError):
    """What is no such JSON. The message is a part of a line."""


def bounded(path: Path, most_bytes: int) -> bytes:
    """The bytes of a file. Raises OSError, or NotJson for one that is larger, or that is none."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise NotJson("it is not a regular file")
    with open(path, "rb") as handle:
        body = b"" if found.st_size > most_bytes else handle.read(most_bytes + 1)
    if max(found.st_size, len(body)) > most_bytes:
        raise NotJson(
            f"it has {max(found.st_size, len(body))} bytes, and none that is meant well has over {most_bytes}"
        )
    return body


def parse(body: bytes | str, finite: bool = True, most_values: int = MOST_VALUES) -> Any:
    """The value. With `finite`, numbers are finite and have at most thirty digits; without, they are what Python reads.

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
    """Level by level, since what is nested may be nested deeper than functions can be."""
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


# How fields of artefacts are read that others may have written: functions for moert.pack.documents.Read.

MOST = 10**24
T = TypeVar("T")
Reader = Callable[[Any, str], T]


def text(value: Any, where: str) -> str:
    """Of any number of lines."""
    if not isinstance(value, str):
        raise ManifestInvalid(f"{where} should be text, found {brief(value)}")
    return value


def number(value: Any, where: str) -> float:
    """A finite one: a perplexity, and with it a loss, may be larger than anything else is."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ManifestInvalid(f"{where} should be a finite number, found {brief(value)}")
    return float(value)


def amount(value: Any, where: str) -> int:
    """Of bytes, operations or tokens."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST:
        raise ManifestInvalid(f"{where} should be a whole number from 0 on, found {brief(value)}")
    return value


def positive(value: Any, where: str) -> int:
    if amount(value, where) == 0:
        raise ManifestInvalid(f"{where} should be a whole number from 1 on, found 0")
    return int(value)


def share(value: Any, where: str) -> float:
    """Between 0 and 1."""
    if not 0 < number(value, where) < 1:
        raise ManifestInvalid(f"{where} should lie between 0 and 1, found {brief(value)}")
    return float(value)


def maybe(reader: Reader[T]) -> Reader[T | None]:
    """The same, or nothing."""
    return lambda value, where: None if value is None else reader(value, where)


def named(reader: Reader[T]) -> Reader[Mapping[str, T]]:
    """Many of them, each with a name."""
    return lambda value, where: {
        name: reader(each, f"{where}: {name[:60]!r}") for name, each in mapping(value, where).items()
    }


def among(*words: str) -> Reader[str]:
    """One of these words."""

    def read(value: Any, where: str) -> str:
        if not isinstance(value, str) or value not in words:
            raise ManifestInvalid(f"{where} should be one of {', '.join(words)}, found {brief(value)}")
        return value

    return read


def listed(reader: Reader[T]) -> Reader[tuple[T, ...]]:
    """Many of them in a row."""

    def read(value: Any, where: str) -> tuple[T, ...]:
        if not isinstance(value, list):
            raise ManifestInvalid(f"{where} should be a list, found {brief(value)}")
        return tuple(reader(each, where) for each in value)

    return read
