"""Validation of requests: a table says of each field which values it takes; any other field is refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from moert.pack.messages import in_one_line

Body = Mapping[str, Any]
"""A request as JSON has it."""


class Refused(Exception):
    """A request that can't be answered. Change the field that the message names, or leave it out. `field`: that name,
    if one field is wrong; `status`: of HTTP."""

    def __init__(self, message: str, field: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.field, self.status = field, status


class Field(NamedTuple):
    """The values of a field: a function that tells whether it takes one, words for them, and their JSON schema."""

    takes: Callable[[Any], bool]
    words: str
    schema: Mapping[str, Any] = MappingProxyType({})


def number(least: float, most: float) -> Field:
    """Returns a field that takes numbers from `least` to `most`."""
    schema = {"type": "number", "minimum": least, "maximum": most}
    takes = lambda value: _is_number(value) and least <= value <= most  # noqa: E731
    return Field(takes, f"a number from {least:g} to {most:g}", schema)


def whole(least: int, most: int) -> Field:
    """Returns a field that takes whole numbers from `least` to `most`."""
    right = lambda value: isinstance(value, int) and not isinstance(value, bool) and least <= value <= most  # noqa: E731
    schema = {"type": "integer", "minimum": least, "maximum": most}
    return Field(right, f"a whole number from {least} to {most}", schema)


def one_of(*values: Any) -> Field:
    """Returns a field that takes some values."""
    right = lambda value: any(value == each and type(value) is type(each) for each in values)  # noqa: E731
    return Field(right, "one of " + ", ".join(json.dumps(each) for each in values), {"enum": [*values]})


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _are(kind: type, value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, kind) for each in value)


def _list_of(schema: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": schema, **more}


FLAG = Field(lambda value: isinstance(value, bool), "true or false", {"type": "boolean"})
TEXT = Field(lambda value: isinstance(value, str), "text", {"type": "string"})
TABLE = Field(lambda value: isinstance(value, dict), "an object", {"type": "object"})
TABLES = Field(lambda value: _are(dict, value), "a list of objects", _list_of(TABLE.schema))
ANY = Field(lambda value: True, "any value")
TEXTS = Field(
    lambda value: _are(str, value) and len(value) <= 16, "a list of up to 16 texts", _list_of(TEXT.schema, maxItems=16)
)
STOP = Field(
    lambda value: TEXT.takes(value) or TEXTS.takes(value), f"text, or {TEXTS.words}",
    {"anyOf": [TEXT.schema, TEXTS.schema]},
)  # fmt: skip
IDS = Field(
    lambda value: _are(int, value) and all(type(each) is int and 0 <= each < 1 << 31 for each in value),
    "a list of token ids", _list_of({"type": "integer", "minimum": 0, "maximum": (1 << 31) - 1}),
)  # fmt: skip
BIAS = Field(
    lambda value: (
        isinstance(value, dict) and all(re.fullmatch("[0-9]+", key) and _is_number(each) for key, each in value.items())
    ),
    "an object from ids of tokens to numbers",
    {"type": "object", "propertyNames": {"pattern": "^[0-9]+$"}, "additionalProperties": {"type": "number"}},
)


class Form(NamedTuple):
    """The form of the bodies that a path takes: its fields, those that may be given and change no answer, and those
    that have to be there."""

    fields: Mapping[str, Field]
    without_effect: Collection[str] = ()
    needed: Collection[str] = ()

    def read(self, body: Body) -> dict[str, Any]:
        """Returns the fields of a body that are given and not null. Raises Refused."""
        found = read(body, self.fields, self.without_effect)
        for name in self.needed:
            required(found, name)
        return found


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
