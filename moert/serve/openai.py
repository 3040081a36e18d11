"""OpenAI's interface: /v1/chat/completions, /v1/completions, /v1/models, /v1/embeddings."""

from __future__ import annotations

import asyncio
import secrets
import time
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from moert.engine.engine import Engine
from moert.engine.generation import GenerationSettings, Likely, Logprobs
from moert.engine.scoring import POOLINGS
from moert.engine.text import Detokenizer, Text
from moert.errors import InputInvalid, SettingInvalid, TemplateFailed
from moert.pack.codec import F32
from moert.serve.answers import answered, body_of, event, refusal, unless_gone, whole
from moert.serve.fields import (
    ANY,
    BIAS,
    FLAG,
    STOP,
    TABLE,
    TABLES,
    TEXT,
    Field,
    Form,
    Refused,
    number,
    one_of,
    read,
)
from moert.serve.fields import whole as whole_number
from moert.serve.forms import Argued, Called, Ended, Event, Wish, Wrote
from moert.serve.tools import Tools, form_of
from moert.serve.worker import PART_TOKENS, Worker, status_of

if TYPE_CHECKING:
    from moert.serve.host import Host

T = TypeVar("T")
_MOST_TOKENS = 1 << 30
_PASS_TOKENS = 4 * PART_TOKENS
"""Tokens of texts whose embeddings are computed in one pass: other answers wait for its end."""
SAMPLING: Mapping[str, Field] = {
    "temperature": number(0, 100),
    "top_p": number(1e-9, 1),
    "top_k": whole_number(0, 1 << 30),
    "min_p": number(0, 1),
    "seed": whole_number(-(1 << 63), (1 << 63) - 1),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "repetition_penalty": number(0.1, 10),
    "logit_bias": BIAS,
    "stop": STOP,
    "max_tokens": whole_number(0, _MOST_TOKENS),
}
_BOTH: Mapping[str, Field] = {
    **SAMPLING, "model": TEXT, "stream": FLAG, "stream_options": TABLE, "n": whole_number(1, 16),
}  # fmt: skip
_CHAT: Mapping[str, Field] = {
    **_BOTH, "messages": TABLES, "max_completion_tokens": whole_number(1, _MOST_TOKENS), "logprobs": FLAG,
    "top_logprobs": whole_number(0, 20), "tools": TABLES, "tool_choice": ANY, "parallel_tool_calls": FLAG,
    "response_format": TABLE, "chat_template_kwargs": TABLE, "reasoning_effort": TEXT, "grammar": TEXT,
    "continue_final_message": FLAG, "add_generation_prompt": FLAG, "max_tokens": whole_number(1, _MOST_TOKENS),
}  # fmt: skip
_TEXT: Mapping[str, Field] = {
    **_BOTH, "prompt": ANY, "logprobs": whole_number(0, 20), "echo": FLAG, "suffix": one_of(""),
    "best_of": whole_number(1, 16), "response_format": TABLE, "grammar": TEXT,
}  # fmt: skip
_EMBED: Mapping[str, Field] = {
    "model": TEXT, "input": ANY, "encoding_format": one_of("float", "base64"), "dimensions": whole_number(1, 1 << 30),
    "pooling": one_of(*POOLINGS),
}  # fmt: skip
_MOST_PROMPTS, MOST_INPUTS = 64, 2048
_HARMLESS = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "verbosity",
)  # fmt: skip
_CHAT_FORM, _TEXT_FORM = Form(_CHAT, _HARMLESS, ("messages",)), Form(_TEXT, _HARMLESS, ("prompt",))
_EMBED_FORM = Form(_EMBED, ("user",), ("input",))
FORMS = {
    "/v1/chat/completions": _CHAT_FORM, "/v1/completions": _TEXT_FORM, "/v1/embeddings": _EMBED_FORM,
}  # fmt: skip
_STREAM: Mapping[str, Field] = {"include_usage": FLAG, "include_obfuscation": FLAG}
_NAMES = {
    "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "stop": "stop",
    "presence_penalty": "presence_penalty", "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repeat_penalty",
}  # fmt: skip
_FIELDS = {name: own for own, name in _NAMES.items()} | {
    "max_new_tokens": "max_tokens", "json_schema": "response_format", "variables": "chat_template_kwargs",
}  # fmt: skip
_OWN: Mapping[str, str] = {}
_OF_CHAT, OF_INPUT = {"prompt": "messages"}, {"prompt": "input", "messages": "input"}


