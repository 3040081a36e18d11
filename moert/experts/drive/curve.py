"""How fast a drive is by how much is read at once, and how many such reads are asked for at the same time (Alizadeh et
al. 2023, Fig. 2b); and which pieces of neurons are read fastest by that."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moert.errors import RunError
from moert.experts.drive.io import is_direct, open_expert, read_into
from moert.experts.drive.probe import aligned, some_of
from moert.experts.drive.reads import READ, Reader, Table, address, open_reader
from moert.pack.codec import U8

CHUNKS = tuple(512 << power for power in range(12))
"""Bytes of one read."""
IN_FLIGHT = (1, 2, 4, 8, 16, 32)
"""Reads that are asked for in one call."""
CELL_S = 0.1
"""Of reading, for each chunk size and number in flight: at least one call."""
_TIE = 0.95

Open = Callable[[int], Reader]
"""A reader, by so many threads where it has no better way."""


class DriveUnmeasurable(RunError):
    """The drive under a file can't be read past the page cache, or the file not at all."""


@dataclass(frozen=True)
class Curve:
    """`speeds`: (bytes of a chunk, chunks in flight) → bytes/s, without chunks that the drive does not read directly or
    that are longer than any file. `spread_bytes`: of the files that chunks were taken from, at random places."""

    speeds: Mapping[tuple[int, int], float]
    spread_bytes: int

    @property
    def chunks(self) -> list[int]:
        return sorted({chunk for chunk, _ in self.speeds})

    def read_s(self, chunk: int, count: float) -> float:
        """Time of so many chunks, asked for at once; of no more than were measured at a time."""
        widths = sorted(width for size, width in self.speeds if size == chunk)
        below = [width for width in widths if width <= count]
        return count * chunk / self.speeds[chunk, below[-1] if below else widths[0]]


def curve_of(
    files: Sequence[Path], seconds: float = CELL_S, open_with: Open = open_reader,
    clock: Callable[[], float] = time.perf_counter,
) -> Curve:  # fmt: skip
    """Reads these files, all on one drive, as the engine does. Raises DriveUnmeasurable."""
    files = some_of(files)
    sizes = [_size(path) for path in files]
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
    """Descriptors of the files that have a chunk of this size, and how many each has; none if they are not read
    directly."""
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
    """Whether a chunk of this size is read without the page cache."""
    with suppress(OSError):
        return read_into(fd, aligned(chunk)) == chunk and is_direct(fd)
    return False


def _tables(fds: Sequence[int], places: Sequence[int], chunk: int, count: int, into: U8) -> Iterator[Table]:
    """Endless: chunks at random places of random files, longer files more often."""
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
    """bytes/s. Raises DriveUnmeasurable where something can't be read."""
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


def _size(path: Path) -> int:
    """Bytes of a file; 0 if it is not there."""
    with suppress(OSError):
        return path.stat().st_size
    return 0


class Neurons(NamedTuple):
    """`n` neurons that a token may ask for at once, with columns of `nbytes` each."""

    n: int
    nbytes: int


def piece_times(curve: Curve, neurons: Neurons, share: float) -> dict[int, float]:
    """By the bytes of a piece, the time in which all that have a neuron that fires come, s, if `share` of them fire,
    each for itself. Without pieces that no neuron fits in, or that hold more than there are."""
    times = dict[int, float]()
    for chunk in curve.chunks:
        each = chunk // neurons.nbytes
        if 1 <= each <= neurons.n:
            asked = neurons.n / each * (1 - (1 - share) ** each)
            times[chunk] = curve.read_s(chunk, asked)
    return times


def best_piece(times: Mapping[int, float]) -> int:
    """The smallest, which takes the least memory, of those that are within 5% of the fastest."""
    least = min(times.values())
    return min(piece for piece, seconds in times.items() if _TIE * seconds <= least)
