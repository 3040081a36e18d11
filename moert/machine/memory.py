"""The memory of this process and of the machine: what is held, what is free, and giving back what is not needed."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from moert.machine.control_groups import ROOT, control_groups, text

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of glibc's mallopt
_LARGE_BYTES = 1 << 20
_ARENAS = 2
_THREAD_BYTES = 128 << 10  # of its stack what it uses, and the kernel's part
_LARGE_STACK_BYTES = 2 << 20  # where the system gives large pages to whatever is large, older kernels to stacks too


@dataclass(frozen=True)
class MachineMemory:
    """The memory of this machine in bytes; None where the system does not tell.

    `limit_bytes`: the least that a control group allows, if that is less than there is. `free_bytes`: what
    this process can still get, under every limit, without swapping.
    """

    total_bytes: int | None
    available_bytes: int | None
    limit_bytes: int | None
    free_bytes: int | None


def held_bytes(root: Path = ROOT) -> int:
    """Physical memory that this process holds: its own, mapped files, shared. Elsewhere than on Linux its peak."""
    fields = _fields(root / "proc/self/status")
    if "VmRSS" in fields:
        return fields["VmRSS"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def machine_memory(root: Path = ROOT) -> MachineMemory:
    fields = _fields(root / "proc/meminfo")
    total, available = fields.get("MemTotal"), fields.get("MemAvailable")
    if total is None and hasattr(os, "sysconf") and sys.platform != "linux":
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits, free = [], [] if available is None else [available]
    for folder in control_groups(root, "memory"):
        limit = _number(folder / "memory.max", folder / "memory.limit_in_bytes")
        if limit is None or (total is not None and limit >= total):
            continue
        limits.append(limit)
        used = _number(folder / "memory.current", folder / "memory.usage_in_bytes")
        if used is not None:
            free.append(max(0, limit - used + _page_cache(folder)))
    return MachineMemory(total, available, min(limits, default=None), min(free, default=None))


def most_bytes(root: Path = ROOT) -> int | None:
    """What this process may come to hold in all. A part of it may be charged to others, such as libraries that they
    have mapped too, until it is read again: so never more than a control group allows."""
    machine = machine_memory(root)
    if machine.free_bytes is None:
        return None
    most = held_bytes(root) + machine.free_bytes
    return most if machine.limit_bytes is None else min(most, machine.limit_bytes)


def thread_bytes(threads: int, root: Path = ROOT) -> int:
    """What so many threads that compute may take."""
    mode = text(root / "sys/kernel/mm/transparent_hugepage/enabled")
    return threads * (_LARGE_STACK_BYTES if "[always]" in mode else _THREAD_BYTES)


def return_early() -> None:
    """Lets malloc hand large pieces back to the system as soon as they are freed, where the C library can."""
    if (library := _glibc()) is not None:
        library.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, _LARGE_BYTES)
        library.mallopt(_M_ARENA_MAX, _ARENAS)


def return_freed() -> None:
    """Hands back everything that malloc keeps for later."""
    if (library := _glibc()) is not None:
        library.malloc_trim(0)


def drop_page_cache(path: Path) -> None:
    """Tells the system that a file was read for the last time: what it keeps of it would count as ours."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            handle = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(handle)


def _glibc() -> ctypes.CDLL | None:
    if platform.libc_ver()[0] != "glibc":
        return None
    return ctypes.CDLL(None)


def _page_cache(folder: Path) -> int:
    """Bytes of files that a control group keeps and gives up when memory is asked for."""
    counts = {
        name: value for name, _, value in (line.partition(" ") for line in text(folder / "memory.stat").splitlines())
    }
    names = ("inactive_file", "active_file")
    below = "total_" if "total_inactive_file" in counts else ""  # version 1 counts the groups below apart
    return sum(int(counts.get(below + name, 0)) for name in names)


def _number(*paths: Path) -> int | None:
    """The number in the first of these files that holds one; "max" is none. None without any."""
    return next((int(found) for path in paths if (found := text(path).strip()).isdecimal()), None)


def _fields(path: Path) -> dict[str, int]:
    """The lines of sizes ("Name:  7 kB") of a file in /proc, in bytes."""
    words = (line.split() for line in text(path).splitlines())
    return {parts[0].rstrip(":"): int(parts[1]) * 1024 for parts in words if len(parts) == 3 and parts[2] == "kB"}
