"""Scanners of text that comes in pieces: marks, JSON, parameters between tags, calls as Python writes them.

A scanner is a generator that yields where it needs more text, so that it never decides by where a piece happens to end:
the same text in other pieces gives the same events.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from moert.engine.generation import longest_beginning

T = TypeVar("T")
Scan = Generator[None, None, T]
_SPACES = " \t\r\n"
_SCALARS = "+-.0123456789eEtrufalsn"
_INSIDE = _SCALARS + ",:" + _SPACES
_DEEPEST = 64  # brackets of JSON inside each other
MOST_NAME = 256  # letters of a tool's name
Schemas = Mapping[str, Mapping[str, Any]]
"""The name of each tool, with the JSON schema of its arguments."""


@dataclass(frozen=True)
class Text:
    """Text of a reply. `part`: "answer" or "thinking"."""

    text: str
    part: str = "answer"


@dataclass(frozen=True)
class CallBegins:
    """The call of a tool; `index` counts from 0. `id`: the model's own name for the call, if it has one."""

    index: int
    name: str
    id: str | None = None


@dataclass(frozen=True)
class Arguments:
    """A piece of the JSON text that a call's arguments are."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnds:
    """The end of a call. `whole`: its arguments are as the model's format demands; else the text ended in the middle,
    or went on in another way, and the arguments are a beginning."""

    index: int
    whole: bool = True


Event = Text | CallBegins | Arguments | CallEnds


@dataclass
class Source:
    """The text that is not scanned yet, from `at` on, and the events that were found. `over`: no more text comes."""

    schemas: Schemas = field(default_factory=dict)
    text: str = ""
    at: int = 0
    over: bool = False
    calls: int = 0
    events: list[Event] = field(default_factory=list)
    whole: bool = True
    """Whether the last call is as its format demands."""
    after_call: bool = False
    """Whether a call came last: white space behind it is dropped."""
    between: bool = False
    """Whether the text before `at` is done with: no call is being read."""
    spaces: str = ""
    """White space that belongs to the text only if text follows."""

    @property
    def left(self) -> str:
        return self.text[self.at :]

    def forget(self) -> None:
        """Forgets the text before `at`, to which nothing goes back."""
        self.text, self.at = self.text[self.at :], 0

    def say(self, text: str) -> None:
        """Adds text to the answer. White space at its end waits: around calls it is dropped."""
        text = self.spaces + text
        if self.after_call:
            text = text.lstrip()
            self.after_call = not text
        kept = text.rstrip()
        self.spaces = text[len(kept) :]
        if kept:
            self.events.append(Text(kept))

    def begin(self, name: str, number: str | None = None) -> None:
        self.spaces = ""
        self.events.append(CallBegins(self.calls, name, number))

    def write(self, text: str) -> None:
        if text:
            self.events.append(Arguments(self.calls, text))

    def end(self, whole: bool = True) -> None:
        self.events.append(CallEnds(self.calls, whole))
        self.after_call, self.whole = True, whole
        self.calls += 1


def peek(source: Source) -> Scan[str]:
    """Returns the next letter; empty at the end."""
    while source.at >= len(source.text) and not source.over:
        yield
    return source.text[source.at : source.at + 1]


def skip_spaces(source: Source) -> Scan[str]:
    """Skips white space; returns the next letter."""
    while (letter := (yield from peek(source))) and letter in _SPACES:
        source.at += 1
    return letter


def takes(source: Source, *marks: str) -> Scan[str]:
    """Returns the longest of these marks that the text goes on with, and goes behind it; empty where there is none."""
    while not source.over:
        left = source.left[: max(map(len, marks))]
        if not any(len(left) < len(mark) and mark.startswith(left) for mark in marks):
            break
        yield
    found = max((mark for mark in marks if source.text.startswith(mark, source.at)), key=len, default="")
    source.at += len(found)
    return found


def ahead(source: Source, *marks: str) -> Scan[str]:
    """Returns the longest of these marks that the text goes on with, and stays before it."""
    place = source.at
    found = yield from takes(source, *marks)
    source.at = place
    return found


def rest(source: Source) -> Scan[str]:
    """Returns all text that is left, once it has come to its end, and goes behind it."""
    while not source.over:
        yield
    found, source.at = source.left, len(source.text)
    return found


def until(source: Source, marks: Collection[str], give: Callable[[str], object]) -> Scan[str]:
    """Gives all text before the first of these marks, goes behind it and returns it; empty where the text ends
    before."""
    while True:
        left = source.left
        found = [(place, -len(mark), mark) for mark in marks if (place := left.find(mark)) >= 0]
        if found:
            place, _, mark = min(found)
            give(left[:place])
            source.at += place + len(mark)
            return mark
        keep = 0 if source.over else longest_beginning(left, marks)
        give(left[: len(left) - keep])
        source.at += len(left) - keep
        if source.over:
            return ""
        yield


def collected(source: Source, marks: Collection[str], most: int = 1 << 30) -> Scan[tuple[str, str]]:
    """Returns the text before the first of these marks, and the mark; an empty mark where the text ends before, or has
    more than `most` letters, and then no text was taken."""
    while True:
        left = source.left
        found = [(place, -len(mark), mark) for mark in marks if (place := left.find(mark)) >= 0]
        if found:
            place, _, mark = min(found)
            source.at += place + len(mark)
            return left[:place], mark
        if source.over or len(left) > most:
            return left, ""
        yield


def string(source: Source) -> Scan[str | None]:
    """Returns the text of a JSON string; None where there is none."""
    start = source.at
    whole = yield from value(source, lambda text: None)
    try:
        found = json.loads(source.text[start : source.at]) if whole else None
    except ValueError:
        return None
    return found if isinstance(found, str) else None


def value(source: Source, give: Callable[[str], object]) -> Scan[bool]:
    """Gives the text of a JSON value as it comes; returns whether it is one, to judge by its brackets and strings. Its
    text is given as far as it is one."""
    start, inside, closers = source.at, False, list[str]()
    while True:
        if source.at >= len(source.text):
            give(source.text[start : source.at])
            start = source.at
            if source.over:
                return False
            yield
            continue
        letter = source.text[source.at]
        if inside:
            if letter == "\\":
                if source.at + 1 >= len(source.text) and not source.over:
                    yield from _more(source, source.at + 1)
                source.at = min(source.at + 2, len(source.text))
                continue
            inside = letter != '"'
            source.at += 1
            if not inside and not closers:
                break
            continue
        if letter == '"':
            inside = True
        elif letter in "{[":
            closers.append("}" if letter == "{" else "]")
            if len(closers) > _DEEPEST:
                give(source.text[start : source.at])
                return False
        elif letter in "}]":
            if not closers or closers.pop() != letter:
                give(source.text[start : source.at])
                return False
            if not closers:
                source.at += 1
                break
        elif not closers:
            return (yield from _scalar(source, give))
        elif letter not in _INSIDE:
            give(source.text[start : source.at])
            return False
        source.at += 1
    give(source.text[start : source.at])
    return True


def _more(source: Source, place: int) -> Scan[None]:
    while place >= len(source.text) and not source.over:
        yield


def _scalar(source: Source, give: Callable[[str], object]) -> Scan[bool]:
    """Gives a number, true, false or null."""
    start = source.at
    while (letter := (yield from peek(source))) and letter in _SCALARS:
        source.at += 1
    text = source.text[start : source.at]
    try:
        json.loads(text)
    except ValueError:
        source.at = start
        return False
    give(text)
    return True


@dataclass(frozen=True)
class Keys:
    """The names of a call's parts in a JSON object."""

    names: tuple[str, ...] = ("name", "tool_name")
    arguments: tuple[str, ...] = ("arguments", "parameters")
    ids: tuple[str, ...] = ("id", "tool_call_id")


