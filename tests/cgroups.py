"""Control groups for tests and benches: a process with little memory and a slow disk, in version 1 and 2 of Linux."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import TracebackType

MOUNT = Path("/sys/fs/cgroup")
_NUMBERS = count()


def missing(reads: Path | None = None) -> str | None:
    """Why groups that limit memory, and reads from the disk under `reads`, can't be made here; None if they can."""
    if not hasattr(os, "geteuid") or not MOUNT.is_dir():
        return "this system has no control groups"
    if os.geteuid() != 0:
        return "control groups can only be made as root"
    for controller in ("memory", "blkio") if reads else ("memory",):
        if not (_version_1(controller) or _version_2(controller)):
            return f"the controller {controller} is not writable at {MOUNT}"
    return None if reads is None else _unthrottled(reads)


class Group:
    """A group of its own in each controller that is needed, for the length of a with block.

    `memory_bytes` bounds its memory, `read_bps` what it reads a second from the disk that `path` is on.
    """

    def __init__(self, memory_bytes: int | None = None, read_bps: int | None = None, path: Path | None = None) -> None:
        self._limits = {"memory": memory_bytes, "blkio": read_bps}
        self._path = path
        self._folders: dict[str, Path] = {}

    def __enter__(self) -> Group:
        name = f"moert-test-{os.getpid()}-{next(_NUMBERS)}"
        for controller, limit in self._limits.items():
            if limit is not None:
                folder = (MOUNT / controller if _version_1(controller) else MOUNT) / name
                folder.mkdir(exist_ok=True)
                self._folders[controller] = folder
        try:
            self._set_memory()
            self._set_reads()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The processes in it must have ended."""
        self._remove()

    def _remove(self) -> None:
        """The system may need a moment to see that processes have ended."""
        for folder in set(self._folders.values()):
            for _ in range(600):
                with suppress(FileNotFoundError, OSError):
                    folder.rmdir()
                if not folder.exists():
                    break
                time.sleep(0.05)

    def add(self, pid: int) -> None:
        """Puts a process into the group; 0 is this one. Fit for preexec_fn: `lambda: group.add(0)`."""
        for folder in self._folders.values():
            (folder / "cgroup.procs").write_text(str(pid))

    @property
    def peak_bytes(self) -> int:
        """The most memory that was charged to it, the page cache included, or its limit."""
        return self._number("memory", "memory.max_usage_in_bytes", "memory.peak")

    @property
    def kernel_bytes(self) -> int:
        """The most that the kernel needed for it (page tables, stacks, file names); version 1 only, otherwise 0."""
        return self._number("memory", "memory.kmem.max_usage_in_bytes")

    @property
    def oom_kills(self) -> int:
        """Processes that the system ended since it could find no memory for them."""
        for name in ("memory.oom_control", "memory.events"):
            lines = dict(line.split() for line in _text(self._folders["memory"] / name).splitlines())
            if "oom_kill" in lines:
                return int(lines["oom_kill"])
        return 0

    @property
    def swapped_bytes(self) -> int:
        for line in _text(self._folders["memory"] / "memory.stat").splitlines():
            name, value = line.split()
            if name in ("total_swap", "swap"):
                return int(value)
        return self._number("memory", "memory.swap.current")

    def _set_memory(self) -> None:
        limit = self._limits["memory"]
        if limit is None:
            return
        folder = self._folders["memory"]
        if _version_1("memory"):
            (folder / "memory.limit_in_bytes").write_text(str(limit))
            with suppress(OSError):
                (folder / "memory.swappiness").write_text("0")
        else:
            (folder / "memory.max").write_text(str(limit))
            with suppress(OSError):
                (folder / "memory.swap.max").write_text("0")

    def _set_reads(self) -> None:
        limit = self._limits["blkio"]
        if limit is None:
            return
        assert self._path is not None, "say which disk: give a path on it"
        folder, disk = self._folders["blkio"], disk_of(self._path)
        if _version_1("blkio"):
            (folder / "blkio.throttle.read_bps_device").write_text(f"{disk} {limit}")
        else:
            (folder / "io.max").write_text(f"{disk} rbps={limit}")

    def _number(self, controller: str, *names: str) -> int:
        found = (_text(self._folders[controller] / name).strip() for name in names)
        return next((int(text) for text in found if text.isdecimal()), 0)


def _unthrottled(path: Path) -> str | None:
    """Why reads from the disk that a file is on can't be limited; None if they can."""
    disk = disk_of(path)
    if not Path(f"/sys/dev/block/{disk}").exists():
        return f"{path} is on no disk of this machine (device {disk}), and only disks have a limit"
    try:
        with Group(read_bps=1 << 40, path=path):
            return None
    except OSError as error:
        return f"reads from the disk {disk} can't be limited ({error.strerror})"


def disk_of(path: Path) -> str:
    """major:minor of the whole disk that a file is on."""
    device = os.stat(path).st_dev
    block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    if (block / "partition").exists():
        return (block.resolve().parent / "dev").read_text().strip()
    return f"{os.major(device)}:{os.minor(device)}"


def _version_1(controller: str) -> bool:
    return (MOUNT / controller / "cgroup.procs").exists() and os.access(MOUNT / controller, os.W_OK)


def _version_2(controller: str) -> bool:
    name = {"blkio": "io"}.get(controller, controller)
    enabled = MOUNT / "cgroup.subtree_control"
    if name not in _text(MOUNT / "cgroup.controllers").split():
        return False
    with suppress(OSError):
        enabled.write_text(f"+{name}")
    return name in _text(enabled).split()


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
