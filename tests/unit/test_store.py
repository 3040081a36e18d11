"""Experts read from real packs, past the page cache and through it, on a disk that has bad moments."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from memory_store import read_ahead_at_once, wait_until
from tiny_packs import SPECS, damage_expert, write_pack

from moert.engine import engine as engine_module
from moert.engine.engine import Engine
from moert.engine.generation import GenerationSettings
from moert.experts import drive
from moert.experts import store as store_module
from moert.experts.cache import Buffers
from moert.experts.drive import in_page_cache, is_direct, open_expert, read_into
from moert.experts.store import ExpertStore, IoSettings
from moert.kernels import open_backend
from moert.kernels.reference import ReferenceBackend
from moert.pack.errors import FileMissing, FileTruncated, HashMismatch, HeaderInvalid, PackError
from moert.pack.model_spec import ExpertKey
from moert.pack.reader import Pack
from moert.stats import ExpertCounters
from tests.pairs import thinned

DIRECT, BUFFERED = IoSettings(True, 1), IoSettings(False, 1)
KEY = ExpertKey("decoder", 1, 3)


@pytest.fixture
def tmp_path(on_a_drive: Path) -> Path:
    """Files in memory never leave the page cache."""
    return on_a_drive


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("store")
    return {name: write_pack(root / f"{name}.pack", spec, paths=False) for name, spec in SPECS.items()}


@pytest.fixture
def root(originals: dict[str, Path], tmp_path: Path) -> Path:
    """A pack that may be damaged."""
    return shutil.copytree(originals["decoder"], tmp_path / "model.pack")


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moert.experts.store._PAUSES_S", (0.0, 0.0, 0.0))


def open_store(root: Path, io: IoSettings = DIRECT) -> tuple[ExpertStore, Pack, ExpertCounters]:
    pack, counters = Pack.open(root), ExpertCounters()
    return ExpertStore(pack, ReferenceBackend(), counters, io), pack, counters


def read(store: ExpertStore, key: ExpertKey = KEY) -> np.ndarray:
    buffer = Buffers().take(store.nbytes(key), 0)
    store.read(key, buffer)
    return buffer


def refusal(kind: type[PackError], store: ExpertStore, key: ExpertKey = KEY) -> str:
    """The one line that a read ends with."""
    with pytest.raises(kind) as caught:
        read(store, key)
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    return str(caught.value)


@thinned("name, io, kernels", SPECS, [DIRECT, BUFFERED], ["reference", "auto"])
def test_every_expert_arrives_whole_and_is_counted(
    originals: dict[str, Path], name: str, io: IoSettings, kernels: str
) -> None:
    pack, counters = Pack.open(originals[name]), ExpertCounters()
    backend = open_backend(kernels)
    store = ExpertStore(pack, backend, counters, io)
    buffers = Buffers()
    for number, entry in enumerate(pack.manifest.experts, 1):
        assert store.nbytes(entry.key) == entry.file_bytes
        buffer = buffers.take(entry.file_bytes, 0)
        store.read(entry.key, buffer)
        assert buffer.tobytes() == pack.file(entry.path).read_bytes()
        assert store.expert(entry.key, buffer) is not None
        assert counters.reads == number
    assert counters.bytes_read == sum(entry.file_bytes for entry in pack.manifest.experts)
    assert (counters.retries, counters.read_s > 0) == (0, True)
    backend.close()


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether each file that was opened was read past the page cache; and all are closed again."""
    seen: list[bool] = []
    open_files: set[int] = set()

    def listen(path: str, direct: bool) -> int:
        handle = open_expert(path, direct)
        open_files.add(handle)
        seen.append(is_direct(handle))
        return handle

    for module in (store_module, drive):
        monkeypatch.setattr(module, "open_expert", listen)
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    yield seen
    if before:
        assert len(os.listdir("/proc/self/fd")) <= before


def direct_reads_work(path: Path) -> bool:
    handle = open_expert(path, True)
    try:
        return is_direct(handle)
    finally:
        os.close(handle)


