"""Chat templates, and prompts rendered by them."""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moert.engine.text import Text
from moert.errors import ChatImpossible, InputInvalid, SettingInvalid, TemplateFailed, said
from moert.machine import limits_processes, used_up_time
from moert.pack.errors import ChatInvalid
from moert.pack.reader import Pack
from moert.pack.text import GIVEN, MAX_CHAT_BYTES, ChatFormat, load_chat

MAX_REQUEST_BYTES = 8 << 20
_EACH_BYTE = 16  # bytes of memory for each of the conversation: read, decoded, joined, written
_EACH_LETTER = 512  # and for each of the template while it is compiled (400 measured),
_LONG_TEMPLATE = 1 << 16  # as far as templates go that are meant well
_BESIDE_BYTES = 6 << 20  # stack, page tables, and what libraries do not share
_PROGRAM = "import sys; sys.path += sys.argv[1:]; from moert.chat.sandbox import main; main()"
_USUAL_LETTERS = 8  # of a token, or more
_PART = 1 << 16
Rendered = tuple[str, str]
"""A prompt that a template has made, and the beginning of the reply to it, if there is one."""
_DAMAGED = "the template in the pack is damaged or means harm"


@dataclass(frozen=True)
class Limits:
    """The limits of one rendering: seconds of the processor, seconds in all, and bytes of memory where template and
    conversation are empty."""

    cpu_s: int = 5
    wall_s: float = 120.0
    data_bytes: int = 20 << 20


