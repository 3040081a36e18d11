"""Calls of tools in the text that models write: one format a family, found by signs in its chat template.

| written | read as |
|---|---|
| a call whose name is not known yet when the text ends or goes another way | text, as it was written |
| a call that is cut, or whose arguments go another way | the call, with the beginning of its arguments |
| arguments in JSON | the same text, piece by piece as it comes |
| arguments between tags, or as Python writes them | JSON with the types of the tool's schema, each when it is whole |
| arguments that are text with JSON in it | that JSON |
| white space around calls | nothing |
| a tool that was not offered | a call: the client answers that; where any JSON might be a call, text |

A cut call stays cut: clients of OpenAI's interface see that its arguments are no whole JSON, as they do there, and run
nothing. It is the last event, with `whole` False.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moert.chat.conversation import Marks, Part, Splitter
from moert.serve.scanning import (
    MOST_NAME,
    CallBegins,
    Event,
    Scan,
    Schemas,
    Source,
    Tags,
    Text,
    ahead,
    braced_arguments,
    collected,
    json_calls,
    peek,
    python_calls,
    raw_arguments,
    rest,
    skip_spaces,
    tagged_arguments,
    takes,
    until,
)

Read = Callable[[Source, "Format", str], Scan[bool]]
"""A function that reads calls behind an opening mark, and returns whether one has begun."""


@dataclass(frozen=True)
class Format:
    """A family's form of calls. `signs`: all texts of one of these groups stand in the chat templates of the family;
    `opens`: marks before calls, `closes`: behind them; `read`: reads the calls behind a mark; `first`: reads calls that
    a reply may begin with, without a mark. `marks`: special tokens that the text has to show, beside `opens` and
    `closes`. `whole_reply`: calls stand outside the answer, so that the reply is read with the marks of its parts."""

    name: str
    signs: tuple[tuple[str, ...], ...]
    opens: tuple[str, ...]
    read: Read
    closes: tuple[str, ...] = ()
    first: Read | None = None
    marks: tuple[str, ...] = ()
    whole_reply: bool = False

    @property
    def special(self) -> tuple[str, ...]:
        """Texts that a detokenizer has to show though they may be special tokens."""
        return (*self.opens, *self.closes, *self.marks)


def format_of(template: str) -> Format | None:
    """Returns the form of calls in a family, by the text of its chat template; None where it names no tools that we
    know the form of."""
    for each in FORMATS:
        if any(all(sign in template for sign in group) for group in each.signs):
            return each
    return None


def schemas_of(tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Mapping[str, Any]]:
    """Returns the schemas of tools as OpenAI's interface lists them, by name; tools without a name are left out."""
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools or ():
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and isinstance(name := function.get("name"), str):
            schema = function.get("parameters")
            found[name] = schema if isinstance(schema, Mapping) else {}
    return found


class CallReader:
    """A reader of text as it comes: returns events, and never raises an error. The sum of all events does not depend on
    the pieces that the text comes in."""

    def __init__(self, format: Format, schemas: Schemas | None = None) -> None:
        self._source = Source(schemas or {})
        self._scan = _replies(self._source, format)
        self._done = False

    def push(self, text: str) -> list[Event]:
        """Returns the events that are certain after more text."""
        self._source.text += text
        return self._go_on()

    def flush(self) -> list[Event]:
        """Returns the last events: no more text comes."""
        self._source.over = True
        events = self._go_on()
        if self._source.spaces and not self._source.calls:
            events.append(Text(self._source.spaces))
            self._source.spaces = ""
        return events

    def _go_on(self) -> list[Event]:
        if not self._done:
            try:
                next(self._scan)
            except StopIteration:
                self._done = self._source.over
        if self._source.between:
            self._source.forget()
        events, self._source.events = self._source.events, []
        return events


class ReplyReader:
    """A reader of whole replies: text comes in parts, thinking and answer, and calls are taken from it. `marks` and
    `first`: see moert.chat.conversation.Splitter. Without a format there is only text."""

    def __init__(
        self, marks: Marks, first: Part = "answer", format: Format | None = None, schemas: Schemas | None = None
    ) -> None:  # fmt: skip
        self._splitter = Splitter(marks, first)
        self._reader = None if format is None else CallReader(format, schemas)
        self._whole = format is not None and format.whole_reply

    def push(self, text: str) -> list[Event]:
        """Returns the events that are certain after more text."""
        if self._whole and self._reader is not None:
            return self._divided(self._reader.push(text))
        return self._read(self._splitter.push(text))

    def flush(self) -> list[Event]:
        """Returns the last events: no more text comes."""
        if self._whole and self._reader is not None:
            return [*self._divided(self._reader.flush()), *_texts(self._splitter.flush())]
        return [*self._read(self._splitter.flush()), *(self._reader.flush() if self._reader is not None else ())]

    def _divided(self, events: Sequence[Event]) -> list[Event]:
        found = list[Event]()
        for event in events:
            if isinstance(event, Text):
                found += _texts(self._splitter.push(event.text))
            else:
                found += [*(_texts(self._splitter.flush()) if isinstance(event, CallBegins) else ()), event]
        return found

    def _read(self, pieces: Sequence[tuple[Part, str]]) -> list[Event]:
        found = list[Event]()
        for part, text in pieces:
            answers = part == "answer" and self._reader is not None
            found += self._reader.push(text) if answers and self._reader is not None else [Text(text, part)]
        return found