KEYS = Keys()


def json_call(source: Source, keys: Keys = KEYS, known: bool = False) -> Scan[bool]:
    """Reads a call that is a JSON object: begins it as soon as its name is known, and writes its arguments as they
    come. Returns whether a call has begun. `known`: a name that the schemas lack is no call."""
    if (yield from skip_spaces(source)) != "{":
        return False
    started = _Started(source, known)
    whole = yield from _members(source, keys, started)
    if not started.begun:
        return False
    if whole and not started.written:
        source.write("{}")
    source.end(whole)
    return True


class _Started:
    """A call whose name and arguments come in any order."""

    def __init__(self, source: Source, known: bool) -> None:
        self._source, self._known = source, known
        self._held = ""
        self.number: str | None = None
        self.begun = self.written = self.refused = False

    def name(self, name: str) -> None:
        if self.begun or not name or (self._known and name not in self._source.schemas):
            self.refused = not self.begun
            return
        self.begun = True
        self._source.begin(name, self.number)
        self.write("")  # all that came before the name

    def write(self, text: str) -> None:
        self._held += text
        if self.begun and self._held:
            self.written = True
            self._source.write(self._held)
            self._held = ""


def _members(source: Source, keys: Keys, started: _Started) -> Scan[bool]:
    """Reads the members of an object; returns whether it is whole."""
    source.at += 1
    while True:
        letter = yield from skip_spaces(source)
        if letter == "}":
            source.at += 1
            return True
        if letter == ",":
            source.at += 1
            continue
        key = (yield from string(source)) if letter == '"' else None
        if key is None or (yield from skip_spaces(source)) != ":":
            return False
        source.at += 1
        letter = yield from skip_spaces(source)
        if not (yield from _member(source, keys, started, (key, letter))) or started.refused:
            return False


