"""Measurements of a drive: the fastest way to read experts, remembered."""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moert.experts.drive import PAGE_BYTES, drive_key, is_direct, leave_page_cache, open_expert, read_into
from moert.experts.store import DEFAULT_THREADS, IoInvalid, IoSettings, parse_io
from moert.machine import DAMAGED, ROOT, cache_file, entries, remember

PROBE_S = 0.5
_THREADS = (1, 2, 4)
_PIECE_BYTES = 4 << 20  # a probe reads no more of a larger file
_FILES = 256
TIE = 0.95
_SECTION = "drives"
_DAMAGED = (*DAMAGED, IoInvalid)


@dataclass(frozen=True)
class Drive:
    """The measurement of a drive: the best settings, and the speed of each that was tried [bytes/s], in reads of at
    most `piece_bytes`; 0 where that was not remembered."""

    settings: IoSettings
    speeds: Mapping[IoSettings, float]
    piece_bytes: int = field(default=0, compare=False)


Measure = Callable[[Iterator[Path], IoSettings, float], float]
"""Reads some of the files with these settings for about that many seconds; returns bytes/s, 0 if none can be read."""


def drive_of(files: Sequence[Path], cache: Path | None = None, root: Path = ROOT) -> Drive:
    """Returns the measurement of the drive that the expert files lie on: remembered, or measured now and remembered.

    `cache` is the file to remember it in, by default one in the user's cache folder; `root` is where /proc and /sys
    are. Never fails: without a cache it measures each time.
    """
    cache, key = cache or cache_file(), drive_key(files[0], root)
    known = known_drives(cache)
    if key in known:
        return known[key]
    drive = probe(files)
    if key and drive.speeds:
        _remember(cache, {**known, key: drive})
    return drive


def remembered(path: Path, cache: Path | None = None, root: Path = ROOT) -> Drive | None:
    """Returns the measurement of the drive under a file or folder, without measuring; None if it was never measured."""
    key = drive_key(path, root)
    return known_drives(cache or cache_file()).get(key) if key else None


def probe(files: Sequence[Path], measure: Measure | None = None, clock: Callable[[], float] = time.monotonic) -> Drive:
    """Measures a drive: reads expert files, cold, in every way for about PROBE_S in all, and takes the fastest.

    Each way has two turns, the second in reverse order, and its better one counts: other caches below this system warm
    up meanwhile. A way that would not end in time is left out, so that slow drives try fewer of them.
    """
    chosen = some_of(files)
    piece = max((_size(path) for path in chosen), default=0)
    modes = (True, False) if takes_direct(chosen[0]) else (False,)
    ways = [IoSettings(direct, threads) for threads in _THREADS for direct in modes]
    turns = [*ways, *reversed(ways)]
    around, speeds, started = itertools.cycle(chosen), dict[IoSettings, float](), clock()
    for way in turns:
        fastest = max(speeds.values(), default=0.0)
        if fastest and clock() - started + way.threads * piece / fastest > PROBE_S:
            continue
        speed = (measure or read_for)(around, way, PROBE_S / len(turns))
        if speed > 0:
            speeds[way] = max(speed, speeds.get(way, 0.0))
    return Drive(choose(speeds) if speeds else IoSettings(modes[0], DEFAULT_THREADS), speeds, piece)


def some_of(files: Sequence[Path]) -> list[Path]:
    """Returns at most _FILES of the files, evenly spread among them."""
    return [files[at] for at in sorted({len(files) * step // _FILES for step in range(_FILES)})]


def choose(speeds: Mapping[IoSettings, float]) -> IoSettings:
    """Returns the settings with the fewest threads of those within 5% of the fastest, then direct ones, which leave the
    page cache alone."""
    enough = TIE * max(speeds.values())
    return min((way for way in speeds if speeds[way] >= enough), key=lambda way: (way.threads, not way.direct))


def takes_direct(path: Path) -> bool:
    """Returns whether this file can be read past the page cache."""
    with suppress(OSError):
        fd = open_expert(path, direct=True)
        try:
            read_into(fd, aligned(PAGE_BYTES))
            return is_direct(fd)
        finally:
            os.close(fd)
    return False


def read_for(
    files: Iterator[Path], settings: IoSettings, seconds: float, clock: Callable[[], float] = time.perf_counter
) -> float:
    """See Measure. Threads begin no read after `seconds`. Returns 0 where the system allows fewer threads than the
    settings name."""
    lock, total = threading.Lock(), 0
    started = clock()

    def read() -> None:
        nonlocal total
        with suppress(OSError, MemoryError):
            while clock() - started < seconds:
                with lock:
                    path = next(files)
                found = _read_cold(path, settings.direct)
                with lock:
                    total += found

    readers: list[threading.Thread] = []
    with suppress(RuntimeError):
        for _ in range(settings.threads):
            reader = threading.Thread(target=read)
            reader.start()
            readers.append(reader)
    for reader in readers:
        reader.join()
    return total / (clock() - started) if len(readers) == settings.threads else 0.0


def _read_cold(path: Path, direct: bool) -> int:
    """Reads a file from the drive and leaves nothing of it in the page cache; returns the number of bytes read."""
    fd = open_expert(path, direct)
    try:
        leave_page_cache(fd)
        found = read_into(fd, aligned(_size(path)))
        leave_page_cache(fd)
        return found
    finally:
        os.close(fd)


def aligned(nbytes: int) -> npt.NDArray[np.uint8]:
    """Returns an array, uint8 [nbytes], that begins on a page."""
    room = np.empty(nbytes + PAGE_BYTES, dtype=np.uint8)
    start = -room.ctypes.data % PAGE_BYTES
    return room[start : start + nbytes]


def _size(path: Path) -> int:
    """Returns the bytes of a file that a probe reads; 0 if there is no file."""
    with suppress(OSError):
        return min(path.stat().st_size, _PIECE_BYTES)
    return 0


def known_drives(cache: Path | None) -> dict[str, Drive]:
    """Returns the drives that were measured before, by key; without damaged entries, and none if the whole file is
    damaged or missing."""
    known: dict[str, Drive] = {}
    for key, found in entries(cache, _SECTION).items():
        with suppress(*_DAMAGED):
            known[key] = _parsed(found)
    return known


def _parsed(found: Mapping[str, Any]) -> Drive:
    speeds = {_way(text): float(speed) for text, speed in found["speeds"].items()}
    settings = _way(found["settings"])
    if not all(0 < speed < math.inf for speed in speeds.values()) or settings not in speeds:
        raise ValueError
    return Drive(settings, speeds, int(found.get("piece_bytes", 0)))


def _way(text: str) -> IoSettings:
    settings = parse_io(text)
    if settings is None:
        raise ValueError
    return settings


def _remember(cache: Path | None, drives: Mapping[str, Drive]) -> None:
    """Writes the drives to the cache; where that fails, nothing is remembered."""
    body = {
        key: {
            "settings": str(drive.settings),
            "speeds": {str(way): speed for way, speed in drive.speeds.items()},
            "piece_bytes": drive.piece_bytes,
        }
        for key, drive in drives.items()
    }
    remember(cache, _SECTION, body)