def _texts(pieces: Sequence[tuple[Part, str]]) -> list[Event]:
    return [Text(text, part) for part, text in pieces]


def _replies(source: Source, format: Format) -> Scan[None]:
    """Reads a whole reply: text, and calls in it."""
    if format.first is not None and not (yield from format.first(source, format, "")):
        source.at = 0
    while True:
        source.between = True
        mark = yield from until(source, format.opens, source.say)
        source.between = False
        if not mark:
            return
        source.forget()
        before = source.calls
        yield from format.read(source, format, mark)
        if source.calls == before:
            source.at = 0
            source.say(mark)


def _closed(source: Source, format: Format, begun: bool) -> Scan[bool]:
    """Goes behind a closing mark; where a call went another way, behind the next one, or before the next opening."""
    if not begun:
        return False
    if source.whole:
        yield from skip_spaces(source)
        if format.closes:
            yield from takes(source, *format.closes)
        return True
    mark = yield from until(source, (*format.closes, *format.opens), lambda text: None)
    if mark in format.opens:
        source.at -= len(mark)
    return True


# One reader a form ----------------------------------------------------------------------------------------------------


_FUNCTION = "<function="


def _json(source: Source, format: Format, mark: str) -> Scan[bool]:
    return (yield from _closed(source, format, (yield from json_calls(source))))


_QWEN_TAGS = Tags("<parameter=", (">",), "</parameter>", ("</function>", "</tool_call>", "</seed:tool_call>"))
_GLM_TAGS = Tags("<arg_key>", ("</arg_key>",), "</arg_value>", ("</tool_call>",), "<arg_value>")
_INVOKE_TAGS = Tags('<parameter name="', ('">',), "</parameter>", ("</invoke>",))
_DSML_TAGS = Tags(
    '<｜DSML｜parameter name="', ('" string="true">', '" string="false">', '">'), "</｜DSML｜parameter>",
    ("</｜DSML｜invoke>",),
)  # fmt: skip


def _tool_call(source: Source, format: Format, mark: str) -> Scan[bool]:
    """Behind <tool_call>: JSON, <function=…>, or a name with <arg_key>."""
    letter = yield from skip_spaces(source)
    if mark != _FUNCTION and letter in ("{", "["):
        return (yield from _json(source, format, mark))
    begun = False
    while mark == _FUNCTION or (yield from takes(source, _FUNCTION)):
        mark = ""
        name, end = yield from collected(source, (">",), MOST_NAME)
        if not _is_name(name.strip(' "')) or not end:
            break
        begun = True
        yield from tagged_arguments(source, name.strip(' "'), _QWEN_TAGS)
        yield from skip_spaces(source)
    if begun or letter == "<":
        return (yield from _closed(source, format, begun))
    name, end = yield from collected(source, ("\n", "<"), MOST_NAME)
    source.at -= end == "<"
    yield from skip_spaces(source)
    named = _is_name(name.strip()) and (yield from ahead(source, _GLM_TAGS.key, *_GLM_TAGS.call_end))
    if not end or not named:
        return False
    yield from tagged_arguments(source, name.strip(), _GLM_TAGS)
    return (yield from _closed(source, format, True))


def _is_name(text: str) -> bool:
    return re.fullmatch(r"[\w.-]+", text) is not None


def _invokes(source: Source, format: Format, mark: str) -> Scan[bool]:
    """Behind <minimax:tool_call> or DeepSeek's function_calls: calls between tags."""
    sign, tags = ("｜DSML｜", _DSML_TAGS) if "DSML" in mark else ("", _INVOKE_TAGS)
    begun = False
    while True:
        yield from skip_spaces(source)
        if not (yield from takes(source, f'<{sign}invoke name="')):
            return (yield from _closed(source, format, begun))
        name, end = yield from collected(source, ('">',), MOST_NAME)
        if not end or not name:
            return (yield from _closed(source, format, begun))
        begun = True
        yield from tagged_arguments(source, name, tags)


