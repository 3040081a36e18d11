"""Strict reading of JSON that strangers wrote: plain values, the small parts of a large text, dataclasses."""

from __future__ import annotations

import dataclasses
import json
import re
import types
from collections.abc import Callable, Collection, Mapping
from functools import cache, lru_cache
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from moert.pack.errors import FormatTooNew, ManifestInvalid, SizeOverflow


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
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"it names {twice[:60]!r} twice in one object")
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
_LARGEST = 1e30  # of the magnitudes of all numbers
KIND = "kind"
"""The field that says which of several classes an object belongs to; each class has its own value as an attribute of
this name."""

T = TypeVar("T")
Reader = Callable[[Any, str], Any]
"""A function (value, where) → the field's Python value. Raises ManifestInvalid, or another PackError of its own."""


class Within(NamedTuple):
    """Annotates a field whose number, or each of whose numbers, lies between these limits, both allowed."""

    low: float
    high: float

    def holds(self, value: Any) -> bool:
        return bool(self.low <= value <= self.high)

    @property
    def words(self) -> str:
        low, high = (f"{limit:g}" if isinstance(limit, float) else str(limit) for limit in self)
        return f"between {low} and {high}"


class Fit(NamedTuple):
    """Annotates a field, or the names or values of a table, by a rule of its own and the words for it."""

    holds: Callable[[Any], Any]
    words: str


class Read(NamedTuple):
    """Annotates a field that has a reader of its own."""

    function: Reader


class Shared:
    """Annotates a field whose tables many objects have alike: equal tables become one."""


def read(kind: type[T], raw: Any, where: str, closed: bool = False) -> T:
    """Returns the JSON object as an instance of `kind`, a dataclass. Fields with a default may be absent.

    A field that the class does not have is ignored, or refused if `closed`, since there no field may be left aside.
    Raises ManifestInvalid or SizeOverflow.
    """
    table, fields = mapping(raw, where), _fields(cast("Any", kind), closed)
    if (named := getattr(kind, "KIND", None)) is not None:
        _said_kind(table, where, (named,))
    if closed and (unknown := sorted(table.keys() - fields.keys() - ({KIND} if named else set()))):
        raise ManifestInvalid(
            f"{where} has the field {unknown[0][:60]!r}, which this program does not know: upgrade it"
        )
    values = {}
    for name, (reader, required) in fields.items():
        if name in table:
            values[name] = reader(table[name], f"{where}: {name}")
        elif required:
            raise lacking(where, name)
    return kind(**values)


def check_version(table: Mapping[str, Any], where: str, form: str, latest: int, field: str = "version") -> None:
    """Checks the fields `format` and `version`, or the other name of the latter. Raises ManifestInvalid, or
    FormatTooNew for a later version than `latest`."""
    for name in ("format", field):
        if name not in table:
            raise lacking(where, name)
    if table["format"] != form:
        raise ManifestInvalid(f"{where} has format {brief(table['format'])}, expected {form!r}")
    version = table[field]
    if type(version) is not int or version < 1:
        raise unfit(f"{where}: {field}", str(latest), version)
    if version > latest:
        raise FormatTooNew(
            f"{where} has format version {brief(version)}, this program reads up to {latest}: upgrade moert"
        )


def mapping(raw: Any, where: str) -> dict[str, Any]:
    """Returns `raw` if it is a JSON object. Raises ManifestInvalid."""
    if not isinstance(raw, dict):
        raise unfit(where, "a JSON object", raw)
    return raw


def unfit(where: str, expected: str, value: Any) -> ManifestInvalid:
    """Returns the error for a value that is not as expected."""
    return ManifestInvalid(f"{where} should be {expected}, found {brief(value)}")


def lacking(where: str, name: str) -> ManifestInvalid:
    """Returns the error for an object without a field that it should have."""
    return ManifestInvalid(f"{where} lacks the field {name!r}")


def brief(value: Any) -> str:
    """Returns a value as a message shows it: one short line, whatever the value is."""
    if value is None or isinstance(value, (str, int, float)):
        return repr(value if not isinstance(value, str) else value[:60])[:80]
    return f"a JSON {'object' if isinstance(value, dict) else 'array'} of {len(value)}"


@cache
def _fields(kind: type[Any], closed: bool) -> dict[str, tuple[Reader, bool]]:
    """Returns for each field of a dataclass its reader, and whether it has to be there."""
    annotations = get_type_hints(kind, include_extras=True)
    return {
        field.name: (_reader(annotations[field.name], None, closed), field.default is dataclasses.MISSING)
        for field in dataclasses.fields(kind)
    }


