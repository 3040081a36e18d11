"""Anthropic's interface: /v1/messages, and /v1/messages/count_tokens."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from moert.serve.answers import answered, body_of, event, refusal, whole
from moert.serve.fields import ANY, FLAG, TABLE, TABLES, TEXT, TEXTS, Field, Form, Refused, read
from moert.serve.fields import whole as whole_number
from moert.serve.forms import Argued, Called, Ended, Event, Talk, Wish, Wrote
from moert.serve.openai import SAMPLING, settings_of
from moert.serve.tools import Tools
from moert.serve.worker import Ticket, status_of

if TYPE_CHECKING:
    from moert.serve.host import Host

_MESSAGES: Mapping[str, Field] = {
    "model": TEXT, "messages": TABLES, "max_tokens": whole_number(1, 1 << 30), "system": ANY, "stop_sequences": TEXTS,
    "stream": FLAG, "tools": TABLES, "tool_choice": TABLE, "thinking": TABLE, "output_config": TABLE,
    "context_management": Field(lambda value: _keeps_all(value), "an object whose edits clear nothing"),
    "thread": TABLE,
    **{name: SAMPLING[name] for name in ("temperature", "top_p", "top_k")},
}  # fmt: skip
_OUTPUT: Mapping[str, Field] = {"effort": TEXT, "format": TABLE}
_HARMLESS = ("metadata", "service_tier", "cache_control")
_FORM = Form(_MESSAGES, _HARMLESS, ("messages", "max_tokens"))
_COUNT = Form(_MESSAGES, _HARMLESS, ("messages",))
FORMS = {"/v1/messages": _FORM, "/v1/messages/count_tokens": _COUNT}
_KINDS = {
    401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error",
    503: "overloaded_error",
}  # fmt: skip


def _keeps_all(given: Any) -> bool:
    edits = given.get("edits", []) if isinstance(given, dict) and given.keys() <= {"edits"} else None
    kind = "clear_thinking_20251015"
    return isinstance(edits, list) and all(each == {"type": kind, "keep": "all"} for each in edits)


def failed(error: BaseException) -> Response:
    """Returns the response for an error."""
    status, text = status_of(error)
    told = _told(status, text)
    if getattr(error, "field", None) == "thread":  # upon which clients send the whole conversation
        told["error"]["details"] = {"error_code": "thread_not_found"}
    return refusal(told, status)


def _told(status: int, text: str) -> dict[str, Any]:
    kind = _KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": text}}


def routes(host: Host) -> list[Route]:
    """Returns the paths of this interface."""
    return [
        Route("/v1/messages", host.guarded(partial(_message, host), failed), methods=["POST"]),
        Route("/v1/messages/count_tokens", host.guarded(partial(_count, host), failed), methods=["POST"]),
    ]


async def _message(host: Host, request: Request) -> Any:
    found = _FORM.read(await body_of(request))
    name, worker = await host.worker(found.get("model"))
    asked = _asked(found)
    tools = Tools.of(worker.engine, asked)
    stops = tuple(found.get("stop_sequences", ()))
    changes = {**found, "stop": list(stops)} if stops else found
    (settings,) = settings_of(changes, host.defaults, **tools.settings(asked))
    talk = _talk(tools, asked, found)
    ticket = worker.submit(Wish([talk], [settings]), host.loop)
    head = {
        "id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "model": name,
    }  # fmt: skip
    return await answered(
        request, worker, ticket, bool(found.get("stream")),
        lambda: _stream(head, ticket, stops), lambda: _whole(head, ticket.events(), stops),
        b'event: ping\ndata: {"type": "ping"}\n\n',
    )  # fmt: skip


async def _count(host: Host, request: Request) -> Response:
    found = _COUNT.read(await body_of(request))
    _, worker = await host.worker(found.get("model"))
    asked = _asked(found)
    talk = _talk(Tools.of(worker.engine, asked), asked, found)
    ids = await asyncio.wrap_future(worker.ids(talk.asked))
    return whole({"input_tokens": len(ids)})


def _talk(tools: Tools, asked: Mapping[str, Any], found: Mapping[str, Any]) -> Talk:
    """Returns the conversation of a request, whose answer goes on from a last message of the assistant."""
    messages = asked["messages"]
    return tools.talk(messages, _variables(found), messages[-1]["role"] == "assistant")


def _variables(found: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the variables by which templates turn thinking on and off."""
    effort = read(found.get("output_config", {}), _OUTPUT).get("effort")
    made: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if "thinking" not in found:
        return made
    kind = found["thinking"].get("type")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise Refused("thinking.type should be enabled, disabled or adaptive", "thinking")
    return {**made, "enable_thinking": kind != "disabled", "thinking": kind != "disabled"}


