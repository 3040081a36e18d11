"""Ollama's interface: /api/chat, /api/generate, /api/embed, /api/tags, /api/show, /api/ps, /api/version."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from datetime import datetime, timezone
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from moert import __version__
from moert.chat.renderer import chat_of
from moert.errors import ChatImpossible
from moert.pack.reader import Pack
from moert.serve.answers import answered, body_of, line, whole
from moert.serve.fields import (
    ANY,
    FLAG,
    TABLE,
    TABLES,
    TEXT,
    Field,
    Form,
    Refused,
    one_of,
    read,
    required,
)
from moert.serve.fields import whole as whole_number
from moert.serve.forms import Argued, Called, Ended, Event, Talk, Wish, Wrote
from moert.serve.openai import MOST_INPUTS, SAMPLING, embedded, messages_of, settings_of, texts_of
from moert.serve.tools import Tools, form_of
from moert.serve.worker import status_of

if TYPE_CHECKING:
    from moert.serve.host import Host

_BOTH: Mapping[str, Field] = {
    "model": TEXT, "stream": FLAG, "options": TABLE, "format": ANY, "keep_alive": ANY, "think": ANY,
}  # fmt: skip
_CHAT: Mapping[str, Field] = {**_BOTH, "messages": TABLES, "tools": TABLES}
_GENERATE: Mapping[str, Field] = {**_BOTH, "prompt": TEXT, "system": TEXT, "raw": FLAG, "suffix": one_of("")}
_EMBED: Mapping[str, Field] = {
    "model": TEXT, "input": ANY, "truncate": one_of(False), "dimensions": whole_number(1, 1 << 30), "options": TABLE,
    "keep_alive": ANY,
}  # fmt: skip
_CHAT_FORM, _GENERATE_FORM = Form(_CHAT, needed=("model",)), Form(_GENERATE, ("context",), ("model",))
_SHOW_FORM = Form({"model": TEXT, "name": TEXT, "verbose": FLAG})
_EMBED_FORM = Form(_EMBED, needed=("model", "input"))
FORMS = {
    "/api/chat": _CHAT_FORM, "/api/embed": _EMBED_FORM, "/api/generate": _GENERATE_FORM, "/api/show": _SHOW_FORM,
}  # fmt: skip
_SAME = ("temperature", "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")
_OPTIONS: Mapping[str, Field] = {
    **{name: SAMPLING[name] for name in _SAME}, "num_predict": whole_number(-2, 1 << 30),
    "repeat_penalty": SAMPLING["repetition_penalty"],
}  # fmt: skip
_MACHINE = ("num_ctx", "num_thread", "num_gpu", "num_batch", "main_gpu", "use_mmap", "use_mlock", "numa", "low_vram")
"""Options of Ollama's own machine, which change no answer here."""


def failed(error: BaseException) -> Response:
    """Returns the response for an error."""
    status, text = status_of(error)
    return whole({"error": text}, status)


def routes(host: Host) -> list[Route]:
    """Returns the paths of this interface."""
    paths = {
        "/api/chat": ("POST", _chat), "/api/generate": ("POST", _generate), "/api/embed": ("POST", _embed),
        "/api/show": ("POST", _show),
        "/api/tags": ("GET", _tags), "/api/ps": ("GET", _running), "/api/version": ("GET", _version),
    }  # fmt: skip
    return [
        Route(path, host.guarded(partial(work, host), failed), methods=[method])
        for path, (method, work) in paths.items()
    ]


async def _chat(host: Host, request: Request) -> Any:
    found = _CHAT_FORM.read(await body_of(request))
    name, worker = await host.worker(found["model"])
    if not found.get("messages"):
        return whole(
            {**_head(name), "message": {"role": "assistant", "content": ""}, "done": True, "done_reason": "load"}
        )
    asked = {**_form(found), "messages": messages_of([_message(each) for each in found["messages"]])}
    tools = Tools.of(worker.engine, asked)
    (settings,) = settings_of(_options(found), host.defaults, **tools.settings(asked))
    messages = asked["messages"]
    talk = tools.talk(messages, _variables(found), messages[-1]["role"] == "assistant")
    ticket = worker.submit(Wish([talk], [settings]), host.loop)
    return await answered(
        request, worker, ticket, found.get("stream", True),
        lambda: _stream(name, ticket.events(), chat=True), lambda: _whole(name, ticket.events(), chat=True),
        b"", "application/x-ndjson",
    )  # fmt: skip