def _deepseek(source: Source, format: Format, mark: str) -> Scan[bool]:
    """V3: `function`, a separator, the name, and JSON in a fence; V3.1: the name, a separator, and JSON."""
    begun = mark == "<｜tool▁call▁begin｜>"
    if begun:
        begun = yield from _deepseek_call(source)
    while True:
        yield from skip_spaces(source)
        if not (yield from takes(source, "<｜tool▁call▁begin｜>")):
            return (yield from _closed(source, format, begun))
        if not (yield from _deepseek_call(source)):
            return (yield from _closed(source, format, begun))
        begun = True


def _deepseek_call(source: Source) -> Scan[bool]:
    name, end = yield from collected(source, ("<｜tool▁sep｜>",), MOST_NAME)
    if not end:
        return False
    letter = yield from skip_spaces(source)
    if not letter:
        return False
    if letter != "{":
        name, end = yield from collected(source, ("\n",), MOST_NAME)
        yield from skip_spaces(source)
        yield from takes(source, "```json")
    if not end or not name.strip():
        return False
    yield from raw_arguments(source, name.strip())
    yield from skip_spaces(source)
    yield from takes(source, "```")
    yield from skip_spaces(source)
    yield from takes(source, "<｜tool▁call▁end｜>")
    return True


def _kimi(source: Source, format: Format, mark: str) -> Scan[bool]:
    """functions.NAME:0 is the id of the call, which templates want to see again."""
    begun = False
    while True:
        yield from skip_spaces(source)
        if mark != "<|tool_call_begin|>" and not (yield from takes(source, "<|tool_call_begin|>")):
            return (yield from _closed(source, format, begun))
        mark = ""
        header, end = yield from collected(source, ("<|tool_call_argument_begin|>",), MOST_NAME)
        name = re.sub(r":\d+$", "", header.strip().removeprefix("functions."))
        if not end or not name:
            return (yield from _closed(source, format, begun))
        begun = True
        yield from raw_arguments(source, name, header.strip())
        yield from skip_spaces(source)
        yield from takes(source, "<|tool_call_end|>")


_RECIPIENT = re.compile(r"\bto=functions\.([\w.-]+)")


def _harmony(source: Source, format: Format, mark: str) -> Scan[bool]:
    """gpt-oss: a message to functions.NAME."""
    header, end = yield from collected(source, ("<|message|>",), MOST_NAME)
    found = _RECIPIENT.search(header)
    if not end or found is None:
        return False
    yield from raw_arguments(source, found[1])
    return (yield from _closed(source, format, True))


def _harmony_first(source: Source, format: Format, mark: str) -> Scan[bool]:
    """The prompt ends with <|start|>assistant, and the name may follow at once."""
    if (yield from peek(source)) not in (" ", "t") or not (yield from takes(source, " to=functions.", "to=functions.")):
        return False
    source.at = 0
    return (yield from _harmony(source, format, mark))


def _mistral(source: Source, format: Format, mark: str) -> Scan[bool]:
    """A list of JSON objects; or since 2025 NAME[ARGS]{…}, with [CALL_ID] between them in some models."""
    if (yield from skip_spaces(source)) in ("[", "{"):
        return (yield from _json(source, format, mark))
    name, end = yield from collected(source, ("[ARGS]", "[CALL_ID]", "{"), MOST_NAME)
    number = None
    if end == "[CALL_ID]":
        number, end = yield from collected(source, ("[ARGS]", "{"), MOST_NAME)
    if not end or not re.fullmatch(r"[\w.-]+", name.strip()):
        return False
    source.at -= end == "{"
    yield from raw_arguments(source, name.strip(), number)
    return (yield from _closed(source, format, True))


def _between(source: Source, format: Format, mark: str) -> Scan[bool]:
    """Calls that are read as a whole, once the closing mark or the end has come."""
    if (yield from skip_spaces(source)) in ("", *format.closes):
        return False
    place = source.at
    text, end = yield from collected(source, format.closes)
    if format.name in _QUOTES:
        source.at = source.at if end else len(source.text)
        return _braced(source, text, _QUOTES[format.name], bool(end))
    if python_calls(source, text):
        source.at = source.at if end else len(source.text)
        return True
    source.at = place
    return (yield from _json(source, format, mark))


_QUOTES = {"gemma4": '<|"|>', "functiongemma": "<escape>"}


def _braced(source: Source, text: str, quote: str, whole: bool) -> bool:
    found = re.match(r"\s*call:\s*([\w.-]+)\s*", text)
    if found is None or not (whole or text[found.end() :]):
        return False
    arguments = braced_arguments(text[found.end() :] or "{}", quote)
    source.begin(found[1])
    if arguments is not None:
        source.write(arguments)
    source.end(whole and arguments is not None)
    return True


