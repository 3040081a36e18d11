"""Experts on the disk: one explicit read for each, straight into its place, checked; many small ones in one call."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

from moert.experts.io import (
    IoSettings,
    OpenFile,
    OpenFiles,
    Read,
    Readers,
    Table,
    in_page_cache,
    open_expert,
    read_into,
    table_of,
)
from moert.experts.policy import Demand
from moert.kernels.backend import Backend, Expert, ExpertView, ProjectionView
from moert.kernels.library import crc32
from moert.kernels.memory import FencedMapping, breaks, mapped
from moert.pack.codec import U8
from moert.pack.errors import FileTruncated, HashMismatch, HeaderInvalid, PackError
from moert.pack.files import unreadable
from moert.pack.layout import group_of
from moert.pack.manifest import ExpertEntry
from moert.pack.model_spec import ExpertKey
from moert.pack.reader import Pack
from moert.stats import ExpertCounters

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
        self._nbytes = {entry.key: entry.file_bytes for entry in pack.manifest.experts}
        self._lock = threading.Lock()
        self._patience = Patience(pack, counters, self._lock)
        self._files = OpenFiles(pack.root)  # all of them were looked at when the pack was opened
        self._readers = Readers()
        self._sound: set[ExpertKey] = set()  # whose bytes, if they have the manifest's checksum, begin as they should
        self._mapped: WeakSet[FencedMapping] = WeakSet()
        self._maps = False  # or has mapped experts
        self._lost: list[str] = []  # files that became shorter than the part that is mapped or copied
        self._breaks = breaks()
        self._views: dict[ExpertKey, Mapping[str, ProjectionView]] = {}
        self._kinds: dict[object, Mapping[str, ProjectionView]] = {}  # of views, which many experts share

    def files(self) -> list[Path]:
        """Returns the files of all experts."""
        return [self._pack.file(path) for path in dict.fromkeys(entry.path for entry in self._pack.manifest.experts)]

    def nbytes(self, key: ExpertKey) -> int:
        """Returns the bytes that an expert takes in memory: all that it has of its file, as it is read."""
        return self._nbytes[key]

    def expect(self) -> None:
        """Has files looked up again for a request that is about to begin: they may have changed since the last one."""
        self._files.expect()

    def check(self, demand: Demand | None = None) -> None:
        """Raises FileTruncated if bytes of a mapped expert are gone: results computed with it since the last call are
        worth nothing then. It is raised each time from then on. A Listener of demands, too."""
        if not self._lost and self._maps and self._breaks != (now := breaks()):
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
        return self._backend.expert(self.view(key, buffer))

    def view(self, key: ExpertKey, buffer: U8) -> ExpertView:
        """Returns the view of an expert that was read, as it lies there."""
        return ExpertView(buffer, self.projections(key))

    def projections(self, key: ExpertKey) -> Mapping[str, ProjectionView]:
        """Returns the places of projections in an expert's bytes; one object for all experts that are alike."""
        views = self._views.get(key)
        if views is None:
            entry = self._pack.entry(key)
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
        return self._patience.again(lambda: self._read_once(key, into), self._pack.entry(key).path, error)

    def _read_once(self, key: ExpertKey, into: U8) -> U8:
        started = time.perf_counter()
        entry = self._pack.entry(key)
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
            if (direct or not self.leaves_page_cache) and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(handle, entry.offset, len(into), os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)
        if found != len(into):
            raise _ends_early(entry, found)
        self._pack.check_expert(key, into, crc32)
        self._count(1, len(into), started)
        return into

    def _mapping(self, key: ExpertKey, handle: int, nbytes: int) -> U8 | None:
        """Returns the expert's bytes where the page cache has them, checked; None if they can't be used there."""
        entry = self._pack.entry(key)
        found = mapped(handle, nbytes, entry.offset)
        if found is None:
            return None
        place, mapping = found
        self._pack.check_expert(key, place, crc32)
        if mapping.is_broken:
            return None
        mapping.path, mapping.lost = entry.path, self._lost
        with self._lock:
            self._maps = True
            self._mapped.add(mapping)
        return place

    def _read_together(self, wanted: Sequence[tuple[ExpertKey, U8]]) -> list[Exception | None]:
        """Reads experts in one call; returns for each the error that stopped it, or None."""
        started = time.perf_counter()
        errors: list[Exception | None] = [None] * len(wanted)
        files: list[OpenFile | None] = []
        try:
            for place, (key, _) in enumerate(wanted):
                files.append(None)
                try:
                    files[-1] = self._files.take(self._pack.entry(key).path, self.io.direct)
                except OSError as error:
                    errors[place] = error
            table, failed = self._carry_out(wanted, files)
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

    def _carry_out(self, wanted: Sequence[tuple[ExpertKey, U8]], files: Sequence[OpenFile | None]) -> tuple[Table, int]:
        """Carries out one read for each expert; returns their results, and how many failed."""
        entries = [self._pack.entry(key) for key, _ in wanted]
        table = table_of([
            Read(-1 if file is None else file.fd, entry.offset, into, entry.crc32, forget=True)
            for file, entry, (_, into) in zip(files, entries, wanted, strict=True)
        ])  # fmt: skip
        return table, self._readers.read_many(table, self.io.threads)

    def _wrong(self, key: ExpertKey, into: U8, row: Any) -> Exception | None:
        """Returns the error of a read by its row of results; None if it brought the right bytes."""
        entry = self._pack.entry(key)
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
    quantization, layout, views = pack.manifest.quantization, pack.layout(key), {}
    powers = pack.entry(key).powers or {}
    for name, width in pack.entry(key).bits.items():
        shape = pack.manifest.model.projection_shape(name)
        whole = ("qweight", "exponent") if quantization.mxfp4 else ("weight",)
        parts = whole if width == 16 else ("qweight", "scale", "min")
        places = tuple(layout.data_offset + layout.slot(f"{name}.{part}").start for part in parts)
        group = group_of(shape[1], quantization.group_size)
        bias = layout.data_offset + layout.slot(f"{name}.bias").start if pack.manifest.model.moe.ffn.bias else None
        views[name] = ProjectionView(shape, width, group, quantization.form16, places, bias, powers.get(name, 0))
    return views
