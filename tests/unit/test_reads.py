"""Many reads in one call: the same by io_uring, by threads and one after the other, and what goes wrong is told."""

from __future__ import annotations

import errno
import mmap
import os
import platform
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from memory_store import PATIENCE_S, Model

from moert.experts import store
from moert.experts.drive import is_direct, open_expert
from moert.experts.store import NativeReader, PlainReader, Read, Reader, open_reader, table_of
from moert.kernels import library
from tests.pairs import thinned

LINUX = sys.platform == "linux"
WAYS: dict[str, Callable[[], Reader]] = {
    "ring": lambda: open_reader(3),
    "threads": lambda: open_reader(3, by_ring=False),
    "one thread": lambda: open_reader(1, by_ring=False),
    "plain": PlainReader,
}
DIRECT = (True, False)
PIECE = 4096
SIZE = 300 * PIECE


@pytest.fixture
def tmp_path(on_a_drive: Path) -> Path:
    """Files in memory never leave the page cache."""
    return on_a_drive


@pytest.fixture(scope="module")
def body() -> bytes:
    return np.random.default_rng(0).integers(0, 256, SIZE, np.uint8).tobytes()


@pytest.fixture
def path(tmp_path: Path, body: bytes) -> Path:
    place = tmp_path / "file"
    place.write_bytes(body)
    return place


@pytest.fixture(params=WAYS)
def reader(request: pytest.FixtureRequest) -> Iterator[Reader]:
    made = WAYS[request.param]()
    yield made
    made.close()


@pytest.fixture(params=DIRECT, ids=["direct", "buffered"])
def fd(request: pytest.FixtureRequest, path: Path) -> Iterator[int]:
    handle = open_expert(path, request.param)
    yield handle
    os.close(handle)


def room(nbytes: int) -> np.ndarray:
    """uint8, beginning on a page."""
    return np.frombuffer(mmap.mmap(-1, max(nbytes, 1)), np.uint8)[:nbytes]


def outcomes(table: store.Table) -> list[tuple[int, int, int]]:
    return [tuple(row) for row in table[["found", "error", "wrong"]].tolist()]