async def _generate(host: Host, request: Request) -> Any:
    found = _GENERATE_FORM.read(await body_of(request))
    name, worker = await host.worker(found["model"])
    prompt: Any = found.get("prompt", "")
    if not prompt:
        return whole({**_head(name), "response": "", "done": True, "done_reason": "load"})
    try:
        worker.engine.speaker  # noqa: B018 - is there a template?
        talks = not found.get("raw", False)
    except ChatImpossible:
        talks = False
    asked = _form(found)
    if talks:
        system = [{"role": "system", "content": found["system"]}] if found.get("system") else []
        prompt = Talk([*system, {"role": "user", "content": prompt}], None, _variables(found))
    elif found.get("system"):
        raise Refused("system goes with a chat template, which raw prompts and some models have not", "system")
    settings = settings_of(_options(found), host.defaults, **form_of(asked))
    ticket = worker.submit(Wish([prompt], settings), host.loop)
    return await answered(
        request, worker, ticket, found.get("stream", True),
        lambda: _stream(name, ticket.events(), chat=False), lambda: _whole(name, ticket.events(), chat=False),
        b"", "application/x-ndjson",
    )  # fmt: skip


async def _embed(host: Host, request: Request) -> Response:
    found = _EMBED_FORM.read(await body_of(request))
    name, worker = await host.worker(found["model"])
    given = found["input"]
    _options(found)
    began_s = time.monotonic()
    inputs = [] if given in ("", []) else texts_of(given, "input", MOST_INPUTS)
    vectors, tokens = await embedded(request, worker, inputs, found)
    return whole({
        "model": name, "embeddings": [vector.tolist() for vector in vectors], "load_duration": 0,
        "total_duration": int((time.monotonic() - began_s) * 1e9), "prompt_eval_count": tokens,
    })  # fmt: skip


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message as OpenAI's interface has it. Raises Refused."""
    if message.get("images"):
        raise Refused("images are not supported", "messages")
    made = {name: value for name, value in message.items() if name not in ("images", "thinking", "tool_name")}
    if message.get("thinking"):
        made["reasoning_content"] = message["thinking"]
    if message.get("tool_calls"):
        calls = message["tool_calls"]
        if not TABLES.takes(calls) or not all(isinstance(each.get("function"), dict) for each in calls):
            raise Refused("tool_calls should be a list of objects with a function", "messages")
        made["tool_calls"] = [
            {
                "id": str(at),
                "type": "function",
                "function": {**call["function"], "arguments": json.dumps(call["function"].get("arguments", {}))},
            }
            for at, call in enumerate(calls)
        ]
    if message.get("role") == "tool":
        made.setdefault("tool_call_id", str(message.get("tool_name", "0")))
    return made


def _form(found: Mapping[str, Any]) -> dict[str, Any]:
    """Returns tools and the form of the answer as OpenAI's interface names them. Raises Refused."""
    asked: dict[str, Any] = {"tools": found["tools"]} if found.get("tools") else {}
    form = found.get("format")
    if form == "json":
        asked["response_format"] = {"type": "json_object"}
    elif isinstance(form, dict):
        asked["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": form}}
    elif form not in (None, ""):
        raise Refused("format should be json or a JSON schema", "format")
    return asked