class Renderer:
    """A renderer of prompts by a chat template, each in a process of its own. `room`: makes room, while that process
    runs, for the most bytes that it will take."""

    def __init__(
        self,
        chat: ChatFormat,
        limits: Limits | None = None,
        room: Callable[[int], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.chat, self._limits, self._room = chat, limits or Limits(), room

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        to_be_answered: bool = True,
    ) -> str:
        """Returns the prompt. `variables`: other variables of the template (enable_thinking); `to_be_answered`: the
        prompt ends where the model is to write.

        Raises InputInvalid for messages or values that are none, TemplateFailed where the template refuses them or
        fails, and the errors of `room`.
        """
        request = self.request(messages, tools, variables, to_be_answered)
        with self._room(self.takes(request)):
            return self.rendered(request)

    def rendered(self, request: bytes) -> str:
        """Returns the prompt of a request, where there is room for the process. Raises TemplateFailed."""
        body, status = _run(request, replace(self._limits, data_bytes=self._data_bytes(len(request))))
        return self._understood(body, status)

    def rendering(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> tuple[Callable[[], Rendered], int]:
        """Returns a function for the prompt, without the beginning of a reply, to be called where there is room for the
        most memory [bytes] that its process takes, which is the second result. Raises InputInvalid; the function raises
        TemplateFailed."""
        request = self.request(messages, tools, variables, True)
        return lambda: (self.rendered(request), ""), self.takes(request)

    def continuing(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> tuple[Callable[[], Rendered], int]:
        """Returns the same for `continued`, whose two processes run one after the other. Raises InputInvalid, and so
        does the function."""
        last = messages[-1] if messages else {}
        content = last.get("content")
        if last.get("role") != "assistant" or not isinstance(content, str):
            raise InputInvalid("the last message is not the assistant's, or no text: it can't be continued")
        mark = f"continued{secrets.token_hex(8)}"
        requests = [
            self.request([*messages[:-1], {**last, "content": text}], tools, variables, False)
            for text in (content, mark)
        ]

        def run() -> Rendered:
            whole, marked = map(self.rendered, requests)
            before, found, _ = marked.partition(mark)
            for text in (content, content.rstrip(), content.strip()):
                if found and whole.startswith(before + text):
                    return before, text
            raise InputInvalid("the model's chat template changes the last message: it can't be continued")

        return run, max(map(self.takes, requests))

    def continued(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """Returns the prompt before the content of the last message, which is the model's own, and that content as the
        template writes it; nothing closes it. Raises the errors of `render`, and InputInvalid where there is
        no such message or the template changes it, but for white space around it."""
        work, nbytes = self.continuing(messages, tools, variables)
        with self._room(nbytes):
            return work()

    def takes(self, request: bytes) -> int:
        """Returns the most memory [bytes] that the process which renders a request takes."""
        return self._data_bytes(len(request)) + _BESIDE_BYTES

    def first_message(self, text: Text, tokens: int) -> tuple[int, int]:
        """Returns the tokens of the prompt that a first message of `tokens` tokens becomes, and the most memory [bytes]
        that the process which renders it takes. Raises the errors of `render`."""
        around = len(text.encode(self.render([{"role": "user", "content": "a"}]), whole=True))
        said = [{"role": "user", "content": "a" * _USUAL_LETTERS * tokens}]
        return around + tokens, self.takes(self.request(said, None, None, True))

    def _data_bytes(self, request_bytes: int) -> int:
        letters = min(_LONG_TEMPLATE, len(self.chat.template))
        return self._limits.data_bytes + _EACH_LETTER * letters + _EACH_BYTE * request_bytes

    def request(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None,
        to_be_answered: bool,
    ) -> bytes:
        """Returns the request that is sent to the process. Raises InputInvalid and SettingInvalid."""
        template, named = self.chat.template, dict(variables or {})
        if tools is not None and self.chat.tool_template is not None:
            template = self.chat.tool_template
        if given := sorted(GIVEN & named.keys()):
            raise SettingInvalid("variables", f"can't name {given[0]}: every template is given that")
        asked = {
            **self.chat.tokens, **named, "messages": _plain(messages), "tools": tools, "documents": None,
            "add_generation_prompt": to_be_answered,
        }  # fmt: skip
        try:
            request = json.dumps({"template": template, "variables": asked}).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise InputInvalid(f"messages, tools and variables should be what JSON can hold ({error})") from None
        if len(request) > MAX_REQUEST_BYTES:
            raise InputInvalid(f"the conversation takes {len(request)} bytes, at most {MAX_REQUEST_BYTES} are rendered")
        return request

    def _understood(self, body: bytes, status: int) -> str:
        answer: Any = None
        with suppress(ValueError, RecursionError):
            answer = json.loads(body)
        found = answer if isinstance(answer, dict) and status == 0 else {}
        if isinstance(text := found.get("text"), str):
            return text
        if "refused" in found:
            raise TemplateFailed(f"the model's chat template refuses this conversation: {found['refused']}")
        if "failed" in found:
            raise TemplateFailed(
                f"the model's chat template can't be rendered ({found['failed']}): moert run takes prompts without it"
            )
        if used_up_time(status):
            raise _too_long(self._limits.cpu_s)
        if "memory" in found:
            raise TemplateFailed(f"the model's chat template takes too much memory: {_DAMAGED}")
        ended = f"by signal {-status}" if status < 0 else f"with status {status}"
        raise TemplateFailed(
            f"the process that renders the model's chat template ended {ended}: {_DAMAGED}, or memory was short"
        )


def _plain(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages as transformers hands them to a template: without fields that are None, thoughts under all the
    names that templates look for them. Raises InputInvalid."""
    listed = isinstance(messages, Sequence) and not isinstance(messages, (str, bytes))
    if not listed or not messages or not all(isinstance(each, Mapping) and "role" in each for each in messages):
        raise InputInvalid("messages should be a list of {'role': …, 'content': …}, with at least one")
    return [_with_thoughts({name: value for name, value in each.items() if value is not None}) for each in messages]


def _with_thoughts(message: dict[str, Any]) -> dict[str, Any]:
    names = ("reasoning_content", "thinking", "reasoning")
    thought = next((message[name] for name in names if name in message), None)
    return message if thought is None else {"thinking": thought, **message, "reasoning_content": thought}


def _run(request: bytes, limits: Limits) -> tuple[bytes, int]:
    """Returns the answer of the process, and its exit status. Raises TemplateFailed."""
    bounds = json.dumps({"cpu_s": limits.cpu_s, "data_bytes": limits.data_bytes}).encode()
    process, ours = _start()
    try:
        with ours:
            body = _exchange(ours, bounds + b"\n" + request, limits.wall_s, limits.data_bytes)
        if len(body) <= limits.data_bytes:
            process.wait(limits.wall_s)
    except (TimeoutError, subprocess.TimeoutExpired):
        raise _too_long(limits.wall_s) from None
    finally:
        process.kill()
        process.wait()
    return body, process.returncode


def _start() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Starts the process; returns it, and the socket that leads to it. Raises TemplateFailed."""
    if not limits_processes():
        raise TemplateFailed(
            "this system can't limit the process that renders a chat template: moert run takes prompts without it"
        )
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", "-c", _PROGRAM, *_folders()],
                stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=subprocess.DEVNULL, cwd="/",
                start_new_session=True,
                env={name: os.environ[name] for name in ("TZ", "LD_LIBRARY_PATH") if name in os.environ},
            )  # fmt: skip
        except BaseException as error:
            ours.close()
            if isinstance(error, OSError):
                raise TemplateFailed(
                    f"no process can be started to render the chat template ({error.strerror})"
                ) from None
            raise
    return process, ours


def _folders() -> list[str]:
    """Returns the folders from which the process imports. Raises TemplateFailed if a package is missing."""
    found = [Path(__file__).parents[2]]
    for name in ("jinja2", "markupsafe"):
        spec = None
        with suppress(ValueError):  # where a module of that name has none
            spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise TemplateFailed(f"chat templates need the package {name}, which is not installed: install moert again")
        found.append(Path(spec.origin).parents[1])
    return list(dict.fromkeys(map(str, found)))


def _exchange(ours: socket.socket, body: bytes, wall_s: float, most_bytes: int) -> bytes:
    """Sends all of the body and returns the answer, a little more than `most_bytes` at most. Raises TimeoutError."""
    ours.setblocking(False)
    if hasattr(socket, "SO_NOSIGPIPE"):
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_NOSIGPIPE, 1)
    deadline, left, found = time.monotonic() + wall_s, memoryview(body), bytearray()
    with selectors.DefaultSelector() as waiting:
        waiting.register(ours, selectors.EVENT_READ | selectors.EVENT_WRITE)
        while len(found) <= most_bytes:
            ready = waiting.select(max(0.0, deadline - time.monotonic()))
            if not ready or time.monotonic() > deadline:
                raise TimeoutError
            if ready[0][1] & selectors.EVENT_WRITE:
                left = _sent(ours, left)
                if not left:
                    waiting.modify(ours, selectors.EVENT_READ)
            if ready[0][1] & selectors.EVENT_READ:
                part = _received(ours)
                if not part:
                    break
                found += part
    return bytes(found)


def _sent(ours: socket.socket, left: memoryview) -> memoryview:
    """Sends a part, and returns the rest that is still to be sent; nothing where nobody reads any more."""
    try:
        left = left[ours.send(left[:_PART], getattr(socket, "MSG_NOSIGNAL", 0)) :]
    except BlockingIOError:
        return left
    except OSError:
        return left[:0]
    if not left:
        with suppress(OSError):
            ours.shutdown(socket.SHUT_WR)
    return left


def _received(ours: socket.socket) -> bytes:
    """Returns a part of the answer; empty where the other side has ended."""
    try:
        return ours.recv(_PART)
    except ConnectionError:
        return b""


def _too_long(seconds: float) -> TemplateFailed:
    return TemplateFailed(f"the model's chat template is not done after {seconds:g} s: {_DAMAGED}")


_EACH = "{{ bos_token }}{% for m in messages %}"
_END = "{% endfor %}{% if add_generation_prompt %}"
TEMPLATES: Mapping[str, tuple[str, str]] = {
    "chatml": (
        _EACH + "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
        + _END + "{{ '<|im_start|>assistant\n' }}{% endif %}",
        "<|im_end|>",
    ),
    "llama3": (
        _EACH + "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content + '<|eot_id|>' }}"
        + _END + "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
        "<|eot_id|>",
    ),
    "alpaca": (
        _EACH + "{% if m.role == 'system' %}{{ m.content + '\n\n' }}"
        "{% elif m.role == 'user' %}{{ '### Instruction:\n' + m.content + '\n\n' }}"
        "{% else %}{{ '### Response:\n' + m.content + '\n\n' }}{% endif %}"
        + _END + "{{ '### Response:\n' }}{% endif %}",
        "### Instruction:",
    ),
}  # fmt: skip
"""Name → a template as models trained for that form of conversation know it, and the text that ends a reply there."""


def chat_of(pack: Pack, text: Text, template: str | None = None) -> ChatFormat:
    """Returns the format of a model's conversations: the pack's own template, or `template`, a name or a file. Raises
    ChatImpossible, SettingInvalid, or a PackError for a chat.json that can't be used."""
    if pack.manifest.model.encoder is not None:
        raise ChatImpossible(_impossible("its model reads with an encoder, and takes prompts as they are"))
    own = load_chat(pack)
    if template is None:
        if own is None:
            why = f"it has no chat template: say which by {said('template')} (chatml, say), or give prompts as they are"
            raise ChatImpossible(_impossible(why))
        return own
    tokens = _own_tokens(pack, text) if own is None else dict(own.tokens)
    if template in TEMPLATES:
        body, end = TEMPLATES[template]
        return ChatFormat(body, {**tokens, "eos_token": end})
    return ChatFormat(_read(template), tokens)


def _impossible(why: str) -> str:
    return f"the pack can't chat: {why}, with moert run"


def _own_tokens(pack: Pack, text: Text) -> dict[str, str]:
    """Returns the model's special tokens by the names that templates have for them, of a pack that has no chat.json."""
    special = pack.manifest.model.tokens
    ids = {"bos_token": special.bos, "eos_token": next(iter(special.eos), None)}
    names = {name: text.tokenizer.id_to_token(number) for name, number in ids.items() if number is not None}
    return {name: token or "" for name, token in names.items()}


def _read(path: str) -> str:
    """Returns the template in a file. Raises SettingInvalid."""
    try:
        with Path(path).open("rb") as file:
            body = file.read(MAX_CHAT_BYTES + 1)
        if not body or len(body) > MAX_CHAT_BYTES:
            raise ChatInvalid(f"it should be text of 1 to {MAX_CHAT_BYTES} bytes")
        return body.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError, ChatInvalid) as error:
        why = getattr(error, "strerror", None) or getattr(error, "reason", None) or str(error)
        names = ", ".join(TEMPLATES)
        raise SettingInvalid("template", f"{path!r} can't be used ({why}): give a file, or one of {names}") from None
