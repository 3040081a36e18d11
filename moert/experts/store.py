"""Experts on the drive: explicit reads straight into their places, many small ones in one call, each checked."""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from ctypes import c_uint8
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import Any, NamedTuple, Protocol, TypeVar
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from moert.errors import RunError, said
from moert.experts.drive import in_page_cache, is_direct, leave_page_cache, open_expert, read_into, wait_for_reads
from moert.kernels import library
from moert.kernels.backend import Backend, Expert, ExpertView, ProjectionView
from moert.kernels.library import NativeFailed, address, crc32
from moert.kernels.memory import FencedMapping, breaks, mapped
from moert.machine import limit_of
from moert.pack.codec import U8
from moert.pack.errors import FileTruncated, HashMismatch, HeaderInvalid, PackError
from moert.pack.files import unreadable
from moert.pack.layout import group_of, tensors_of
from moert.pack.manifest import ExpertEntry
from moert.pack.model_spec import ExpertKey
from moert.pack.reader import Pack
from moert.stats import ExpertCounters

DEFAULT_THREADS = 2
MOST_THREADS = 64


class IoInvalid(RunError):
    """`--tune io` says neither auto, direct nor buffered, or no sensible number of threads. Leave it out to let the
    drive decide."""


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
        allowed = limit_of("RLIMIT_NOFILE") or _MOST * _SHARE
        self._root, self._most = os.fspath(root), most or max(1, min(_MOST, allowed // _SHARE))
        self._files: dict[tuple[str, bool], OpenFile] = {}
        self._lock, self._epoch = threading.Lock(), 0

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
            wait_for_reads(fd)
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


READ = np.dtype(library.Read)
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
            return int(self._call.moert_read_many(self._reader, table, len(table)))
        checked = table["checked"].copy()
        table["checked"] = 0
        self._call.moert_read_many(self._reader, table, len(table))
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
            if row["forget"] and not is_direct(int(row["fd"])):
                leave_page_cache(int(row["fd"]), offset, nbytes)
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


FAILURES = (OSError, FileTruncated, HashMismatch, HeaderInvalid)
"""Errors of reads that did not bring the bytes that the manifest promises."""
_PAUSES_S = (0.02, 0.1, 0.5)
_FINAL = {errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ELOOP}

_T = TypeVar("_T")


class Patience:
    """Retries of failed reads of a pack, and their count; `lock` guards the counters."""

    def __init__(self, pack: Pack, counters: ExpertCounters, lock: threading.Lock) -> None:
        self._pack, self._counters, self._lock = pack, counters, lock

    def again(self, read: Callable[[], _T], path: str, error: Exception) -> _T:
        """Returns the result of `read`, tried again after one of FAILURES on a file of the pack. Raises PackError if it
        fails four times in a row, or at once where waiting can't help."""
        for pause_s in _PAUSES_S:
            if isinstance(error, OSError) and error.errno in _FINAL:
                break
            with self._lock:
                self._counters.retries += 1
            time.sleep(pause_s)
            try:
                return read()
            except FAILURES as caught:
                error = caught
        if isinstance(error, OSError):
            raise unreadable(self._pack.root, path, error) from None
        raise error from None


TOGETHER_BYTES = 128 << 10
"""Below this size many experts are read in one call, from files that stay open."""
MAPPED_BYTES = 256 << 10
"""From this size on an expert that the page cache has is used there at first; smaller ones are read as quickly."""


class ExpertStore:
    """The experts of a pack on the drive: reads them, and counts reads and bytes. Safe to use from several threads.

    A read that fails, ends early or brings other bytes than the manifest promises is tried again: a cable, a network or
    a drive may have had a bad moment. Four failures in a row are an error.
    """

    def __init__(self, pack: Pack, backend: Backend, counters: ExpertCounters, io: IoSettings) -> None:
        self.io = io
        self.leaves_page_cache = False
        """True: experts that lie in the system's page cache are taken from there and left there. Otherwise nothing is
        left in it, since it would count as memory of this process."""
        self._pack, self._backend, self._counters = pack, backend, counters
        self._entries = {entry.key: entry for entry in pack.manifest.experts}
        self._lock = threading.Lock()
        self._patience = Patience(pack, counters, self._lock)
        self._files = OpenFiles(pack.root)  # all of them were looked at when the pack was opened
        self._readers = Readers()
        self._sound: set[ExpertKey] = set()  # whose bytes, if they have the manifest's checksum, begin as they should
        self._mapped: WeakSet[FencedMapping] = WeakSet()
        self.has_mapped = False
        """Whether experts were ever used where the page cache has them."""
        self._lost: list[str] = []  # files that became shorter than the part that is mapped or copied
        self._breaks = breaks()
        self._views: dict[ExpertKey, Mapping[str, ProjectionView]] = {}
        self._kinds: dict[object, Mapping[str, ProjectionView]] = {}  # of views, which many experts share

    def files(self) -> list[Path]:
        """Returns the files of all experts."""
        return [self._pack.file(path) for path in dict.fromkeys(entry.path for entry in self._pack.manifest.experts)]

    def nbytes(self, key: ExpertKey) -> int:
        """Returns the bytes that an expert takes in memory: all that it has of its file, as it is read."""
        return self._entries[key].file_bytes

    def expect(self) -> None:
        """Has files looked up again for a request that is about to begin: they may have changed since the last one."""
        self._files.expect()

    def check(self) -> None:
        """Raises FileTruncated if bytes of a mapped expert are gone: results computed with it since the last call are
        worth nothing then. It is raised each time from then on."""
        if not self._lost and self.has_mapped and self._breaks != (now := breaks()):
            self._breaks = now
            with self._lock:
                self._lost += [mapping.path for mapping in self._mapped if mapping.is_broken]
        if self._lost:
            raise FileTruncated(
                f"{self._lost[0]} became shorter, or could not be read any more, while it was in use: copy the pack "
                "again"
            )

    def close(self) -> None:
        """Closes the files that are not being read."""
        self._files.close()
        self._readers.close()

    def read(self, key: ExpertKey, into: U8) -> U8:
        """Reads an expert into `into`, uint8 [nbytes], page-aligned, and returns it; or leaves it as it is, and returns
        the bytes where the page cache has them, not to be written. Raises a PackError if the file does not begin with
        the bytes that the manifest promises; later additions to the file are not looked at."""
        try:
            return self._read_once(key, into)
        except FAILURES as error:
            return self._again(key, into, error)

    def read_all(self, wanted: Sequence[tuple[ExpertKey, U8]]) -> list[U8 | PackError]:
        """Reads several experts as `read` does; returns the bytes that each lies in, or the error that stopped its
        reading."""
        if self.leaves_page_cache or any(len(into) >= TOGETHER_BYTES for _, into in wanted):
            return [self._tried(key, into) for key, into in wanted]
        return [
            into if error is None else self._tried(key, into, error)
            for (key, into), error in zip(wanted, self._read_together(wanted), strict=True)
        ]

    def expert(self, key: ExpertKey, buffer: U8) -> Expert:
        """Returns the expert that was read, as the backend takes it."""
        return self._backend.expert(ExpertView(buffer, self.projections(key)))

    def projections(self, key: ExpertKey) -> Mapping[str, ProjectionView]:
        """Returns the places of projections in an expert's bytes; one object for all experts that are alike."""
        views = self._views.get(key)
        if views is None:
            entry = self._entries[key]
            powers = tuple((entry.powers or {}).items())
            kind = (*entry.bits.items(), *powers, self._pack.layout(key).data_offset)
            views = self._views[key] = self._kinds.setdefault(kind, _views(self._pack, key))
        return views

    def _tried(self, key: ExpertKey, into: U8, error: Exception | None = None) -> U8 | PackError:
        """Reads an expert, again if it failed with `error`; returns the bytes that it lies in, or its error."""
        try:
            return self.read(key, into) if error is None else self._again(key, into, error)
        except PackError as caught:
            return caught

    def _again(self, key: ExpertKey, into: U8, error: Exception) -> U8:
        """Reads an expert again after a read that failed."""
        return self._patience.again(lambda: self._read_once(key, into), self._entries[key].path, error)

    def _read_once(self, key: ExpertKey, into: U8) -> U8:
        started, entry = time.perf_counter(), self._entries[key]
        path = os.path.join(self._pack.root, entry.path)  # looked at when the pack was opened
        direct = not in_page_cache(path, entry.offset) if self.leaves_page_cache else self.io.direct
        handle = open_expert(path, direct)
        try:
            if self.leaves_page_cache and not direct and len(into) >= MAPPED_BYTES:
                place = self._mapping(key, handle, len(into))
                if place is not None:
                    self._count(1, len(into), started)
                    return place
            found = read_into(handle, into, entry.offset)
            if direct or not self.leaves_page_cache:
                leave_page_cache(handle, entry.offset, len(into))
        finally:
            os.close(handle)
        if found != len(into):
            raise _ends_early(entry, found)
        self._pack.check_expert(key, into, crc32)
        self._count(1, len(into), started)
        return into

    def _mapping(self, key: ExpertKey, handle: int, nbytes: int) -> U8 | None:
        """Returns the expert's bytes where the page cache has them, checked; None if they can't be used there."""
        entry = self._entries[key]
        found = mapped(handle, nbytes, entry.offset)
        if found is None:
            return None
        place, mapping = found
        self._pack.check_expert(key, place, crc32)
        if mapping.is_broken:
            return None
        mapping.path, mapping.lost = entry.path, self._lost
        with self._lock:
            self.has_mapped = True
            self._mapped.add(mapping)
        return place

    def _read_together(self, wanted: Sequence[tuple[ExpertKey, U8]]) -> list[Exception | None]:
        """Reads experts in one call; returns for each the error that stopped it, or None."""
        started, entries = time.perf_counter(), [self._entries[key] for key, _ in wanted]
        errors: list[Exception | None] = [None] * len(wanted)
        files: list[OpenFile | None] = []
        try:
            for place, entry in enumerate(entries):
                files.append(None)
                try:
                    files[-1] = self._files.take(entry.path, self.io.direct)
                except OSError as error:
                    errors[place] = error
            table = table_of([
                Read(-1 if file is None else file.fd, entry.offset, into, entry.crc32, forget=True)
                for file, entry, (_, into) in zip(files, entries, wanted, strict=True)
            ])  # fmt: skip
            failed = self._readers.read_many(table, self.io.threads)
            for place, (key, into) in enumerate(wanted):
                if errors[place] is None and (failed or key not in self._sound):
                    errors[place] = self._wrong(key, into, table[place])
        finally:
            for file, wrong in zip(files, errors, strict=False):
                if file is not None:
                    self._files.give(file, failed=wrong is not None)
        arrived = [into for (_, into), error in zip(wanted, errors, strict=True) if error is None]
        self._count(len(arrived), sum(map(len, arrived)), started)
        return errors

    def _wrong(self, key: ExpertKey, into: U8, row: Any) -> Exception | None:
        """Returns the error of a read by its row of results; None if it brought the right bytes."""
        entry = self._entries[key]
        if row["error"]:
            return OSError(int(row["error"]), os.strerror(int(row["error"])))
        if row["found"] != len(into):
            return _ends_early(entry, int(row["found"]))
        if row["wrong"] or key not in self._sound:
            try:
                self._pack.check_expert(key, into, crc32)
            except (HashMismatch, HeaderInvalid) as error:
                return error
        self._sound.add(key)
        return None

    def _count(self, reads: int, nbytes: int, started: float) -> None:
        with self._lock:
            self._counters.reads += reads
            self._counters.bytes_read += nbytes
            self._counters.read_s += time.perf_counter() - started


def _ends_early(entry: ExpertEntry, found: int) -> FileTruncated:
    return FileTruncated(f"{entry.path}: read {found} of {entry.file_bytes} bytes: copy the pack again")


def _views(pack: Pack, key: ExpertKey) -> dict[str, ProjectionView]:
    """Returns the places of an expert's projections in its file."""
    coding, layout, views = pack.manifest.quantization.coding, pack.layout(key), {}
    powers = pack.entry(key).powers or {}
    for name, width in pack.entry(key).bits.items():
        shape = pack.manifest.model.projection_shape(name)
        slots = [layout.slot(f"{name}.{part}") for part, *_ in tensors_of(width, shape, coding)]
        places, group = tuple(layout.data_offset + slot.start for slot in slots), group_of(shape[1], coding.group_size)
        bias = layout.data_offset + layout.slot(f"{name}.bias").start if pack.manifest.model.moe.ffn.bias else None
        views[name] = ProjectionView(
            shape, width, group, coding.form16, places, bias, powers.get(name, 0), coding.trellis
        )
    return views
