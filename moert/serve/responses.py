"""OpenAI's newer interface: /v1/responses, alone or as an answer to a previous response."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.routing import Route

from moert.serve.answers import answered, body_of, event, line
from moert.serve.fields import ANY, FLAG, TABLE, TABLES, TEXT, Field, Form, Refused, one_of
from moert.serve.fields import whole as whole_number
from moert.serve.forms import Argued, Called, Ended, Event, Wish, Wrote
from moert.serve.openai import OF_INPUT, SAMPLING, failed, messages_of, settings_of
from moert.serve.tools import Tools
from moert.serve.worker import status_of

if TYPE_CHECKING:
    from moert.serve.host import Host

_FIELDS: Mapping[str, Field] = {
    "model": TEXT, "input": ANY, "instructions": TEXT, "stream": FLAG, "max_output_tokens": whole_number(1, 1 << 30),
    "temperature": SAMPLING["temperature"], "top_p": SAMPLING["top_p"], "tools": TABLES, "tool_choice": ANY,
    "parallel_tool_calls": FLAG, "previous_response_id": TEXT, "store": FLAG, "text": TABLE, "reasoning": TABLE,
    "truncation": one_of("disabled"), "background": one_of(False), "metadata": TABLE,
}  # fmt: skip
_HARMLESS = (
    "user", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "include",
    "stream_options", "client_metadata",
)  # fmt: skip
_FORM = Form(_FIELDS, _HARMLESS, ("input",))
FORMS = {"/v1/responses": _FORM}
_MOST_KEPT, _MOST_BYTES = 256, 64 << 20
_KIND = {"answer": "message", "thinking": "reasoning"}


class Conversations:
    """The conversations behind responses, by their ids; the oldest ones go."""

    def __init__(self, most: int = _MOST_KEPT, most_bytes: int = _MOST_BYTES) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._kept: OrderedDict[str, tuple[list[dict[str, Any]], int]] = OrderedDict()

    def keep(self, name: str, messages: list[dict[str, Any]]) -> None:
        self._kept[name] = messages, len(line(messages))
        while len(self._kept) > self._most or sum(size for _, size in self._kept.values()) > self._most_bytes:
            self._kept.popitem(last=False)

    def get(self, name: str) -> list[dict[str, Any]]:
        """Returns the messages up to a response. Raises Refused."""
        found = self._kept.get(name)
        if found is None:
            raise Refused(f"there is no response {name[:80]!r}: it was not stored, or too long ago",
                          "previous_response_id", 404)  # fmt: skip
        return found[0]


def routes(host: Host) -> list[Route]:
    """Returns the path of this interface."""
    work = partial(_respond, host, Conversations())
    own = {**OF_INPUT, "response_format": "text", "max_tokens": "max_output_tokens"}
    return [Route("/v1/responses", host.guarded(work, partial(failed, own=own)), methods=["POST"])]


async def _respond(host: Host, kept: Conversations, request: Request) -> Any:
    found = _FORM.read(await body_of(request))
    name, worker = await host.worker(found.get("model"))
    before = kept.get(found["previous_response_id"]) if "previous_response_id" in found else []
    messages = [*before, *_messages(found["input"])]
    asked = _asked(found)
    tools = Tools.of(worker.engine, asked)
    changes = {**found, "max_tokens": found["max_output_tokens"]} if "max_output_tokens" in found else found
    (settings,) = settings_of(changes, host.defaults, **tools.settings(asked))
    system = [{"role": "system", "content": found["instructions"]}] if "instructions" in found else []
    effort = found.get("reasoning", {}).get("effort")
    variables = {} if effort is None else {"reasoning_effort": effort}
    talk = tools.talk(messages_of([*system, *messages]), variables)
    ticket = worker.submit(Wish([talk], [settings]), host.loop)
    response = _Response(_head(found, name), ticket.events(), _keeper(kept, found, messages))
    return await answered(
        request, worker, ticket, bool(found.get("stream")), response.stream, response.whole
    )  # fmt: skip


def _keeper(kept: Conversations, found: Mapping[str, Any], messages: list[dict[str, Any]]) -> Any:
    def keep(name: str, message: dict[str, Any]) -> None:
        if found.get("store", True):
            kept.keep(name, [*messages, message])

    return keep


def _head(found: Mapping[str, Any], model: str) -> dict[str, Any]:
    return {
        "id": f"resp_{secrets.token_hex(12)}", "object": "response", "created_at": int(time.time()),
        "status": "in_progress", "background": False, "error": None, "incomplete_details": None,
        "instructions": found.get("instructions"), "max_output_tokens": found.get("max_output_tokens"),
        "model": model, "output": [], "parallel_tool_calls": found.get("parallel_tool_calls", True),
        "previous_response_id": found.get("previous_response_id"),
        "reasoning": {"effort": None, "summary": None, **found.get("reasoning", {})},
        "store": found.get("store", True), "temperature": found.get("temperature"),
        "text": found.get("text", {"format": {"type": "text"}}), "tool_choice": found.get("tool_choice", "auto"),
        "tools": found.get("tools", []), "top_p": found.get("top_p"), "truncation": "disabled", "usage": None,
        "metadata": found.get("metadata", {}),
    }  # fmt: skip


def _messages(given: Any) -> list[dict[str, Any]]:
    """Returns the input as messages. Raises Refused."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given or not all(isinstance(each, dict) for each in given):
        raise Refused("input should be text or a list of items", "input")
    made: list[dict[str, Any]] = []
    for at, item in enumerate(given):
        kind = item.get("type", "message")
        if kind == "message":
            made.append({"role": item.get("role"), "content": item.get("content")})
        elif kind == "function_call":
            function = {"name": str(item.get("name")), "arguments": str(item.get("arguments", "{}"))}
            call = {"id": str(item.get("call_id")), "type": "function", "function": function}
            _assistant(made).setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            made.append({"role": "tool", "tool_call_id": str(item.get("call_id")), "content": item.get("output", "")})
        elif kind == "reasoning":
            text = "".join(str(part.get("text", "")) for part in item.get("content") or [] if isinstance(part, dict))
            _assistant(made)["reasoning_content"] = text
        else:
            raise Refused(f"input[{at}] has the type {kind!r:.40}, which is not supported", "input")
    return made


