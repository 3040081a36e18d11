"""What `moert info --system` says: this machine, and what of it the native kernels use."""

from __future__ import annotations

import math
import os
import platform
import sys
from pathlib import Path
from typing import Any

from moert.kernels import library
from moert.stats import size

ROOT = Path("/")


def usable_cores(root: Path = ROOT) -> int:
    """Cores that this process may use: its affinity, and the quota of its control groups rounded up."""
    quota = _quota(root)
    cores = _affinity()
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def system_facts(root: Path = ROOT) -> dict[str, Any]:
    """Everything as plain values; null where this system does not tell. `root` is where /proc and /sys are."""
    return {
        "processor": _processor(root),
        "cores": {
            "machine": os.cpu_count(),
            "affinity": _affinity(),
            "quota": _quota(root),
            "usable": usable_cores(root),
        },
        "threads": usable_cores(root),
        "native_kernels": {"path": str(library.PATH), "missing": library.missing()},
        "instruction_sets": _instruction_sets(),
        "memory": _memory(root),
        "transparent_huge_pages": _huge_pages(root),
    }


def system_lines(facts: dict[str, Any]) -> list[str]:
    """The same for people."""
    cores, memory, missing = facts["cores"], facts["memory"], facts["native_kernels"]["missing"]
    quota = "no quota" if cores["quota"] is None else f"a quota of {cores['quota']:g}"
    limit = "" if memory["limit_bytes"] is None else f", limited to {size(memory['limit_bytes'])}"
    sets = facts["instruction_sets"]
    names = [f"  {each['name']:<14} {each['why']}" for each in sets]
    return [
        f"processor        {facts['processor']}",
        f"cores            {cores['usable']} usable: {cores['affinity']} by affinity, {quota}, "
        f"{_or_unknown(cores['machine'])} in the machine",
        f"threads          {facts['threads']} by default",
        f"kernels          {'native' if missing is None else library.missing_note()}",
        *names,
        f"memory           {_size(memory['total_bytes'])}, {_size(memory['available_bytes'])} of it available{limit}",
        f"huge pages       {_or_unknown(facts['transparent_huge_pages'])} (transparent)",
    ]


def _instruction_sets() -> list[dict[str, Any]]:
    loaded = library.load()
    if loaded is None:
        return []
    chosen = loaded.choose()
    return [
        {
            "name": each.name,
            "runs": each.runs,
            "chosen": each.number == chosen,
            "why": _why(each.number == chosen, each.runs),
        }
        for each in loaded.instruction_sets
    ]


def _why(chosen: bool, runs: bool) -> str:
    if chosen:
        return "chosen: the best that this processor has"
    return "available" if runs else "not on this processor"


def _affinity() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _processor(root: Path) -> str:
    for line in _text(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model") and value.strip():
            return value.strip()
    return platform.processor() or platform.machine()


def _memory(root: Path) -> dict[str, int | None]:
    fields = dict(line.split(":", 1) for line in _text(root / "proc/meminfo").splitlines() if ":" in line)
    total, available = (
        int(fields[name].split()[0]) * 1024 if name in fields else None for name in ("MemTotal", "MemAvailable")
    )
    if total is None and hasattr(os, "sysconf") and sys.platform != "linux":
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [
        int(text)
        for folder in _control_groups(root, "memory")
        for text in (_text(folder / "memory.max"), _text(folder / "memory.limit_in_bytes"))
        if text.strip().isdecimal() and (total is None or int(text) < total)
    ]
    return {"total_bytes": total, "available_bytes": available, "limit_bytes": min(limits, default=None)}


def _quota(root: Path) -> float | None:
    """Cores' worth of time that the process gets, the least over its control groups; None: no quota."""
    quotas = []
    for folder in _control_groups(root, "cpu"):
        words = _text(folder / "cpu.max").split() or [
            *_text(folder / "cpu.cfs_quota_us").split(),
            *_text(folder / "cpu.cfs_period_us").split(),
        ]
        if len(words) == 2 and all(word.isdecimal() and int(word) for word in words):  # not "max", not -1
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def _control_groups(root: Path, controller: str) -> list[Path]:
    """Folders of the process's control groups and those above them, of version 2 and of one controller in version 1.

    Inside a container the path named in /proc may not exist; its own group is then the root of what is mounted.
    """
    folders = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            mount = root / "sys/fs/cgroup" / controller
        else:
            continue
        group = Path(path.lstrip("/"))
        folders += [mount / part for part in (group, *group.parents)]
    return folders


def _huge_pages(root: Path) -> str | None:
    """The mode in brackets, as in "always [madvise] never"."""
    words = _text(root / "sys/kernel/mm/transparent_hugepage/enabled").split()
    return next((word[1:-1] for word in words if word.startswith("[")), None)


def _text(path: Path) -> str:
    """What the file holds; nothing if it can't be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _size(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else size(nbytes)


def _or_unknown(value: object) -> object:
    return "unknown" if value is None else value
