from __future__ import annotations

import itertools
import json
import os
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from moert.experts import probe as module
from moert.experts.drive import drive_key, is_direct, open_expert
from moert.experts.probe import (
    PROBE_S,
    Drive,
    cache_file,
    choose,
    drive_of,
    known_drives,
    probe,
    read_for,
)
from moert.experts.store import DEFAULT_THREADS, IoSettings

DIRECT = [IoSettings(True, threads) for threads in (1, 2, 4)]
BUFFERED = [IoSettings(False, threads) for threads in (1, 2, 4)]
MB = 1e6
TAKES_DIRECT = module.takes_direct


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"E{number}.safetensors" for number in range(5)]
    for path in paths:
        path.write_bytes(os.urandom(2 * 4096))
    return paths


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "drives.json"


class FakeDrive:
    """Reads so many bytes/s in each way and lets time pass as that takes."""

    def __init__(self, speeds: dict[IoSettings, float], piece: int) -> None:
        self.speeds, self.piece = speeds, piece
        self.now, self.asked = 0.0, list[IoSettings]()

    def clock(self) -> float:
        return self.now

    def measure(self, files: Iterator[Path], way: IoSettings, seconds: float) -> float:
        self.asked.append(way)
        speed = self.speeds[way]
        self.now += max(seconds, way.threads * self.piece / speed)
        return speed


@pytest.fixture(autouse=True)
def direct_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "takes_direct", lambda path: True)


def test_the_fastest_way_is_taken() -> None:
    assert choose({DIRECT[0]: 1.0, DIRECT[1]: 2.0, BUFFERED[0]: 3.0, BUFFERED[1]: 1.0}) == BUFFERED[0]


def test_ties_go_to_fewer_threads_and_then_to_direct() -> None:
    assert choose({DIRECT[0]: 96.0, BUFFERED[0]: 100.0, BUFFERED[2]: 99.0}) == DIRECT[0]
    assert choose({DIRECT[0]: 94.0, BUFFERED[0]: 96.0, DIRECT[2]: 100.0}) == BUFFERED[0]
    assert choose({DIRECT[0]: 94.0, DIRECT[1]: 94.0, DIRECT[2]: 100.0}) == DIRECT[2]


def test_a_fast_drive_is_tried_in_every_way_twice(files) -> None:
    speeds = dict(zip([*DIRECT, *BUFFERED], (500 * MB, 900 * MB, 950 * MB, 400 * MB, 700 * MB, 800 * MB), strict=True))
    fake = FakeDrive(speeds, 8192)
    found = probe(files, fake.measure, fake.clock)
    assert sorted(fake.asked) == sorted([*DIRECT, *BUFFERED] * 2)
    assert fake.asked == fake.asked[::-1]
    assert fake.now <= PROBE_S * 1.01
    assert found == Drive(DIRECT[2], speeds)


@pytest.mark.parametrize("speed", [20 * MB, 100 * MB])
def test_a_slow_drive_is_tried_in_fewer_ways_and_ends_in_time(tmp_path, speed) -> None:
    large = tmp_path / "large"
    with large.open("wb") as handle:
        handle.truncate(50 << 20)
    fake = FakeDrive(dict.fromkeys([*DIRECT, *BUFFERED], speed), 4 << 20)
    found = probe([large], fake.measure, fake.clock)
    assert fake.now <= PROBE_S * 1.01
    assert found.settings == DIRECT[0]
    assert {DIRECT[0], BUFFERED[0]} <= set(found.speeds) < {*DIRECT, *BUFFERED}


def test_without_direct_reads_only_buffered_ones_are_tried(files, monkeypatch) -> None:
    monkeypatch.setattr(module, "takes_direct", lambda path: False)
    fake = FakeDrive(dict.fromkeys(BUFFERED, 100 * MB), 8192)
    assert probe(files, fake.measure, fake.clock).settings == BUFFERED[0]
    assert set(fake.asked) == set(BUFFERED)


def test_files_that_can_t_be_read_give_the_default(tmp_path) -> None:
    missing = [tmp_path / "nothing"]
    found = probe(missing, lambda files, way, seconds: 0.0)
    assert found == Drive(IoSettings(True, DEFAULT_THREADS), {})
    assert read_for(itertools.cycle(missing), IoSettings(False, 2), 0.01) == 0.0