def _reader(annotation: Any, rule: Any, closed: bool) -> Reader:
    """Returns the reader of a type; `rule`: an annotation around it, which items of lists and values beside None
    have to keep."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _reader(arguments[0], arguments[1], closed)
    if isinstance(rule, Read):
        return rule.function
    if origin in (Union, types.UnionType):
        return _one_of(arguments, rule, closed)
    if origin is Literal:
        return _plain_reader(str, Fit(frozenset(arguments).__contains__, f"one of {', '.join(arguments)}"))
    if origin is tuple:
        return _list_reader(_reader(arguments[0], rule, closed))
    if origin in (dict, Mapping):
        return _table_reader(_reader(arguments[0], None, closed), _reader(arguments[1], None, closed), rule)
    if dataclasses.is_dataclass(annotation):
        return lambda value, where: read(cast("Any", annotation), value, where, closed)
    return _plain_reader(annotation, rule)


def _one_of(arguments: tuple[Any, ...], rule: Any, closed: bool) -> Reader:
    kinds = [argument for argument in arguments if argument is not types.NoneType]
    named = {str(getattr(kind, "KIND", "")): _reader(kind, rule, closed) for kind in kinds}
    if len(kinds) == 1:
        (some,) = named.values()
    else:

        def some(value: Any, where: str) -> Any:
            return named[_said_kind(mapping(value, where), where, named)](value, where)

    return some if len(kinds) == len(arguments) else lambda value, where: None if value is None else some(value, where)


def _said_kind(table: dict[str, Any], where: str, allowed: Collection[str]) -> str:
    if KIND not in table:
        raise lacking(where, KIND)
    said = table[KIND]
    if not isinstance(said, str) or said not in allowed:
        raise unfit(f"{where}: kind", f"one of {', '.join(allowed)}", said)
    return said


def _list_reader(item: Reader) -> Reader:
    def reader(value: Any, where: str) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) > MAX_COUNT:
            raise unfit(where, "a list", value)
        return tuple([item(each, where) for each in value])

    return reader


def _table_reader(name: Reader, item: Reader, rule: Any) -> Reader:
    def reader(value: Any, where: str) -> dict[str, Any]:
        table = mapping(value, where)
        if isinstance(rule, Fit) and not rule.holds(table):
            raise unfit(where, rule.words, table)
        found = {name(key, f"{where}: a name"): item(each, f"{where}: {key[:60]}") for key, each in table.items()}
        return _one(tuple(found.items())) if rule is Shared else found

    return reader


@lru_cache(maxsize=1024)
def _one(items: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    """Returns one table for all calls with equal items."""
    return dict(items)


_PLAIN: Mapping[Any, tuple[str, Any]] = {
    bool: ("true or false", Fit(lambda value: True, "true or false")),
    str: ("text", Fit(str.isprintable, "one line of text")),
    int: ("a whole number", Within(0, MAX_COUNT)),
    float: ("a finite number", Within(-_LARGEST, _LARGEST)),
}
"""For each plain type the words for it, and the rule of fields without one."""


def _plain_reader(kind: Any, rule: Any) -> Reader:
    words, usual = _PLAIN[kind]
    rule, kinds = rule or usual, (int, float) if kind is float else (kind,)
    holds: Callable[[Any], Any] = rule.holds
    if isinstance(rule, Fit):
        words = rule.words

    def reader(value: Any, where: str) -> Any:
        if type(value) not in kinds or (kind is float and not abs(value) <= _LARGEST):
            raise unfit(where, words, value)
        if not holds(value):
            if isinstance(rule, Within) and value > rule.high >= MAX_BYTES:
                raise SizeOverflow(f"{where} is {brief(value)}, larger than any file can be ({rule.high} bytes)")
            raise unfit(where, rule.words, value)
        return float(value) if kind is float else value

    return reader


def extended(value: Any) -> bool:
    """Returns whether a part, or a part of it, has a field that its class names in LEFT_OUT and that is not the
    default."""
    return dataclasses.is_dataclass(value) and any(
        extended(each) or (field.name in getattr(value, "LEFT_OUT", ()) and each != field.default)
        for field in dataclasses.fields(value)
        for each in (getattr(value, field.name),)
    )


def plain(value: Any) -> Any:
    """Returns a value as json writes it: the reverse of `read`. Fields that a class names in LEFT_OUT are left out
    where they have their default."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = getattr(value, "KIND", None)
        left_out = getattr(value, "LEFT_OUT", ())
        return ({} if kind is None else {KIND: kind}) | {
            field.name: plain(each)
            for field in dataclasses.fields(value)
            if (each := getattr(value, field.name)) != field.default or field.name not in left_out
        }
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (tuple, list)) else value