def _asked(found: Mapping[str, Any]) -> dict[str, Any]:
    """Returns messages and tools as OpenAI's interface has them. Raises Refused."""
    messages: list[dict[str, Any]] = []
    if "system" in found:
        messages.append({"role": "system", "content": _text(found["system"], "system")})
    given = found["messages"]
    if not given:
        raise Refused("messages is empty: give at least one", "messages")
    for at, message in enumerate(given):
        messages += _converted(message, at)
    asked: dict[str, Any] = {"messages": messages}
    if found.get("tools"):
        asked["tools"] = [_tool(each, at) for at, each in enumerate(found["tools"])]
    if "tool_choice" in found:
        choice = found["tool_choice"]
        kind = choice.get("type")
        if kind not in ("auto", "any", "tool", "none"):
            raise Refused("tool_choice.type should be auto, any, tool or none", "tool_choice")
        named = {"type": "function", "function": {"name": choice.get("name")}}
        asked["tool_choice"] = named if kind == "tool" else {"any": "required"}.get(kind, kind)
        if choice.get("disable_parallel_tool_use"):
            asked["parallel_tool_calls"] = False
    form = read(found.get("output_config", {}), _OUTPUT).get("format")
    if form is not None:
        asked["response_format"] = {"type": form.get("type"), "json_schema": form}
    if found.get("thread", {}).get("type", "create") != "create":
        raise Refused("there is no such thread: send all messages", "thread", 404)
    return asked


def _tool(tool: Mapping[str, Any], at: int) -> dict[str, Any]:
    if not isinstance(tool.get("name"), str) or not isinstance(tool.get("input_schema"), dict):
        raise Refused(f"tools[{at}] should have a name and an input_schema: tools of the server are not there", "tools")
    function = {"name": tool["name"], "description": tool.get("description", ""), "parameters": tool["input_schema"]}
    return {"type": "function", "function": function}


