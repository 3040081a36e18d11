"""Small experts that are read in one call, from files that stay open: what arrives, what fails, what is opened."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tiny_packs import SPECS, damage_expert, write_pack

from moert.engine.engine import Engine
from moert.engine.generation import GenerationSettings
from moert.experts import store as store_module
from moert.experts.cache import Buffers
from moert.experts.store import ExpertStore, IoSettings, OpenFiles, PlainReader, Reader, Table, open_reader
from moert.kernels.reference import ReferenceBackend
from moert.pack.errors import FileMissing, FileTruncated, HashMismatch, HeaderInvalid, PackError
from moert.pack.model_spec import ExpertKey
from moert.pack.reader import Pack
from moert.stats import ExpertCounters

DIRECT, BUFFERED = IoSettings(True, 2), IoSettings(False, 2)
KEYS = [ExpertKey("decoder", 1, expert) for expert in (3, 0, 2)]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pack(tmp_path_factory.mktemp("together") / "model.pack", SPECS["decoder"], paths=False)


@pytest.fixture
def root(original: Path, tmp_path: Path) -> Path:
    """A pack that may be damaged."""
    return shutil.copytree(original, tmp_path / "model.pack")


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moert.experts.store._PAUSES_S", (0.0, 0.0, 0.0))


def open_store(root: Path, io: IoSettings = DIRECT) -> tuple[ExpertStore, Pack, ExpertCounters]:
    pack, counters = Pack.open(root), ExpertCounters()
    return ExpertStore(pack, ReferenceBackend(), counters, io), pack, counters


def read(store: ExpertStore, keys: list[ExpertKey]) -> list[np.ndarray | PackError]:
    buffers = Buffers()
    return store.read_all([(key, buffers.take(store.nbytes(key), 0)) for key in keys])


def arrived(found: np.ndarray | PackError, pack: Pack, key: ExpertKey) -> bool:
    return isinstance(found, np.ndarray) and found.tobytes() == pack.file(pack.entry(key).path).read_bytes()


def settled() -> int:
    """Files that are open once those are closed that other tests have left."""
    gc.collect()
    return descriptors()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


class Faulty:
    """A reader whose first calls go wrong in some rows, and which remembers how many reads each call had."""

    def __init__(self, times: int, how: Callable[[Table], None]) -> None:
        self.calls: list[int] = []
        self._times, self._how, self._inner = times, how, open_reader(2)

    def read_many(self, table: Table) -> int:
        self.calls.append(len(table))
        failed = self._inner.read_many(table)
        if len(self.calls) > self._times:
            return failed
        self._how(table)
        return int(((table["error"] != 0) | (table["wrong"] != 0) | (table["found"] < table["nbytes"])).sum())

    def close(self) -> None:
        self._inner.close()


def set_of(column: str, value: int, row: int = 1) -> Callable[[Table], None]:
    def change(table: Table) -> None:
        table[column][row] = value

    return change


@pytest.mark.parametrize("io", [DIRECT, BUFFERED], ids=str)
@pytest.mark.parametrize("reader", [open_reader, lambda threads: open_reader(threads, False), lambda _: PlainReader()])
def test_all_experts_arrive_in_one_call(
    original: Path, monkeypatch: pytest.MonkeyPatch, io: IoSettings, reader: Callable[[int], Reader]
) -> None:
    monkeypatch.setattr("moert.experts.store.open_reader", reader)
    store, pack, counters = open_store(original, io)
    keys = [entry.key for entry in pack.manifest.experts]
    for turn in (1, 2):
        found = read(store, keys)
        assert [arrived(each, pack, key) for each, key in zip(found, keys, strict=True)] == [True] * len(keys)
        assert (counters.reads, counters.retries) == (turn * len(keys), 0)
    assert counters.bytes_read == 2 * sum(entry.file_bytes for entry in pack.manifest.experts)
    assert counters.read_s > 0
    assert read(store, []) == []
    store.close()


def test_large_ones_are_read_by_themselves(original: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty = Faulty(0, lambda table: None)
    monkeypatch.setattr("moert.experts.store.open_reader", lambda threads: faulty)
    store, pack, _ = open_store(original)
    read(store, KEYS)
    assert faulty.calls == [3]
    monkeypatch.setattr(store_module, "TOGETHER_BYTES", store.nbytes(KEYS[0]))
    assert all(arrived(each, pack, key) for each, key in zip(read(store, KEYS), KEYS, strict=True))
    assert faulty.calls == [3]


def garble(table: Table) -> None:
    ctypes.memset(int(table["place"][1]), 7, 64)
    table["wrong"][1] = 1


@pytest.mark.parametrize("how", [set_of("error", errno.EIO), set_of("found", 0), set_of("found", 4096), garble])
def test_a_bad_moment_costs_one_retry_of_one_expert(root: Path, monkeypatch: pytest.MonkeyPatch, how) -> None:
    faulty = Faulty(1, how)
    monkeypatch.setattr("moert.experts.store.open_reader", lambda threads: faulty)
    store, pack, counters = open_store(root)
    found = read(store, KEYS)
    assert all(arrived(each, pack, key) for each, key in zip(found, KEYS, strict=True))
    assert faulty.calls == [3]  # the retry reads by itself
    assert (counters.reads, counters.retries) == (3, 1)
    assert counters.bytes_read == sum(map(store.nbytes, KEYS))


DAMAGES: dict[str, tuple[Callable[[Path], object], type[PackError], str]] = {
    "deleted": (Path.unlink, FileMissing, "is missing from the pack at"),
    "cut": (lambda path: os.truncate(path, path.stat().st_size - 4096), FileTruncated, "copy the pack again"),
    "emptied": (lambda path: os.truncate(path, 0), FileTruncated, "read 0 of"),
    "overwritten": (lambda path: path.write_bytes(bytes(path.stat().st_size)), HeaderInvalid, "its header is not"),
    "directory": (lambda path: (path.unlink(), path.mkdir()), FileMissing, "can't be read: Is a directory"),
    "pipe": (lambda path: (path.unlink(), os.mkfifo(path)), FileMissing, "can't be read: Illegal seek"),
    "link": (lambda path: (path.unlink(), path.symlink_to(path.name)), FileMissing, "Too many levels of symbolic"),
}  # fmt: skip


@pytest.mark.parametrize("known", [False, True], ids=["at the first read", "between two requests"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_and_the_others_arrive(root: Path, damage: str, known: bool) -> None:
    store, pack, counters = open_store(root)
    if known:
        read(store, KEYS)
    change, kind, said = DAMAGES[damage]
    change(pack.root / pack.entry(KEYS[1]).path)
    store.expect()
    found = read(store, KEYS)
    assert type(found[1]) is kind
    assert said in str(found[1])
    assert arrived(found[0], pack, KEYS[0])
    assert arrived(found[2], pack, KEYS[2])
    final = damage in ("deleted", "directory", "link")
    assert counters.retries == (0 if final else 3)


def test_a_wrong_bit_is_named_also_without_a_new_request(root: Path) -> None:
    store, pack, _ = open_store(root)
    for known in (False, True):
        if known:
            read(store, KEYS)
        damage_expert(root, KEYS[1])
        assert isinstance(read(store, KEYS)[1], HashMismatch)
        damage_expert(root, KEYS[1])  # the same bit
        if not arrived(read(store, KEYS)[1], pack, KEYS[1]):
            pytest.skip("damage is not undone by more of it")


def test_another_file_in_its_place_is_read_from_the_next_request_on(root: Path) -> None:
    store, pack, counters = open_store(root)
    path = pack.root / pack.entry(KEYS[0]).path
    body = path.read_bytes()
    read(store, KEYS)
    path.unlink()
    path.write_bytes(bytes(len(body)))
    assert isinstance(read(store, KEYS)[0], np.ndarray)  # what was opened is still whole
    store.expect()
    assert isinstance(read(store, KEYS)[0], HeaderInvalid)
    path.write_bytes(body)
    assert arrived(read(store, KEYS)[0], pack, KEYS[0])
    assert counters.retries == 3


def test_files_stay_open_and_are_closed_in_the_end(original: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, *rest: (opened.append(str(path)), real(path, *rest))[1])
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("nobody tells how many files are open")
    before = settled()
    store = open_store(original)[0]
    read(store, KEYS)
    opened.clear()
    for _ in range(5):
        read(store, KEYS)
        store.expect()
    assert opened == []
    assert descriptors() >= before + 3
    store.close()
    assert descriptors() == before
    read(store, KEYS)
    del store
    assert descriptors() == before


def test_few_descriptors_are_enough(original: Path) -> None:
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("nobody tells how many files are open")
    before = settled()
    pack = Pack.open(original)
    paths = [entry.path for entry in pack.manifest.experts][:8]
    files = OpenFiles(original, most=3)
    held = [files.take(path, False) for path in paths]  # all at once: no fewer will do
    assert descriptors() == before + 8
    for file in held:
        files.give(file)
    for path in paths:
        file = files.take(path, False)
        assert os.pread(file.fd, 8, 0)
        assert descriptors() == before + 3  # the one more that is opened waits for another to be closed
        files.give(file)
    assert len(files._files) == 3
    assert descriptors() == before + 3
    file = files.take(paths[0], False)
    files.close()
    assert os.pread(file.fd, 8, 0)  # who reads goes on
    files.give(file)
    assert descriptors() == before


def test_a_file_that_failed_is_opened_anew(original: Path) -> None:
    pack = Pack.open(original)
    path = pack.manifest.experts[0].path
    files = OpenFiles(original)
    one, other = files.take(path, False), files.take(path, False)
    assert one is other
    files.give(one, failed=True)
    assert os.pread(other.fd, 8, 0)
    again = files.take(path, False)
    assert again.fd != other.fd
    files.give(other, failed=True)
    assert os.pread(again.fd, 8, 0)
    files.give(again)
    files.close()


def test_several_threads_read_together(original: Path) -> None:
    store, pack, counters = open_store(original)
    keys = [entry.key for entry in pack.manifest.experts]
    wrong: list[ExpertKey] = []

    def work(seed: int) -> None:
        for turn in range(10):
            some = [keys[at] for at in np.random.default_rng((seed, turn)).permutation(len(keys))[:8]]
            wrong.extend(key for key, each in zip(some, read(store, some), strict=True) if not arrived(each, pack, key))
            store.expect()

    threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert wrong == []
    assert counters.reads == 4 * 10 * 8
    store.close()


def test_ctrl_c_in_a_pause_is_not_swallowed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(root)[0]
    damage_expert(root, KEYS[1])

    def interrupted(pause_s: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(store_module.time, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        read(store, KEYS)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_answers_are_the_same_read_together_or_one_by_one(
    original: Path, monkeypatch: pytest.MonkeyPatch, kernels: str
) -> None:
    settings = GenerationSettings(max_new_tokens=12)

    def answers() -> tuple[list[list[int]], ExpertCounters]:
        with Engine.open(
            original, eviction="lru", predict="none", cache=40_000, io=DIRECT, kernels=kernels, notify=str
        ) as engine:
            return [engine.generate(each, settings).result.tokens for each in ("abc", "zig", "abc")], engine.counters

    together, counters = answers()
    monkeypatch.setattr(store_module, "TOGETHER_BYTES", 0)
    apart, others = answers()
    assert together == apart
    assert (counters.reads, counters.evictions, counters.hits) == (others.reads, others.evictions, others.hits)
    assert counters.reads > 0
