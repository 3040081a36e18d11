"""chat.json: the template and the tokens that it names."""

from __future__ import annotations

from moert.chat.conversation import begins_with, marks_of
from moert.chat.renderer import Renderer
from moert.pack.errors import PackError
from moert.pack.text import ChatFormat, dump_chat, parse_chat
from tests.fuzz.target import Target


def read(body: bytes) -> None:
    """Read, and made part of what the template's process is sent."""
    chat = parse_chat(body)
    begins_with(chat.template, marks_of(chat))
    Renderer(chat).request([{"role": "user", "content": "x"}], None, None, True)
    dump_chat(chat)


def seeds() -> list[bytes]:
    plain = ChatFormat("{{ messages[0].content }}<think>", {"eos_token": "</s>"})
    tools = ChatFormat("{{ bos_token }}", {"bos_token": "<|channel|>"}, "{{ tools }}")
    return [b"".join(map(bytes.strip, dump_chat(chat).splitlines())) for chat in (plain, tools)]


TARGET = Target(read, (PackError,), seeds)