def drawn_seed() -> int:
    """Returns the seed of a request that names none."""
    return secrets.randbits(62)


def settings_of(
    found: Mapping[str, Any], defaults: GenerationSettings, count: int = 1, **more: Any
) -> list[GenerationSettings]:
    """Returns the settings of `count` answers, which differ in their seeds. Without a seed, one is drawn. Raises
    Refused, or SettingInvalid."""
    changes = {name: found[own] for own, name in _NAMES.items() if own in found}
    if "logit_bias" in found:
        changes["logit_bias"] = {int(token): float(value) for token, value in found["logit_bias"].items()}
    most = found.get("max_completion_tokens", found.get("max_tokens"))
    if most is not None:
        changes["max_new_tokens"] = most
    base = defaults.but(**changes, **more)
    if base.temperature == 0.0:
        return [base] * count
    seed = found["seed"] & ((1 << 62) - 1) if "seed" in found else drawn_seed()
    return [base.but(seed=seed + number) for number in range(count)]


def messages_of(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages as templates take them: their text in one piece. Raises Refused."""
    if not found:
        raise Refused("messages is empty: give at least one", "messages")
    made = []
    for at, message in enumerate(found):
        role = message.get("role")
        if role not in ("system", "developer", "user", "assistant", "tool", "function"):
            raise Refused(
                f"messages[{at}].role is {role!r:.40}: it should be system, user, assistant or tool", "messages"
            )
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(_part(part, at) for part in content)
        elif content is not None and not isinstance(content, str):
            raise Refused(f"messages[{at}].content should be text or a list of parts", "messages")
        if content is None and role != "assistant":
            raise Refused(f"messages[{at}].content is missing", "messages")
        made.append({**message, "role": "system" if role == "developer" else role, "content": content or ""})
    return made


def _part(part: Any, at: int) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("text", part.get("refusal")) if isinstance(part, dict) else part
    if kind not in ("text", "input_text", "output_text", "refusal", None) or not isinstance(text, str):
        raise Refused(f"messages[{at}].content has a part of type {kind!r:.40}: only text is supported", "messages")
    return text


def usage_of(ends: Sequence[Ended], prompts: int = 1) -> dict[str, Any]:
    """Returns the figures of a request's tokens; `prompts`: of this many the first answer's prompt counts."""
    each = max(1, len(ends) // max(1, prompts))
    first = ends[::each]
    read, new = sum(end.prompt_tokens for end in first), sum(end.new_tokens for end in ends)
    kept = sum(end.kept_tokens for end in first)
    return {
        "prompt_tokens": read, "completion_tokens": new, "total_tokens": read + new,
        "prompt_tokens_details": {"cached_tokens": kept},
    }  # fmt: skip


def failed(error: BaseException, own: Mapping[str, str] = _OWN) -> Response:
    """Returns the response for an error. `own`: names of fields that the path has in place of those of a text's."""
    status, text = status_of(error)
    return refusal({"error": told(error, status, text, own)}, status)


def told(error: BaseException, status: int, text: str, own: Mapping[str, str] = _OWN) -> dict[str, Any]:
    """Returns an error as OpenAI has it."""
    kind = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}.get(status)
    kind = kind or ("server_error" if status >= 500 else "invalid_request_error")
    return {"message": text, "type": kind, "param": _field(error, own), "code": None}


def _field(error: BaseException, own: Mapping[str, str]) -> str | None:
    """Returns the name of the field that an error is about, if it is about one."""
    if isinstance(error, Refused):
        return error.field and own.get(error.field, error.field)
    if isinstance(error, (InputInvalid, TemplateFailed)):
        return own.get("prompt", "prompt")
    name = _FIELDS.get(error.name, error.name) if isinstance(error, SettingInvalid) else None
    return own.get(name, name) if name is not None and (name in _CHAT or name in _TEXT) else None


