"""Chat templates, as what renders them sees them, within bounds on time and memory."""

from __future__ import annotations

import json
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from moert.chat.sandbox import answer
from tests import chat_templates
from tests.fuzz.target import Target

_S, _DATA_BYTES = 0.2, 64 << 20
_SAYS = {"text", "refused", "failed", "memory"}
_MESSAGES = [{"role": "system", "content": "s"}, {"role": "user", "content": "é\n"}, {"role": "tool", "content": "1"}]


class _TooLong(BaseException):
    """Where a template's process would be ended."""


class Unclear(Exception):
    """An answer that the runtime does not understand."""


def _end(number: int, frame: FrameType | None) -> None:
    raise _TooLong


@contextmanager
def _bounded() -> Iterator[None]:
    """Raises _TooLong."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    held = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (1024 * int(held.split()[1]) + _DATA_BYTES, before[1]))
    handler = signal.signal(signal.SIGVTALRM, _end)
    signal.setitimer(signal.ITIMER_VIRTUAL, _S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, handler)
        resource.setrlimit(resource.RLIMIT_DATA, before)


def read(body: bytes) -> None:
    """Raises Unclear, which is a finding."""
    variables = {"messages": _MESSAGES, "tools": [{"name": "f"}], "add_generation_prompt": True, "eos_token": "</s>"}
    request = json.dumps({"template": body.decode("utf-8", "replace"), "variables": variables}).encode()
    try:
        with _bounded():
            said = answer(request)
    except _TooLong:
        return
    if len(said) != 1 or not said.keys() <= _SAYS or not all(isinstance(text, str) for text in said.values()):
        raise Unclear(f"the answer is {said!r:.200}")
    for name in ("refused", "failed"):
        if name in said and not said[name].isprintable():
            raise Unclear(f"{name} is not one line: {said[name]!r:.200}")
    json.dumps(said).encode()


def seeds() -> list[bytes]:
    styles = [text for name, text in vars(chat_templates).items() if name.isupper() and isinstance(text, str)]
    small = (
        "{{ 'a' * 9 ** 9 }}", "{% for i in range(9) %}{{ i|tojson }}{% endfor %}",
        "{{ messages|map(attribute='role')|list }}", "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
        "{{ ''.__class__ }}{{ cycler.__init__ }}",
        "{{ strftime_now('%Y') }}{{ namespace(a=1).a }}{{ dict(a=1)|items|list }}",
    )  # fmt: skip
    return [text.encode() for text in (*styles, *small)]


TARGET = Target(read, (), seeds)
