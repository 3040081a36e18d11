"""Grammars that make a model write calls of tools in its own form, with arguments that the tools' schemas allow."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moert.engine.constraint import JSON_SPACES, MAX_GRAMMAR_BYTES, Grammar
from moert.serve.calls import Format, schemas_of
from moert.serve.scanning import Schemas, listed, resolved, types_of

_MOST_CALLS = 16
_DEEPEST = 8  # values of Gemma inside each other
_NAME = re.compile(r"[\w.-]+")


@dataclass(frozen=True)
class Forced:
    """A grammar of calls. `opening`: it binds the answer, behind thinking that stays free, as other grammars do; else
    the whole reply, from its first token on, so that the request has no Opening."""

    grammar: Grammar
    opening: bool


@dataclass(frozen=True)
class Choice:
    """The calls that are asked for. `name`: of one tool; None: any of them, at least one. `parallel`: more than one
    call may come. `optional`: text may come in place of calls or before them, and only calls are bound. `thinks`: the
    prompt ends inside of thinking, of forms that are read with the marks of parts."""

    name: str | None = None
    parallel: bool = True
    optional: bool = False
    thinks: bool = False


@dataclass(frozen=True)
class Written:
    """A form of calls, to be written. `begin` and `end` stand around all calls, `between` between two of them; `call`
    and `call_end` around the arguments of each, with $NAME for the tool's name and $NUMBER for a digit. `parameter` and
    `parameter_end` stand around each value where arguments are not JSON, with $KEY for its name and $ISTEXT for true or
    false; `comma` between two of them. `single`: there is never a second call. `quote`: around texts, where values are
    written as Gemma writes them."""

    call: str
    call_end: str
    begin: str = ""
    end: str = ""
    between: str = ""
    parameter: str = ""
    parameter_end: str = ""
    comma: str = ""
    single: bool = False
    quote: str = ""


_OBJECT = ('{"name": "$NAME", "arguments": ', "}")
_QWEN = ("<parameter=$KEY>\n", "\n</parameter>\n")
_LISTED = ("$NAME(", ")")
FORMS: Mapping[str, Written] = {
    "harmony": Written("<|channel|>commentary to=functions.$NAME <|constrain|>json<|message|>", "", single=True),
    "dsml": Written(
        '<｜DSML｜invoke name="$NAME">\n', "</｜DSML｜invoke>\n", "<｜DSML｜function_calls>\n",
        "</｜DSML｜function_calls>", "", '<｜DSML｜parameter name="$KEY" string="$ISTEXT">', "</｜DSML｜parameter>\n",
    ),
    "deepseek_v3": Written(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>$NAME\n```json\n", "\n```<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "\n",
    ),
    "deepseek": Written(
        "<｜tool▁call▁begin｜>$NAME<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "kimi": Written(
        "<|tool_call_begin|>functions.$NAME:$NUMBER<|tool_call_argument_begin|>", "<|tool_call_end|>",
        "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
    ),
    "minimax": Written(
        '<invoke name="$NAME">\n', "</invoke>\n", "<minimax:tool_call>\n", "</minimax:tool_call>", "",
        '<parameter name="$KEY">', "</parameter>\n",
    ),
    "seed": Written(
        "<seed:tool_call>\n<function=$NAME>\n", "</function>\n</seed:tool_call>", between="\n",
        parameter="<parameter=$KEY>", parameter_end="</parameter>\n",
    ),
    "glm": Written(
        "<tool_call>$NAME\n", "</tool_call>", between="\n", parameter="<arg_key>$KEY</arg_key>\n<arg_value>",
        parameter_end="</arg_value>\n",
    ),
    "qwen_coder": Written(
        "<tool_call>\n<function=$NAME>\n", "</function>\n</tool_call>", "", "", "\n", *_QWEN,
    ),
    "gemma4": Written(
        "<|tool_call>call:$NAME{", "}<tool_call|>", parameter="$KEY:", comma=",", quote='<|"|>',
    ),
    "functiongemma": Written(
        "<start_function_call>call:$NAME{", "}<end_function_call>", parameter="$KEY:", comma=",", quote="<escape>",
    ),
    "lfm2": Written(*_LISTED, "<|tool_call_start|>[", "]<|tool_call_end|>", ", ", "$KEY=", "", ", "),
    "pythonic": Written(*_LISTED, "[", "]", ", ", "$KEY=", "", ", "),
    "cohere": Written(
        '{"tool_call_id": "$NUMBER", "tool_name": "$NAME", "parameters": ', "}", "<|START_ACTION|>[\n    ",
        "\n]<|END_ACTION|>", ",\n    ",
    ),
    "mistral_names": Written("[TOOL_CALLS]$NAME[ARGS]", ""),
    "mistral": Written(*_OBJECT, "[TOOL_CALLS][", "]", ", "),
    "nemotron": Written(*_OBJECT, "<TOOLCALL>[", "]</TOOLCALL>", ", "),
    "tool_calls": Written(*_OBJECT, "<tool_calls>[", "]</tool_calls>", ", "),
    "granite": Written(*_OBJECT, "<|tool_call|>[", "]", ", "),
    "hermes": Written('<tool_call>\n{"name": "$NAME", "arguments": ', "}\n</tool_call>", between="\n"),
    "llama": Written('{"name": "$NAME", "parameters": ', "}", single=True),
}  # fmt: skip
"""How calls are written in each form of moert.serve.calls."""
_AROUND: Mapping[str, tuple[str, str]] = {
    "harmony": ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    "cohere": ("<|START_THINKING|>", "<|END_THINKING|>"),
}
"""The marks around thinking, of forms that are read with the marks of parts."""


def forced(
    format: Format, tools: Sequence[Mapping[str, Any]], choice: Choice, special: Mapping[str, int]
) -> Forced | None:  # fmt: skip
    """Returns a grammar of calls in a form. `special`: ids of the tokenizer's special tokens by their names.

    None where no tool has that name, where a name or a required argument can't be written in the form (for Gemma values
    without a type or with several), or where the tools' schemas are too large. Arguments between tags obey types and
    enums, as Gemma's do; patterns and lengths of texts there do not count. A schema that can't be followed is found
    when the request is added: SettingInvalid.
    """
    schemas = schemas_of(tools)
    chosen = {name: schema for name, schema in schemas.items() if choice.name in (None, name)}
    form = FORMS.get(format.name)
    if form is None or not chosen or not all(_can_be_named(form, *each) for each in chosen.items()):
        return None
    try:
        text = _Lark(form, special).text(chosen, choice, _AROUND.get(format.name))
    except (_Unwritable, RecursionError):
        return None
    if len(text.encode()) > MAX_GRAMMAR_BYTES:
        return None
    return Forced(Grammar("lark", text), not format.whole_reply)


def _can_be_named(form: Written, name: str, schema: Mapping[str, Any]) -> bool:
    """Returns whether names of a tool and of its parameters can stand in a form as they are."""
    keys = _properties(schema) if form.parameter else {}
    fits = r"[A-Za-z_]\w*" if form.comma and not form.quote else r"[\w.-]+"
    return _NAME.fullmatch(name) is not None and all(re.fullmatch(fits, key) for key in keys)


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, Mapping) else {}


class _Unwritable(Exception):
    """A value of that schema can't be written in the form."""


