"""Systems that lack parts of Linux: the programs still load, and do without."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from tiny import tiny_olmoe
from tiny_packs import SPECS, write_pack

from moeconv.measure.workdir import WorkDir
from moeconv.writer import DirectoryLock
from moert import machine
from moert.beside import grammar as grammars
from moert.chat import renderer
from moert.engine.constraint import Grammar
from moert.errors import SettingInvalid, TemplateFailed
from moert.experts.store import OpenFiles
from moert.pack import fence, files
from moert.serve import server

ROOT = Path(__file__).resolve().parents[2]
# What a process does first, so that a part of the system is missing in it; nothing of moert is imported before.
OFF = {
    "resource": "sys.modules['resource'] = None",
    "fcntl": "sys.modules['fcntl'] = None",
    "O_DIRECT": "del os.O_DIRECT",
    "flags of open": "del os.O_CLOEXEC, os.O_NONBLOCK",
    "preadv": "del os.preadv, os.pread",
    "RWF_NOWAIT": "del os.RWF_NOWAIT",
    "posix_fadvise": "del os.posix_fadvise",
    "posix_fallocate": "del os.posix_fallocate",
    "set_blocking": "del os.set_blocking",
    "memfd_create": "del os.memfd_create",
    "affinity": "del os.sched_getaffinity",
    "priorities": "del os.SCHED_IDLE, os.setpriority",
    "numbers of drives": "del os.major, os.minor",
    "SIGXCPU": "del signal.SIGXCPU",
    "maps with flags": "del mmap.MAP_PRIVATE, mmap.MAP_POPULATE",
    "large pages": "del mmap.MADV_HUGEPAGE; import moert.kernels.memory; moert.kernels.memory._ON_LINUX = False",
    "/proc and /sys": "import moert.machine; moert.machine.text = lambda path: ''",
    "folders that open": "import moert.pack.files; moert.pack.files._ON_WINDOWS = True",
    "io_uring": "from moert.experts import store; store.open_reader.__defaults__ = (False,)",
    "reads by the library": "from moert.experts import store; store.open_reader = lambda *_: store.PlainReader()",
}


def without(parts: Sequence[str], program: str, *arguments: object, home: Path) -> str:
    """The output of a program's command line in a process that lacks these parts of the system."""
    code = "\n".join(
        ["import mmap, os, signal, sys", *(OFF[part] for part in parts), f"from {program}.command.cli import main"]
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nsys.exit(main(sys.argv[1:]))", *map(str, arguments)],
        capture_output=True, text=True, check=False, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(home), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert not done.returncode, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pack(tmp_path_factory.mktemp("platforms") / "decoder.pack", SPECS["decoder"])


def written(parts: Sequence[str], pack: Path, home: Path) -> str:
    """Some tokens with experts that come and go."""
    return without(parts, "moert", "run", pack, "abc", "--max-new-tokens", 8, "--tune", "cache=40%", home=home)


@pytest.fixture(scope="module")
def expected(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return written([], packed, tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("parts", [[part] for part in OFF] + [[*OFF]], ids=[*OFF, "all of them"])
def test_a_run_without_a_part_of_the_system_writes_the_same(
    parts: list[str], packed: Path, expected: str, tmp_path: Path
) -> None:
    assert written(parts, packed, tmp_path) == expected


@pytest.mark.slow
def test_a_conversion_without_any_of_them_makes_the_same_experts(tmp_path: Path) -> None:
    """Maps with flags stay: torch itself needs them on Linux."""
    model = tiny_olmoe(tmp_path / "model")
    packs = []
    for name, parts in (("all", list[str]()), ("none", [part for part in OFF if part != "maps with flags"])):
        packs.append(tmp_path / f"{name}.pack")
        work = ("--out", packs[-1], "--work", tmp_path / f"{name}.work")
        without(parts, "moeconv", "quantize", model, "--bits", 4, *work, home=tmp_path)
    mine, others = (
        {path.relative_to(pack): path.read_bytes() for path in pack.glob("experts/**/*.safetensors")} for pack in packs
    )
    assert mine
    assert mine == others


@pytest.mark.parametrize(
    "module", ["moert.command.cli", "moert.hub.catalogue", "moert.engine.engine", "moeconv.writer"]
)
def test_it_loads_without_resource_and_fcntl(module: str) -> None:
    code = f"import sys; sys.modules['resource'] = sys.modules['fcntl'] = None; import {module}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_resource_there_are_no_limits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "resource", None)
    assert machine.limit_of("RLIMIT_AS") is None
    assert machine.peak_bytes(tmp_path) == 0
    assert OpenFiles(tmp_path)._most == 1024


def test_without_locks_every_lock_is_granted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with WorkDir(tmp_path), pytest.raises(Exception, match="another run"), WorkDir(tmp_path):
        pass
    monkeypatch.setattr(machine, "fcntl", None)
    with WorkDir(tmp_path), WorkDir(tmp_path):
        pass
    assert DirectoryLock(tmp_path)
    assert DirectoryLock(tmp_path)


def test_without_proc_nothing_is_known_of_groups(tmp_path: Path) -> None:
    assert machine.control_groups(tmp_path, "memory") == []
    assert machine.quota_of(tmp_path) is None
    assert machine.usable_cores(tmp_path) == machine.affinity()
    assert machine.machine_memory(tmp_path).limit_bytes is None


def test_without_affinity_all_cores_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert machine.affinity() == (os.cpu_count() or 1)


def test_without_posix_fallocate_zeros_are_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("as it is", "without"):
        with (tmp_path / name).open("wb") as file:
            machine.reserve(file, (3 << 20) + 5)
        monkeypatch.delattr(os, "posix_fallocate", raising=False)
    assert (tmp_path / "without").read_bytes() == bytes((3 << 20) + 5) == (tmp_path / "as it is").read_bytes()


def test_without_limits_no_template_and_no_grammar_of_a_stranger_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "resource", None)
    with pytest.raises(TemplateFailed, match="this system can't limit the process"):
        renderer._start()
    pytest.importorskip("llguidance")
    with pytest.raises(SettingInvalid, match="this system can't limit the process"):
        grammars.check_apart(Grammar("lark", 'start: "a"'))


def test_where_folders_do_not_open_files_are_written_all_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(files, "_ON_WINDOWS", True)
    monkeypatch.setattr(machine, "fcntl", None)
    files.write_atomically(tmp_path / "file", b"body")
    files.fsync(tmp_path)
    assert (tmp_path / "file").read_bytes() == b"body"
    with machine.locked(tmp_path), machine.locked(tmp_path, wait=True):
        pass


def test_without_memfd_create_what_is_held_back_is_dropped(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def complain() -> str:
        os.write(2, b"said")
        return "done"

    with fence.owned_stderr():
        assert fence.fenced(complain, 60) == "done"
        assert capfd.readouterr().err == "said"
        monkeypatch.delattr(os, "memfd_create", raising=False)
        assert fence.fenced(complain, 60) == "done"
        assert capfd.readouterr().err == ""


def test_a_loop_without_signal_handlers_hears_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise NotImplementedError

    async def one() -> int:
        loop, found = asyncio.get_running_loop(), asyncio.Queue[int]()
        monkeypatch.setattr(loop, "add_signal_handler", refuse)
        server.on_signals(loop, (signal.SIGTERM,), found.put_nowait)
        os.kill(os.getpid(), signal.SIGTERM)
        return await asyncio.wait_for(found.get(), 60)

    before = signal.getsignal(signal.SIGTERM)
    try:
        assert asyncio.run(one()) == signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, before)