def test_direct_reads_must_work_and_not_only_be_promised(files, monkeypatch) -> None:
    assert TAKES_DIRECT(files[0].with_name("nothing")) is False
    expected = TAKES_DIRECT(files[0])
    fd = open_expert(files[0], direct=True)
    assert is_direct(fd) or not expected
    os.close(fd)

    def refusing(fd: int, buffers: list[memoryview], offset: int) -> int:
        if is_direct(fd):
            raise OSError(22, "Invalid argument")
        return len(buffers[0])

    monkeypatch.setattr(os, "preadv", refusing)
    assert TAKES_DIRECT(files[0]) is False


def test_reading_for_a_while_reads_whole_files_until_the_time_is_over(files) -> None:
    look = itertools.count().__next__  # a clock on which each look at it takes a second
    assert read_for(itertools.cycle(files), BUFFERED[0], 10, look) == 9 * 8192 / 11  # begun at 1 to 9, over at 11


def test_every_way_of_reading_reads(files) -> None:
    for way in (DIRECT[1], BUFFERED[0]):
        assert read_for(itertools.cycle(files), way, 10, itertools.count().__next__) > 0


def test_what_takes_more_threads_or_memory_than_the_system_allows_is_not_chosen(files, monkeypatch) -> None:
    start, started = threading.Thread.start, []

    def one_only(self: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(self)
        start(self)

    monkeypatch.setattr(threading.Thread, "start", one_only)
    assert read_for(itertools.cycle(files), BUFFERED[1], 10, itertools.count().__next__) == 0.0
    assert not started.pop().is_alive()
    assert read_for(itertools.cycle(files), BUFFERED[0], 10, itertools.count().__next__) > 0
    monkeypatch.undo()

    def no_memory(nbytes: int) -> None:
        raise MemoryError

    monkeypatch.setattr(module, "aligned", no_memory)
    assert read_for(itertools.cycle(files), BUFFERED[0], 10, itertools.count().__next__) == 0.0


def measured_once(monkeypatch: pytest.MonkeyPatch, settings: IoSettings) -> list[int]:
    """Makes probing take no time; each probe adds to the list."""
    probes: list[int] = []

    def fake(files: list[Path]) -> Drive:
        probes.append(len(files))
        return Drive(settings, {settings: 123 * MB, BUFFERED[0]: 100 * MB})

    monkeypatch.setattr(module, "probe", fake)
    return probes


def test_a_drive_is_measured_once_and_remembered(files, cache, monkeypatch) -> None:
    probes = measured_once(monkeypatch, DIRECT[2])
    first, second = drive_of(files, cache), drive_of(files[:2], cache)
    assert first == second
    assert probes == [5]
    assert list(known_drives(cache).values()) == [first]
    assert [path.name for path in cache.parent.iterdir()] == [cache.name]


def test_another_drive_is_measured_and_the_first_kept(files, cache, monkeypatch) -> None:
    probes = measured_once(monkeypatch, DIRECT[0])
    drive_of(files, cache)
    monkeypatch.setattr(module, "drive_key", lambda path, root: "another")
    drive_of(files, cache)
    assert len(probes) == len(known_drives(cache)) == 2


def good() -> dict:
    return {"version": 1, "drives": {"other": {"settings": "direct,1", "speeds": {"direct,1": 5.0}}}}


DAMAGED = [
    b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"version": 2, "drives": {}}', b'{"version": 1}',
    b'{"version": 1, "drives": []}', b'{"version": 1, "drives": {"a": 3}}',
    *(json.dumps({"version": 1, "drives": {"a": entry}}).encode() for entry in (
        {"settings": "direct,1"},
        {"settings": "auto", "speeds": {"auto": 1.0}},
        {"settings": "direct,1", "speeds": {}},
        {"settings": "direct,1", "speeds": {"direct,1": -1}},
        {"settings": "direct,1", "speeds": {"direct,1": float("nan")}},
        {"settings": "direct,1", "speeds": {"direct,1": "fast"}},
        {"settings": "direct,999", "speeds": {"direct,999": 1}},
        {"settings": 7, "speeds": {"direct,1": 1}},
        {"settings": "direct,1", "speeds": {"direct,1": 10**400}},
    )),
]  # fmt: skip


