"""Renders one chat template where it can reach nothing: a process of its own, started by moert.chat.renderer.

It reads two lines of JSON, its limits and its request, and answers with one. Templates behave as in transformers; their
rights follow Jinja's immutable sandbox.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any

import jinja2.constants  # Jinja imports these when it needs them, and no file can be opened then
import jinja2.debug
import jinja2.sandbox
import jinja2.utils
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser

_STACK_BYTES = 4 << 20
_LONGEST = 300  # letters of a message
_WARM = "{% for one in ['é'] %}{{ one|tojson|fromjson }}{{ strftime_now('%Y') }}{% endfor %}{{ raise_exception('') }}"


class Refused(TemplateError):
    """The message of a template that called raise_exception."""


class Generation(Extension):
    """The tag {% generation %} … {% endgeneration %}: marks text that a model writes when it is trained; rendered as it
    stands."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("said"), [], [], body).set_lineno(line)

    def said(self, caller: Callable[[], str]) -> str:
        return caller()


class Namespace(jinja2.utils.Namespace):
    """Jinja's namespace, without names that begin with an underscore."""

    def __init__(*args: Any, **values: Any) -> None:
        self, *rest = args  # so that a value may be called self
        given = dict(*rest, **values)
        for name in given:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class Dict:
    """The name dict in templates: makes dictionaries, and has nothing else of the type but fromkeys."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace can't hold {name!r}: such names are not the template's")


def _raise(message: object) -> None:
    raise Refused(str(message))


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Returns the environment that templates are rendered in."""
    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, LoopControlExtension]
    )
    made.filters.update(tojson=_to_json, fromjson=json.loads)
    made.globals.update(raise_exception=_raise, strftime_now=_now, dict=Dict(), namespace=Namespace)
    return made


def rendered(template: str, variables: Mapping[str, Any]) -> str:
    """Returns the rendered template. Raises every error that a template can bring about."""
    return environment().from_string(template).render(variables)


def confine(cpu_s: int, data_bytes: int) -> None:
    """Limits this process from here on to `cpu_s` more seconds of the processor, `data_bytes` of memory in all, no
    file, no other process. Raises ImportError where the system can't limit a process."""
    import resource

    spent = math.ceil(time.process_time())
    bounds = {
        "RLIMIT_CPU": (spent + cpu_s, spent + cpu_s + 1),
        "RLIMIT_DATA": (data_bytes, data_bytes),
        "RLIMIT_STACK": (_STACK_BYTES, _STACK_BYTES),
        **dict.fromkeys(("RLIMIT_NOFILE", "RLIMIT_NPROC", "RLIMIT_FSIZE", "RLIMIT_CORE"), (0, 0)),
    }
    for name, bound in bounds.items():
        with suppress(AttributeError, ValueError, OSError):  # not every system knows all of them
            resource.setrlimit(getattr(resource, name), bound)


def answer(request: bytes) -> dict[str, str]:
    """Returns {"text": …}, or the reason why there is none: {"refused": …} in the template's words, {"memory": …},
    {"failed": …}."""
    try:
        asked = json.loads(request)
        return {"text": rendered(asked["template"], asked["variables"])}
    except Refused as error:
        return {"refused": _line(error)}
    except MemoryError:
        return {"memory": ""}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {_line(error)}"}


def _line(error: Exception) -> str:
    """Returns the message of an error in one line of moderate length, without characters that a terminal would obey."""
    text = " ".join(str(error).split())
    line = "" if not isinstance(error, jinja2.TemplateSyntaxError) else f" (line {error.lineno} of the template)"
    return "".join(letter if letter.isprintable() else "?" for letter in text)[:_LONGEST] + line


def main() -> None:
    answer(json.dumps({"template": _WARM, "variables": {}}).encode())  # finds codecs and the time zone
    bounds, _, request = sys.stdin.buffer.read().partition(b"\n")
    confine(**json.loads(bounds))
    body = json.dumps(answer(request)).encode()
    with open(1, "wb", closefd=False) as out:
        out.write(body)
    os._exit(0)
