"""A process of its own for each program that is timed: commands go in as JSON lines, measurements come back.

A session is a loaded model; between commands it does nothing. Its methods are the commands:
- generate(ids, new_tokens) → new tokens, seconds to the first of them, seconds to the last; greedy;
- read(ids, room), then go_on(new_tokens) → seconds, as often as `room` tokens allow, then forget(): a long prompt that
  is read once;
- logits(ids) → [vocab] after the last token;
- fill() → None; all weights are in memory afterwards;
- bytes_per_token() → bytes of weights that one token reads, scales counted, embeddings not: they are looked up;
- expert_bits() → bits of an expert's weight, scales counted.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any


def serve(load: Callable[[], object]) -> None:
    """Answers the commands on stdin until it ends: [name of a method, its arguments...] → its result, one a line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to stderr
    session = load()
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(session, name)(*arguments)), file=answers, flush=True)


class ProgramEnded(RuntimeError):
    """A program that was asked for something and ended; the message has its command and how it ended."""


def ending(status: int) -> str:
    """How a process ended, from its return code."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = "a signal without a name"
    return f"ended with status {status} ({name})"


class Runner:
    """The other end: starts the program, and ends it at the end of a with block."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        enter: Callable[[], object] | None = None,
    ) -> None:
        """Variables of OpenMP are taken out, so that each program runs with what it sets itself. `enter` is called in
        the new process before the program starts."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
        self.command, clean = list(command), clean | dict(environment or {})
        self._process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=clean, preexec_fn=enter
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, name: str, *arguments: Any) -> Any:
        """Calls a method of the session. Raises ProgramEnded."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps([name, *arguments]) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass
        line = self._process.stdout.readline()
        if not line:
            raise ProgramEnded(f"{' '.join(self.command)} {ending(self._process.wait())}")
        return json.loads(line)

    def __enter__(self) -> Runner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()
