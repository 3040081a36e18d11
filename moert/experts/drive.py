"""What the system has for reading from a drive: reads past the page cache, the page cache itself, a name for the drive.
Each part has a fallback, since not every system has it."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from io import FileIO
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moert.machine import ROOT, text
from moert.pack.files import READING

try:
    import fcntl
except ImportError:  # not on this system
    fcntl = None  # type: ignore[assignment]

PAGE_BYTES = 4096
_DIRECT: int = 0 if fcntl is None else getattr(os, "O_DIRECT", 0)
_PLACE = threading.Lock()
"""Held where a read first moves the place in a file, which all its readers share."""


def open_expert(path: str | os.PathLike[str], direct: bool) -> int:
    """Returns a descriptor to read from, past the page cache if `direct` and the file system can. Raises OSError."""
    if direct and _DIRECT:
        try:
            return os.open(path, READING | _DIRECT)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
    return os.open(path, READING)


def read_into(fd: int, buffer: memoryview | npt.NDArray[np.uint8], offset: int = 0) -> int:
    """Fills `buffer` from a place in the file; returns the bytes found, fewer only if the file ends. Raises OSError.

    Behind the end of the file the buffer's contents are then undefined. Direct reads need a buffer that begins on a
    page. Parts that can't be read so (another place, a length that is not a whole number of pages, a file system that
    takes the flag but not the read) are read through the page cache.
    """
    view = (buffer if isinstance(buffer, memoryview) else buffer.data).cast("B")
    whole = len(view) - len(view) % PAGE_BYTES
    found = 0
    while found < len(view):
        stop = whole if found < whole else len(view)
        try:
            count = _read_at(fd, view[found:stop], offset + found)
        except OSError as error:
            if error.errno != errno.EINVAL or not _make_buffered(fd):
                raise
            continue
        if not count:
            break
        found += count
    return found


def _read_at(fd: int, view: memoryview, offset: int) -> int:
    """Reads into `view` from a place in the file; returns the number of bytes read. Raises OSError."""
    if hasattr(os, "preadv"):
        return os.preadv(fd, [view], offset)
    with _PLACE, FileIO(fd, closefd=False) as file:
        file.seek(offset)
        return file.readinto(view) or 0


def leave_page_cache(fd: int, offset: int = 0, nbytes: int = 0) -> None:
    """Lets the page cache drop bytes of a file, all of them by default, where the system can. Raises OSError."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)


def wait_for_reads(fd: int) -> None:
    """Lets reads of the descriptor wait for the drive: of a file that means that a read in the background may wait."""
    if hasattr(os, "set_blocking"):
        os.set_blocking(fd, True)


def in_page_cache(path: str | os.PathLike[str], offset: int = 0) -> bool:
    """Returns whether the file's page at `offset` can be read without the drive; True where the system does not say.
    Raises OSError.

    The first check is mincore(2), which the system answers to the file's owner alone: others may only try to read
    without waiting, and this try itself has the page brought in, in time if the drive is fast.
    """
    if not all(hasattr(os, name) for name in ("preadv", "posix_fadvise", "RWF_NOWAIT")):
        return True
    fd = open_expert(path, direct=False)
    try:
        if not _shown_cached(fd, offset):
            return False
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # or the try would bring more of it in
        return os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT) > 0
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        os.close(fd)


def _shown_cached(fd: int, offset: int) -> bool:
    """Returns mincore(2)'s answer for that page: True also for a file that is not the caller's. Raises OSError."""
    if os.fstat(fd).st_size <= offset:
        return True
    # Closed with its last reference: Ctrl-C may come at any place, and a mapping that is pointed to can't be closed.
    page = mmap.mmap(fd, 1, access=mmap.ACCESS_COPY, offset=offset)  # nothing is written: ctypes wants it writable
    first, found = ctypes.c_char.from_buffer(page), ctypes.c_ubyte()
    failed = ctypes.CDLL(None).mincore(ctypes.byref(first), ctypes.c_size_t(1), ctypes.byref(found))
    return bool(failed) or bool(found.value & 1)


def is_direct(fd: int) -> bool:
    """Returns whether reads of the descriptor go past the page cache."""
    return bool(_DIRECT) and bool(fcntl.fcntl(fd, fcntl.F_GETFL) & _DIRECT)


def _make_buffered(fd: int) -> bool:
    """Has reads of the descriptor go through the page cache from now on; returns False if they did so already."""
    if not is_direct(fd):
        return False
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~_DIRECT)
    return True


def drive_key(path: Path, root: Path = ROOT) -> str:
    """Returns a name for the drive under a file: its number, its file system, and the system's data on it. Empty if
    there is no file."""
    try:
        found = path.stat().st_dev
    except OSError:
        return ""
    if not hasattr(os, "major"):
        return str(found)
    number = f"{os.major(found)}:{os.minor(found)}"
    known = [number]
    for line in text(root / "proc/self/mountinfo").splitlines():
        words = line.split()  # ... major:minor ... - type source ...
        if len(words) > 2 and words[2] == number and "-" in words:
            known += words[words.index("-") + 1 :][:2]
            break
    folder = root / "sys/dev/block" / number
    for name in ("size", "serial", "wwid", "dm/uuid", "device/serial", "../serial", "../wwid", "../device/serial"):
        known += text(folder / name).split()
    return " ".join(known)
