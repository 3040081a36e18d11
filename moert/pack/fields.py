"""Typed access to a JSON object: each wrong field becomes one line: which, what was expected, what is there."""

from __future__ import annotations

from typing import Any

from moert.pack.errors import ManifestInvalid, SizeOverflow

MAX_BYTES = 1 << 46  # 64 TiB: no single file is larger
MAX_COUNT = 1 << 24
_HEX = frozenset("0123456789abcdef")


def brief(value: Any) -> str:
    """A value for a message: one short line, whatever the value is."""
    if value is None or isinstance(value, (str, int, float)):
        return repr(value if not isinstance(value, str) else value[:60])[:80]
    return f"a JSON {'object' if isinstance(value, dict) else 'array'} of {len(value)}"


class Fields:
    """A JSON object with typed access; `where` names it in messages."""

    def __init__(self, raw: Any, where: str) -> None:
        if not isinstance(raw, dict):
            raise ManifestInvalid(f"{where} should be a JSON object, found {brief(raw)}")
        self.raw: dict[str, Any] = raw
        self.where = where

    def get(self, name: str) -> Any:
        if name not in self.raw:
            raise ManifestInvalid(f"{self.where} lacks the field {name!r}")
        return self.raw[name]

    def absent(self, name: str) -> bool:
        """True if an optional field is not there or is null."""
        return self.raw.get(name) is None

    def _bad(self, name: str, expected: str) -> ManifestInvalid:
        return ManifestInvalid(f"{self.where}: {name} should be {expected}, found {brief(self.raw[name])}")

    def text(self, name: str) -> str:
        value = self.get(name)
        if not isinstance(value, str) or not value.isprintable():
            raise self._bad(name, "one line of text")
        return value

    def choice(self, name: str, allowed: tuple[str, ...]) -> Any:
        value = self.get(name)
        if not isinstance(value, str) or value not in allowed:
            raise self._bad(name, "one of " + ", ".join(allowed))
        return value

    def flag(self, name: str) -> bool:
        value = self.get(name)
        if not isinstance(value, bool):
            raise self._bad(name, "true or false")
        return value

    def integer(self, name: str, low: int, high: int) -> int:
        value = self.get(name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._bad(name, "a whole number")
        if value > high and high >= MAX_BYTES:
            raise SizeOverflow(f"{self.where}: {name} is {brief(value)}, larger than any file can be ({high} bytes)")
        if not low <= value <= high:
            raise self._bad(name, f"between {low} and {high}")
        return value

    def optional_integer(self, name: str) -> int | None:
        return None if self.get(name) is None else self.integer(name, 0, MAX_COUNT)

    def number(self, name: str) -> float:
        value = self.get(name)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or value != value or abs(value) > 1e30:
            raise self._bad(name, "a finite number")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        return None if self.get(name) is None else self.number(name)

    def digest(self, name: str) -> str:
        value = self.text(name)
        if len(value) != 64 or not _HEX.issuperset(value):
            raise self._bad(name, "a sha256 in hexadecimal")
        return value

    def array(self, name: str) -> list[Any]:
        value = self.get(name)
        if not isinstance(value, list) or len(value) > MAX_COUNT:
            raise self._bad(name, "a list")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        items = self.array(name)
        if not all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item <= MAX_COUNT for item in items):
            raise self._bad(name, "a list of whole numbers")
        return tuple(items)

    def fields(self, name: str) -> Fields:
        return Fields(self.get(name), f"{self.where}: {name}")
