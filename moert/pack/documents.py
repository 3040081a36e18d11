"""Strict reading of JSON that strangers wrote: plain values, the small parts of a large text, dataclasses."""

from __future__ import annotations

import dataclasses
import json
import re
import types
from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from moert.pack.errors import ManifestInvalid, SizeOverflow


def parsed(body: bytes) -> Any:
    """Returns the JSON document of a text. Raises ValueError, whose text is one short line, for a text that is not JSON
    or is nested too deep. Callers check the text's size first (moert.pack.tensors)."""
    try:
        return json.loads(body.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 text: {error.reason}") from None
    except ValueError as error:
        raise ValueError(" ".join(str(error).split())[:100]) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("it names a field twice in one object")
    return table


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number")


_PART = 1 << 20
_QUOTE, _BACKSLASH = 0x22, 0x5C
_OPENS = np.isin(np.arange(256), [ord("{"), ord("[")])
_BRACKETS = _OPENS | np.isin(np.arange(256), [ord("}"), ord("]")])
_LIKE, _BRACKET = 0b11011001, 0b01011001  # the bits that all four brackets have, and four other letters
_SHALLOW = 2  # containers that are open around the left-out contents

I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]


class Skimmed(NamedTuple):
    """A JSON text without the contents of the lists and objects of one field: `text`. `long` has the bytes of each
    string in the left-out contents that was longer than the limit, counted as the string stands in the source."""

    text: bytes
    long: list[int]


def skim(body: bytes, field: str, long: int) -> Skimmed:
    """Returns a JSON text without the contents of the lists and objects that the outermost object's `field` holds;
    `long` is the limit of Skimmed, in bytes.

    Never raises: a text that is not JSON may come out as another text that is not JSON.
    """
    reader = _Reader(long)
    for at in range(0, len(body), _PART):
        reader.read(np.frombuffer(body, np.uint8, min(_PART, len(body) - at), at), at)
    cuts = _inside(body, field, reader.events())
    starts, stops = [0, *(stop for _, stop in cuts)], [*(start for start, _ in cuts), len(body)]
    text = b"".join(body[start:stop] for start, stop in zip(starts, stops, strict=True))
    return Skimmed(text, [n for at, n in reader.long if any(start <= at < stop for start, stop in cuts)])


class _Reader:
    """A reader of the text in parts, which remembers where containers of the first levels open and close."""

    def __init__(self, long: int) -> None:
        self.long, self._longer = list[tuple[int, int]](), long
        self._opened_at: int | None = None  # where the string began that is still open
        self._backslashes = 0  # at the end of the part before
        self._depth = 0
        self._events: list[tuple[I64, I64]] = []

    def events(self) -> list[tuple[int, int]]:
        """Returns the places of brackets that open inside at most two containers, or close and leave at most two open;
        and the number of these containers, inverted (~) where a bracket closes."""
        return [
            (int(at), int(depth)) for places, depths in self._events for at, depth in zip(places, depths, strict=True)
        ]

    def read(self, part: U8, at: int) -> None:
        quotes, inside = self._quotes(part), self._opened_at is not None
        brackets = np.flatnonzero(part & _LIKE == _BRACKET)
        brackets = brackets[_BRACKETS[part[brackets]]]
        outside = ((np.searchsorted(quotes, brackets) + inside) & 1) == 0
        self._strings(quotes + at)
        brackets = brackets[outside]
        opens = _OPENS[part[brackets]]
        after = self._depth + np.cumsum(np.where(opens, 1, -1))
        around = np.where(opens, after - 1, after)
        near = (around <= _SHALLOW) & (around >= 0)
        self._events.append((brackets[near] + at, np.where(opens, around, ~around)[near]))
        if len(after):
            self._depth = int(after[-1])

    def _quotes(self, part: U8) -> I64:
        """Returns the places of quotation marks that no backslash escapes."""
        quotes, slashes, before = np.flatnonzero(part == _QUOTE), np.flatnonzero(part == _BACKSLASH), self._backslashes
        self._backslashes = 0
        if not len(slashes) and not before:
            return quotes
        escaped = np.zeros(len(part) + 1, bool)
        escaped[0] = before & 1
        if len(slashes):
            first = np.flatnonzero(np.diff(slashes, prepend=-2) > 1)
            runs = np.diff(first, append=len(slashes))
            behind = slashes[first] + runs
            if slashes[0] == 0:
                escaped[0] = False
                runs[0] += before
            escaped[behind[(runs & 1) == 1]] = True
            if behind[-1] == len(part):
                self._backslashes = int(runs[-1])
        return quotes[~escaped[quotes]]

    def _strings(self, quotes: I64) -> None:
        """Remembers the place and length of each string longer than the limit."""
        ends = quotes if self._opened_at is None else np.append(self._opened_at, quotes)
        self._opened_at = int(ends[-1]) if len(ends) & 1 else None
        starts, stops = ends[0 : len(ends) & ~1 : 2], ends[1::2]
        lengths = stops - starts - 1
        for place in np.flatnonzero(lengths > self._longer):
            self.long.append((int(starts[place]), int(lengths[place])))


