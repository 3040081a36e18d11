"""Conversions as a user runs them: the command line in a process of its own, and what must be equal of two packs."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

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


def start(words: list[str]) -> subprocess.Popen[str]:
    """Ctrl-C reaches it also where the tests themselves run in the background, without a terminal."""
    return subprocess.Popen(
        words, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


def run(words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, env=environment(), capture_output=True, text=True, check=False, timeout=900)


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
