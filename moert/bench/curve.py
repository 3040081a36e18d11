"""The curve of a drive: its speed by the size and the number of reads."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moert.errors import RunError
from moert.experts.drive import is_direct, open_expert, read_into
from moert.experts.probe import TIE, aligned, some_of
from moert.experts.store import READ, Reader, Table, open_reader
from moert.kernels.library import address
from moert.pack.codec import U8

CHUNKS = tuple(512 << power for power in range(12))
"""Sizes of one read [bytes]."""
IN_FLIGHT = (1, 2, 4, 8, 16, 32)
"""Numbers of reads in one call."""
CELL_S = 0.1
"""Seconds of reading for each chunk size and number in flight: at least one call."""
Open = Callable[[int], Reader]
"""Opens a reader, which uses that many threads where it has no better way."""


class DriveUnmeasurable(RunError):
    """The drive under a file can't be read past the page cache, or the file not at all. Put the pack on a local
    drive."""


@dataclass(frozen=True)
class Curve:
    """A drive's speed by size and number of reads. `speeds`: (bytes of a chunk, chunks in flight) → bytes/s, without
    chunks that the drive does not read directly or that are longer than any file. `spread_bytes`: total size of the
    files that chunks were taken from, at random places."""

    speeds: Mapping[tuple[int, int], float]
    spread_bytes: int

    @property
    def chunks(self) -> list[int]:
        return sorted({chunk for chunk, _ in self.speeds})

    def read_s(self, chunk: int, count: float) -> float:
        """Returns the time of `count` chunks in one call [s], at the speed of the largest number in flight that is not
        above it."""
        widths = sorted(width for size, width in self.speeds if size == chunk)
        below = [width for width in widths if width <= count]
        return count * chunk / self.speeds[chunk, below[-1] if below else widths[0]]


def curve_of(
    files: Sequence[Path], seconds: float = CELL_S, open_with: Open = open_reader,
    clock: Callable[[], float] = time.perf_counter,
) -> Curve:  # fmt: skip
    """Returns the curve of the drive that all these files lie on, reading as the engine does. Raises
    DriveUnmeasurable."""
    files = some_of(files)
    sizes = [_file_bytes(path) for path in files]
    into, speeds = aligned(CHUNKS[-1] * IN_FLIGHT[-1]), dict[tuple[int, int], float]()
    for chunk in CHUNKS:
        with _opened(files, sizes, chunk) as (fds, places):
            for count in IN_FLIGHT if len(fds) else ():
                reader = open_with(count)
                try:
                    tables = _tables(fds, places, chunk, count, into)
                    speeds[chunk, count] = _speed(reader, tables, seconds, clock)
                finally:
                    reader.close()
    if not speeds:
        raise DriveUnmeasurable(f"{files[0]} can't be read past the page cache: there is no drive to measure")
    return Curve(speeds, sum(sizes))


@contextmanager
def _opened(files: Sequence[Path], sizes: Sequence[int], chunk: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yields descriptors of the files that have a chunk of this size, and the number of chunks in each; none if they
    are not read directly."""
    fds, places = list[int](), list[int]()
    try:
        for path, size in zip(files, sizes, strict=True):
            if size >= chunk:
                with suppress(OSError):
                    fds.append(open_expert(path, direct=True))
                    places.append(size // chunk)
        yield (fds, places) if fds and _takes(fds[0], chunk) else ([], [])
    finally:
        for fd in fds:
            os.close(fd)


def _takes(fd: int, chunk: int) -> bool:
    """Returns whether a chunk of this size is read without the page cache."""
    with suppress(OSError):
        return read_into(fd, aligned(chunk)) == chunk and is_direct(fd)
    return False


def _tables(fds: Sequence[int], places: Sequence[int], chunk: int, count: int, into: U8) -> Iterator[Table]:
    """Yields tables without end: chunks at random places of random files, longer files more often."""
    rng, ends = np.random.default_rng(0), np.cumsum(places)
    which: Table = np.array(fds)
    for _ in itertools.count():
        drawn = rng.integers(ends[-1], size=count)
        file = np.searchsorted(ends, drawn, side="right")
        table: Table = np.zeros(count, READ)
        table["fd"], table["nbytes"] = which[file], chunk
        table["offset"] = (drawn - (ends - places)[file]) * chunk
        table["place"] = address(into) + np.arange(count) * chunk
        yield table


def _speed(reader: Reader, tables: Iterator[Table], seconds: float, clock: Callable[[], float]) -> float:
    """Returns the speed of these reads [bytes/s]. Raises DriveUnmeasurable where one fails."""
    reader.read_many(next(tables))
    nbytes, spent = 0, 0.0
    while not spent or spent < seconds:
        table = next(tables)
        started = clock()
        failed = reader.read_many(table)
        spent += max(clock() - started, 1e-9)
        nbytes += int(table["nbytes"].sum())
        if failed:
            raise DriveUnmeasurable(f"the drive fails: {os.strerror(int(table['error'].max()))}")
    return nbytes / spent


def _file_bytes(path: Path) -> int:
    """Returns the bytes of a file; 0 if there is no file."""
    with suppress(OSError):
        return path.stat().st_size
    return 0


def best_piece(times: Mapping[int, float]) -> int:
    """Returns the smallest piece, which takes the least memory, of those that are within 5% of the fastest."""
    least = min(times.values())
    return min(piece for piece, seconds in times.items() if TIE * seconds <= least)
