"""Facts about this machine: its memory, its cores, limits of control groups, and a file of remembered measurements."""

from __future__ import annotations

import ctypes
import json
import math
import os
import platform
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from moert.pack.files import write_atomically

try:
    import fcntl
    import resource
except ImportError:  # not on this system
    fcntl = resource = None  # type: ignore[assignment]

ROOT = Path("/")


def control_groups(root: Path, controller: str) -> list[Path]:
    """Returns the folders of the process's control groups and of the groups above them, of version 2 and of one
    controller in version 1.

    Inside a container the path named in /proc may not exist; the container's own group is then the mounted root.
    """
    folders = []
    for line in text(root / "proc/self/cgroup").splitlines():
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


def text(path: Path) -> str:
    """Returns the text of a file; "" if it can't be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def usable_cores(root: Path = ROOT) -> int:
    """Returns the number of cores that this process may use: its affinity, at most the quota of its control groups
    rounded up."""
    quota, cores = quota_of(root), affinity()
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def affinity() -> int:
    """Returns the number of cores that the system lets this process run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def quota_of(root: Path) -> float | None:
    """Returns the processor time that the process may take [cores], the least over its control groups; None without a
    quota."""
    quotas = []
    for folder in control_groups(root, "cpu"):
        words = text(folder / "cpu.max").split() or [
            *text(folder / "cpu.cfs_quota_us").split(),
            *text(folder / "cpu.cfs_period_us").split(),
        ]
        if len(words) == 2 and all(word.isdecimal() and int(word) for word in words):  # not "max", not -1
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def processor_name(root: Path = ROOT) -> str:
    for line in text(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model") and value.strip():
            return value.strip()
    return platform.processor() or platform.machine()


def has_nvidia_driver(root: Path = ROOT) -> bool:
    """Returns whether NVIDIA's driver is loaded, as Linux shows it; False elsewhere."""
    return any((root / path).exists() for path in ("proc/driver/nvidia/version", "dev/nvidiactl"))


def step_back() -> None:
    """Gives the calling thread only time that no other thread wants; where the system can't, a low priority."""
    with suppress(OSError):
        if hasattr(os, "SCHED_IDLE"):
            os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))
        elif hasattr(os, "setpriority"):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


_NICE = 10
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of glibc's mallopt
_LARGE_BYTES = 1 << 20
_ARENAS = 2
_THREAD_BYTES = 128 << 10  # the used part of its stack, and the kernel's part
_LARGE_STACK_BYTES = 2 << 20  # where the system gives large pages to whatever is large, older kernels to stacks too


@dataclass(frozen=True)
class MachineMemory:
    """The memory of this machine in bytes; None where the system does not tell.

    `limit_bytes`: the least limit of a control group, if one is below `total_bytes`. `free_bytes`: memory that this
    process can still get, under every limit, without swapping.
    """

    total_bytes: int | None
    available_bytes: int | None
    limit_bytes: int | None
    free_bytes: int | None


def held_bytes(root: Path = ROOT) -> int:
    """Returns the physical memory [bytes] that this process holds: its own, mapped files, shared. Elsewhere than on
    Linux its peak."""
    found = _fields(root / "proc/self/status").get("VmRSS")
    return peak_bytes(root) if found is None else found


def peak_bytes(root: Path = ROOT) -> int:
    """Returns the most physical memory [bytes] that this process has held, as the system counts it.

    The figure of getrusage on Linux can be the peak of the process that started this one, so it comes second. 0 where
    the system does not tell.
    """
    if (found := _fields(root / "proc/self/status").get("VmHWM")) is not None:
        return found
    if resource is None:
        return 0
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
    """Returns the most memory [bytes] that this process may come to hold in all; None where the system does not tell.
    Some of its pages may be charged to other processes, such as libraries that they have mapped too, until they are
    read again: so the result is never more than a control group allows."""
    machine = machine_memory(root)
    if machine.free_bytes is None:
        return None
    most = held_bytes(root) + machine.free_bytes
    return most if machine.limit_bytes is None else min(most, machine.limit_bytes)


def thread_bytes(threads: int, root: Path = ROOT) -> int:
    """Returns the memory [bytes] that `threads` computing threads may take."""
    return threads * (_LARGE_STACK_BYTES if huge_pages(root) == "always" else _THREAD_BYTES)


def huge_pages(root: Path = ROOT) -> str | None:
    """Returns the mode of large pages, which is the one in brackets, as in "always [madvise] never"; None where the
    system has none."""
    words = text(root / "sys/kernel/mm/transparent_hugepage/enabled").split()
    return next((word[1:-1] for word in words if word.startswith("[")), None)


