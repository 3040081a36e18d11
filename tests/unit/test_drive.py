from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moert.errors import RunError
from moert.experts import store as drive
from moert.experts.store import PAGE_BYTES, IoSettings, is_direct, open_expert, parse_io, read_into


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
        asked.append(bool(flags & drive._DIRECT))
        if flags & drive._DIRECT:
            raise OSError(code, "refused")
        return plain(path, flags, *rest)

    monkeypatch.setattr(drive, "_DIRECT", drive._DIRECT or 1 << 30)
    monkeypatch.setattr(os, "open", refusing)
    fd = open_expert(tmp_path / "file", direct=True)
    monkeypatch.undo()
    assert asked == [True, False]
    buffer = aligned(8192)
    assert read_into(fd, buffer) == 8192
    assert buffer.tobytes() == body
    os.close(fd)


@pytest.mark.skipif(not drive._DIRECT, reason="this system has no direct reads")
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
    assert parse_io("direct") == IoSettings(True, drive.DEFAULT_THREADS)
    assert parse_io("buffered") == IoSettings(False, drive.DEFAULT_THREADS)
    assert parse_io(" Direct, 4 ") == IoSettings(True, 4)
    assert parse_io("buffered,64") == IoSettings(False, 64)


@pytest.mark.parametrize("text", ["", ",", "auto,2", "mmap", "4"])
def test_other_ways_to_read_are_refused_in_one_line(text) -> None:
    refused(text, r"io=.* is none of auto, direct, buffered")


@pytest.mark.parametrize(
    ("count", "found"),
    [("", "''"), ("0", "'0'"), ("65", "'65'"), ("-1", "'-1'"), ("1.5", "'1.5'"), ("4,4", "'4,4'"), ("²", "'²'"),
     ("9" * 5000, "'9+'")],
)  # fmt: skip
def test_other_numbers_of_threads_are_refused_in_one_line(count, found) -> None:
    refused(f"direct,{count}", rf"io=.*: {found} should be a number of threads, 1 to 64")


def refused(text, says) -> None:
    with pytest.raises(drive.IoInvalid, match=says) as error:
        parse_io(text)
    assert isinstance(error.value, RunError)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 200


@given(st.booleans(), st.integers(1, drive.MOST_THREADS))
def test_printed_settings_are_what_the_option_takes(direct, threads) -> None:
    assert parse_io(str(IoSettings(direct, threads))) == IoSettings(direct, threads)