def _member(source: Source, keys: Keys, started: _Started, member: tuple[str, str]) -> Scan[bool]:
    key, letter = member
    if key == "function" and letter == "{":
        return (yield from _members(source, keys, started))
    if (key in keys.names or key == "function") and letter == '"':
        name = yield from string(source)
        started.name(name or "")
        return name is not None
    if key in keys.ids and letter == '"':
        started.number = yield from string(source)
        return started.number is not None
    if key not in keys.arguments:
        return (yield from value(source, lambda text: None))
    if letter == '"':  # JSON in a string
        text = yield from string(source)
        started.write(text or "")
        return text is not None
    if letter == "n":
        return (yield from value(source, lambda text: None))
    return (yield from value(source, started.write))


def json_calls(source: Source, keys: Keys = KEYS, known: bool = False) -> Scan[bool]:
    """Reads a call that is a JSON object, or a list of them. Returns whether one has begun."""
    if (yield from skip_spaces(source)) != "[":
        return (yield from json_call(source, keys, known))
    source.at += 1
    found = False
    while True:
        letter = yield from skip_spaces(source)
        if letter == "]":
            source.at += 1
            return found
        if letter == ",":
            source.at += 1
        elif not (yield from json_call(source, keys, known)):
            return found
        else:
            found = True


def raw_arguments(source: Source, name: str, number: str | None = None) -> Scan[None]:
    """Reads arguments that follow a name as JSON, and writes them as they come; without any they are {}."""
    source.begin(name, number)
    if (yield from skip_spaces(source)) != "{":
        source.write("{}")
        source.end()
        return
    source.end((yield from value(source, source.write)))


# Parameters between tags ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tags:
    """The tags of one parameter, and of a call's end. `key`: before the name; `named`: behind it, the first that
    comes; `value`: before the value, where there is one; `end`: behind the value; `call_end`: behind the call."""

    key: str
    named: tuple[str, ...]
    end: str
    call_end: tuple[str, ...]
    value: str = ""