def _converted(message: Mapping[str, Any], at: int) -> list[dict[str, Any]]:
    """Returns one message as templates take it: results of tools are messages of their own."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise Refused(f"messages[{at}].role should be user or assistant", "messages")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(each, dict) for each in blocks):
        raise Refused(f"messages[{at}].content should be text or a list of blocks", "messages")
    texts, thoughts, calls, results = list[str](), list[str](), list[dict[str, Any]](), list[dict[str, Any]]()
    for block in blocks:
        kind = block.get("type")
        if kind == "text" and isinstance(block.get("text"), str):
            texts.append(block["text"])
        elif kind == "thinking" and role == "assistant" and isinstance(block.get("thinking"), str):
            thoughts.append(block["thinking"])
        elif kind == "redacted_thinking" and role == "assistant":
            continue
        elif kind == "tool_use" and role == "assistant":
            function = {"name": str(block.get("name")), "arguments": json.dumps(block.get("input", {}))}
            calls.append({"id": str(block.get("id")), "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            text = _text(block.get("content", ""), f"messages[{at}]")
            results.append({"role": "tool", "tool_call_id": str(block.get("tool_use_id")), "content": text})
        else:
            raise Refused(
                f"messages[{at}].content has a block of type {kind!r:.40}, which is not supported", "messages"
            )
    made: dict[str, Any] = {"role": role, "content": "".join(texts)}
    if calls:
        made["tool_calls"] = calls
    if thoughts:
        made["reasoning_content"] = "".join(thoughts)
    return [*results, *([made] if texts or calls or thoughts or not results else [])]


def _text(given: Any, name: str) -> str:
    if isinstance(given, str):
        return given
    right = isinstance(given, list) and all(
        isinstance(each, dict) and each.get("type") == "text" and isinstance(each.get("text"), str) for each in given
    )
    if not right:
        raise Refused(f"{name} should be text or a list of text blocks", name.partition("[")[0])
    return "".join(each["text"] for each in given)


def _reason(end: Ended, called: bool, stops: Sequence[str]) -> tuple[str, str | None]:
    """Returns the reason of an end, and the stop sequence that brought it."""
    if end.reason == "stop_string":
        return ("stop_sequence", end.stop) if end.stop in stops else ("end_turn", None)
    if not end.whole:
        return "max_tokens", None
    return "tool_use" if called else "end_turn", None


def _usage(end: Ended) -> dict[str, int]:
    return {
        "input_tokens": end.prompt_tokens - end.kept_tokens, "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": end.kept_tokens, "output_tokens": end.new_tokens,
    }  # fmt: skip


async def _whole(head: Mapping[str, Any], events: AsyncIterator[Event], stops: Sequence[str]) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = []
    end: Ended | None = None
    called = False
    async for each in events:
        if isinstance(each, Wrote):
            kind = "text" if each.part == "answer" else "thinking"
            if not blocks or blocks[-1]["type"] != kind:
                blocks.append({"type": "text", "text": ""} if kind == "text" else _THOUGHT.copy())
            blocks[-1][kind] += each.text
        elif isinstance(each, Called):
            called = True
            blocks.append({"type": "tool_use", "id": each.id, "name": each.name, "input": ""})
        elif isinstance(each, Argued):
            blocks[-1]["input"] += each.text
        else:
            end = each
    assert end is not None
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = _object(block["input"])
    reason, stop = _reason(end, called, stops)
    return {**head, "content": blocks, "stop_reason": reason, "stop_sequence": stop, "usage": _usage(end)}


_THOUGHT = {"type": "thinking", "thinking": "", "signature": ""}


def _object(text: str) -> Any:
    """Returns the object that arguments are in JSON; those that are none under the name `text`."""
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return {"text": text}
    return found if isinstance(found, dict) else {"value": found}


async def _stream(head: Mapping[str, Any], ticket: Ticket, stops: Sequence[str]) -> AsyncIterator[bytes]:
    def told(name: str, **fields: Any) -> bytes:
        return event({"type": name, **fields}, name)

    usage = _usage(Ended(0, "cancelled", 0, ticket.prompt_tokens, 0))  # the last event says how many were kept
    message = {**head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    yield told("message_start", message=message)
    at, kind, called = -1, "", False
    try:
        async for each in ticket.events():
            wanted = ("text" if each.part == "answer" else "thinking") if isinstance(each, Wrote) else "tool_use"
            begins = isinstance(each, Called) or (isinstance(each, Wrote) and wanted != kind)
            if kind and (begins or isinstance(each, Ended)):
                if kind == "thinking":
                    yield told("content_block_delta", index=at, delta={"type": "signature_delta", "signature": ""})
                yield told("content_block_stop", index=at)
                kind = ""
            if begins:
                at, kind = at + 1, wanted
                block: dict[str, Any] = {"type": "text", "text": ""} if kind == "text" else _THOUGHT.copy()
                if isinstance(each, Called):
                    called = True
                    block = {"type": "tool_use", "id": each.id, "name": each.name, "input": {}}
                yield told("content_block_start", index=at, content_block=block)
            if isinstance(each, Wrote):
                delta = {"type": f"{kind}_delta", kind: each.text}
                yield told("content_block_delta", index=at, delta=delta)
            elif isinstance(each, Argued):
                delta = {"type": "input_json_delta", "partial_json": each.text}
                yield told("content_block_delta", index=at, delta=delta)
            elif isinstance(each, Ended):
                reason, stop = _reason(each, called, stops)
                ended = {"stop_reason": reason, "stop_sequence": stop}
                yield told("message_delta", delta=ended, usage=_usage(each))
                yield told("message_stop")
    except Exception as error:
        yield event(_told(*status_of(error)), "error")