def cached_pages(path: Path) -> int:
    """Of the file, that are in the page cache; asking reads none."""
    with open(path, "r+b") as handle, mmap.mmap(handle.fileno(), 0) as mapped:
        pages = -(-len(mapped) // mmap.PAGESIZE)
        found, first = (ctypes.c_ubyte * pages)(), ctypes.c_char.from_buffer(mapped)
        call = ctypes.CDLL(None, use_errno=True).mincore
        assert call(ctypes.byref(first), ctypes.c_size_t(len(mapped)), found) == 0
        del first
    return sum(page & 1 for page in found)


def put_into_page_cache(path: Path, wanted: bool) -> int:
    """Puts a file into the page cache, or takes it out; the pages that are there then."""
    with open(path, "rb") as handle:
        os.fsync(handle.fileno())  # what has yet to be written can't be dropped
        handle.read()
        if not wanted:
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return cached_pages(path)


@pytest.mark.skipif(sys.platform != "linux", reason="others do not tell what is cached")
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("io", [DIRECT, BUFFERED], ids=str)
def test_what_was_cached_is_used_and_kept_only_if_there_is_room_and_nothing_is_added(
    root: Path, opened: list[bool], io: IoSettings, leaves: bool, cached: bool
) -> None:
    store, pack, _ = open_store(root, io)
    path = pack.file(pack.entry(KEY).path)
    if not direct_reads_work(path):
        pytest.skip("no direct reads on this file system")
    before = put_into_page_cache(path, cached)
    assert (before > 0) == cached
    store.leaves_page_cache = leaves
    read(store)
    assert opened == ([False, not cached] if leaves else [io.direct])  # first to look at the page cache
    assert cached_pages(path) == (before if leaves else 0)


def test_what_the_page_cache_has_is_used_there(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAPPED_BYTES", 1)
    monkeypatch.setattr(store_module, "in_page_cache", lambda *_: True)
    store, pack, counters = open_store(root)
    path = pack.file(pack.entry(KEY).path)
    into = np.zeros(store.nbytes(KEY), np.uint8)
    store.leaves_page_cache = True
    place = store.read(KEY, into)
    assert (place.tobytes(), into.any()) == (path.read_bytes(), False)
    assert not place.flags.writeable
    assert (counters.reads, counters.bytes_read) == (1, len(into))
    store.leaves_page_cache = False
    assert store.read(KEY, into) is into
    damage_expert(root, KEY)
    store.leaves_page_cache = True
    assert "checksum" in refusal(HashMismatch, store)
    path.write_bytes(path.read_bytes()[:-1])
    assert "read " in refusal(FileTruncated, store)


def test_answers_do_not_depend_on_where_experts_lie(
    originals: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At first in the page cache, later in memory of the process."""
    settings = GenerationSettings(max_new_tokens=8)

    def answers() -> list[list[int]]:
        with Engine.open(originals["decoder"], predict="none", notify=str) as engine:
            tokens = [engine.generate(prompt, settings).result.tokens for prompt in ("abc", "zig", "abc")]
            slots = engine.cache._slots.values()
            wait_until(lambda: not engine.cache._to_move and not engine.cache._reading)
            assert all(slot.expert is not None for slot in slots)
            return [*tokens, engine.generate("abc", settings).result.tokens]

    expected = answers()
    monkeypatch.setattr(store_module, "MAPPED_BYTES", 1)
    monkeypatch.setattr(store_module, "in_page_cache", lambda *_: True)
    places: list[bool] = []
    real = ExpertStore.read

    def read_and_note(store: ExpertStore, key: ExpertKey, into: np.ndarray) -> np.ndarray:
        place = real(store, key, into)
        places.append(place is into)
        return place

    monkeypatch.setattr(ExpertStore, "read", read_and_note)
    assert answers() == expected
    assert places
    assert not any(places)


@pytest.mark.skipif(sys.platform != "linux", reason="others do not tell what is cached")
def test_a_drive_that_answers_at_once_is_not_the_page_cache(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that may not wait succeeds on a fast drive: it had the page brought in itself."""
    pack = Pack.open(root)
    path = pack.file(pack.entry(KEY).path)
    monkeypatch.setattr(os, "preadv", lambda *_: 1)
    for cached in (True, False):
        assert (put_into_page_cache(path, cached) > 0) == cached == in_page_cache(path)


Faults = Callable[[int, Callable[[], int]], None]


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch, opened: list[bool]) -> Faults:
    """fail(times, how): the first reads end as `how` says."""

    def inject(times: int, how: Callable[[], int]) -> None:
        left = [how] * times

        def faulty(handle: int, into: np.ndarray, offset: int) -> int:
            return left.pop()() if left else read_into(handle, into, offset)

        monkeypatch.setattr(store_module, "read_into", faulty)
        monkeypatch.setattr(store_module, "TOGETHER_BYTES", 0)  # one by one

    return inject


def io_error(number: int = errno.EIO) -> Callable[[], int]:
    def raises() -> int:
        raise OSError(number, os.strerror(number))

    return raises


BAD_MOMENTS = {
    "I/O error": io_error(), "no answer": io_error(errno.ETIMEDOUT), "stale handle": io_error(errno.ESTALE),
    "nothing": lambda: 0, "short": lambda: 4096,
}  # fmt: skip


@pytest.mark.parametrize("moment", BAD_MOMENTS)
@pytest.mark.parametrize("times", [1, 3])
def test_a_read_that_fails_is_tried_again(root: Path, fail: Faults, moment: str, times: int) -> None:
    store, pack, counters = open_store(root)
    fail(times, BAD_MOMENTS[moment])
    assert read(store).tobytes() == pack.file(pack.entry(KEY).path).read_bytes()
    assert (counters.retries, counters.reads, counters.bytes_read) == (times, 1, store.nbytes(KEY))


@pytest.mark.parametrize("moment", BAD_MOMENTS)
def test_a_read_that_always_fails_is_one_clear_line(root: Path, fail: Faults, opened: list[bool], moment: str) -> None:
    store, pack, counters = open_store(root)
    fail(100, BAD_MOMENTS[moment])
    path = pack.entry(KEY).path
    if moment in ("nothing", "short"):
        found = BAD_MOMENTS[moment]()
        expected = f"{path}: read {found} of {store.nbytes(KEY)} bytes: copy the pack again"
        assert refusal(FileTruncated, store) == expected
    else:
        line = refusal(FileMissing, store)
        assert line.startswith(f"{path} in the pack at {root} can't be read: ")
        assert moment != "I/O error" or line.endswith("Input/output error")
    assert (len(opened), counters.retries, counters.reads, counters.bytes_read) == (4, 3, 0, 0)


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES])
def test_what_can_not_change_is_not_tried_again(root: Path, fail: Faults, opened: list[bool], number: int) -> None:
    store, _, counters = open_store(root)
    fail(100, io_error(number))
    refusal(FileMissing, store)
    assert (len(opened), counters.retries) == (1, 0)


