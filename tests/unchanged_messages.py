"""A plugin of pytest that writes down the messages of errors that tests expect: `-p tests.unchanged_messages`."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

_PLACE = re.compile(r"/[^\s'\",:;]*/(?=[^\s/'\",:;]+)")
_messages: set[str] = set()


def _note(text: str) -> None:
    for line in text.splitlines():
        if line.startswith(("moert: ", "moeconv: ")):
            _messages.add(_PLACE.sub("", line))


def pytest_configure() -> None:
    """Exceptions that `pytest.raises` catches, and what programs print to stderr."""
    raises = type(pytest.raises(KeyError, match="any"))
    leave, ended = raises.__exit__, subprocess.run

    def __exit__(self: Any, kind: Any, value: Any, trace: Any) -> Any:
        if value is not None:
            _messages.add(_PLACE.sub("", f"{kind.__name__}: {value}").replace("\n", " "))
        return leave(self, kind, value, trace)

    def run(*given: Any, **named: Any) -> Any:
        done = ended(*given, **named)
        if isinstance(done.stderr, str):
            _note(done.stderr)
        return done

    raises.__exit__ = __exit__  # type: ignore[method-assign]
    subprocess.run = run  # type: ignore[assignment]


def pytest_unconfigure() -> None:
    out = Path(os.environ["UNCHANGED_MESSAGES"])
    out.with_name(f"{out.name}-{os.getpid()}").write_text("\n".join(sorted(_messages)), encoding="utf-8")
