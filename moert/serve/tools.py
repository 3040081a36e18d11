"""Tools and forms of answers, as OpenAI's interface names them: schemas for the template, calls in the text of answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moert.engine.constraint import Grammar
from moert.engine.engine import Engine
from moert.serve.fields import Refused
from moert.serve.forms import Event
from moert.serve.worker import Ticket


@dataclass(frozen=True)
class Tools:
    """The tools of one request. `schemas`: for the template; `shown`: texts of special tokens that calls begin with."""

    schemas: Sequence[Mapping[str, Any]] | None = None
    shown: Sequence[str] = ()

    @classmethod
    def of(cls, engine: Engine, found: Mapping[str, Any]) -> Tools:
        """Returns the tools of a request. Raises Refused."""
        if found.get("tools"):
            raise Refused("tools are not supported yet", "tools")
        return cls()

    @classmethod
    def formats(cls, engine: Engine | None, found: Mapping[str, Any]) -> dict[str, Any]:
        """Returns settings for the form of an answer that a request names. Raises Refused."""
        form, grammar = found.get("response_format", {"type": "text"}), found.get("grammar")
        kind = form.get("type")
        if grammar is not None:
            if kind != "text":
                raise Refused("grammar and response_format exclude each other", "grammar")
            return {"grammar": Grammar("lark", grammar)}
        if kind == "json_object":
            return {"grammar": Grammar("json_object")}
        if kind == "json_schema":
            inner = form.get("json_schema")
            schema = inner.get("schema") if isinstance(inner, dict) else None
            if not isinstance(schema, (dict, bool)):
                raise Refused("response_format.json_schema.schema is missing", "response_format")
            return {"json_schema": schema}
        if kind != "text":
            raise Refused("response_format.type should be text, json_object or json_schema", "response_format")
        return {}

    def limits(self, found: Mapping[str, Any]) -> dict[str, Any]:
        return self.formats(None, found)

    def messages(self, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return found

    def events(self, ticket: Ticket) -> AsyncIterator[Event]:
        return ticket.events()
