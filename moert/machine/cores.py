"""How many cores this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

from moert.machine.control_groups import ROOT, control_groups, text


def usable_cores(root: Path = ROOT) -> int:
    """Cores that this process may use: its affinity, and the quota of its control groups rounded up."""
    quota, cores = quota_of(root), affinity()
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def affinity() -> int:
    """Cores that the system lets it run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def quota_of(root: Path) -> float | None:
    """Cores' worth of time that the process gets, the least over its control groups; None: no quota."""
    quotas = []
    for folder in control_groups(root, "cpu"):
        words = text(folder / "cpu.max").split() or [
            *text(folder / "cpu.cfs_quota_us").split(),
            *text(folder / "cpu.cfs_period_us").split(),
        ]
        if len(words) == 2 and all(word.isdecimal() and int(word) for word in words):  # not "max", not -1
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)
