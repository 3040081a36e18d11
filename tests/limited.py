"""Commands of moeconv in a process that can neither hang nor eat the machine, many of them behind one another."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from typing import Any, NamedTuple

DATA_BYTES = 4 << 30
_PROGRAM = """
import contextlib, io, json, os, resource, sys, traceback
from moert.machine import peak_bytes
resource.setrlimit(resource.RLIMIT_DATA, (int(sys.argv[1]),) * 2)
resource.setrlimit(resource.RLIMIT_CPU, (900, 900))
said = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

def load_splits(words):
    from moeconv.calibration import load_splits
    from pathlib import Path
    text, heldout, tokenizer = words
    found = load_splits(text, heldout, seed=0, tokenizer=None if tokenizer is None else Path(tokenizer))
    print(found.digest("calibration"), found.digest("heldout"))
    return 0

def moeconv(words):
    from moeconv.command.cli import _exit_code
    return _exit_code(words)

for line in sys.stdin:
    kind, words = json.loads(line)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = {"load_splits": load_splits, "moeconv": moeconv}[kind](words)
        except Exception as error:
            from moeconv.errors import ConversionError
            code = 2 if isinstance(error, ConversionError) else 1
            print(f"moeconv: {error}" if code == 2 else traceback.format_exc(), file=sys.stderr)
    used = peak_bytes()  # its own, where getrusage can say that of the process that started it
    print(json.dumps([code, out.getvalue(), err.getvalue(), used]), file=said, flush=True)
"""


class Done(NamedTuple):
    """`held_bytes`: the most that the process held until then."""

    code: int
    out: str
    err: str
    held_bytes: int

    @property
    def complaint(self) -> str:
        """The one line with which a command ended that must end with exit code 2."""
        assert self.code == 2, (self.code, self.err)
        lines = [line for line in self.err.splitlines() if line.startswith("moeconv: ")]
        assert len(lines) == 1, self.err
        assert self.err.endswith(f"{lines[0]}\n"), self.err
        assert "Traceback" not in self.err
        assert len(lines[0]) < 1200, lines[0]
        assert self.out == ""
        return lines[0].removeprefix("moeconv: ")


class Limited:
    """That process; it is started when it is first needed, and again after one that was ended."""

    def __init__(self, data_bytes: int = DATA_BYTES) -> None:
        self._data_bytes = data_bytes
        self._process: subprocess.Popen[bytes] | None = None

    def moeconv(self, *words: object, seconds: float = 300) -> Done:
        """A command line."""
        return self._run("moeconv", [str(word) for word in words], seconds)

    def load_splits(
        self, text: object, heldout: object = None, tokenizer: object = None, seconds: float = 300
    ) -> Done:  # fmt: skip
        """Prints the digests of both parts."""
        return self._run(
            "load_splits", [None if each is None else str(each) for each in (text, heldout, tokenizer)], seconds
        )

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _run(self, kind: str, words: list[Any], seconds: float) -> Done:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(self._data_bytes)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}, bufsize=0,
            )  # fmt: skip
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps([kind, words]).encode() + b"\n")
        ready, _, _ = select.select([process.stdout], [], [], seconds)
        line = b""
        while ready and not line.endswith(b"\n") and (part := os.read(process.stdout.fileno(), 1 << 20)):
            line += part
        if not line.endswith(b"\n"):
            status = process.poll() if ready else f"still running after {seconds} s"
            self.close()
            raise AssertionError(f"{kind} {words}: it was not done: {status}")
        return Done(*json.loads(line))