def _assistant(made: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the message of the assistant that items belong to; a new one where none comes last."""
    if not made or made[-1]["role"] != "assistant" or made[-1].get("content"):
        made.append({"role": "assistant", "content": ""})
    return made[-1]


def _asked(found: Mapping[str, Any]) -> dict[str, Any]:
    """Returns tools and the form of the answer as the older interface has them. Raises Refused."""
    asked: dict[str, Any] = {name: found[name] for name in ("parallel_tool_calls",) if name in found}
    if found.get("tools"):
        asked["tools"] = [_tool(each, at) for at, each in enumerate(found["tools"])]
    choice = found.get("tool_choice")
    if choice is not None:
        named = isinstance(choice, dict)
        asked["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}} if named else choice
    form = found.get("text", {}).get("format")
    if isinstance(form, dict) and form.get("type") == "json_schema":
        inner = {name: value for name, value in form.items() if name != "type"}
        asked["response_format"] = {"type": "json_schema", "json_schema": inner}
    elif isinstance(form, dict) and form.get("type") != "text":
        asked["response_format"] = form
    return asked


def _tool(tool: Mapping[str, Any], at: int) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise Refused(f"tools[{at}] is of type {tool.get('type')!r:.40}: only functions are supported", "tools")
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


class _Response:
    """A response as it comes: items of its output, one after another, and the events about them."""

    def __init__(self, head: dict[str, Any], events: AsyncIterator[Event], keep: Any) -> None:
        self._head, self._events, self._keep = head, events, keep
        self._items: list[dict[str, Any]] = []
        self._number = -1

    async def whole(self) -> dict[str, Any]:
        """Returns the response when it has ended. Raises the errors of its events."""
        last: dict[str, Any] = {}
        async for each in self._events:
            for found in self._take(each):
                last = found
        response: dict[str, Any] = last["response"]
        return response

    async def stream(self) -> AsyncIterator[bytes]:
        """Yields the events of the response."""
        for name in ("response.created", "response.in_progress"):
            yield self._event({"type": name, "response": self._head})
        try:
            async for each in self._events:
                for found in self._take(each):
                    yield self._event(found)
        except Exception as error:
            status, text = status_of(error)
            code = "server_error" if status >= 500 else "invalid_prompt"
            told = {**self._head, "status": "failed", "error": {"code": code, "message": text}}
            yield self._event({"type": "response.failed", "response": told})

    def _event(self, found: Mapping[str, Any]) -> bytes:
        self._number += 1
        return event({**found, "sequence_number": self._number}, found["type"])

    def _take(self, each: Event) -> list[dict[str, Any]]:
        """Returns the events that follow from one of the engine."""
        found: list[dict[str, Any]] = []
        if isinstance(each, Wrote):
            kind = _KIND[each.part]
            if not self._items or self._items[-1]["type"] != kind or self._items[-1]["status"] != "in_progress":
                found += [*self._done(), *self._new_text(kind)]
            self._items[-1]["content"][0]["text"] += each.text
            found.append({"type": f"{_PART[kind]}.delta", **self._place(), "delta": each.text, **_PROBS[kind]})
        elif isinstance(each, Called):
            item = {
                "type": "function_call", "id": f"fc_{secrets.token_hex(12)}", "call_id": each.id, "name": each.name,
                "arguments": "", "status": "in_progress",
            }  # fmt: skip
            found += [*self._done(), *self._added(item)]
        elif isinstance(each, Argued):
            self._items[-1]["arguments"] += each.text
            place = {name: value for name, value in self._place().items() if name != "content_index"}
            found.append({"type": "response.function_call_arguments.delta", **place, "delta": each.text})
        elif isinstance(each, Ended):
            found += [*self._done(), self._completed(each)]
        return found

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1, "content_index": 0}

    def _added(self, item: dict[str, Any]) -> list[dict[str, Any]]:
        self._items.append(item)
        return [{"type": "response.output_item.added", "output_index": len(self._items) - 1, "item": {**item}}]

    def _new_text(self, kind: str) -> list[dict[str, Any]]:
        item: dict[str, Any]
        if kind == "message":
            item = {"type": kind, "id": f"msg_{secrets.token_hex(12)}", "role": "assistant", "status": "in_progress"}
        else:
            item = {"type": kind, "id": f"rs_{secrets.token_hex(12)}", "summary": [], "status": "in_progress"}
        found = self._added({**item, "content": []})
        part = dict(_EMPTY[kind])
        self._items[-1]["content"] = [part]
        return [*found, {"type": "response.content_part.added", **self._place(), "part": {**part}}]

    def _done(self) -> list[dict[str, Any]]:
        """Returns the events at the end of the last item."""
        if not self._items or self._items[-1]["status"] != "in_progress":
            return []
        item, place = self._items[-1], self._place()
        item["status"] = "completed"
        found: list[dict[str, Any]] = []
        if item["type"] == "function_call":
            del place["content_index"]
            name = "response.function_call_arguments.done"
            found.append({"type": name, **place, "arguments": item["arguments"], "name": item["name"]})
        else:
            (part,) = item["content"]
            found.append({"type": f"{_PART[item['type']]}.done", **place, "text": part["text"], **_PROBS[item["type"]]})
            found.append({"type": "response.content_part.done", **place, "part": {**part}})
        return [*found, {"type": "response.output_item.done", "output_index": len(self._items) - 1, "item": {**item}}]

    def _completed(self, end: Ended) -> dict[str, Any]:
        usage = {
            "input_tokens": end.prompt_tokens, "input_tokens_details": {"cached_tokens": end.kept_tokens},
            "output_tokens": end.new_tokens, "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": end.prompt_tokens + end.new_tokens,
        }  # fmt: skip
        status = "completed" if end.whole else "incomplete"
        why = None if end.whole else {"reason": "max_output_tokens"}
        told = {**self._head, "status": status, "incomplete_details": why, "output": self._items, "usage": usage}
        self._keep(self._head["id"], _message_of(self._items))
        return {"type": f"response.{status}", "response": told}


_PART = {"message": "response.output_text", "reasoning": "response.reasoning_text"}
_PROBS: Mapping[str, Mapping[str, Any]] = {"message": {"logprobs": []}, "reasoning": {}}
_EMPTY: Mapping[str, Mapping[str, Any]] = {
    "message": {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
    "reasoning": {"type": "reasoning_text", "text": ""},
}


def _message_of(items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the items of a response as one message of the assistant."""
    made: dict[str, Any] = {"role": "assistant", "content": ""}
    for item in items:
        if item["type"] == "message":
            made["content"] += item["content"][0]["text"]
        elif item["type"] == "reasoning":
            made["reasoning_content"] = made.get("reasoning_content", "") + item["content"][0]["text"]
        else:
            function = {"name": item["name"], "arguments": item["arguments"]}
            made.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": function})
    return made
