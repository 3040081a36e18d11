"""How fields of artefacts are read that others may have written: functions for moert.pack.documents.Read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from moert.pack.documents import brief, mapping
from moert.pack.errors import ManifestInvalid

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
