"""The curve of a drive: what is read for it, what it makes of that, and which pieces of neurons it favours."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from moert.bench.drive import Neurons, piece_times
from moert.experts import probe as module
from moert.experts.probe import (
    CHUNKS,
    IN_FLIGHT,
    Curve,
    DriveUnmeasurable,
    best_piece,
    curve_of,
)
from moert.experts.store import Table

REQUEST_S, BYTES_PER_S = 1e-5, 1e9


class FakeDrive:
    """A reader that lets time pass, and notes what is asked of which file."""

    def __init__(self) -> None:
        self.now, self.asked = 0.0, list[tuple[str, int, int]]()
        self.error = 0

    def clock(self) -> float:
        return self.now

    def read_many(self, table: Table) -> int:
        for row in table:
            self.asked.append((os.readlink(f"/proc/self/fd/{row['fd']}"), int(row["offset"]), int(row["nbytes"])))
        self.now += len(table) * REQUEST_S + int(table["nbytes"].sum()) / BYTES_PER_S
        table["error"] = self.error
        return len(table) if self.error else 0

    def close(self) -> None:
        pass


pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="looks into /proc")


@pytest.fixture
def drive(monkeypatch: pytest.MonkeyPatch) -> FakeDrive:
    monkeypatch.setattr(module, "_takes", lambda fd, chunk: chunk >= 1024)
    return FakeDrive()


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    sizes = {"small": 700, "middle": 900_000, "large": 3 << 20}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(bytes(size))
    return [tmp_path / name for name in (*sizes, "missing")]


def test_each_size_is_read_from_whole_places_of_files_that_have_it(files: list[Path], drive: FakeDrive) -> None:
    found = curve_of(files, 1e-4, lambda threads: drive, drive.clock)
    assert set(found.speeds) == {(chunk, count) for chunk in CHUNKS[1:] for count in IN_FLIGHT}
    assert found.spread_bytes == 700 + 900_000 + (3 << 20)
    for path, offset, nbytes in drive.asked:
        assert offset % nbytes == 0
        assert offset + nbytes <= os.path.getsize(path)
    assert {Path(path).name for path, _, nbytes in drive.asked if nbytes <= 8192} == {"middle", "large"}
    for (chunk, _), speed in found.speeds.items():
        assert speed == pytest.approx(chunk / (REQUEST_S + chunk / BYTES_PER_S))


def test_what_can_not_be_read_is_one_line(files: list[Path], drive: FakeDrive, monkeypatch: pytest.MonkeyPatch) -> None:
    drive.error = 5
    with pytest.raises(DriveUnmeasurable, match="the drive fails: Input/output error"):
        curve_of(files, 1e-4, lambda threads: drive, drive.clock)
    monkeypatch.setattr(module, "_takes", lambda fd, chunk: False)
    with pytest.raises(DriveUnmeasurable, match="can't be read past the page cache"):
        curve_of(files)


def test_a_real_drive_gives_a_curve_or_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(np.random.default_rng(0).bytes(1 << 16))
    try:
        found = curve_of([tmp_path / "file"], 0.0)
    except DriveUnmeasurable:
        return
    assert found.chunks == [chunk for chunk in CHUNKS if found.chunks[0] <= chunk <= 1 << 16]
    assert all(speed > 0 for speed in found.speeds.values())
    assert not list(open_in(tmp_path))


def open_in(folder: Path) -> Iterator[str]:
    for fd in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if path.startswith(str(folder)):
            yield path


def like(request_s: float, bytes_per_s: float) -> Curve:
    """A drive on which reads at once are no faster than one after the other."""
    speeds = {(chunk, n): chunk / (request_s + chunk / bytes_per_s) for chunk in CHUNKS for n in IN_FLIGHT}
    return Curve(speeds, 1 << 30)


def test_a_drive_for_which_requests_cost_nothing_likes_the_smallest_pieces() -> None:
    times = piece_times(like(1e-9, 1e8), Neurons(1280, 256), 0.1)
    assert best_piece(times) == 512
    assert max(times) == 262144  # of all 1280 neurons there are 1.25 of the next size
    assert times[512] == pytest.approx(640 * (1 - 0.9**2) * (1e-9 + 512 / 1e8))


def test_a_drive_that_is_all_requests_likes_the_largest() -> None:
    assert best_piece(piece_times(like(1e-3, 1e10), Neurons(1280, 256), 0.1)) == 262144


def test_neurons_that_no_piece_holds_have_no_times() -> None:
    assert piece_times(like(1e-5, 1e9), Neurons(10, 2 << 20), 0.1) == {}


def test_of_pieces_that_are_nearly_as_fast_the_smallest_is_taken() -> None:
    assert best_piece({512: 1.04, 1024: 1.0, 2048: 0.999}) == 512
    assert best_piece({512: 1.06, 1024: 1.0, 2048: 0.999}) == 1024


def test_more_reads_than_were_measured_at_once_take_as_long_each() -> None:
    curve = Curve({(512, 1): 512e3, (512, 4): 1024e3}, 0)
    assert curve.read_s(512, 1) == pytest.approx(1e-3)
    assert curve.read_s(512, 3.9) == pytest.approx(3.9e-3)
    assert curve.read_s(512, 40) == pytest.approx(20e-3)
    assert curve.read_s(512, 0.5) == pytest.approx(0.5e-3)
