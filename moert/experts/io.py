"""Files of experts: how they are opened and read, files that stay open, and many reads in one call."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
import stat
import threading
import zlib
from collections.abc import Iterable
from ctypes import addressof, c_char, c_uint8
from dataclasses import dataclass
from struct import Struct
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from moert.errors import RunError, said
from moert.kernels import library, structs
from moert.kernels.library import NativeFailed
from moert.pack.codec import U8

DEFAULT_THREADS = 2
MOST_THREADS = 64
PAGE_BYTES = 4096
_DIRECT: int = getattr(os, "O_DIRECT", 0)


class IoInvalid(RunError):
    """An io that says neither auto, direct nor buffered, or no sensible number of threads."""


class IoSettings(NamedTuple):
    """How experts are read. `direct`: past the page cache where the file system can. `threads`: reads at the same
    time."""

    direct: bool
    threads: int

    def __str__(self) -> str:
        return f"{'direct' if self.direct else 'buffered'},{self.threads}"


def parse_io(text: str) -> IoSettings | None:
    """Returns the settings that `--tune io` names: auto (None), direct or buffered, the last two with ,THREADS if
    wanted. Raises IoInvalid."""
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
    """Returns a descriptor to read from, past the page cache if `direct` and the file system can. Raises OSError."""
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
    """Returns whether the file's page at `offset` can be read without the drive; True where the system does not say.
    Raises OSError.

    The first check is mincore(2), which the system answers to the file's owner alone: others may only try to read
    without waiting, and this try itself has the page brought in, in time if the drive is fast.
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
    """Returns mincore(2)'s answer for that page: True also for a file that is not the caller's. Raises OSError, and
    AttributeError where the system has no mincore."""
    if os.fstat(fd).st_size <= offset:
        return True
    # Closed with its last reference: Ctrl-C may come at any place, and a mapping that is pointed to can't be closed.
    page = mmap.mmap(fd, 1, access=mmap.ACCESS_COPY, offset=offset)  # nothing is written: ctypes wants it writable
    first, found = ctypes.c_char.from_buffer(page), ctypes.c_ubyte()
    failed = ctypes.CDLL(None).mincore(ctypes.byref(first), ctypes.c_size_t(1), ctypes.byref(found))
    return bool(failed) or bool(found.value & 1)


def is_direct(fd: int) -> bool:
    """Returns whether reads of the descriptor go past the page cache."""
    import fcntl

    return bool(_DIRECT) and bool(fcntl.fcntl(fd, fcntl.F_GETFL) & _DIRECT)


def _make_buffered(fd: int) -> bool:
    """Has reads of the descriptor go through the page cache from now on; returns False if they did so already."""
    import fcntl

    if not is_direct(fd):
        return False
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~_DIRECT)
    return True


_MOST = 1024
_SHARE = 3  # of the descriptors that the process may have


@dataclass(eq=False, slots=True)
class OpenFile:
    """An open file, and the number of its readers (`users`). A `stale` one is closed after the last of them."""

    name: tuple[str, bool]
    fd: int
    seen: tuple[int, ...]
    epoch: int
    users: int = 0
    stale: bool = False


