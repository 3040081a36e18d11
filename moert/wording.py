"""What settings are called where the user says them: options on a command line, arguments in Python."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_OPTIONS = {"n_return": "--return"}  # others are called alike
_command_line = ContextVar("command_line", default=False)


@contextmanager
def command_line() -> Iterator[None]:
    """Messages made inside speak of options."""
    before = _command_line.set(True)
    try:
        yield
    finally:
        _command_line.reset(before)


def said(name: str, value: object = None) -> str:
    """A setting, or one with a value, for messages: `--memory 450000000`, or `memory=450000000`."""
    if _command_line.get():
        option = _OPTIONS.get(name, f"--{name.replace('_', '-')}")
        return option if value is None else f"{option} {value}"
    return name if value is None else f"{name}={value!r}"