def routes(host: Host) -> list[Route]:
    """Returns the paths of this interface."""
    chats, embeds = partial(failed, own=_OF_CHAT), partial(failed, own=OF_INPUT)
    return [
        Route("/v1/chat/completions", host.guarded(partial(_chat, host), chats), methods=["POST"]),
        Route("/v1/completions", host.guarded(partial(_complete, host), failed), methods=["POST"]),
        Route("/v1/embeddings", host.guarded(partial(_embed, host), embeds), methods=["POST"]),
        Route("/v1/models", host.guarded(partial(_models, host), failed), methods=["GET"]),
        Route("/v1/models/{name:path}", host.guarded(partial(_model, host), failed), methods=["GET"]),
    ]


# Chat -----------------------------------------------------------------------------------------------------------------


async def _chat(host: Host, request: Request) -> Any:
    found = _CHAT_FORM.read(await body_of(request))
    messages = messages_of(found["messages"])
    options = read(found.get("stream_options", {}), _STREAM)
    name, worker = await host.worker(found.get("model"))
    tools = Tools.of(worker.engine, found)
    more: dict[str, Any] = {}
    if found.get("logprobs"):
        more["logprobs"] = found.get("top_logprobs", 0)
    elif "top_logprobs" in found:
        raise Refused("top_logprobs goes with logprobs: true", "top_logprobs")
    settings = settings_of(found, host.defaults, found.get("n", 1), **more, **tools.settings(found))
    variables = dict(found.get("chat_template_kwargs", {}))
    if "reasoning_effort" in found:
        variables.setdefault("reasoning_effort", found["reasoning_effort"])
    talk = tools.talk(messages, variables, _continues(found))
    ticket, text = worker.submit(Wish([talk], settings), host.loop), worker.engine.text
    head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": name}
    return await answered(
        request, worker, ticket, bool(found.get("stream")),
        lambda: _chat_stream(head, ticket.events(), bool(options.get("include_usage")), len(settings), text),
        lambda: _chat_whole(head, ticket.events(), len(settings), text),
    )  # fmt: skip


def _continues(found: Mapping[str, Any]) -> bool:
    """Returns whether the answer goes on from the last message. Raises Refused."""
    continues: bool = found.get("continue_final_message", False)
    if found.get("add_generation_prompt", not continues) == continues:
        other = "false" if continues else "true"
        raise Refused(
            f"add_generation_prompt should be {other} where continue_final_message is {str(continues).lower()}",
            "add_generation_prompt",
        )
    return continues


async def _chat_stream(
    head: Mapping[str, Any], events: AsyncIterator[Event], usage: bool, count: int, text: Text
) -> AsyncIterator[bytes]:
    base = {"id": head["id"], "object": "chat.completion.chunk", "created": head["created"], "model": head["model"]}
    more = {"usage": None} if usage else {}

    def chunk(choice: int, delta: Mapping[str, Any], reason: str | None = None, probs: Any = None) -> bytes:
        one = {"index": choice, "delta": delta, "logprobs": probs, "finish_reason": reason}
        return event({**base, "choices": [one], **more})

    ends: list[Ended] = []
    called: set[int] = set()
    try:
        for choice in range(count):
            yield chunk(choice, {"role": "assistant", "content": ""})
        async for each in events:
            if isinstance(each, Wrote):
                name = "content" if each.part == "answer" else "reasoning_content"
                yield chunk(each.choice, {name: each.text}, None, _chat_probs(each.logprobs, text))
            elif isinstance(each, Called):
                called.add(each.choice)
                function = {"name": each.name, "arguments": ""}
                call = {"index": each.call, "id": each.id, "type": "function", "function": function}
                yield chunk(each.choice, {"tool_calls": [call]})
            elif isinstance(each, Argued):
                yield chunk(each.choice, {"tool_calls": [{"index": each.call, "function": {"arguments": each.text}}]})
            else:
                ends.append(each)
                yield chunk(each.choice, {}, _reason(each, each.choice in called), _chat_probs(each.logprobs, text))
    except Exception as error:
        yield event({"error": told(error, *status_of(error), _OF_CHAT)})
        return
    if usage:
        yield event({**base, "choices": [], "usage": usage_of(ends)})
    yield event(b"[DONE]")