class OpenFiles:
    """The files of a folder that were opened last. Safe to use from several threads.

    Before the first read after `expect`, a file is looked up by its name: another in its place, or one whose rights
    have changed, is opened anew.
    """

    def __init__(self, root: str | os.PathLike[str], most: int | None = None) -> None:
        """`most`: files that stay open; None: a third of the descriptors that the process may have, at most 1,024."""
        self._root, self._most = os.fspath(root), most or max(1, min(_MOST, _allowed() // _SHARE))
        self._files: dict[tuple[str, bool], OpenFile] = {}
        self._lock, self._epoch = threading.Lock(), 0

    def __len__(self) -> int:
        return len(self._files)

    def expect(self) -> None:
        """Has each file looked up again before its next read: it may have changed since the last one."""
        self._epoch += 1

    def take(self, path: str, direct: bool) -> OpenFile:
        """Returns an open file, to be read from until it is given back; past the page cache if `direct` and the file
        system can. Raises OSError."""
        with self._lock:
            file = self._files.get((path, direct))
            if file is not None and file.epoch != self._epoch and not self._still(file):
                self._drop(file)
                file = None
            if file is None:
                file = self._open((path, direct))
            file.users += 1
            return file

    def give(self, file: OpenFile, failed: bool = False) -> None:
        """Takes a file back that is not in use any more. One whose read has `failed` is opened anew next time."""
        with self._lock:
            file.users -= 1
            if file.stale and not file.users:
                os.close(file.fd)
            elif not file.stale and (failed or (len(self._files) > self._most and not file.users)):
                self._drop(file)

    def close(self) -> None:
        """Closes all files; one in use is closed when it is given back."""
        with self._lock:
            for file in list(self._files.values()):
                self._drop(file)

    def __del__(self) -> None:
        self.close()

    # Called with the lock held.

    def _still(self, file: OpenFile) -> bool:
        try:
            found = os.stat(os.path.join(self._root, file.name[0]))
        except OSError:
            return False
        file.epoch = self._epoch
        return _identity(found) == file.seen

    def _open(self, name: tuple[str, bool]) -> OpenFile:
        unused = [file for file in self._files.values() if not file.users] if len(self._files) >= self._most else []
        for file in unused[: len(self._files) - self._most + 1]:
            self._drop(file)
        path, direct = name
        fd = open_expert(os.path.join(self._root, path), direct)
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):  # a pipe would be waited for
                number = errno.EISDIR if stat.S_ISDIR(found.st_mode) else errno.ESPIPE
                raise OSError(number, os.strerror(number))
            os.set_blocking(fd, True)  # of a file that means: a read in the background may wait
        except BaseException:
            os.close(fd)
            raise
        file = self._files[name] = OpenFile(name, fd, _identity(found), self._epoch)
        return file

    def _drop(self, file: OpenFile) -> None:
        del self._files[file.name]
        file.stale = True
        if not file.users:
            os.close(file.fd)


def _identity(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_ctime_ns


def _allowed() -> int:
    """Returns the number of descriptors that the process may have."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft


READ = np.dtype(structs.Read)
"""The struct moert_read. `place`: an address; with `checked`, `crc`: the CRC-32 that the bytes must have; with
`forget`, bytes read through the page cache do not stay there. Filled in: `found`, the bytes that came, fewer than
`nbytes` only where the file ends or the system gives the errno `error`; `wrong`: all came and have another checksum."""

_ROW = Struct("<qqQiIii16x")
Table = npt.NDArray[Any]
"""Reads in one call: [reads] of READ."""


class Read(NamedTuple):
    """A read of consecutive bytes of an open file into `into`, uint8 [nbytes]; `crc`: the CRC-32 that they must
    have."""

    fd: int
    offset: int
    into: U8
    crc: int | None = None
    forget: bool = False


class Reader(Protocol):
    """A way to carry out many reads in one call; one thread at a time uses it."""

    def read_many(self, table: Table) -> int:
        """Carries out all reads of a table and fills in its last three columns; returns the number of reads that are
        incomplete or wrong.

        Reads that follow each other, in the table and in a file, are one request, scattered to their places: so
        consecutive pieces should stand in order. Direct reads need places, offsets and lengths that suit the drive
        (multiples of 512 or 4,096): others go through the page cache, and their descriptor from then on. No read is
        under way any more when this returns.
        """
        ...

    def close(self) -> None: ...


def open_reader(threads: int, by_ring: bool = True) -> Reader:
    """Returns the best reader of this system: io_uring if `by_ring`, else `threads` threads, else one read after the
    other.

    Raises NativeFailed where there is no memory for it.
    """
    found = library.load()
    return PlainReader() if found is None else NativeReader(found, threads, by_ring)


class Readers:
    """Readers that stay open, one for each thread that reads at the same time."""

    def __init__(self) -> None:
        self._idle: list[Reader] = []

    def read_many(self, table: Table, threads: int) -> int:
        """See Reader; a reader that is opened for this call gets `threads` threads. Safe to use from several
        threads."""
        try:
            reader = self._idle.pop()
        except IndexError:
            reader = open_reader(threads)
        failed = reader.read_many(table)
        self._idle.append(reader)
        return failed

    def close(self) -> None:
        """Closes the readers that are not in use."""
        while self._idle:
            self._idle.pop().close()


def table_of(reads: Iterable[Read]) -> Table:
    """Returns a table [reads] for `read_many`; the places of the reads have to outlive it."""
    rows = [
        _ROW.pack(offset, len(into), address(into), fd, crc or 0, crc is not None, forget)
        for fd, offset, into, crc, forget in reads
    ]
    return np.frombuffer(bytearray().join(rows), READ)  # np.array of tuples takes several times as long


def address(array: U8) -> int:
    """Returns the address of the first byte of a writable array."""
    return addressof(c_char.from_buffer(array))  # type: ignore[arg-type]  # array.ctypes takes three times as long


class NativeReader:
    """A Reader by the native library, without Python's lock."""

    def __init__(self, native: library.Library, threads: int, by_ring: bool) -> None:
        self._call: Any = native.functions
        self._checks = bool(self._call.moert_crc32_fast())
        self._reader = self._call.moert_reader_open(threads, by_ring)
        if not self._reader:
            raise NativeFailed("no memory to read with")

    @property
    def has_ring(self) -> bool:
        """Whether the system lets us use io_uring."""
        return bool(self._call.moert_reader_has_ring(self._reader))

    def read_many(self, table: Table) -> int:
        """See Reader."""
        if self._checks:
            at = addressof(c_char.from_buffer(table)) if len(table) else None  # type: ignore[arg-type]
            return int(self._call.moert_read_many(self._reader, at, len(table)))
        checked = table["checked"].copy()
        table["checked"] = 0
        self._call.moert_read_many(self._reader, table.ctypes.data, len(table))
        table["checked"] = checked
        return _check(table)

    def close(self) -> None:
        """Closes the reader; nothing may be read after that."""
        if self._reader:
            self._call.moert_reader_close(self._reader)
            self._reader = None

    def __del__(self) -> None:
        if getattr(self, "_reader", None):
            self.close()


class PlainReader:
    """A Reader that does one read after the other, where there is no native library."""

    def read_many(self, table: Table) -> int:
        """See Reader."""
        for row in table:
            offset, nbytes = int(row["offset"]), int(row["nbytes"])
            row["found"] = row["error"] = row["wrong"] = 0
            try:
                row["found"] = read_into(int(row["fd"]), _place(row).data, offset)
            except OSError as error:
                row["error"] = error.errno
            if row["forget"] and hasattr(os, "posix_fadvise") and not is_direct(int(row["fd"])):
                os.posix_fadvise(int(row["fd"]), offset, nbytes, os.POSIX_FADV_DONTNEED)
        return _check(table)

    def close(self) -> None:
        """Does nothing: there is nothing to close."""


def _check(table: Table) -> int:
    """Compares the checksums of complete reads; returns the number of reads that are incomplete or wrong."""
    whole = (table["found"] == table["nbytes"]) & (table["error"] == 0)
    for at in np.flatnonzero(whole & (table["checked"] != 0)):
        table["wrong"][at] = zlib.crc32(_place(table[at]).data) != table["crc"][at]
    return int(np.count_nonzero(~whole | (table["wrong"] != 0)))


def _place(row: Any) -> U8:
    """Returns the memory that a read fills, uint8 [nbytes]."""
    return np.ctypeslib.as_array((c_uint8 * int(row["nbytes"])).from_address(int(row["place"])))
