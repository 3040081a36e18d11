"""A whole conversion as a process of its own in a control group of memory: how long it took, and what it held."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from moeconv.artifacts import REPORT
from moeconv.errors import ConversionError
from moeconv.report.writer import read_report
from moert.pack.errors import PackError
from moert.pack.reader import Pack
from tests.cgroups import Group

LOOKS_EVERY_S = 0.1


@dataclass(frozen=True)
class Ran:
    """`resident_peak_bytes`: VmHWM of the process, the pages of files that it had mapped included; `group_peak_bytes`:
    the most that was charged to its group, the page cache included, so at most the limit. `read_bytes`: from the disk;
    `steps`: what the pack's report says, name → seconds. `failed`: the last lines, if it did not end well."""

    wall_s: float
    cpu_s: float
    read_bytes: int
    resident_peak_bytes: int
    group_peak_bytes: int
    steps: Mapping[str, float]
    failed: str | None = None


def conversion(arguments: Sequence[str], virtual: bool) -> list[str]:
    """The command line of moeconv with these arguments."""
    return [sys.executable, "-m", "recipes.bench.virtual_run" if virtual else "moeconv", *arguments]


def run(command: Sequence[str], out: Path, memory_bytes: int) -> Ran:
    """Runs it to its end, its messages into OUT.log; `out` is the pack that it writes."""
    log = out.with_name(f"{out.name}.log")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.getcwd()}
    with Group(memory_bytes) as group, open(log, "wb") as messages:
        started = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=messages, stderr=messages, env=environment, preexec_fn=lambda: group.add(0)
        )
        peak, status, usage = 0, 0, None
        while usage is None:
            peak = max(peak, _resident_peak_bytes(process.pid))
            ended, status, used = os.wait4(process.pid, os.WNOHANG)
            usage = used if ended else None
            time.sleep(0 if ended else LOOKS_EVERY_S)
        wall_s = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        killed = group.oom_kills
        cpu_s, read_bytes, charged = usage.ru_utime + usage.ru_stime, usage.ru_inblock * 512, group.peak_bytes
    failed = None
    if process.returncode:
        last = log.read_text(errors="replace").strip().splitlines()[-3:]
        failed = f"exit code {process.returncode}{', out of memory' if killed else ''}: {' / '.join(last)}"
    return Ran(wall_s, cpu_s, read_bytes, peak, charged, _steps(out), failed)


def forget(folder: Path) -> None:
    """Has the system drop what its page cache holds of a folder's files, as far as nobody else uses them."""
    for file in folder.rglob("*.safetensors"):
        with open(file, "rb") as handle, contextlib.suppress(OSError):
            os.fsync(handle.fileno())
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _resident_peak_bytes(pid: int) -> int:
    """0 where the process has ended."""
    with contextlib.suppress(OSError):
        found = re.search(r"^VmHWM:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        return int(found[1]) * 1024 if found else 0
    return 0


def _steps(out: Path) -> Mapping[str, float]:
    if not (out / REPORT).is_file():
        return {}
    with contextlib.suppress(PackError, ConversionError):
        return {step.name: step.seconds for step in read_report(Pack.open(out)).steps}
    return {}