def return_early() -> None:
    """Lets malloc hand large pieces back to the system as soon as they are freed, where the C library can."""
    if (library := _glibc()) is not None:
        library.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, _LARGE_BYTES)
        library.mallopt(_M_ARENA_MAX, _ARENAS)


def return_freed() -> None:
    """Returns to the system all memory that malloc keeps for later, where the C library can."""
    if (library := _glibc()) is not None:
        library.malloc_trim(0)


def limit_of(name: str) -> int | None:
    """Returns a limit of this process by its name, such as "RLIMIT_AS"; None without one."""
    if resource is None:
        return None
    soft, _ = resource.getrlimit(getattr(resource, name))
    return None if soft == resource.RLIM_INFINITY else soft


def limits_processes() -> bool:
    """Returns whether the system can limit the memory and the time of a process that works for a stranger."""
    return resource is not None


def used_up_time(status: int) -> bool:
    """Returns whether a process with this exit status was ended since its time of the processor was used up."""
    return hasattr(signal, "SIGXCPU") and status == -signal.SIGXCPU


def lock(descriptor: int, wait: bool = False) -> bool:
    """Locks an open file or folder against other processes until it is closed; returns False where the system knows no
    locks: this is the user's care then. Raises BlockingIOError if another holder has it and `wait` is false, OSError if
    the file system knows no locks."""
    if fcntl is None:
        return False
    fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    return True


def open_folder(path: Path) -> int:
    """Returns a descriptor to lock a folder by; where the system knows no locks, it may open no folders either, and the
    descriptor is of nothing. Raises OSError."""
    return os.open(os.devnull if fcntl is None else path, os.O_RDONLY)


@contextmanager
def locked(folder: Path, wait: bool = False) -> Iterator[None]:
    """Keeps other processes from a folder, if they do the same. Raises the errors of `lock`."""
    descriptor = open_folder(folder)
    try:
        lock(descriptor, wait)
        yield
    finally:
        os.close(descriptor)


def reserve(file: IO[bytes], nbytes: int) -> None:
    """Takes room on the disk for an open, empty file, whose bytes are then zeros. Raises OSError where the disk is
    full."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, nbytes)
        return
    for start in range(0, nbytes, _LARGE_BYTES):
        file.write(bytes(min(_LARGE_BYTES, nbytes - start)))


def drop_page_cache(path: Path) -> None:
    """Tells the system that a file was read for the last time: its pages in the system's cache would count as ours."""
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
    """Returns the bytes of files that a control group keeps and gives up when memory is needed."""
    counts = {
        name: value for name, _, value in (line.partition(" ") for line in text(folder / "memory.stat").splitlines())
    }
    names = ("inactive_file", "active_file")
    below = "total_" if "total_inactive_file" in counts else ""  # version 1 counts the groups below apart
    return sum(int(counts.get(below + name, 0)) for name in names)


def _number(*paths: Path) -> int | None:
    """Returns the number in the first of these files that holds one, which "max" is not; None where no file does."""
    return next((int(found) for path in paths if (found := text(path).strip()).isdecimal()), None)


def _fields(path: Path) -> dict[str, int]:
    """Returns the sizes [bytes] in a file of /proc by their names (lines such as "Name: 7 kB")."""
    words = (line.split() for line in text(path).splitlines())
    return {parts[0].rstrip(":"): int(parts[1]) * 1024 for parts in words if len(parts) == 3 and parts[2] == "kB"}


DAMAGED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""Exceptions that reading an entry can raise where somebody has changed it."""
_CACHE = Path("moert", "drives.json")
_VERSION = 1


def cache_folder() -> Path | None:
    """Returns the folder for what programs remember; None if the user has none."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return Path(given) if os.path.isabs(given) else Path.home() / ".cache"
    except RuntimeError:
        return None


def cache_file() -> Path | None:
    """Returns the file in which measurements are remembered; None if the user has no such folder."""
    folder = cache_folder()
    return None if folder is None else folder / _CACHE


def entries(cache: Path | None, section: str) -> dict[str, Any]:
    """Returns the remembered entries of a section by key, not checked yet; none if the file is damaged or missing."""
    found = _document(cache).get(section, {})
    return dict(found) if isinstance(found, dict) else {}


def remember(cache: Path | None, section: str, body: Mapping[str, Any]) -> None:
    """Replaces a section of the file, and with it the file, in one step; where that can't be done, nothing is
    remembered."""
    if cache is None:
        return
    document = {**_document(cache), "version": _VERSION, section: body}
    with suppress(OSError):
        cache.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(cache, json.dumps(document, indent=1).encode())


def _document(cache: Path | None) -> dict[str, Any]:
    with suppress(OSError, *DAMAGED):
        if cache is not None and cache.is_file():  # of anything else a read may not end
            document = json.loads(cache.read_bytes())
            if document["version"] == _VERSION:
                return dict(document)
    return {}
