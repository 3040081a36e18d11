"""A plugin of pytest that writes down the messages of errors that tests expect: `-p tests.unchanged_messages`."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

_PLACE = re.compile(r"/[^\s'\",:;]*/(?=[^\s/'\",:;]+)")
_HELD = re.compile(r"\d{7,}|\d+\.\d\d MB")
"""What messages about memory say of how much the process of a test holds."""
_messages: set[str] = set()


def _note(message: str) -> None:
    line = _PLACE.sub("", message.replace("\n", " "))
    _messages.add(_HELD.sub("N", line) if "memory budget" in line else line)


def pytest_configure() -> None:
    """Exceptions that `pytest.raises` catches, and what programs print to stderr."""
    raises = type(pytest.raises(KeyError, match="any"))
    leave, ended = raises.__exit__, subprocess.run

    def __exit__(self: Any, kind: Any, value: Any, trace: Any) -> Any:
        if value is not None:
            _note(f"{kind.__name__}: {value}")
        return leave(self, kind, value, trace)

    def run(*given: Any, **named: Any) -> Any:
        done = ended(*given, **named)
        if isinstance(done.stderr, str):
            for line in done.stderr.splitlines():
                if line.startswith(("moert: ", "moeconv: ")):
                    _note(line)
        return done

    raises.__exit__ = __exit__  # type: ignore[method-assign]
    subprocess.run = run  # type: ignore[assignment]


def pytest_unconfigure() -> None:
    out = Path(os.environ["UNCHANGED_MESSAGES"])
    out.with_name(f"{out.name}-{os.getpid()}").write_text("\n".join(sorted(_messages)), encoding="utf-8")
