"""Conversions by the command line in a process of its own, and what must be equal of two packs."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

WORDS = ["ab", "cde", "fghi", "kl", "mno", "pqrs", "tu", "vwx", "yz", "aeiou"]
TIMES = {"seconds", "evaluation_seconds", "steps"}


def running_text(path: Path, rows: int = 60) -> Path:
    """Lines of random words, as JSONL."""
    rng = random.Random(0)
    lines = [json.dumps({"text": " ".join(rng.choice(WORDS) for _ in range(18))}) for _ in range(rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


def command(model: Path, calib: Path | None, out: Path, work: Path, *more: str) -> list[str]:
    text = [] if calib is None else ["--calib", str(calib), "--metric", "perplexity", "--context", "32"]
    places = ["--out", str(out), "--work", str(work)]
    return [sys.executable, "-m", "moeconv", "quantize", str(model), *text, *places, *more]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


_FORKING = multiprocessing.get_context("forkserver")


class Started:
    """A command of moeconv in a process of its own. It is forked from one that has imported the libraries and done
    nothing else, which saves the seconds that their import takes. What it prints goes to files."""

    def __init__(self, words: list[str]) -> None:
        assert words[:3] == [sys.executable, "-m", "moeconv"], words
        self._printed = [tempfile.NamedTemporaryFile() for _ in range(2)]  # noqa: SIM115
        paths = [file.name for file in self._printed]
        _FORKING.set_forkserver_preload(["tests.preloaded"])
        self._process = _FORKING.Process(target=_command, args=(words[3:], paths, environment()))
        with patch.dict(os.environ, environment()):  # the first one starts what is forked from
            self._process.start()

    @property
    def returncode(self) -> int | None:
        """Less than 0 where a signal ended it."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None and self._process.pid is not None:
            os.kill(self._process.pid, number)

    def wait(self, timeout: float = 900) -> int:
        self._process.join(timeout)
        assert self.returncode is not None, f"it still runs after {timeout} s"
        return self.returncode

    def communicate(self, timeout: float = 900) -> tuple[str, str]:
        """Returns what it printed, to stdout and to stderr, once it has ended."""
        self.wait(timeout)
        out, err = (Path(file.name).read_text() for file in self._printed)
        return out, err


def _command(words: list[str], printed: list[str], variables: dict[str, str]) -> None:
    """Runs in the forked process."""
    from moeconv.command import cli

    os.environ.update(variables)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, path in enumerate(printed, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["moeconv", *words]
    cli.main()


def run(words: list[str]) -> subprocess.CompletedProcess[str]:
    process = Started(words)
    out, err = process.communicate()
    return subprocess.CompletedProcess(words, process.wait(), out, err)


def complaint(done: subprocess.CompletedProcess[str]) -> str:
    """The one line with which a run ended that must end with exit code 2; progress may come before it."""
    assert done.returncode == 2, (done.returncode, done.stderr)
    assert "Traceback" not in done.stderr, done.stderr
    assert done.stdout == "", done.stdout
    lines = [line for line in done.stderr.splitlines() if line.startswith("moeconv: ")]
    assert len(lines) == 1, done.stderr
    assert done.stderr.splitlines()[-1] == lines[0], done.stderr
    return lines[0]


def contents(pack: Path) -> dict[str, Any]:
    """What is in every file of a pack, but for times, and for the checksums of what holds times."""
    found: dict[str, Any] = {}
    for path in sorted(pack.rglob("*")):
        if path.is_file():
            found[str(path.relative_to(pack))] = path.read_bytes()
    found["report.json"] = _timeless(json.loads(found["report.json"]))
    manifest = json.loads(found["manifest.json"])
    del manifest["crc32"], manifest["files"]["report.json"]
    found["manifest.json"] = manifest
    return found


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _timeless(item) for key, item in value.items() if key not in TIMES}
    return [_timeless(item) for item in value] if isinstance(value, list) else value


def journals(work: Path) -> list[Path]:
    return sorted(work.glob("*/journal.jsonl"))