async def _chat_whole(head: Mapping[str, Any], events: AsyncIterator[Event], count: int, text: Text) -> dict[str, Any]:
    texts: list[dict[str, str]] = [{"answer": "", "thinking": ""} for _ in range(count)]
    calls: list[list[dict[str, Any]]] = [[] for _ in range(count)]
    probs: list[list[Logprobs]] = [[] for _ in range(count)]
    ends: dict[int, Ended] = {}
    async for each in events:
        if isinstance(each, Wrote):
            texts[each.choice][each.part] += each.text
            probs[each.choice] += each.logprobs
        elif isinstance(each, Called):
            calls[each.choice].append({
                "id": each.id, "type": "function", "function": {"name": each.name, "arguments": ""},
            })  # fmt: skip
        elif isinstance(each, Argued):
            calls[each.choice][each.call]["function"]["arguments"] += each.text
        else:
            ends[each.choice] = each
            probs[each.choice] += each.logprobs
    choices = []
    for choice in range(count):
        content = texts[choice]["answer"]
        message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls[choice] else None}
        if thought := texts[choice]["thinking"].rstrip("\n"):
            message["reasoning_content"] = thought
        if calls[choice]:
            message["tool_calls"] = calls[choice]
        choices.append({
            "index": choice, "message": message, "logprobs": _chat_probs(probs[choice], text),
            "finish_reason": _reason(ends[choice], bool(calls[choice])),
        })  # fmt: skip
    usage = usage_of([ends[choice] for choice in range(count)])
    return {
        "id": head["id"], "object": "chat.completion", "created": head["created"], "model": head["model"],
        "choices": choices, "usage": usage,
    }  # fmt: skip


def _reason(end: Ended, called: bool = False) -> str:
    if not end.whole:
        return "length"
    return "tool_calls" if called else "stop"


def _chat_probs(found: Sequence[Logprobs], text: Text) -> dict[str, Any] | None:
    def likely(token: Likely) -> dict[str, Any]:
        return {"token": token.text, "logprob": token.logprob, "bytes": [*text.bytes_of(token.id, token.text)]}

    if not found:
        return None
    content = [{**likely(step.chosen), "top_logprobs": [*map(likely, step.likeliest)]} for step in found]
    return {"content": content, "refusal": None}


# Text -----------------------------------------------------------------------------------------------------------------


async def _complete(host: Host, request: Request) -> Any:
    found = _TEXT_FORM.read(await body_of(request))
    prompts = texts_of(found["prompt"], "prompt", _MOST_PROMPTS)
    options = read(found.get("stream_options", {}), _STREAM)
    count = found.get("n", 1)
    if found.get("best_of", count) != count:
        raise Refused("best_of is not supported: leave it out", "best_of")
    name, worker = await host.worker(found.get("model"))
    if found.get("echo"):
        return await _echoed(host, request, worker, name, found, prompts)
    if found.get("max_tokens") == 0:
        raise Refused("max_tokens is 0: without echo it should be 1 or more", "max_tokens")
    more = {"logprobs": found["logprobs"]} if "logprobs" in found else {}
    settings = settings_of(found, host.defaults, count, **more, **form_of(found))
    ticket, text = worker.submit(Wish(prompts, settings), host.loop), worker.engine.text
    head = {
        "id": f"cmpl-{secrets.token_hex(12)}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": name,
    }
    return await answered(
        request, worker, ticket, bool(found.get("stream")),
        lambda: _text_stream(
            head, ticket.events(), bool(options.get("include_usage")), len(prompts), _placed(text, len(prompts) * count)
        ),
        lambda: _text_whole(head, ticket.events(), len(prompts), _placed(text, len(prompts) * count)),
    )  # fmt: skip


