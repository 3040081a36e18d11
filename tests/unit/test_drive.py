from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moert.bench import curve as module
from moert.bench.curve import CHUNKS, IN_FLIGHT, Curve, DriveUnmeasurable, best_piece, curve_of
from moert.bench.drive import Neurons, piece_times
from moert.errors import RunError
from moert.experts import drive as reading
from moert.experts.drive import PAGE_BYTES, is_direct, open_expert, read_into
from moert.experts.store import DEFAULT_THREADS, MOST_THREADS, IoInvalid, IoSettings, Table, parse_io


def aligned(nbytes: int, shift: int = 0) -> np.ndarray:
    """uint8 [nbytes], `shift` bytes after the beginning of a page, filled with 7."""
    room = np.full(nbytes + 2 * PAGE_BYTES, 7, dtype=np.uint8)
    start = -room.ctypes.data % PAGE_BYTES + shift
    return room[start : start + nbytes]


def written(path: Path, nbytes: int) -> bytes:
    body = np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8).tobytes()
    path.write_bytes(body)
    return body


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, 3 * 4096, 5 * 4096 + 100])
def test_a_whole_file_is_read_whatever_its_length(tmp_path, nbytes, direct) -> None:
    body = written(tmp_path / "file", nbytes)
    for shift in (0, 1, 512):
        for room in (nbytes, nbytes + 1, nbytes + PAGE_BYTES, nbytes // 2):
            fd = open_expert(tmp_path / "file", direct)
            buffer = aligned(room, shift)
            found = read_into(fd, buffer if shift else buffer.data)
            os.close(fd)
            assert found == min(nbytes, room)
            assert buffer[:found].tobytes() == body[:found]
            outside = np.ones(len(buffer.base), dtype=bool)
            start = buffer.ctypes.data - buffer.base.ctypes.data
            outside[start : start + room] = False
            assert (buffer.base[outside] == 7).all()


def test_whole_pages_into_a_page_stay_direct_where_the_file_system_can(tmp_path) -> None:
    body = written(tmp_path / "file", 4 * PAGE_BYTES)
    fd = open_expert(tmp_path / "file", direct=True)
    before = is_direct(fd)
    buffer = aligned(len(body))
    assert read_into(fd, buffer) == len(body)
    assert is_direct(fd) == before
    os.close(fd)
    fd = open_expert(tmp_path / "file", direct=False)
    assert not is_direct(fd)
    os.close(fd)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_that_refuses_to_open_directly_is_read_through_the_page_cache(
    tmp_path, monkeypatch, code
) -> None:
    body, plain, asked = written(tmp_path / "file", 8192), os.open, []

    def refusing(path, flags, *rest):
        asked.append(bool(flags & reading._DIRECT))
        if flags & reading._DIRECT:
            raise OSError(code, "refused")
        return plain(path, flags, *rest)

    monkeypatch.setattr(reading, "_DIRECT", reading._DIRECT or 1 << 30)
    monkeypatch.setattr(os, "open", refusing)
    fd = open_expert(tmp_path / "file", direct=True)
    monkeypatch.undo()
    assert asked == [True, False]
    buffer = aligned(8192)
    assert read_into(fd, buffer) == 8192
    assert buffer.tobytes() == body
    os.close(fd)


@pytest.mark.skipif(not reading._DIRECT, reason="this system has no direct reads")
def test_a_file_system_that_refuses_direct_reads_is_read_through_the_page_cache(tmp_path, monkeypatch) -> None:
    body, plain = written(tmp_path / "file", 3 * PAGE_BYTES), os.preadv
    fd = open_expert(tmp_path / "file", direct=True)
    if not is_direct(fd):
        pytest.skip("this file system has no direct reads")
    refused = []

    def refusing(fd, buffers, offset):
        if is_direct(fd):
            refused.append(offset)
            raise OSError(errno.EINVAL, "refused")
        return plain(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", refusing)
    buffer = aligned(len(body))
    assert read_into(fd, buffer) == len(body)
    assert (buffer.tobytes(), refused) == (body, [0])
    os.close(fd)


def test_short_reads_go_on_where_they_ended(tmp_path, monkeypatch) -> None:
    body, plain = written(tmp_path / "file", 20_000), os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: plain(fd, [buffers[0][:777]], offset))
    fd = open_expert(tmp_path / "file", direct=False)
    buffer = aligned(len(body))
    assert read_into(fd, buffer) == len(body)
    assert buffer.tobytes() == body
    os.close(fd)


@pytest.mark.parametrize("code", [errno.EIO, errno.EINVAL])
def test_real_errors_come_out(tmp_path, monkeypatch, code) -> None:
    written(tmp_path / "file", 8192)

    def failing(fd, buffers, offset):
        raise OSError(code, "broken")

    fd = open_expert(tmp_path / "file", direct=False)
    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(OSError, match="broken"):
        read_into(fd, aligned(8192))
    os.close(fd)


@pytest.mark.parametrize("direct", [True, False])
def test_a_missing_file_is_an_error(tmp_path, direct) -> None:
    with pytest.raises(FileNotFoundError):
        open_expert(tmp_path / "nothing", direct)


def test_settings_are_parsed() -> None:
    assert parse_io("auto") is None
    assert parse_io("direct") == IoSettings(True, DEFAULT_THREADS)
    assert parse_io("buffered") == IoSettings(False, DEFAULT_THREADS)
    assert parse_io(" Direct, 4 ") == IoSettings(True, 4)
    assert parse_io("buffered,64") == IoSettings(False, 64)


WAYS, COUNTS = "io=.* is none of auto, direct, buffered", "io=.*: {} should be a number of threads, 1 to 64"


@pytest.mark.parametrize(
    ("text", "says"),
    [*((text, WAYS) for text in ("", ",", "auto,2", "mmap", "4")),
     *((f"direct,{count}", COUNTS.format(repr(count))) for count in ("", "0", "65", "-1", "1.5", "4,4", "²")),
     ("direct," + "9" * 5000, COUNTS.format("'9+'"))],
)  # fmt: skip
def test_what_is_no_way_to_read_is_refused_in_one_line(text, says) -> None:
    with pytest.raises(IoInvalid, match=says) as error:
        parse_io(text)
    assert isinstance(error.value, RunError)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 200


@given(st.booleans(), st.integers(1, MOST_THREADS))
def test_printed_settings_are_what_the_option_takes(direct, threads) -> None:
    assert parse_io(str(IoSettings(direct, threads))) == IoSettings(direct, threads)


# The curve of a drive

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


@pytest.fixture
def drive(monkeypatch: pytest.MonkeyPatch) -> FakeDrive:
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("looks into /proc")
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


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="looks into /proc")
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


