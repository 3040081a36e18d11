"""The figures of a run that come from the system."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from moert import stats

ROOT = Path(__file__).resolve().parents[2]
CHILD = "from moert.stats import peak_rss_bytes; print(peak_rss_bytes())"
PARENT = f"""
import subprocess, sys
held = bytes(range(256)) * (300_000_000 // 256)
from moert.stats import peak_rss_bytes
print(peak_rss_bytes(), flush=True)
subprocess.run([sys.executable, "-c", {CHILD!r}], check=True)
"""


def test_the_peak_is_this_process_own_not_that_of_the_one_that_started_it() -> None:
    done = subprocess.run([sys.executable, "-c", PARENT], cwd=ROOT, capture_output=True, text=True, check=True)
    parent, child = map(int, done.stdout.split())
    assert parent > 300_000_000
    assert 1_000_000 < child < 150_000_000


def test_the_peak_without_a_status_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Systems other than Linux have none; some kernels have one without the line."""
    known = stats.peak_rss_bytes()
    monkeypatch.setattr(stats.Path, "read_text", lambda *args, **kwargs: "Name:\tpython\nVmRSS:\t 17 kB\n")
    assert stats.peak_rss_bytes() >= 0.5 * known

    def missing(*args: object, **kwargs: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(stats.Path, "read_text", missing)
    assert stats.peak_rss_bytes() >= 0.5 * known
