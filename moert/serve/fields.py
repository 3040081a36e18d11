"""Validation of requests: a table says of each field which values it takes; any other field is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from moert.pack.messages import in_one_line

Body = Mapping[str, Any]
"""A request as JSON has it."""


class Refused(Exception):
    """A request that can't be answered. `field`: the name of the field that is wrong, if one is; `status`: of HTTP."""

    def __init__(self, message: str, field: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.field, self.status = field, status


class Field(NamedTuple):
    """The values of a field: a function that tells whether it takes one, and words for them."""

    takes: Callable[[Any], bool]
    words: str


def number(least: float, most: float) -> Field:
    """Returns a field that takes numbers from `least` to `most`."""
    return Field(lambda value: _is_number(value) and least <= value <= most, f"a number from {least:g} to {most:g}")


def whole(least: int, most: int) -> Field:
    """Returns a field that takes whole numbers from `least` to `most`."""
    right = lambda value: isinstance(value, int) and not isinstance(value, bool) and least <= value <= most  # noqa: E731
    return Field(right, f"a whole number from {least} to {most}")


def one_of(*values: Any) -> Field:
    """Returns a field that takes some values."""
    return Field(lambda value: value in values, "one of " + ", ".join(json.dumps(each) for each in values))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _are(kind: type, value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, kind) for each in value)


FLAG = Field(lambda value: isinstance(value, bool), "true or false")
TEXT = Field(lambda value: isinstance(value, str), "text")
TABLE = Field(lambda value: isinstance(value, dict), "an object")
TABLES = Field(lambda value: _are(dict, value), "a list of objects")
ANY = Field(lambda value: True, "any value")
TEXTS = Field(lambda value: _are(str, value) and len(value) <= 16, "a list of up to 16 texts")
STOP = Field(lambda value: TEXT.takes(value) or TEXTS.takes(value), f"text, or {TEXTS.words}")
BIAS = Field(
    lambda value: isinstance(value, dict) and all(key.isdecimal() and _is_number(each) for key, each in value.items()),
    "an object from ids of tokens to numbers",
)


def read(body: Body, table: Mapping[str, Field], without_effect: Collection[str] = ()) -> dict[str, Any]:
    """Returns the fields of a request that are given and not null. `without_effect`: fields that may be given and
    change no answer. Raises Refused."""
    found = {}
    for name, value in body.items():
        if value is None or name in without_effect:
            continue
        field = table.get(name)
        if field is None:
            raise Refused(f"{_short(name)} is not supported: leave it out", name)
        if not field.takes(value):
            raise Refused(f"{name} is {_short(value)}: it should be {field.words}", name)
        found[name] = value
    return found


def required(found: Mapping[str, Any], name: str) -> Any:
    """Returns the value of a field that has to be there. Raises Refused."""
    if name not in found:
        raise Refused(f"{name} is missing", name)
    return found[name]


def parsed(body: bytes) -> dict[str, Any]:
    """Returns the object that a body is in JSON. Raises Refused."""

    def no_number(text: str) -> Any:
        raise ValueError(f"{text} is no number of JSON")

    try:
        found = json.loads(body, parse_constant=no_number)
    except RecursionError:
        raise Refused("the body is nested too deep") from None
    except ValueError as error:
        raise Refused(f"the body is not JSON: {in_one_line(str(error))[:200]}") from None
    if not isinstance(found, dict):
        raise Refused("the body should be a JSON object")
    return found


def _short(value: Any) -> str:
    text = in_one_line(json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else value)
    return text if len(text) <= 60 else f"{text[:57]}..."