def test_where_requests_cost_nothing_the_smallest_pieces_are_best_and_where_they_cost_all_the_largest() -> None:
    times = piece_times(like(1e-9, 1e8), Neurons(1280, 256), 0.1)
    assert best_piece(times) == 512
    assert max(times) == 262144  # of all 1280 neurons there are 1.25 of the next size
    assert times[512] == pytest.approx(640 * (1 - 0.9**2) * (1e-9 + 512 / 1e8))
    assert best_piece(piece_times(like(1e-3, 1e10), Neurons(1280, 256), 0.1)) == 262144
    assert piece_times(like(1e-5, 1e9), Neurons(10, 2 << 20), 0.1) == {}, "no piece holds such a neuron"


def test_of_pieces_that_are_nearly_as_fast_the_smallest_is_taken() -> None:
    assert best_piece({512: 1.04, 1024: 1.0, 2048: 0.999}) == 512
    assert best_piece({512: 1.06, 1024: 1.0, 2048: 0.999}) == 1024


def test_more_reads_than_were_measured_at_once_take_as_long_each() -> None:
    curve = Curve({(512, 1): 512e3, (512, 4): 1024e3}, 0)
    assert curve.read_s(512, 1) == pytest.approx(1e-3)
    assert curve.read_s(512, 3.9) == pytest.approx(3.9e-3)
    assert curve.read_s(512, 40) == pytest.approx(20e-3)
    assert curve.read_s(512, 0.5) == pytest.approx(0.5e-3)
