"""The figures of a run: those that come from the system, and how all of them are said."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from moert import machine
from moert.stats import PAGE_CACHE, ExpertCounters, ReadAhead, RequestTimes, RunStats, run_stats

ROOT = Path(__file__).resolve().parents[2]
CHILD = "from moert.machine import peak_bytes; print(peak_bytes())"
PARENT = f"""
import subprocess, sys
held = bytes(range(256)) * (300_000_000 // 256)
from moert.machine import peak_bytes
print(peak_bytes(), flush=True)
subprocess.run([sys.executable, "-c", {CHILD!r}], check=True)
"""


def test_the_peak_is_this_process_own_not_that_of_the_one_that_started_it() -> None:
    done = subprocess.run([sys.executable, "-c", PARENT], cwd=ROOT, capture_output=True, text=True, check=True)
    parent, child = map(int, done.stdout.split())
    assert parent > 300_000_000
    assert 1_000_000 < child < 150_000_000


def test_the_peak_without_a_status_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Systems other than Linux have none; some kernels have one without the line."""
    known = machine.peak_bytes()
    monkeypatch.setattr(machine.Path, "read_text", lambda *args, **kwargs: "Name:\tpython\nVmRSS:\t 17 kB\n")
    assert machine.peak_bytes() >= 0.5 * known

    def missing(*args: object, **kwargs: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(machine.Path, "read_text", missing)
    assert machine.peak_bytes() >= 0.5 * known


ROOM = {"memory_bytes": None, "cache_bytes": 3_000_000, "smallest_cache_bytes": 3_000_000, "expert_bytes": 9_000_000}
BEST = {"belady_demands": 100, "belady_hit_rate": 0.125}


def figures(io: str = "direct,2", **room: int | None) -> RunStats:
    counters = ExpertCounters(requests=200, hits=50, hits_in_flight=8, evictions=140, reads=160,
                              bytes_read=8_000_000, stall_s=0.5,
                              prefetch_issued_bytes=4_000_000, prefetch_used_bytes=1_000_000)  # fmt: skip
    times = RequestTimes(requests=1, prompt_tokens=3, new_tokens=11, first_token_s=0.25, decode_s=2.0)
    ahead = ReadAhead(read=80, used=20, missed=60, tokens_on=1, tokens_off=3)
    ways = {"eviction": "lru", "io": io, "routing": "exact"}
    return run_stats(times, counters, ahead, **(ROOM | room), **ways, **BEST)


def test_the_figures_in_words() -> None:
    *lines, peak = figures(memory_bytes=200_000_000, smallest_cache_bytes=1_000_000).lines()
    assert lines == [
        "tokens           3 read, 11 written in 1 request(s)",
        "speed            5.00 tokens/s after the first token",
        "first token      after 0.250 s",
        "experts          asked for 200 times, 21.0% in memory, 4.0% on the way",
        "made room        140 times, eviction lru; knowing the future, without reading ahead: 12.5% (of the first 100)",
        "read from disk   8.00 MB in 160 reads (io='direct,2'); waited 0.500 s",
        "read ahead       4.00 MB, of it 1.00 MB used; guesses 25% right, 25% complete; on for 25% of written tokens",
        "room             200.00 MB for the process; experts have 3.00 MB, once only 1.00 MB, all are 9.00 MB",
    ]
    assert peak.startswith("peak memory ")


def test_the_least_room_is_said_only_where_it_was_less() -> None:
    assert "room             no limit for the process; experts have 3.00 MB, all are 9.00 MB" in figures().lines()


def test_the_page_cache_is_named_in_words() -> None:
    assert any("160 reads (through the system's page cache)" in line for line in figures(PAGE_CACHE).lines())


def test_what_did_not_happen_is_not_said() -> None:
    ways = {"eviction": "auto", "io": "direct,2", "routing": "exact"}
    idle = run_stats(RequestTimes(), ExpertCounters(), ReadAhead(), **ROOM, **ways, **BEST)
    words = "\n".join(idle.lines())
    assert "read ahead" not in words
    assert "made room" not in words