def _llama_first(source: Source, format: Format, mark: str) -> Scan[bool]:
    """A reply that begins with {"name": …, "parameters": …}, or several with ; between them."""
    begun = False
    while True:
        yield from skip_spaces(source)
        yield from takes(source, "<|python_tag|>")
        place = source.at
        if (yield from skip_spaces(source)) != "{" or not (yield from json_calls(source, known=bool(source.schemas))):
            source.at = place
            return begun
        begun = True
        yield from skip_spaces(source)
        yield from takes(source, ";")


def _llama(source: Source, format: Format, mark: str) -> Scan[bool]:
    """Behind <|python_tag|>: JSON, or NAME.call(…) of a built-in tool."""
    if (yield from skip_spaces(source)) == "{":
        return (yield from _json(source, format, mark))
    text = yield from rest(source)
    name, call, behind = text.partition(".call(")
    return python_calls(source, f"{name}({behind}" if call else text)


def _python_first(source: Source, format: Format, mark: str) -> Scan[bool]:
    """A reply that is a list of calls and nothing else."""
    if (yield from skip_spaces(source)) != "[":
        return False
    text = yield from rest(source)
    first = re.match(r"\[\s*([\w.]+)\(", text)
    if first is None or (source.schemas and first[1] not in source.schemas):
        return False
    return python_calls(source, text)


FORMATS: tuple[Format, ...] = (
    Format(
        "harmony", (("<|channel|>", "<|call|>"), ("<|channel|>", "to=functions.")),
        ("<|channel|>", "<|start|>assistant"), _harmony, ("<|call|>", "<|end|>"), _harmony_first,
        ("<|message|>", "<|constrain|>"), True,
    ),
    Format(
        "dsml", (("｜DSML｜",),), ("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>"), _invokes,
        ("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"),
    ),
    Format(
        "deepseek_v3", (("<｜tool▁calls▁begin｜>", "```json"),), ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
        _deepseek, ("<｜tool▁calls▁end｜>",), marks=("<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    ),
    Format(
        "deepseek", (("<｜tool▁calls▁begin｜>",),), ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"), _deepseek,
        ("<｜tool▁calls▁end｜>",), marks=("<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    ),
    Format(
        "kimi", (("<|tool_calls_section_begin|>",),), ("<|tool_calls_section_begin|>", "<|tool_call_begin|>"), _kimi,
        ("<|tool_calls_section_end|>",), marks=("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ),
    Format(
        "minimax", (("<minimax:tool_call>",),), ("<minimax:tool_call>",), _invokes, ("</minimax:tool_call>",),
    ),
    Format("seed", (("<seed:tool_call>",),), ("<seed:tool_call>",), _tool_call, ("</seed:tool_call>",)),
    Format("glm", (("<arg_key>",),), ("<tool_call>",), _tool_call, ("</tool_call>",),
           marks=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")),
    Format("qwen_coder", (("<function=",),), ("<tool_call>", "<function="), _tool_call, ("</tool_call>",)),
    Format("gemma4", (("<|tool_call>", "call:"),), ("<|tool_call>",), _between, ("<tool_call|>",), marks=('<|"|>',)),
    Format(
        "functiongemma", (("<start_function_call>",),), ("<start_function_call>",), _between,
        ("<end_function_call>",), marks=("<escape>",),
    ),
    Format(
        "lfm2", (("<|tool_call_start|>",), ("<|tool_list_start|>",), ("List of tools: ", "<|im_start|>")),
        ("<|tool_call_start|>",), _between, ("<|tool_call_end|>",),
    ),
    Format("cohere", (("<|START_ACTION|>",),), ("<|START_ACTION|>",), _json, ("<|END_ACTION|>",), whole_reply=True),
    Format(
        "mistral_names", (("[TOOL_CALLS]", "[ARGS]"),), ("[TOOL_CALLS]",), _mistral, marks=("[ARGS]", "[CALL_ID]"),
    ),
    Format("mistral", (("[TOOL_CALLS]",),), ("[TOOL_CALLS]",), _mistral, marks=("[ARGS]", "[CALL_ID]")),
    Format("nemotron", (("<TOOLCALL>",),), ("<TOOLCALL>",), _json, ("</TOOLCALL>",)),
    Format("tool_calls", (("<tool_calls>",),), ("<tool_calls>",), _json, ("</tool_calls>",)),
    Format(
        "granite", (("<|tool_call|>",),), ("<|tool_call|>", "<tool_call>"), _json, ("<|/tool_call|>", "</tool_call>"),
    ),
    Format("hermes", (("<tool_call>",),), ("<tool_call>",), _tool_call, ("</tool_call>",)),
    Format("pythonic", (("[func_name1(",),), ("<|python_tag|>",), _llama, first=_python_first),
    Format(
        "llama", (("<|python_tag|>",), ('"parameters": dictionary of argument',)), ("<|python_tag|>",), _llama,
        first=_llama_first,
    ),
)  # fmt: skip
"""All forms that are known. The first whose signs stand in a template is its form."""