@pytest.mark.parametrize("body", DAMAGED, ids=lambda body: ascii(body[:60]))
def test_a_damaged_memory_is_measured_again_and_replaced(files, cache, monkeypatch, body) -> None:
    probes = measured_once(monkeypatch, DIRECT[1])
    cache.parent.mkdir()
    cache.write_text(json.dumps(good()))
    assert known_drives(cache) == {"other": Drive(DIRECT[0], {DIRECT[0]: 5.0})}
    cache.write_bytes(body)
    assert known_drives(cache) == {}
    assert drive_of(files, cache).settings == drive_of(files, cache).settings == DIRECT[1]
    assert len(probes) == 1


@pytest.mark.parametrize("entry", [3, {"settings": "direct,1", "speeds": {"direct,1": 10**400}}], ids=["3", "10**400"])
def test_a_damaged_entry_does_not_take_the_other_drives_with_it(cache, entry) -> None:
    cache.parent.mkdir()
    cache.write_text(json.dumps({"version": 1, "drives": {"before": entry, **good()["drives"], "after": entry}}))
    assert list(known_drives(cache)) == ["other"]


def test_what_is_no_plain_file_is_not_read_but_replaced(files, cache, monkeypatch) -> None:
    measured_once(monkeypatch, DIRECT[1])
    cache.parent.mkdir()
    os.mkfifo(cache)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", lambda self: pytest.fail("waits for ever"))
        assert drive_of(files, cache).settings == DIRECT[1]
    assert len(known_drives(cache)) == 1


def test_where_nothing_can_be_written_it_measures_each_time(files, tmp_path, monkeypatch) -> None:
    probes = measured_once(monkeypatch, DIRECT[1])
    (tmp_path / "file").write_text("in the way")
    for _ in range(2):
        assert drive_of(files, tmp_path / "file" / "drives.json").settings == DIRECT[1]
    monkeypatch.setattr(module, "cache_file", lambda: None)
    assert drive_of(files).settings == DIRECT[1]
    assert len(probes) == 3


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=repr)
def test_a_full_disk_or_ctrl_c_leaves_the_old_memory_whole_and_no_other_file(files, cache, monkeypatch, error) -> None:
    measured_once(monkeypatch, DIRECT[1])
    cache.parent.mkdir()
    cache.write_text(json.dumps(good()))

    def cut_short(descriptor: int) -> None:
        raise error

    monkeypatch.setattr(os, "fsync", cut_short)
    with pytest.raises(KeyboardInterrupt) if isinstance(error, KeyboardInterrupt) else nullcontext():
        assert drive_of(files, cache).settings == DIRECT[1]
    monkeypatch.undo()
    assert list(known_drives(cache)) == ["other"]
    assert [path.name for path in cache.parent.iterdir()] == [cache.name]


def test_a_failed_measurement_is_not_remembered(files, cache, monkeypatch) -> None:
    monkeypatch.setattr(module, "probe", lambda files: Drive(DIRECT[1], {}))
    assert drive_of(files, cache).settings == DIRECT[1]
    assert not cache.exists()


def test_a_drive_is_named_by_number_file_system_and_what_identifies_it(files, tmp_path) -> None:
    device = files[0].stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    root = tmp_path / "root"
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/mountinfo").write_text(
        f"22 1 0:99 / /proc rw - proc proc rw\n27 1 {number} / / rw shared:1 - ext4 /dev/vda rw\nshort line\n"
    )
    folder = root / "sys/dev/block" / number
    (folder / "device").mkdir(parents=True)
    (folder / "size").write_text("1024\n")
    (folder / "device/serial").write_text("  S3RIAL \n")
    assert drive_key(files[0], root) == f"{number} ext4 /dev/vda 1024 S3RIAL"
    assert drive_key(files[0], tmp_path / "empty") == number
    assert drive_key(tmp_path / "nothing", root) == ""


def test_the_memory_lies_in_the_users_cache_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_file() == tmp_path / "moert/drives.json"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_file() == tmp_path / "home/.cache/moert/drives.json"

    def homeless() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "home", homeless)
    assert cache_file() is None
