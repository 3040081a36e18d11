"""With too little memory to begin with, or to go on, a program says one line."""

from __future__ import annotations

import errno
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_packs import DECODER, write_pack

from moeconv import __main__ as moeconv
from moert import __main__ as moert
from moert.command import console
from moert.pack.messages import Least, refusal, short_of_memory

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = {"moert": Least(*moert.LEAST), "moeconv": Least(*moeconv.LEAST)}


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pack(tmp_path_factory.mktemp("least") / "p", DECODER, paths=False)


def run(nbytes: int, program: str, *arguments: object) -> tuple[int, str]:
    """Status and errors of a program that may have so many bytes of addresses."""

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (nbytes, nbytes))
        resource.setrlimit(resource.RLIMIT_CPU, (60, 60))

    done = subprocess.run(
        [sys.executable, "-m", program, *map(str, arguments)], stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=120, check=False, preexec_fn=limited, cwd=ROOT,
    )  # fmt: skip
    return done.returncode, done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="addresses are limited on Linux alone")
@pytest.mark.parametrize("megabytes", [40, 100, 159, 170, 200, 250, 300, 400])
def test_running_with_few_addresses_is_one_line(pack: Path, megabytes: int) -> None:
    code, errors = run(megabytes * 10**6, "moert", "run", pack, "one", "--max-new-tokens", "2")
    assert (code, errors) == (0, "") or (code == 2 and errors.startswith("moert: ") and errors.count("\n") == 1)
    if megabytes * 10**6 < PROGRAMS["moert"].address_bytes:
        assert "at least 160 MB are needed to begin" in errors


@pytest.mark.skipif(sys.platform != "linux", reason="addresses are limited on Linux alone")
@pytest.mark.parametrize("megabytes", [100, 500, 999])
def test_converting_with_few_addresses_is_one_line(pack: Path, megabytes: int) -> None:
    code, errors = run(megabytes * 10**6, "moeconv", "verify", pack)
    assert code == 2
    assert errors.startswith("moeconv: ")
    assert errors.count("\n") == 1


def test_what_is_needed_runs(pack: Path) -> None:
    assert run(1 << 30, "moert", "run", pack, "one", "--max-new-tokens", "2") == (0, "")


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_control_group_that_is_too_small_is_noticed(program: str, tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/a/b\n")
    limits = tmp_path / "sys/fs/cgroup/a"
    limits.mkdir(parents=True)
    (limits / "memory.max").write_text("max\n")
    assert refusal(PROGRAMS[program], tmp_path) is None
    (limits / "memory.max").write_text("20000000\n")
    needed = PROGRAMS[program].memory_bytes // 10**6
    reason = refusal(PROGRAMS[program], tmp_path)
    assert reason is not None
    assert f"at least {needed} MB are needed to begin, and this process may have 20 MB of memory" in reason


def test_the_least_is_in_the_docs() -> None:
    text = (ROOT / "docs/commands.md").read_text(encoding="utf-8")
    for least in PROGRAMS.values():
        assert f"{least.memory_bytes // 10**6} MB" in text
        assert f"{least.address_bytes // 10**6:,} MB" in text


def test_what_python_says_of_a_shortage() -> None:
    def brought_about(error: BaseException, by: BaseException) -> BaseException:
        error.__cause__ = by
        return error

    short = [
        MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory"), RuntimeError("can't start new thread"),
        ImportError("libx.so: failed to map segment from shared object"),
        brought_about(ImportError("no numpy"), ImportError("libx.so: failed to map segment from shared object")),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"),
    ]  # fmt: skip
    assert all(map(short_of_memory, short))
    others = [ImportError("no module"), OSError(errno.ENOSPC, "No space"), ValueError("can't start new thread"), None]
    assert not any(map(short_of_memory, others))


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.ENOMEM, "x"), RuntimeError("can't start new thread")])
def test_a_command_that_finds_no_memory_says_so(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> None:
        raise error

    assert console.exit_code(command) == console.USAGE
    assert capsys.readouterr().err == f"moert: {console.SHORT}\n"