def test_a_file_that_vanished_is_named(root: Path) -> None:
    store, pack, counters = open_store(root)
    path = pack.file(pack.entry(KEY).path)
    path.unlink()
    assert refusal(FileMissing, store) == (
        f"{pack.entry(KEY).path} is missing from the pack at {root}: copy the pack again"
    )
    path.mkdir()
    assert "can't be read" in refusal(FileMissing, store)
    path.rmdir()
    shutil.rmtree(path.parent)
    refusal(FileMissing, store)
    assert counters.retries == 0


def test_a_file_that_became_shorter_or_was_damaged_is_named(root: Path) -> None:
    store, pack, counters = open_store(root)
    path = pack.file(pack.entry(KEY).path)
    body = path.read_bytes()
    path.write_bytes(body[:-4096])
    assert f"read {len(body) - 4096} of {len(body)} bytes" in refusal(FileTruncated, store)
    path.write_bytes(body[:1000])
    assert f"read 1000 of {len(body)} bytes" in refusal(FileTruncated, store)
    path.write_bytes(body)
    damage_expert(root, KEY)
    assert refusal(HashMismatch, store).startswith(f"{pack.entry(KEY).path}: checksum differs")
    path.write_bytes(bytes(len(body)))
    refusal(HeaderInvalid, store)
    for whole in (body, body + bytes(4096)):  # what was added is not looked at
        path.write_bytes(whole)
        assert read(store).tobytes() == body
    assert (counters.reads, counters.retries) == (2, 12)