@dataclass
class _Lark:
    """A grammar that is being written."""

    form: Written
    special: Mapping[str, int]
    rules: list[str] = field(default_factory=list)

    def text(self, schemas: Schemas, choice: Choice, around: tuple[str, str] | None) -> str:
        """Returns the grammar."""
        form = self.form
        calls = [(name, self._arguments(number, schema)) for number, (name, schema) in enumerate(schemas.items())]
        self._calls("call", form.call, calls)
        more = ""
        if choice.parallel and not form.single:
            more = f"({self._literal(form.between)} call){{0,{_MOST_CALLS - 1}}} "
        behind = f"{more}{self._literal(form.end)}"
        start = f"{self._literal(form.begin)} call {behind}"
        if choice.optional:
            start = self._optional(start, behind, calls)
        if around is not None:
            start = f"{self._thinking(around, choice.thinks)}({start})"
        return "\n".join(["%llguidance {}", f"start: {start}", *self.rules, r"TEXT: /(?s:.*)/", ""])

    def _calls(self, rule: str, before: str, calls: Sequence[tuple[str, str]]) -> None:
        """Adds a rule for one call. `before`: the text before its arguments."""
        end = self._literal(self.form.call_end)
        ways = [f"{self._literal(before, name)} {arguments} {end}" for name, arguments in calls]
        self.rules.append(f"{rule}: {' | '.join(ways)}")

    def _optional(self, start: str, behind: str, calls: Sequence[tuple[str, str]]) -> str:
        """Returns text, and perhaps calls behind it, whose first mark ends the text; calls without a mark only stand at
        the beginning."""
        form = self.form
        first = form.begin or form.call
        found = re.match(r"<[^>]*>|\[[A-Z_]+\]", first)
        if found is None:
            self.rules.append(r"OTHER: /[^{\[](?s:.*)/")
            return f"{start} | OTHER"
        mark = found[0]
        if mark in self.special:
            return f"TEXT ({start})?"
        self.rules.append(f"head[lazy]: TEXT {_quoted(mark)}")
        if form.begin:
            return f"head {self._literal(form.begin[len(mark) :])} call {behind} | TEXT"
        self._calls("first", form.call[len(mark) :], calls)
        return f"head first {behind} | TEXT"

    def _thinking(self, around: tuple[str, str], begun: bool) -> str:
        begin, end = around
        free = self._until("thought", end)
        return f"{free} " if begun else f"({self._literal(begin)} {free})? "

    def _arguments(self, number: int, schema: Mapping[str, Any]) -> str:
        """Returns a rule for the arguments of a tool."""
        if self.form.parameter:
            return self._parameters(number, schema)
        self.rules.append(f"arguments_{number}: {_json({**schema, 'type': 'object'})}")
        return f"arguments_{number}"

    def _parameters(self, number: int, schema: Mapping[str, Any]) -> str:
        """Returns the parameters of a tool in the order of its schema, those that are not required perhaps left out."""
        required, rules = listed(schema.get("required")), list[tuple[str, bool]]()
        properties = _properties(schema)
        for place, key in enumerate(sorted(properties) if self.form.quote else properties):
            rule, each = f"p_{number}_{place}", properties[key]
            try:
                found = self._parameter(rule, key, resolved(each if isinstance(each, Mapping) else {}, schema), schema)
            except _Unwritable:
                if key in required:
                    raise
                continue
            self.rules.append(f"{rule}: {found}")
            rules.append((rule, key in required))
        if not self.form.comma:
            return " ".join(f"{rule}{'' if needed else '?'}" for rule, needed in rules)
        return self._with_commas(str(number), rules)

    def _with_commas(self, name: str, rules: Sequence[tuple[str, bool]]) -> str:
        """Returns a rule for parameters with commas between those that come."""
        comma = self._literal(self.form.comma)
        for place, (rule, needed) in enumerate(rules):
            for kind, before in (("a", ""), ("b", f"{comma} ")):
                skip = "" if needed else f" | {kind}_{name}_{place + 1}"
                self.rules.append(f"{kind}_{name}_{place}: {before}{rule} b_{name}_{place + 1}{skip}")
        self.rules += [f'{kind}_{name}_{len(rules)}: ""' for kind in "ab"]
        return f"a_{name}_0"

    def _braced(self, rule: str, schema: Mapping[str, Any], root: Mapping[str, Any], depth: int = 0) -> str:
        """Returns a rule for a value as Gemma writes it. Raises _Unwritable."""
        types, quote = types_of(schema), self._literal(self.form.quote)
        if types == {"string"} and (words := _words(schema)):
            return f"{quote} ({' | '.join(map(_quoted, words))}) {quote}"
        if types == {"string"}:
            return f"{quote} {self._until(f'{rule}_text', self.form.quote)}"
        if types and types <= {"integer", "number", "boolean", "null"}:
            return _json(schema)
        if depth > _DEEPEST:
            raise _Unwritable
        if types == {"array"} and isinstance(schema.get("items"), Mapping):
            item, comma = f"{rule}_i", self._literal(self.form.comma)
            self.rules.append(f"{item}: {self._braced(item, resolved(schema['items'], root), root, depth + 1)}")
            return f'"[" ({item} ({comma} {item}){{0,{_MOST_CALLS}}})? "]"'
        if types == {"object"} and _properties(schema):
            required, rules = listed(schema.get("required")), list[tuple[str, bool]]()
            for place, (key, each) in enumerate(sorted(_properties(schema).items())):
                if not isinstance(each, Mapping) or not _NAME.fullmatch(key):
                    raise _Unwritable
                inner = f"{rule}_{place}"
                value = self._braced(inner, resolved(each, root), root, depth + 1)
                self.rules.append(f"{inner}: {self._literal(f'{key}:')} {value}")
                rules.append((inner, key in required))
            return f'"{{" {self._with_commas(rule, rules)} "}}"'
        raise _Unwritable

    def _parameter(self, rule: str, key: str, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
        form, types = self.form, types_of(schema)
        if form.quote:
            return f"{self._literal(form.parameter.replace('$KEY', key))} {self._braced(rule, schema, root)}"
        beside = {name: root[name] for name in ("$defs", "definitions") if name in root}
        is_text = types == {"string"}
        before = form.parameter.replace("$ISTEXT", "true" if is_text else "false").replace("$KEY", key)
        words = _words(schema) if is_text else []
        if form.comma and types == {"boolean"}:
            return f'{self._literal(before)} ("True" | "False")'
        if words and not form.comma:
            ways = " | ".join(map(_quoted, words))
            return f"{self._literal(before)} ({ways}) {self._literal(form.parameter_end)}"
        if (is_text or not types or "string" in types) and not form.comma:
            return f"{self._literal(before)} {self._until(f'{rule}_text', form.parameter_end)}"
        return f"{self._literal(before)} {_json({**beside, **schema})} {self._literal(form.parameter_end)}"

    def _until(self, rule: str, end: str) -> str:
        """Returns a rule for any text up to and with `end`."""
        first = next(iter(self._parts(end)), "")
        if first in self.special:
            return f"TEXT {self._literal(end)}"
        plain = next((place for place, part in enumerate([*self._parts(end)]) if part in self.special), None)
        parts = [*self._parts(end)][:plain]
        self.rules.append(f"{rule}[lazy]: TEXT {_quoted(''.join(parts))}")
        return f"{rule} {self._literal(end[len(''.join(parts)) :])}"

    def _parts(self, text: str) -> Iterator[str]:
        """Yields a text in pieces: special tokens, and the texts between them."""
        names = sorted((each for each in self.special if each in text), key=len, reverse=True)
        if not names:
            yield text
            return
        for piece in re.split("(" + "|".join(map(re.escape, names)) + ")", text):
            if piece:
                yield piece

    def _literal(self, text: str, name: str = "") -> str:
        """Returns a text as a grammar has it, with special tokens by their ids."""
        found = list[str]()
        for piece in self._parts(text):
            if piece in self.special:
                found.append(f"<[{self.special[piece]}]>")
                continue
            pieces = piece.replace("$NAME", name).split("$NUMBER")
            found += [_quoted(pieces[0]), *(f"/[0-9]/ {_quoted(each)}" for each in pieces[1:])]
        return " ".join(each for each in found if each != '""')


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': {'whitespace_pattern': JSON_SPACES}}, ensure_ascii=False)}"


def _words(schema: Mapping[str, Any]) -> list[str]:
    """Returns the texts that a schema lists."""
    found = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return [each for each in listed(found) if isinstance(each, str)]
