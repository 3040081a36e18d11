"""A process of its own for what can't be bounded in this one: it has so much time and memory, and says lines."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

_PROGRAM = "import json, sys; sys.path[:0] = json.loads(sys.argv[1]); from {module} import main; main(*sys.argv[2:])"
_PART = 1 << 20
_ENDING_S = 10.0


@dataclass(frozen=True)
class Limits:
    """Seconds of the processor, seconds without a line, bytes of memory of its own, and bytes of a line. Where a system
    does not know the first or the third, `idle_s` and what the program itself counts are left."""

    cpu_s: int
    idle_s: float
    data_bytes: int
    line_bytes: int


class Overlong(Exception):
    """It said a line that is longer than any should be."""


class Process:
    """Runs `main(*arguments)` of a module, which calls `bound` first. Use it in a with block, whose end is its own."""

    def __init__(
        self, module: str, arguments: Sequence[str], limits: Limits, shown: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        """`shown`: whether a person sees what it says on stderr; `environment`: all that it is told, None for what
        this process was."""
        self._limits, self._found = limits, bytearray()
        paths = [str(Path(__file__).parents[2]), *(os.path.realpath(path) for path in sys.path)]
        bounds = json.dumps({"cpu_s": limits.cpu_s, "data_bytes": limits.data_bytes})
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", _PROGRAM.format(module=module), json.dumps(paths), bounds, *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=None if shown else subprocess.DEVNULL,
            start_new_session=True, bufsize=0,
            env={**(os.environ if environment is None else environment), "ARROW_DEFAULT_MEMORY_POOL": "system"},
        )  # fmt: skip
        assert self._process.stdout is not None
        self._waiting = selectors.DefaultSelector()
        self._waiting.register(self._process.stdout, selectors.EVENT_READ)

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._waiting.close()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()

    def send(self, line: bytes) -> None:
        """Where it reads no more, `line` will tell."""
        assert self._process.stdin is not None
        left = memoryview(line + b"\n")
        with suppress(OSError):
            while left:
                left = left[self._process.stdin.write(left) or 0 :]

    def line(self) -> bytes | None:
        """What it says next; None where it has ended. Raises TimeoutError or Overlong."""
        stream = self._process.stdout
        assert stream is not None
        looked, deadline = 0, time.monotonic() + self._limits.idle_s
        while (end := self._found.find(b"\n", looked)) < 0:
            looked = len(self._found)
            if looked > self._limits.line_bytes:
                raise Overlong
            if not self._waiting.select(max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            part = os.read(stream.fileno(), _PART)
            if not part:
                return None
            self._found += part
        line = bytes(self._found[:end])
        del self._found[: end + 1]
        return line

    def ended(self) -> str:
        """How, in words, after `line` gave None."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDING_S)
        status = self._process.poll()
        if status is None:
            return "it closed its output and did not end"
        if hasattr(signal, "SIGXCPU") and status == -signal.SIGXCPU:
            return f"it took more than {self._limits.cpu_s} s of the processor"
        return f"it was ended by signal {-status}" if status < 0 else f"it ended with status {status}"


def bound(bounds: str) -> None:
    """From here on the process that this is called in has so much time of the processor and memory in all."""
    asked: Mapping[str, int] = json.loads(bounds)
    with suppress(ImportError):
        import resource

        cpu_s, data_bytes = asked["cpu_s"], asked["data_bytes"]
        for name, soft, wanted in (
            ("RLIMIT_CPU", cpu_s, cpu_s + 1), ("RLIMIT_DATA", data_bytes, data_bytes), ("RLIMIT_CORE", 0, 0),
        ):  # fmt: skip
            with suppress(AttributeError, ValueError, OSError):  # not every system knows all of them
                _, hard = resource.getrlimit(getattr(resource, name))
                most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
                resource.setrlimit(getattr(resource, name), (min(soft, most), most))


def say(out: IO[bytes], answer: Any) -> None:
    """One line."""
    out.write(json.dumps(answer, default=_strange).encode() + b"\n")


def _strange(value: Any) -> list[str]:
    """For what JSON can't hold: something that is no text either, and says in messages what was there."""
    return [f"{value!r:.60}"]
