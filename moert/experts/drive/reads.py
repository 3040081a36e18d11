"""Many reads in one call: by io_uring where the system lets us, else by a few threads; checked as they come."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable
from ctypes import addressof, c_char, c_uint8
from struct import Struct
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from moert.experts.drive import io
from moert.kernels import library, structs
from moert.kernels.library import NativeFailed
from moert.pack.codec import U8

READ = np.dtype(structs.Read)
"""The struct moert_read. `place` is an address; of those with `checked`, `crc` is the CRC-32 to be found; with `forget`
what was read through the page cache does not stay there. `found` bytes come, fewer than `nbytes` only where the file
ends or the system gives the errno `error`; `wrong`: all came and have another checksum."""

_ROW = Struct("<qqQiIii16x")
Table = npt.NDArray[Any]
"""[reads] of READ."""


class Read(NamedTuple):
    """Consecutive bytes of an open file into `into`, uint8 [nbytes]; `crc`: the CRC-32 that they should have."""

    fd: int
    offset: int
    into: U8
    crc: int | None = None
    forget: bool = False


class Reader(Protocol):
    """One thread at a time uses it."""

    def read_many(self, table: Table) -> int:
        """Carries out all reads of a table and fills in its last three columns; the number of those that are not whole
        and right.

        Reads that follow each other, in the table and in a file, are one request, scattered to their places: so
        consecutive pieces should stand in order. Direct reads want what the drive wants (places, offsets and lengths
        that are multiples of 512 or 4,096): others go through the page cache, and their descriptor from then on. None
        is on its way any more when this returns.
        """
        ...

    def close(self) -> None: ...


def open_reader(threads: int, by_ring: bool = True) -> Reader:
    """The best that there is here: io_uring unless not `by_ring`, else so many threads, else one read after the other.

    Raises NativeFailed where there is no memory for it.
    """
    found = library.load()
    return PlainReader() if found is None else NativeReader(found, threads, by_ring)


class Readers:
    """Readers that stay open, one for each thread that reads at the same time."""

    def __init__(self) -> None:
        self._idle: list[Reader] = []

    def read_many(self, table: Table, threads: int) -> int:
        """See Reader; with so many threads where a reader is opened for it. Safe to use from several threads."""
        try:
            reader = self._idle.pop()
        except IndexError:
            reader = open_reader(threads)
        failed = reader.read_many(table)
        self._idle.append(reader)
        return failed

    def close(self) -> None:
        """Closes those that nobody uses."""
        while self._idle:
            self._idle.pop().close()


def table_of(reads: Iterable[Read]) -> Table:
    """[reads] for `read_many`; the places have to outlive it."""
    rows = [
        _ROW.pack(offset, len(into), address(into), fd, crc or 0, crc is not None, forget)
        for fd, offset, into, crc, forget in reads
    ]
    return np.frombuffer(bytearray().join(rows), READ)  # np.array of tuples takes several times as long


def address(array: U8) -> int:
    """Where its first byte lies; it is to be written to."""
    return addressof(c_char.from_buffer(array))  # type: ignore[arg-type]  # array.ctypes takes three times as long


class NativeReader:
    """By the native library, without Python's lock."""

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
        """Nothing may be read after that."""
        if self._reader:
            self._call.moert_reader_close(self._reader)
            self._reader = None

    def __del__(self) -> None:
        if getattr(self, "_reader", None):
            self.close()


class PlainReader:
    """One read after the other, where there is no native library."""

    def read_many(self, table: Table) -> int:
        """See Reader."""
        for row in table:
            offset, nbytes = int(row["offset"]), int(row["nbytes"])
            row["found"] = row["error"] = row["wrong"] = 0
            try:
                row["found"] = io.read_into(int(row["fd"]), _place(row).data, offset)
            except OSError as error:
                row["error"] = error.errno
            if row["forget"] and hasattr(os, "posix_fadvise") and not io.is_direct(int(row["fd"])):
                os.posix_fadvise(int(row["fd"]), offset, nbytes, os.POSIX_FADV_DONTNEED)
        return _check(table)

    def close(self) -> None:
        """Nothing is held."""


def _check(table: Table) -> int:
    """Compares checksums of what has come whole; how many reads are not whole and right."""
    whole = (table["found"] == table["nbytes"]) & (table["error"] == 0)
    for at in np.flatnonzero(whole & (table["checked"] != 0)):
        table["wrong"][at] = zlib.crc32(_place(table[at]).data) != table["crc"][at]
    return int(np.count_nonzero(~whole | (table["wrong"] != 0)))


def _place(row: Any) -> U8:
    """uint8 [nbytes] where a read goes."""
    return np.ctypeslib.as_array((c_uint8 * int(row["nbytes"])).from_address(int(row["place"])))