@thinned("reader, fd, count", WAYS, DIRECT, [0, 1, 2, 63, 64, 65, 256, 257, 700], indirect=["reader", "fd"])
def test_many_pieces_arrive_in_their_places(reader: Reader, fd: int, body: bytes, count: int) -> None:
    """In any order, some of them following each other."""
    rng = np.random.default_rng(count)
    numbers = rng.integers(0, SIZE // PIECE, count)
    numbers[: count // 2] = np.sort(numbers[: count // 2])
    places = room(count * PIECE).reshape(count, PIECE)
    wanted = [body[number * PIECE : (number + 1) * PIECE] for number in numbers]
    table = table_of(
        Read(fd, int(number) * PIECE, place, zlib.crc32(piece))
        for number, place, piece in zip(numbers, places, wanted, strict=True)
    )
    assert reader.read_many(table) == 0
    assert outcomes(table) == [(PIECE, 0, 0)] * count
    assert [place.tobytes() for place in places] == wanted


def test_a_stretch_of_a_file_is_scattered_to_its_places(reader: Reader, fd: int, body: bytes) -> None:
    sizes = [512, 1024, 8192, 512, 3 * PIECE, 1536] * 20
    places = [room(16384)[512 * (index % 3) :][:size] for index, size in enumerate(sizes)]
    starts = np.cumsum([0, *sizes])
    table = table_of(Read(fd, int(start), place) for start, place in zip(starts, places, strict=False))
    assert reader.read_many(table) == 0
    assert b"".join(place.tobytes() for place in places) == body[: starts[-1]]


def test_neighbours_are_one_request(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told by the system: of a process that has read in one way only."""
    if not LINUX or library.load() is None:
        pytest.skip("only Linux counts, and only the native library puts them together")
    fd, reader, places = open_expert(path, False), open_reader(1, by_ring=False), room(64 * PIECE).reshape(64, PIECE)

    def calls(table: store.Table) -> int:
        before = _read_calls()
        assert reader.read_many(table) == 0
        return _read_calls() - before

    _read_calls()
    asking = _read_calls()
    asking = _read_calls() - asking
    together = calls(table_of(Read(fd, at * PIECE, place) for at, place in enumerate(places))) - asking
    apart = calls(table_of(Read(fd, 2 * at * PIECE, place) for at, place in enumerate(places))) - asking
    os.close(fd)
    assert (together, apart) == (1, 64)


def _read_calls() -> int:
    return int(next(line for line in Path("/proc/self/io").read_text().splitlines() if "syscr" in line).split()[1])


def test_wrong_bytes_are_told_and_the_others_arrive(reader: Reader, fd: int, body: bytes) -> None:
    places = room(4 * PIECE).reshape(4, PIECE)
    crcs = [zlib.crc32(body[at * PIECE : (at + 1) * PIECE]) for at in range(4)]
    crcs[2] ^= 1
    table = table_of(Read(fd, at * PIECE, place, crc) for at, (place, crc) in enumerate(zip(places, crcs, strict=True)))
    for _ in range(2):  # what is left from before does not count
        assert reader.read_many(table) == 1
        assert outcomes(table) == [(PIECE, 0, 0), (PIECE, 0, 0), (PIECE, 0, 1), (PIECE, 0, 0)]
    table["crc"][2] ^= 1
    assert reader.read_many(table) == 0
    assert places.tobytes() == body[: 4 * PIECE]


@thinned("reader, fd, cut", WAYS, DIRECT, [0, 1, PIECE, PIECE + 100, 2 * PIECE], indirect=["reader", "fd"])
def test_a_file_that_ends_early(reader: Reader, fd: int, path: Path, body: bytes, cut: int) -> None:
    os.truncate(path, cut)
    places = room(3 * PIECE).reshape(3, PIECE)
    together = table_of(Read(fd, at * PIECE, place, 1) for at, place in enumerate(places))
    apart = table_of(Read(fd, at * PIECE, places[at], 1) for at in (2, 0, 1))
    expected = [min(max(0, cut - at * PIECE), PIECE) for at in range(3)]
    for table, order in ((together, (0, 1, 2)), (apart, (2, 0, 1))):
        assert reader.read_many(table) == 3
        found = [(expected[at], 0, int(expected[at] == PIECE)) for at in order]
        assert outcomes(table) == found
    assert places.tobytes()[:cut] == body[:cut]


def test_a_read_that_the_system_refuses_fails_alone(reader: Reader, fd: int, path: Path, body: bytes) -> None:
    folder = os.open(path.parent, os.O_RDONLY)
    closed = open_expert(path, False)
    os.close(closed)
    places = room(4 * PIECE).reshape(4, PIECE)
    table = table_of(Read(each, 0, place) for each, place in zip((fd, closed, folder, fd), places, strict=True))
    assert reader.read_many(table) == 2
    os.close(folder)
    assert outcomes(table) == [(PIECE, 0, 0), (0, errno.EBADF, 0), (0, errno.EISDIR, 0), (PIECE, 0, 0)]
    assert places[0].tobytes() == places[3].tobytes() == body[:PIECE]
    pair = table_of(Read(closed, at * PIECE, places[at]) for at in range(2))
    assert reader.read_many(pair) == 2
    assert outcomes(pair) == [(0, errno.EBADF, 0)] * 2
    assert reader.read_many(table_of([Read(closed, 0, places[0])])) == 1


@thinned(
    "reader, fd, lengths, shift, start",
    WAYS, DIRECT, [[100], [4096, 100, 4096], [5000, 4096], [8192 + 17]], [0, 1], [0, 3], indirect=["reader", "fd"],
)  # fmt: skip
def test_what_direct_reads_refuse_goes_through_the_page_cache(
    reader: Reader, fd: int, body: bytes, lengths: list[int], shift: int, start: int
) -> None:
    places = [room(3 * PIECE)[shift:][:nbytes] for nbytes in lengths]
    starts = np.cumsum([start, *lengths])
    pieces = [body[at : at + nbytes] for at, nbytes in zip(starts, lengths, strict=False)]
    table = table_of(
        Read(fd, int(at), place, zlib.crc32(piece), forget=True)
        for at, place, piece in zip(starts, places, pieces, strict=False)
    )
    assert reader.read_many(table) == 0
    assert [place.tobytes() for place in places] == pieces
    if shift:
        assert not is_direct(fd)


@pytest.mark.skipif(not LINUX, reason="others do not tell what is cached")
@pytest.mark.parametrize("forget", [False, True])
def test_what_was_read_stays_in_the_page_cache_unless_it_is_to_go(reader: Reader, path: Path, forget: bool) -> None:
    with open(path, "rb") as handle:
        os.fsync(handle.fileno())
        os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert reader.read_many(table_of([Read(handle.fileno(), 0, room(PIECE), forget=forget)])) == 0
    assert store.in_page_cache(path) == (not forget)


def test_two_threads_with_a_reader_each(path: Path, body: bytes) -> None:
    fd = open_expert(path, True)

    def work() -> None:
        reader, places = open_reader(2), room(64 * PIECE).reshape(64, PIECE)
        for turn in range(20):
            numbers = np.random.default_rng(turn).integers(0, SIZE // PIECE, 64)
            table = table_of(Read(fd, int(at) * PIECE, place) for at, place in zip(numbers, places, strict=True))
            assert reader.read_many(table) == 0
            assert places.tobytes() == b"".join(body[at * PIECE : (at + 1) * PIECE] for at in numbers)
        reader.close()

    for model in [Model(work) for _ in range(3)]:
        model.end()
    os.close(fd)


@pytest.mark.skipif(library.load() is None, reason="no native library")
def test_other_threads_run_while_it_reads() -> None:
    """Two reads of pipes, which come once another thread writes: it could not if Python's lock were held."""
    reader = open_reader(2)
    assert isinstance(reader, NativeReader)
    if not reader.has_ring:
        pytest.skip("nothing else waits for a pipe")
    ends = [os.pipe() for _ in range(2)]
    places = room(8).reshape(2, 4)
    writers = [threading.Timer(0.05, os.write, (writing, b"abcd")) for _, writing in ends]
    for writer in writers:
        writer.start()
    assert reader.read_many(table_of(Read(end[0], -1, place) for end, place in zip(ends, places, strict=True))) == 0
    assert places.tobytes() == b"abcdabcd"
    for writer, end in zip(writers, ends, strict=True):
        writer.join()
        os.close(end[0])
        os.close(end[1])


def test_a_closed_reader_may_be_closed_again(reader: Reader) -> None:
    reader.close()
    reader.close()


def test_without_fast_checksums_in_the_processor_zlib_checks(
    fd: int, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = library.load()
    if found is None:
        pytest.skip("no native library")
    reader = NativeReader(found, 2, by_ring=True)
    monkeypatch.setattr(reader, "_checks", False)
    places = room(2 * PIECE).reshape(2, PIECE)
    crcs = [zlib.crc32(body[:PIECE]), 5]
    table = table_of(Read(fd, at * PIECE, place, crc) for at, (place, crc) in enumerate(zip(places, crcs, strict=True)))
    assert reader.read_many(table) == 1
    assert outcomes(table) == [(PIECE, 0, 0), (PIECE, 0, 1)]
    assert table["checked"].tolist() == [1, 1]


REFUSED = """
import ctypes, struct, sys, zlib, mmap
import numpy as np
from moert.experts.store import open_reader, table_of, Read
from moert.experts.drive import open_expert
SETUP = 425
load, equal, give = 0x20, 0x15, 0x06
rules = [(load, 0, 0, 0), (equal, 0, 1, SETUP), (give, 0, 0, 0x50000 | int(sys.argv[1])), (give, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
class Program(ctypes.Structure):
    _fields_ = [("count", ctypes.c_ushort), ("rules", ctypes.c_void_p)]
libc = ctypes.CDLL(None, use_errno=True)
program = Program(len(rules), ctypes.addressof(code))
assert libc.prctl(38, 1, 0, 0, 0) == 0
if libc.prctl(22, 2, ctypes.byref(program), 0, 0):
    sys.exit(77)
reader = open_reader(4)
assert not reader.has_ring
fd = open_expert(sys.argv[2], True)
body = open(sys.argv[2], "rb").read()
places = np.frombuffer(mmap.mmap(-1, 64 * 4096), np.uint8).reshape(64, 4096)
table = table_of(Read(fd, 8192 * at, place, zlib.crc32(body[8192 * at:][:4096])) for at, place in enumerate(places))
assert reader.read_many(table) == 0
assert all(place.tobytes() == body[8192 * at:][:4096] for at, place in enumerate(places))
"""


@pytest.mark.skipif(not LINUX or library.load() is None, reason="no io_uring")
@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="the call has another number")
@pytest.mark.parametrize("refusal", [errno.EPERM, errno.ENOSYS, errno.EMFILE], ids=errno.errorcode.get)
def test_where_the_system_refuses_io_uring_threads_read(path: Path, refusal: int) -> None:
    """As in many containers."""
    done = subprocess.run(
        [sys.executable, "-c", REFUSED, str(refusal), str(path)], capture_output=True, text=True, timeout=PATIENCE_S
    )
    if done.returncode == 77:
        pytest.skip("no seccomp")
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not LINUX, reason="no io_uring")
def test_here_io_uring_is_used_where_it_can_be() -> None:
    found = library.load()
    if found is None:
        pytest.skip("no native library")
    import ctypes

    given = ctypes.CDLL(None, use_errno=True).syscall(425, 4, ctypes.create_string_buffer(120))
    if given >= 0:
        os.close(given)
    assert NativeReader(found, 2, by_ring=True).has_ring == (given >= 0)
    assert not NativeReader(found, 2, by_ring=False).has_ring
