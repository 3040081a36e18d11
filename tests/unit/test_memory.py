"""What a process holds and what is free for it, on machines that are folders and on this one."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moert import machine
from moert.machine import (
    drop_page_cache,
    held_bytes,
    machine_memory,
    most_bytes,
    return_early,
    return_freed,
    thread_bytes,
)
from tests.alone import alone


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MACHINE = {"proc/meminfo": "MemTotal: 4000000 kB\nMemAvailable: 3000000 kB\nHugePages_Total: 0\n"}


def test_a_process_holds_its_own_memory_mapped_files_and_what_it_shares(tmp_path: Path) -> None:
    write(tmp_path, {"proc/self/status": "Name:\tpython\nVmHWM:\t 900 kB\nVmRSS:\t 700 kB\nRssAnon: 400 kB\n"})
    assert held_bytes(tmp_path) == 700 * 1024
    assert 40_000_000 < alone(held_for_50_megabytes) < 60_000_000


def held_for_50_megabytes() -> int:
    before = held_bytes()
    with mmap.mmap(-1, 50_000_000) as block:  # a bytearray may get what malloc holds already
        for page in range(0, len(block), mmap.PAGESIZE):
            block[page] = 1
        return held_bytes() - before


def test_without_a_table_of_processes_the_peak_is_what_is_known(tmp_path: Path) -> None:
    assert held_bytes(tmp_path) > 5_000_000


def test_without_groups_all_that_is_available_is_free(tmp_path: Path) -> None:
    found = machine_memory(write(tmp_path, MACHINE))
    assert (found.total_bytes, found.available_bytes) == (4000000 * 1024, 3000000 * 1024)
    assert (found.limit_bytes, found.free_bytes) == (None, 3000000 * 1024)


def test_the_page_cache_of_a_group_is_free_and_the_tightest_group_counts(tmp_path: Path) -> None:
    group = "sys/fs/cgroup"
    write(tmp_path, MACHINE | {
        "proc/self/cgroup": "0::/outer/inner\n",
        f"{group}/outer/inner/memory.max": "max\n",
        f"{group}/outer/memory.max": "100000000\n",
        f"{group}/outer/memory.current": "60000000\n",
        f"{group}/outer/memory.stat": "anon 40000000\ninactive_file 7000000\nactive_file 3000000\n",
    })  # fmt: skip
    assert machine_memory(tmp_path).limit_bytes == 100_000_000
    assert machine_memory(tmp_path).free_bytes == 50_000_000
    write(tmp_path, {"proc/self/status": "VmRSS:\t 20000 kB\n"})
    assert most_bytes(tmp_path) == 50_000_000 + 20_000 * 1024
    write(tmp_path, {"proc/self/status": "VmRSS:\t 90000 kB\n"})  # not all of it charged to the group
    assert most_bytes(tmp_path) == 100_000_000


def test_groups_of_version_1_count_those_below_apart(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory"
    write(tmp_path, MACHINE | {
        "proc/self/cgroup": "4:memory:/job\n0::/\n",
        f"{group}/memory.limit_in_bytes": "9223372036854771712\n",
        f"{group}/job/memory.limit_in_bytes": "100000000\n",
        f"{group}/job/memory.usage_in_bytes": "120000000\n",
        f"{group}/job/memory.stat": "inactive_file 1\ntotal_inactive_file 5000000\ntotal_active_file 2000000\n",
    })  # fmt: skip
    assert machine_memory(tmp_path).limit_bytes == 100_000_000
    assert machine_memory(tmp_path).free_bytes == 0


def test_a_machine_that_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine_memory(tmp_path).free_bytes is most_bytes(tmp_path) is None
    monkeypatch.setattr(machine.platform, "libc_ver", lambda: ("", ""))
    return_early()  # nothing to do, and no error
    return_freed()


def test_stacks_may_get_large_pages(tmp_path: Path) -> None:
    mode = "sys/kernel/mm/transparent_hugepage/enabled"
    few = thread_bytes(8, write(tmp_path, {mode: "always [madvise] never\n"}))
    assert few == 2 * thread_bytes(4, tmp_path) > 8 << 16
    assert thread_bytes(8, write(tmp_path, {mode: "[always] madvise never\n"})) == 8 * (2 << 20)


@pytest.mark.skipif(sys.platform != "linux", reason="the page cache is asked for by mincore, the heap by /proc")
def test_freed_memory_goes_back_to_the_system() -> None:
    code = (
        "from moert.machine import held_bytes, return_early, return_freed\n"
        "return_early()\n"
        "import numpy as np\n"
        "before = held_bytes()\n"
        "blocks = [np.ones(2_000_000, np.float32) for _ in range(10)]\n"  # 80 MB, in pieces above the threshold
        "small = [np.ones(25_000, np.float32) for _ in range(500)]\n"  # 50 MB, below it
        "held = held_bytes() - before\n"
        "blocks.clear()\n"
        "large = held_bytes() - before\n"
        "small.clear()\n"
        "return_freed()\n"
        "print(held, large, held_bytes() - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    held, large, rest = (int(word) for word in done.stdout.split())
    assert held > 125_000_000
    assert large < 60_000_000
    if machine.platform.libc_ver()[0] == "glibc":
        assert rest < 10_000_000


def test_a_file_that_cannot_be_opened_has_no_page_cache_to_drop(tmp_path: Path) -> None:
    drop_page_cache(tmp_path / "nothing")
    path = tmp_path / "file"
    path.write_bytes(os.urandom(100_000))
    drop_page_cache(path)
    assert len(path.read_bytes()) == 100_000