@pytest.mark.parametrize("io", [DIRECT, BUFFERED], ids=str)
def test_other_bytes_are_refused_and_the_right_ones_taken_once_they_are_back(
    root: Path, tmp_path: Path, io: IoSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, pack, counters = open_store(root, io)
    path = pack.file(pack.entry(KEY).path)
    body = path.read_bytes()
    size = len(body)
    neighbour = next(entry for entry in pack.manifest.experts if entry.key != KEY and entry.file_bytes == size)
    path.write_bytes(pack.file(neighbour.path).read_bytes())
    assert "belongs to another expert" in refusal(HeaderInvalid, store)
    other_seed = write_pack(tmp_path / "other.pack", SPECS["decoder"], paths=False, seed=1)
    shutil.copy(other_seed / pack.entry(KEY).path, path)
    assert path.stat().st_size == size
    refusal(HashMismatch, store)
    monkeypatch.setattr(store_module.time, "sleep", lambda pause_s: path.write_bytes(body))  # somebody mends it
    assert read(store).tobytes() == body
    assert (counters.reads, counters.retries) == (1, 7)


def test_a_drive_that_gives_a_page_at_a_time_is_read_to_the_end(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, pack, counters = open_store(root)
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:4096]], at))
    assert read(store).tobytes() == pack.file(pack.entry(KEY).path).read_bytes()
    assert (counters.reads, counters.retries) == (1, 0)


def test_several_threads_read_and_count_at_once(root: Path) -> None:
    store, pack, counters = open_store(root, IoSettings(True, 4))
    wrong: list[ExpertKey] = []

    def work() -> None:
        buffers = Buffers()
        for entry in pack.manifest.experts:
            buffer = buffers.take(entry.file_bytes, 0)
            store.read(entry.key, buffer)
            if buffer.tobytes() != pack.file(entry.path).read_bytes():
                wrong.append(entry.key)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert wrong == []
    assert counters.reads == 4 * len(pack.manifest.experts)
    assert counters.bytes_read == 4 * sum(entry.file_bytes for entry in pack.manifest.experts)


def test_ctrl_c_in_a_pause_is_not_swallowed(root: Path, fail: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    store, _, _ = open_store(root)
    fail(100, io_error())

    def interrupted(pause_s: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(store_module.time, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        read(store)


@pytest.mark.parametrize("predict", ["none", "gate"])
def test_one_bad_moment_costs_one_retry_and_no_token(
    originals: dict[str, Path], fail: Faults, monkeypatch: pytest.MonkeyPatch, predict: str
) -> None:
    settings, io = GenerationSettings(max_new_tokens=8), IoSettings(True, 2)
    monkeypatch.setattr(engine_module, "Worth", lambda: None)  # predictions at any price

    def answer() -> tuple[list[int], Engine]:
        with Engine.open(
            originals["decoder"], eviction="lru", predict=predict, cache=40_000, io=io, notify=str
        ) as engine:
            read_ahead_at_once(engine.cache)
            return engine.generate("abc", settings).result.tokens, engine

    expected, engine = answer()
    assert (engine.counters.retries, engine.counters.prefetch_used > 0) == (0, predict == "gate")
    fail(1, BAD_MOMENTS["I/O error"])
    found, engine = answer()
    assert (found, engine.counters.retries) == (expected, 1)
    fail(10**6, BAD_MOMENTS["I/O error"])
    with pytest.raises(FileMissing, match="can't be read: Input/output error"):
        answer()


def test_an_engine_that_met_a_dead_disk_goes_on_once_it_is_back(originals: dict[str, Path], fail: Faults) -> None:
    settings = GenerationSettings(max_new_tokens=8)
    with Engine.open(
        originals["decoder"], eviction="lru", predict="gate", cache=40_000, io=DIRECT, notify=str
    ) as engine:
        expected = engine.generate("abc", settings).result.tokens
        for prompt in ("zig", "abc"):
            fail(10**6, BAD_MOMENTS["I/O error"])
            with pytest.raises(FileMissing):
                engine.generate(prompt, settings)
            fail(0, BAD_MOMENTS["I/O error"])
            assert engine.generate("abc", settings).result.tokens == expected
            engine.cache.resize(40_000)  # after what is still being read ahead
            assert engine.cache._locked == set()
