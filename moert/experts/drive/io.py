"""How experts are read: past the page cache or through it, by how many threads; one explicit read for each."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moert.errors import RunError, said

DEFAULT_THREADS = 2
MOST_THREADS = 64
PAGE_BYTES = 4096
_DIRECT: int = getattr(os, "O_DIRECT", 0)


class IoInvalid(RunError):
    """An --io that says neither auto, direct nor buffered, or no sensible number of threads."""


class IoSettings(NamedTuple):
    """`direct`: past the page cache where the file system can. `threads` read at the same time."""

    direct: bool
    threads: int

    def __str__(self) -> str:
        return f"{'direct' if self.direct else 'buffered'},{self.threads}"


def parse_io(text: str) -> IoSettings | None:
    """auto | direct | buffered, the last two with ,THREADS if wanted. None stands for auto. Raises IoInvalid."""
    mode, comma, count = text.strip().lower().partition(",")
    if mode == "auto" and not comma:
        return None
    if mode.strip() not in ("direct", "buffered"):
        raise IoInvalid(f"{said('io', text[:60])} is none of auto, direct, buffered: write direct,4 for 4 threads")
    threads = count.strip() if comma else str(DEFAULT_THREADS)
    sound = threads.isascii() and threads.isdigit() and len(threads) < 4 and 1 <= int(threads) <= MOST_THREADS
    if not sound:
        raise IoInvalid(f"{said('io', text[:60])}: {threads[:60]!r} should be a number of threads, 1 to {MOST_THREADS}")
    return IoSettings(mode.strip() == "direct", int(threads))


def open_expert(path: str | os.PathLike[str], direct: bool) -> int:
    """A descriptor to read from, past the page cache if `direct` and the file system can. Raises OSError."""
    flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)  # a pipe must not be waited for
    if direct and _DIRECT:
        try:
            return os.open(path, flags | _DIRECT)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
    return os.open(path, flags)


def read_into(fd: int, buffer: memoryview | npt.NDArray[np.uint8], offset: int = 0) -> int:
    """Fills `buffer` from a place in the file; returns the bytes found, fewer only if the file ends. Raises OSError.

    What the buffer holds after the end of the file is then undefined. Direct reads want a buffer that begins on a page.
    What they refuse (another place, a length that is not a whole number of pages, a file system that takes the flag
    but not the read) is read through the page cache.
    """
    view = (buffer if isinstance(buffer, memoryview) else buffer.data).cast("B")
    whole = len(view) - len(view) % PAGE_BYTES
    found = 0
    while found < len(view):
        stop = whole if found < whole else len(view)
        try:
            count = os.preadv(fd, [view[found:stop]], offset + found)
        except OSError as error:
            if error.errno != errno.EINVAL or not _make_buffered(fd):
                raise
            continue
        if not count:
            break
        found += count
    return found


def in_page_cache(path: str | os.PathLike[str], offset: int = 0) -> bool:
    """Whether the page of the file there can be read without the drive; True where the system does not tell. Raises
    OSError.

    The pages are looked at first, which the system shows to the file's owner alone: others may only try to read without
    waiting, and such a try itself has the page brought in, in time if the drive is fast.
    """
    fd = open_expert(path, direct=False)
    try:
        if not _shown_cached(fd, offset):
            return False
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # or the try would bring more of it in
        return os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT) > 0
    except BlockingIOError:
        return False
    except (OSError, AttributeError):
        return True
    finally:
        os.close(fd)


def _shown_cached(fd: int, offset: int) -> bool:
    """What mincore(2) says of that page: True also of a file that is not the caller's. Raises OSError, AttributeError
    where there is no such call."""
    if os.fstat(fd).st_size <= offset:
        return True
    # Closed with its last reference: Ctrl-C may come at any place, and a mapping that is pointed to can't be closed.
    page = mmap.mmap(fd, 1, access=mmap.ACCESS_COPY, offset=offset)  # nothing is written: ctypes wants it writable
    first, found = ctypes.c_char.from_buffer(page), ctypes.c_ubyte()
    failed = ctypes.CDLL(None).mincore(ctypes.byref(first), ctypes.c_size_t(1), ctypes.byref(found))
    return bool(failed) or bool(found.value & 1)


def is_direct(fd: int) -> bool:
    """True while reads of the descriptor go past the page cache."""
    import fcntl

    return bool(_DIRECT) and bool(fcntl.fcntl(fd, fcntl.F_GETFL) & _DIRECT)


def _make_buffered(fd: int) -> bool:
    """Lets reads of the descriptor go through the page cache from now on; False if they did so already."""
    import fcntl

    if not is_direct(fd):
        return False
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~_DIRECT)
    return True