def _inside(body: bytes, field: str, events: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the first and last byte (exclusive) of the contents of each container in the field."""
    named = re.compile(rb'(?<!\\)"' + field.encode() + rb'"\s*:\s*\Z')
    found, here, start = list[tuple[int, int]](), False, -1
    for at, depth in events:
        if depth == 1:
            here, start = named.search(body, max(0, at - 64), at) is not None, -1
        elif depth == 2 and here:
            start = at + 1
        elif depth == ~2 and here and start >= 0:
            found.append((start, at))
            start = -1
        elif depth == ~1:
            here = False
    return found


MAX_BYTES = 1 << 46  # 64 TiB: no single file is larger
MAX_COUNT = 1 << 24
KIND = "kind"
"""The field that says which of several classes an object belongs to; each class has its own value as an attribute of
this name."""


T = TypeVar("T")


class Within(NamedTuple):
    """Annotates a field whose whole number, or each of whose whole numbers, lies between these limits, both allowed."""

    low: int
    high: int


class Above(NamedTuple):
    """Annotates a field whose number is larger than `limit`."""

    limit: float


class Between(NamedTuple):
    """Annotates a field whose number, which need not be whole, lies between these limits, both allowed."""

    low: float
    high: float


class Read(NamedTuple):
    """Annotates a field that has a reader of its own: (value, where) → the field's Python value. The function raises
    ManifestInvalid, or another PackError of its own."""

    function: Callable[[Any, str], Any]


def read(kind: type[T], raw: Any, where: str, closed: bool = False) -> T:
    """Returns the JSON object as an instance of `kind`, a dataclass. Fields with a default may be absent.

    A field that the class does not have is ignored, or refused if `closed`, since there no field may be left aside.
    Raises ManifestInvalid or SizeOverflow.
    """
    table, plan = mapping(raw, where), _plan(cast("Any", kind))
    if (named := _kind_of(kind)) is not None:
        _said_kind(table, where, (named,))
    names = {field.name for field in plan} | ({KIND} if _kind_of(kind) else set())
    if closed and (unknown := sorted(set(table) - names)):
        raise ManifestInvalid(
            f"{where} has the field {unknown[0][:60]!r}, which this program does not know: upgrade it"
        )
    values = {}
    for field in plan:
        if field.name in table:
            values[field.name] = _value(
                field.annotation, table[field.name], _Place(f"{where}: {field.name}", field, closed)
            )
        elif field.required:
            raise ManifestInvalid(f"{where} lacks the field {field.name!r}")
    return kind(**values)


def mapping(raw: Any, where: str) -> dict[str, Any]:
    """Returns `raw` if it is a JSON object. Raises ManifestInvalid."""
    if not isinstance(raw, dict):
        raise ManifestInvalid(f"{where} should be a JSON object, found {brief(raw)}")
    return raw


def brief(value: Any) -> str:
    """Returns a value as a message shows it: one short line, whatever the value is."""
    if value is None or isinstance(value, (str, int, float)):
        return repr(value if not isinstance(value, str) else value[:60])[:80]
    return f"a JSON {'object' if isinstance(value, dict) else 'array'} of {len(value)}"


class _Field(NamedTuple):
    """A field of a dataclass; `rule`, if any, is a Within, Above, Between or Read."""

    name: str
    annotation: Any
    rule: Any
    required: bool


@cache
def _plan(kind: type[Any]) -> tuple[_Field, ...]:
    annotations, plan = get_type_hints(kind, include_extras=True), []
    for field in dataclasses.fields(kind):
        annotation, rule = annotations[field.name], None
        if get_origin(annotation) is Annotated:
            annotation, rule = get_args(annotation)
        plan.append(_Field(field.name, annotation, rule, field.default is dataclasses.MISSING))
    return tuple(plan)


def _kind_of(kind: type[Any]) -> str | None:
    found = getattr(kind, "KIND", None)
    return found if isinstance(found, str) else None


class _Place(NamedTuple):
    """The place of a value in the document, and the rules for its field."""

    where: str
    field: _Field
    closed: bool

    def bad(self, expected: str, value: Any) -> ManifestInvalid:
        return ManifestInvalid(f"{self.where} should be {expected}, found {brief(value)}")


def _value(annotation: Any, value: Any, place: _Place) -> Any:
    if isinstance(place.field.rule, Read):
        return place.field.rule.function(value, place.where)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return _one_of(arguments, value, place)
    if origin is Literal:
        if not isinstance(value, str) or value not in arguments:
            raise place.bad("one of " + ", ".join(arguments), value)
        return value
    if origin is tuple:
        if not isinstance(value, list) or len(value) > MAX_COUNT:
            raise place.bad("a list", value)
        return tuple(_value(arguments[0], item, place) for item in value)
    if hasattr(annotation, "__dataclass_fields__"):
        return read(annotation, value, place.where, place.closed)
    return _PLAIN[annotation](value, place)


def _one_of(arguments: tuple[Any, ...], value: Any, place: _Place) -> Any:
    kinds = [argument for argument in arguments if argument is not types.NoneType]
    if value is None and len(kinds) < len(arguments):
        return None
    if len(kinds) == 1:
        return _value(kinds[0], value, place)
    named = {str(_kind_of(kind)): kind for kind in kinds}
    return read(named[_said_kind(mapping(value, place.where), place.where, named)], value, place.where, place.closed)


def _said_kind(table: dict[str, Any], where: str, allowed: Collection[str]) -> str:
    if KIND not in table:
        raise ManifestInvalid(f"{where} lacks the field {KIND!r}")
    said = table[KIND]
    if not isinstance(said, str) or said not in allowed:
        raise ManifestInvalid(f"{where}: kind should be one of {', '.join(allowed)}, found {brief(said)}")
    return said


def _flag(value: Any, place: _Place) -> bool:
    if not isinstance(value, bool):
        raise place.bad("true or false", value)
    return value


def _text(value: Any, place: _Place) -> str:
    if not isinstance(value, str) or not value.isprintable():
        raise place.bad("one line of text", value)
    return value


def _integer(value: Any, place: _Place) -> int:
    low, high = place.field.rule if isinstance(place.field.rule, Within) else (0, MAX_COUNT)
    if not isinstance(value, int) or isinstance(value, bool):
        raise place.bad("a whole number", value)
    if value > high and high >= MAX_BYTES:
        raise SizeOverflow(f"{place.where} is {brief(value)}, larger than any file can be ({high} bytes)")
    if not low <= value <= high:
        raise place.bad(f"between {low} and {high}", value)
    return value


def _number(value: Any, place: _Place) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or value != value or abs(value) > 1e30:
        raise place.bad("a finite number", value)
    rule = place.field.rule
    if isinstance(rule, Above) and value <= rule.limit:
        raise place.bad(f"above {rule.limit}", value)
    if isinstance(rule, Between) and not rule.low <= value <= rule.high:
        raise place.bad(f"between {rule.low:g} and {rule.high:g}", value)
    return float(value)


_PLAIN: Mapping[Any, Callable[[Any, _Place], Any]] = {bool: _flag, str: _text, int: _integer, float: _number}


def plain(value: Any) -> Any:
    """Returns a value as json writes it: the reverse of `read`."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = _kind_of(type(value))
        named = {} if kind is None else {KIND: kind}
        return named | {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (tuple, list)) else value