def texts_of(given: Any, field: str, most: int) -> list[Any]:
    """Returns the texts in a field, texts or lists of token ids. Raises Refused."""

    def is_ids(value: Any) -> bool:
        right = isinstance(value, list) and bool(value)
        return right and all(isinstance(each, int) and not isinstance(each, bool) for each in value)

    if isinstance(given, str) or is_ids(given):
        return [given]
    if isinstance(given, list) and given and all(isinstance(each, str) or is_ids(each) for each in given):
        if len(given) > most:
            raise Refused(f"{field} has {len(given)} texts, at most {most} are taken at once", field)
        return given
    raise Refused(f"{field} should be text, a list of token ids, or a list of these", field)


class _Placed:
    """The text that tokens make up as they come, and where in it each begins: the tokens of a character together."""

    def __init__(self, names: Detokenizer) -> None:
        self._names, self._length = names, 0

    def offset(self, token: int) -> int:
        """Returns the place of the next token."""
        at = self._length
        self._length += len(self._names.push(token))
        return at


def _placed(text: Text, count: int) -> list[_Placed]:
    return [_Placed(text.detokenizer()) for _ in range(count)]


async def _text_stream(
    head: Mapping[str, Any], events: AsyncIterator[Event], usage: bool, prompts: int, placed: Sequence[_Placed]
) -> AsyncIterator[bytes]:
    more = {"usage": None} if usage else {}
    ends: dict[int, Ended] = {}
    try:
        async for each in events:
            if not isinstance(each, (Wrote, Ended)):
                continue
            text = each.text if isinstance(each, Wrote) else ""
            probs = _text_probs(each.logprobs, placed[each.choice]) if each.logprobs else None
            if isinstance(each, Ended):
                ends[each.choice] = each
            reason = _reason(each) if isinstance(each, Ended) else None
            one = {"index": each.choice, "text": text, "logprobs": probs, "finish_reason": reason}
            yield event({**head, "choices": [one], **more})
    except Exception as error:
        yield event({"error": told(error, *status_of(error))})
        return
    if usage:
        yield event({**head, "choices": [], "usage": usage_of([ends[at] for at in sorted(ends)], prompts)})
    yield event(b"[DONE]")


async def _text_whole(
    head: Mapping[str, Any], events: AsyncIterator[Event], prompts: int, placed: Sequence[_Placed]
) -> dict[str, Any]:
    count = len(placed)
    texts, probs = [""] * count, [list[Logprobs]() for _ in range(count)]
    ends: dict[int, Ended] = {}
    async for each in events:
        if isinstance(each, Wrote):
            texts[each.choice] += each.text
            probs[each.choice] += each.logprobs
        elif isinstance(each, Ended):
            ends[each.choice] = each
            probs[each.choice] += each.logprobs
    choices = [
        {
            "index": at, "text": texts[at], "logprobs": _text_probs(probs[at], placed[at]) if probs[at] else None,
            "finish_reason": _reason(ends[at]),
        }
        for at in range(count)
    ]  # fmt: skip
    return {**head, "choices": choices, "usage": usage_of([ends[at] for at in range(count)], prompts)}


def _text_probs(found: Sequence[Logprobs], placed: _Placed) -> dict[str, Any]:
    return {
        "tokens": [step.chosen.text for step in found],
        "token_logprobs": [step.chosen.logprob for step in found],
        "top_logprobs": [*map(_by_text, found)],
        "text_offset": [placed.offset(step.chosen.id) for step in found],
    }


def _by_text(step: Logprobs | None) -> dict[str, float] | None:
    """Returns the likeliest tokens by their text; of those with the same one, the likeliest."""
    if step is None:
        return None
    found: dict[str, float] = {}
    for each in step.likeliest:
        found.setdefault(each.text, each.logprob)
    return found


