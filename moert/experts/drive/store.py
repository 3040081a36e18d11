"""Experts on the disk: one explicit read for each, straight into its place, checked."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

from moert.experts.drive.io import IoSettings, in_page_cache, mapped, open_expert, read_into
from moert.kernels.backend import Backend, Expert, ExpertView, ProjectionView
from moert.kernels.checksum import crc32
from moert.pack.codec import U8
from moert.pack.errors import FileTruncated, HashMismatch, HeaderInvalid, PackError
from moert.pack.layout import group_of
from moert.pack.model_spec import ExpertKey
from moert.pack.reader import Pack, unreadable
from moert.stats import ExpertCounters

MAPPED_BYTES = 256 << 10
"""From this size on an expert that the page cache has is used there at first; smaller ones are read as quickly."""
_PAUSES_S = (0.02, 0.1, 0.5)  # before a failed read is tried again
_FINAL = {errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ELOOP}


class ExpertStore:
    """Reads experts of a pack and counts what it read. Safe to use from several threads.

    A read that fails, ends early or brings other bytes than the manifest promises is tried again: a cable, a network
    or a drive may have had a bad moment. What is wrong four times in a row is an error.
    """

    def __init__(self, pack: Pack, backend: Backend, counters: ExpertCounters, io: IoSettings) -> None:
        self.io = io
        self.leaves_page_cache = False
        """True: what lies in the system's page cache is taken from there and left there. Otherwise nothing is left in
        it, since it would count as memory of this process."""
        self._pack, self._backend, self._counters = pack, backend, counters
        self._lock = threading.Lock()

    def files(self) -> list[Path]:
        """The files of all experts."""
        return [self._pack.file(path) for path in dict.fromkeys(entry.path for entry in self._pack.manifest.experts)]

    def nbytes(self, key: ExpertKey) -> int:
        """Bytes that the expert takes in memory: all that it has of its file, as it is read."""
        return self._pack.entry(key).file_bytes

    def read(self, key: ExpertKey, into: U8) -> U8:
        """Fills `into`, uint8 [nbytes], page-aligned, and gives it back; or leaves it as it is, and gives the bytes
        where the page cache has them, not to be written. Raises a PackError if the file does not begin with what the
        manifest promises; what has been added behind that is not looked at."""
        for pause_s in (*_PAUSES_S, None):
            started = time.perf_counter()
            try:
                place = self._read_once(key, into)
            except (OSError, FileTruncated, HashMismatch, HeaderInvalid) as error:
                if pause_s is None or (isinstance(error, OSError) and error.errno in _FINAL):
                    raise self._named(key, error) from None
                with self._lock:
                    self._counters.retries += 1
                time.sleep(pause_s)
            else:
                with self._lock:
                    self._counters.reads += 1
                    self._counters.bytes_read += len(into)
                    self._counters.read_s += time.perf_counter() - started
                return place
        raise AssertionError("the last try returns or raises")

    def expert(self, key: ExpertKey, buffer: U8) -> Expert:
        """What was read, as the backend takes it."""
        return self._backend.expert(ExpertView(buffer, _views(self._pack, key)))

    def _read_once(self, key: ExpertKey, into: U8) -> U8:
        entry = self._pack.entry(key)
        path = os.path.join(self._pack.root, entry.path)  # looked at when the pack was opened
        direct = not in_page_cache(path, entry.offset) if self.leaves_page_cache else self.io.direct
        handle = open_expert(path, direct)
        try:
            if self.leaves_page_cache and not direct and len(into) >= MAPPED_BYTES:
                place = mapped(handle, len(into), entry.offset)
                if place is not None:
                    self._pack.check_expert(key, place, crc32)
                    return place
            found = read_into(handle, into, entry.offset)
            if (direct or not self.leaves_page_cache) and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(handle, entry.offset, len(into), os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)
        if found != len(into):
            raise FileTruncated(f"{entry.path}: read {found} of {len(into)} bytes: copy the pack again")
        self._pack.check_expert(key, into, crc32)
        return into

    def _named(self, key: ExpertKey, error: Exception) -> PackError:
        if isinstance(error, OSError):
            return unreadable(self._pack.root, self._pack.entry(key).path, error)
        assert isinstance(error, PackError)
        return error


def _views(pack: Pack, key: ExpertKey) -> dict[str, ProjectionView]:
    """Where the projections of an expert lie in its file."""
    quantization, layout, views = pack.manifest.quantization, pack.layout(key), {}
    for name, width in pack.entry(key).bits.items():
        shape = pack.manifest.model.projection_shape(name)
        whole = ("qweight", "exponent") if quantization.mxfp4 else ("weight",)
        parts = whole if width == 16 else ("qweight", "scale", "min")
        places = tuple(layout.data_offset + layout.slot(f"{name}.{part}").start for part in parts)
        group = group_of(shape[1], quantization.group_size)
        bias = layout.data_offset + layout.slot(f"{name}.bias").start if pack.manifest.model.moe.ffn.bias else None
        views[name] = ProjectionView(shape, width, group, quantization.form16, places, bias)
    return views