def tagged_arguments(source: Source, name: str, tags: Tags) -> Scan[None]:
    """Reads parameters between tags, and writes each as JSON once it is whole, with the type that the tool's schema
    gives it."""
    source.begin(name)
    schema, written = source.schemas.get(name, {}), False
    while True:
        yield from skip_spaces(source)
        mark = yield from takes(source, tags.key, *tags.call_end)
        if mark != tags.key:
            if mark:
                source.write("}" if written else "{}")
            source.end(bool(mark))
            return
        key, named = yield from collected(source, tags.named, MOST_NAME)
        if not named:
            source.end(False)
            return
        if tags.value:
            yield from skip_spaces(source)
            yield from takes(source, tags.value)
        text, mark = yield from collected(source, (tags.end,))
        if not mark:
            source.at = len(source.text)
            source.end(False)
            return
        key = key.strip()
        made = typed(text, resolved(property_of(schema, key), schema), 'string="true"' in named)
        source.write(f"{', ' if written else '{'}{json.dumps(key, ensure_ascii=False)}: {made}")
        written = True


def property_of(schema: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Returns the schema of a property; an empty one where there is none."""
    properties = schema.get("properties")
    found = properties.get(name) if isinstance(properties, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def listed(value: Any) -> list[Any]:
    """Returns a list as it is, and nothing of anything else."""
    return value if isinstance(value, list) else []


def resolved(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the schema that a schema refers to inside of `root`, with the fields beside the reference; an empty one
    where there is none."""
    for _ in range(_DEEPEST):
        alone = listed(schema.get("allOf"))
        if len(alone) == 1 and isinstance(alone[0], Mapping):
            schema = {**{name: each for name, each in schema.items() if name != "allOf"}, **alone[0]}
        named = schema.get("$ref")
        if not isinstance(named, str):
            return schema
        found: Any = root
        for step in named.removeprefix("#").strip("/").split("/") if named != "#" else ():
            found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        if not isinstance(found, Mapping):
            return {}
        schema = {**{name: each for name, each in schema.items() if name != "$ref"}, **found}
    return {}


def types_of(schema: Mapping[str, Any], depth: int = 0) -> set[str]:
    """Returns the names of the types that a schema allows; none where it allows all."""
    found = schema.get("type")
    named = {each for each in (found, *listed(found)) if isinstance(each, str)}
    for each in [*listed(schema.get("anyOf")), *listed(schema.get("oneOf"))] if depth < _DEEPEST else ():
        named |= types_of(each, depth + 1) if isinstance(each, Mapping) else set()
    values = listed(schema.get("enum")) or ([schema["const"]] if "const" in schema else [])
    if not named and values and all(isinstance(each, str) for each in values):
        return {"string"}
    return named


def typed(text: str, schema: Mapping[str, Any], is_text: bool = False) -> str:
    """Returns the JSON of a parameter's text: of the type that the schema names, else of the value that JSON has for
    it, else text. Line breaks around a value belong to the tags."""
    bare = text.removeprefix("\n").removesuffix("\n")
    types = types_of(schema)
    if is_text or types == {"string"}:
        return json.dumps(bare, ensure_ascii=False)
    found = parsed(bare.strip())
    if found is _NOTHING or ("string" in types and not _is_of(found, types)):
        return json.dumps(bare, ensure_ascii=False)
    if types and isinstance(found, float) and "integer" in types and "number" not in types and found.is_integer():
        found = int(found)
    return json.dumps(found, ensure_ascii=False)


_NOTHING = object()
_NAMED = {"True": True, "False": False, "None": None}
_KINDS: Mapping[str, tuple[type, ...]] = {
    "integer": (int,), "number": (int, float), "boolean": (bool,), "null": (type(None),), "array": (list,),
    "object": (dict,), "string": (str,),
}  # fmt: skip


def _is_of(found: object, types: Collection[str]) -> bool:
    """Returns whether a value is of one of these types but text."""
    for each in types:
        if isinstance(found, bool) is (each == "boolean") and isinstance(found, _KINDS.get(each, ())):
            return each != "string"
    return False


def parsed(text: str) -> Any:
    """Returns the value that JSON, or else Python, has for a text; _NOTHING for none."""
    if text in _NAMED:
        return _NAMED[text]
    for read in (json.loads, _python) if text[:1] in ("{", "[") else (json.loads,):
        try:
            found = read(text)
            json.dumps(found, allow_nan=False)
            return found
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            pass
    return _NOTHING


def _python(text: str) -> Any:
    return _literal(ast.parse(text, mode="eval").body)


# Calls as Python writes them ------------------------------------------------------------------------------------------


def python_calls(source: Source, text: str) -> bool:
    """Reads calls as Python writes them, `[one(a=1), other(b="x")]` or without brackets, from a whole text. Returns
    whether it is such calls and nothing else."""
    try:
        tree: Any = ast.parse(text.strip(), mode="eval").body
        calls: list[Any] = tree.elts if isinstance(tree, (ast.List, ast.Tuple)) else [tree]
        made = [(_name(each.func), _keywords(each)) for each in calls]
    except (ValueError, SyntaxError, TypeError, AttributeError, RecursionError, MemoryError):
        return False
    for name, arguments in made:
        source.begin(name)
        source.write(arguments)
        source.end()
    return bool(made)


def _name(node: Any) -> str:
    return node.id if isinstance(node, ast.Name) else f"{_name(node.value)}.{node.attr}"


def _keywords(call: Any) -> str:
    if call.args or not all(each.arg for each in call.keywords):
        raise ValueError("arguments without names")
    return json.dumps({each.arg: _literal(each.value) for each in call.keywords}, ensure_ascii=False, allow_nan=False)


def _literal(node: Any) -> Any:
    """Returns the value of a literal of Python, or of JSON's true, false and null. Raises ValueError."""
    if isinstance(node, ast.Constant) and isinstance(node.value, (str, int, float, bool, type(None))):
        return node.value
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_literal(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        return {str(_literal(key)): _literal(each) for key, each in zip(node.keys, node.values, strict=True)}
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_literal(node.operand)
    if isinstance(node, ast.Name) and node.id in ("true", "false", "null"):
        return {"true": True, "false": False, "null": None}[node.id]
    raise ValueError(f"{type(node).__name__} is no literal")


# Values as Gemma writes them ------------------------------------------------------------------------------------------


def braced_arguments(text: str, quote: str) -> str | None:
    """Returns the JSON of `{key:value,…}`, with texts between two `quote`s, as Gemma writes it; None where the text is
    nothing like that."""
    reader = _Braced(text, quote)
    try:
        found = reader.value(0)
        return json.dumps(found, ensure_ascii=False) if isinstance(found, dict) and not reader.left else None
    except (ValueError, IndexError):
        return None


class _Braced:
    """A reader of that form. All methods raise ValueError or IndexError for another one."""

    def __init__(self, text: str, quote: str) -> None:
        self.left, self._quote = text.strip(), quote

    def value(self, depth: int) -> Any:
        if depth > _DEEPEST:
            raise ValueError("nested too deep")
        if self.left.startswith(self._quote):
            found, sign, self.left = self.left[len(self._quote) :].partition(self._quote)
            if not sign:
                raise ValueError("a text without end")
            return found
        if self.left[0] in "{[":
            return self._nested(depth)
        end = min((place for sign in ",}]" if (place := self.left.find(sign)) >= 0), default=len(self.left))
        word, self.left = self.left[:end].strip(), self.left[end:]
        found = parsed(word)
        return word if found is _NOTHING else found

    def _nested(self, depth: int) -> Any:
        closer = {"{": "}", "[": "]"}[self.left[0]]
        members, items = dict[str, Any](), list[Any]()
        self.left = self.left[1:].lstrip()
        while self.left[0] != closer:
            if closer == "}":
                key = self._key()
                members[key] = self.value(depth + 1)
            else:
                items.append(self.value(depth + 1))
            self.left = self.left.lstrip()
            if self.left[0] == ",":
                self.left = self.left[1:].lstrip()
            elif self.left[0] != closer:
                raise ValueError("no comma")
        self.left = self.left[1:].lstrip() if depth == 0 else self.left[1:]
        return members if closer == "}" else items

    def _key(self) -> str:
        if self.left.startswith(self._quote):
            found = str(self.value(0))
            self.left = self.left.lstrip().removeprefix(":").lstrip()
            return found
        found, sign, self.left = self.left.partition(":")
        if not sign:
            raise ValueError("no colon")
        self.left = self.left.lstrip()
        return found.strip().strip('"')