async def _echoed(
    host: Host, request: Request, worker: Worker, name: str, found: Mapping[str, Any], prompts: Sequence[Any]
) -> Response:
    """Answers with the prompt itself and the log-probabilities of its tokens, as evaluations ask for; at most one
    token is written behind it."""
    if found.get("stream") or found.get("n", 1) != 1:
        raise Refused("echo goes with one whole answer: leave stream and n out", "echo")
    count, most = found.get("logprobs"), found.get("max_tokens", 16)
    if most > 1:
        raise Refused(f"max_tokens is {most}: with echo it should be 0 or 1", "max_tokens")

    def run(engine: Engine) -> list[list[tuple[int, str, Logprobs | None]]]:
        return [engine.steps(prompt, count or 0, most) for prompt in prompts]

    rows, text = await unless_gone(request, asyncio.wrap_future(worker.call(run, alone=True))), worker.engine.text
    choices = []
    for at, found_steps in enumerate(rows):
        ids, texts, steps = zip(*found_steps, strict=True)
        placed = _Placed(text.detokenizer_with(text.special))
        probs = None
        if count is not None:
            probs = {
                "tokens": texts,
                "token_logprobs": [None if step is None else step.chosen.logprob for step in steps],
                "top_logprobs": [*map(_by_text, steps)],
                "text_offset": [*map(placed.offset, ids)],
            }
        choices.append({"index": at, "text": text.decode(ids), "logprobs": probs, "finish_reason": "length"})
    read_tokens = sum(map(len, rows)) - most * len(rows)
    new = most * len(rows)
    usage = {"prompt_tokens": read_tokens, "completion_tokens": new, "total_tokens": read_tokens + new}
    head = {
        "id": f"cmpl-{secrets.token_hex(12)}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": name,
    }
    return whole({**head, "choices": choices, "usage": usage})


# Embeddings -----------------------------------------------------------------------------------------------------------


async def _embed(host: Host, request: Request) -> Response:
    found = _EMBED_FORM.read(await body_of(request))
    inputs = texts_of(found["input"], "input", MOST_INPUTS)
    name, worker = await host.worker(found.get("model"))
    vectors, tokens = await embedded(request, worker, inputs, found)
    coded = found.get("encoding_format") == "base64"
    data = [
        {"object": "embedding", "index": at, "embedding": _in_base64(each) if coded else each.tolist()}
        for at, each in enumerate(vectors)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return whole({"object": "list", "data": data, "model": name, "usage": usage})


def _in_base64(vector: F32) -> str:
    return b64encode(vector.astype("<f4").tobytes()).decode()


async def embedded(
    request: Request, worker: Worker, inputs: Sequence[str | Sequence[int]], found: Mapping[str, Any]
) -> tuple[list[F32], int]:
    """Returns the embeddings of texts, some in each pass between answers, and the number of their tokens. Raises
    Refused, or the errors of Engine.embed."""
    width = worker.engine.spec.d_model
    if (dimensions := found.get("dimensions", width)) != width:
        raise Refused(f"dimensions is {dimensions}: embeddings of this model have {width}", "dimensions")
    pooling, vectors = found.get("pooling", "mean"), list[F32]()

    def of_next(prompts: Sequence[Sequence[int]], engine: Engine) -> list[F32]:
        count = sum(end <= _PASS_TOKENS for end in accumulate(map(len, prompts)))
        return engine.embed_many(prompts[: max(1, count)], pooling)

    def alone(work: Callable[[Engine], T]) -> Awaitable[T]:
        return unless_gone(request, asyncio.wrap_future(worker.call(work, alone=True)))

    prompts = await alone(lambda engine: [*map(engine.text.ids, inputs)])
    while left := prompts[len(vectors) :]:
        vectors += await alone(partial(of_next, left))
    return vectors, sum(map(len, prompts))


# Models ---------------------------------------------------------------------------------------------------------------


async def _models(host: Host, request: Request) -> Response:
    return whole({"object": "list", "data": [_of_model(host, name) for name in host.names]})


async def _model(host: Host, request: Request) -> Response:
    name = request.path_params["name"]
    host.check(name)
    return whole(_of_model(host, name))


def _of_model(host: Host, name: str) -> dict[str, Any]:
    there = name in host.there
    return {"id": name, "object": "model", "created": host.created, "owned_by": "moert", "in_memory": there}