def _options(found: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings as OpenAI's interface names them. Raises Refused."""
    options = read(found.get("options", {}), _OPTIONS, _MACHINE)
    made = {name: value for name, value in options.items() if name in _SAME}
    if options.get("num_predict", -1) > 0:
        made["max_tokens"] = options["num_predict"]
    if "repeat_penalty" in options:
        made["repetition_penalty"] = options["repeat_penalty"]
    return made


def _variables(found: Mapping[str, Any]) -> dict[str, Any]:
    think = found.get("think")
    if think is None:
        return {}
    if isinstance(think, str):
        return {"enable_thinking": True, "thinking": True, "reasoning_effort": think}
    if not isinstance(think, bool):
        raise Refused("think should be true, false, or a level", "think")
    return {"enable_thinking": think, "thinking": think}


def _head(name: str) -> dict[str, Any]:
    return {"model": name, "created_at": datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")}


def _last(end: Ended) -> dict[str, Any]:
    """Returns the fields of the last line; times in nanoseconds."""
    first, total = int(end.first_s * 1e9), int(end.total_s * 1e9)
    reason = "stop" if end.whole else "length"
    return {
        "done": True, "done_reason": reason, "total_duration": total, "load_duration": 0,
        "prompt_eval_count": end.prompt_tokens, "prompt_eval_duration": first, "eval_count": end.new_tokens,
        "eval_duration": max(0, total - first),
    }  # fmt: skip


class _Calls:
    """The tool calls of an answer, each whole: Ollama's interface has no pieces of them."""

    def __init__(self) -> None:
        self._name, self._text, self._count = "", "", 0

    def take(self, each: Event) -> list[dict[str, Any]]:
        """Returns the calls that end before an event."""
        if isinstance(each, Argued):
            self._text += each.text
            return []
        done = self._whole()
        if isinstance(each, Called):
            self._name = each.name
        return done

    def _whole(self) -> list[dict[str, Any]]:
        if not self._name:
            return []
        try:
            arguments = json.loads(self._text or "{}")
        except ValueError:
            arguments = {"text": self._text}
        call = {"function": {"index": self._count, "name": self._name, "arguments": arguments}}
        self._name, self._text, self._count = "", "", self._count + 1
        return [call]


async def _stream(name: str, events: AsyncIterator[Event], chat: bool) -> AsyncIterator[bytes]:
    calls = _Calls()
    try:
        async for each in events:
            for call in calls.take(each):
                message = {"role": "assistant", "content": "", "tool_calls": [call]}
                yield line({**_head(name), "message": message, "done": False}) + b"\n"
            if isinstance(each, Wrote):
                yield line({**_head(name), **_said(each.part, each.text, chat), "done": False}) + b"\n"
            elif isinstance(each, Ended):
                yield line({**_head(name), **_said("answer", "", chat), **_last(each)}) + b"\n"
    except Exception as error:
        yield line({"error": status_of(error)[1]}) + b"\n"


def _said(part: str, text: str, chat: bool) -> dict[str, Any]:
    said, thought = (text, "") if part == "answer" else ("", text)
    more = {"thinking": thought} if thought else {}
    return {"message": {"role": "assistant", "content": said, **more}} if chat else {"response": said, **more}


async def _whole(name: str, events: AsyncIterator[Event], chat: bool) -> dict[str, Any]:
    calls, found, last = _Calls(), list[dict[str, Any]](), dict[str, Any]()
    texts = {"answer": "", "thinking": ""}
    async for each in events:
        found += calls.take(each)
        if isinstance(each, Wrote):
            texts[each.part] += each.text
        elif isinstance(each, Ended):
            last = _last(each)
    said: dict[str, Any] = _said("answer", texts["answer"], chat)
    inner = said["message"] if chat else said
    if texts["thinking"]:
        inner["thinking"] = texts["thinking"]
    if found:
        inner["tool_calls"] = found
    return {**_head(name), **said, **last}


# Models ---------------------------------------------------------------------------------------------------------------


async def _tags(host: Host, request: Request) -> Response:
    return whole({"models": [_listed(host, name) for name in host.names]})


async def _running(host: Host, request: Request) -> Response:
    models = [
        {
            **_listed(host, name), "expires_at": _NEVER, "size_vram": 0, "requests": worker.unfinished,
            "memory_share_bytes": host.share_bytes(name),
        }
        for name, worker in host.there.items()
    ]  # fmt: skip
    return whole({"models": models})


_NEVER = "9999-12-31T23:59:59Z"


def _listed(host: Host, name: str) -> dict[str, Any]:
    pack = Pack.open(host.settings.packs[name])
    manifest = pack.manifest
    changed = datetime.fromtimestamp(pack.file("manifest.json").stat().st_mtime, timezone.utc)
    return {
        "name": name, "model": name, "modified_at": changed.isoformat().replace("+00:00", "Z"),
        "size": manifest.nbytes(), "digest": "", "details": _DETAILS,
    }  # fmt: skip


_DETAILS = {
    "parent_model": "", "format": "model.pack", "family": "moert", "families": ["moert"], "parameter_size": "",
    "quantization_level": "mixed",
}  # fmt: skip


async def _show(host: Host, request: Request) -> Response:
    found = _SHOW_FORM.read(await body_of(request))
    name = found["model"] if "model" in found else required(found, "name")
    name, worker = await host.worker(name)
    engine = worker.engine
    try:
        template = chat_of(engine.pack, engine.text, host.settings.engine.template)
        text, tools = template.template, "tools" in (template.tool_template or template.template)
    except ChatImpossible:
        text, tools = "", False
    spec = engine.spec
    return whole({
        "modelfile": "", "parameters": "", "template": text, "details": _DETAILS,
        "model_info": {
            "general.architecture": "moert", "context_length": spec.max_positions,
            "embedding_length": spec.d_model, "vocabulary": spec.vocab_size,
        },
        "capabilities": ["completion", *(["tools"] if tools else [])],
        "modified_at": _listed(host, name)["modified_at"],
    })  # fmt: skip


async def _version(host: Host, request: Request) -> Response:
    return whole({"version": __version__})
