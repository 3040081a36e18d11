"""Tools and forms of answers, as OpenAI's interface names them: schemas for the template, grammars for the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moert.engine.constraint import Grammar
from moert.engine.engine import Engine
from moert.serve.calls import Format, format_of
from moert.serve.fields import Refused
from moert.serve.forcing import Choice, forced
from moert.serve.forms import Talk
from moert.serve.messages import for_template


@dataclass(frozen=True)
class Tools:
    """The tools of one request, and the chat template that they are for. `choice`: the calls that the answer has to be,
    or may be with arguments that obey the schemas; None: the model writes freely."""

    template: str
    special: Mapping[str, int]
    listed: Sequence[Mapping[str, Any]] | None = None
    format: Format | None = None
    choice: Choice | None = None

    @classmethod
    def of(cls, engine: Engine, found: Mapping[str, Any]) -> Tools:
        """Returns the tools of a request. Raises Refused, ChatImpossible, or a PackError for a damaged template."""
        chat = engine.speaker.chat
        listed, choice = found.get("tools") or None, found.get("tool_choice", "auto")
        template = chat.template if listed is None or chat.tool_template is None else chat.tool_template
        special = engine.text.special
        if listed is None:
            if choice not in ("auto", "none"):
                raise Refused("tool_choice goes with tools: there are none", "tool_choice")
            return cls(template, special)
        _check(listed)
        if choice == "none":
            return cls(template, special)
        if "tools" not in template:
            raise Refused("the model's chat template has no tools: leave them out", "tools")
        format = format_of(template)
        if format is None:
            raise Refused("the form of tool calls in the model's chat template is not known: leave tools out", "tools")
        return cls(template, special, listed, format, _choice(listed, choice, found.get("parallel_tool_calls", True)))

    def talk(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], continues: bool = False
    ) -> Talk:
        """Returns the conversation of a request, its messages as the template takes them. `continues`: the answer goes
        on from the last one. Raises Refused where that one calls tools."""
        if continues and messages[-1].get("tool_calls"):
            raise Refused("the last message calls tools: give their results, or a text to go on from", "messages")
        made = for_template(messages, self.template, self.format)
        forced = None if self.choice is None else self._forced
        return Talk(made, self.listed, variables, self.format, forced, continues)

    def settings(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """Returns settings for the form of the answer that a request names. Raises Refused."""
        made = form_of(found)
        if made and self.choice is not None:
            raise Refused("response_format binds the answer, and tool_choice or strict tools do: leave one of both out",
                          "response_format")  # fmt: skip
        return made

    def _forced(self, thinks: bool) -> tuple[Grammar, bool]:
        assert self.format is not None
        assert self.choice is not None
        made = forced(self.format, self.listed or (), replace(self.choice, thinks=thinks), self.special)
        if made is None:
            raise Refused("this model's form of calls can't be forced for these tools: give tool_choice auto, without "
                          "strict tools and with parallel_tool_calls", "tool_choice")  # fmt: skip
        return made.grammar, made.opening


def form_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings for the form of an answer that a request names. Raises Refused."""
    form, grammar = found.get("response_format", {"type": "text"}), found.get("grammar")
    kind = form.get("type")
    if grammar is not None:
        if kind != "text":
            raise Refused("grammar and response_format exclude each other", "grammar")
        return {"grammar": Grammar("lark", grammar)}
    if kind == "json_object" and form.get("schema") is None:
        return {"grammar": Grammar("json_object")}
    if kind in ("json_schema", "json_object"):  # with a schema in either: some clients know one, some the other
        inner = form.get("json_schema") if kind == "json_schema" else form
        schema = inner.get("schema") if isinstance(inner, dict) else None
        if not isinstance(schema, (dict, bool)):
            raise Refused("response_format.json_schema.schema is missing", "response_format")
        return {"json_schema": schema}
    if kind != "text":
        raise Refused("response_format.type should be text, json_object or json_schema", "response_format")
    return {}


def _check(listed: Sequence[Mapping[str, Any]]) -> None:
    for at, tool in enumerate(listed):
        function = tool.get("function")
        if (
            tool.get("type") != "function"
            or not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
        ):
            raise Refused(f"tools[{at}] should be of type function, with a function that has a name", "tools")
        if not isinstance(function.get("parameters", {}), dict):
            raise Refused(f"tools[{at}].function.parameters should be a JSON schema", "tools")


def _choice(listed: Sequence[Mapping[str, Any]], choice: Any, parallel: bool) -> Choice | None:
    """Returns the calls that a request asks for. Raises Refused."""
    names = [tool["function"]["name"] for tool in listed]
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if choice.get("type") != "function" or name not in names:
            raise Refused("tool_choice should name a function of tools", "tool_choice")
        return Choice(name, parallel)
    if choice == "required":
        return Choice(None, parallel)
    if choice != "auto":
        raise Refused("tool_choice should be auto, none, required, or name a function", "tool_choice")
    strict = any(tool["function"].get("strict") for tool in listed)
    return Choice(None, parallel, optional=True) if strict or not parallel else None
