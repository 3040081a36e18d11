"""With --json a command that fails prints an object too, in one shape for both programs."""

from __future__ import annotations

import errno
import json
import resource
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_line import Moert
from tiny_packs import DECODER, write_pack

from moeconv import __main__ as moeconv
from moeconv.command import cli
from moeconv.errors import TargetMissed
from moert import __main__ as moert
from moert.command import console
from moert.pack.messages import Least, refusal, short_of_memory


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("moert run no.pack x --json", "ManifestMissing"),
        ("moert run no.pack --json --file none.txt", "InputInvalid"),
        ("moert run no.pack x --json --memory 5X", "InvalidMemory"),
        ("moert run no.pack x --json --temperature -1", "SettingInvalid"),
        ("moert run --json --tempature 3", "UsageError"),
        ("moert run --json", "UsageError"),
        ("moert chat no.pack --json", "ManifestMissing"),
        ("moert bench no.pack --json", "ManifestMissing"),
        ("moert bench no.pack --drive --json --memory 3GB", "RunError"),
        ("moert info no.pack --json", "ManifestMissing"),
        ("moert info --json", "RunError"),
        ("moert nothing --json", "UsageError"),
        ("moeconv quantize no/such/model --json", "SettingsError"),
        ("moeconv quantize no/such/model --json --bits 4", "CheckpointError"),
        ("moeconv quantize --json --bits", "UsageError"),
        ("moeconv check no/such/model --json", "CheckpointError"),
        ("moeconv plan no/such/work --json", "SettingsError"),
        ("moeconv report no.pack --json", "ManifestMissing"),
        ("moeconv profile-paths no.pack --json", "ManifestMissing"),
        ("moeconv train-hash no.pack --json", "ManifestMissing"),
        ("moeconv train-neurons no.pack --json", "ManifestMissing"),
        ("moeconv verify no.pack --json", "ManifestMissing"),
        ("moeconv recipe run none.toml --json", "SettingsError"),
        ("moeconv recipe walk --json", "UsageError"),
    ],
)
def test_every_command_says_as_json_why_it_failed(
    line: str, kind: str, tmp_path: Path, moert: Moert, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    program, *arguments = line.split()
    if program == "moert":
        code, out, said = moert(*arguments), moert.out, moert.err
    else:
        code, (out, said) = cli._exit_code(arguments), capsys.readouterr()
    found = json.loads(out)
    assert (code, set(found), said.count("\n")) == (2, {"error"}, 1)
    assert {"code": 2, "kind": kind} == {name: found["error"][name] for name in ("code", "kind")}
    assert said == f"{program}: {found['error']['message']}\n"


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("moert run no.pack x --json", "ManifestMissing"),
        ("moeconv plan no/such/work --json", "SettingsError"),
        ("moert run no.pack -- --json", None),  # behind two dashes it is no option
    ],
)
def test_processes_say_the_same(line: str, kind: str | None) -> None:
    command = [sys.executable, "-m", *line.split()]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert (json.loads(done.stdout)["error"]["kind"] if done.stdout else None) == kind


@pytest.mark.parametrize("program", ["moert", "moeconv"])
def test_a_program_that_can_not_begin_says_so_too(program: str) -> None:
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (100_000_000, 100_000_000)); "
        f"sys.argv = [{program!r}, 'x', '--json']; from {program}.__main__ import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)["error"]
    assert (done.returncode, found["kind"], done.stderr) == (2, "OutOfMemory", f"{program}: {found['message']}\n")


def test_a_missed_target_is_an_object_with_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*_: object) -> None:
        raise TargetMissed("no widths do")

    monkeypatch.setattr(cli, "_convert", run)
    assert cli._exit_code(["quantize", "m", "--bits", "4", "--json"]) == 3
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"error": {"code": 3, "kind": "TargetMissed", "message": "no widths do"}}
    assert printed.err == "moeconv: no widths do\n"


def test_a_result_that_misses_its_target_has_both(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("moeconv.conversion.conversion.Conversion.run", lambda self: (SimpleNamespace(files={}), {}))
    monkeypatch.setattr("moeconv.command.present.missed_target", lambda report: "the held-out loss is above")
    monkeypatch.setattr(cli, "_as_json", lambda report: {"model": "m"})
    assert cli._exit_code(["quantize", "m", "--bits", "4", "--json"]) == 3
    error = {"code": 3, "kind": "TargetMissed", "message": "the held-out loss is above"}
    assert json.loads(capsys.readouterr().out) == {"model": "m", "error": error}


# Ctrl-C while Python still loads a program: no traceback, whichever module it comes in

ROOT = Path(__file__).resolve().parents[2]
CODE = """
import os, signal, sys

class CtrlC:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # tests run in the background ignore it
sys.meta_path.insert(0, CtrlC())
sys.argv = [{program!r}, *{arguments!r}]
from {program}.__main__ import main
main()
"""
ASKED = {"moert": ["info", "--system"], "moeconv": ["plan", "no such folder", "--loss", "5%"]}


@pytest.mark.parametrize("program", ASKED)
@pytest.mark.parametrize("module", ["typer", "PROGRAM.command.cli", "PROGRAM.errors", "moert.pack.errors"])
def test_it_ends_quietly(program: str, module: str) -> None:
    code = CODE.format(module=module.replace("PROGRAM", program), program=program, arguments=ASKED[program])
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode in (130, -signal.SIGINT), run.stderr
    assert "Traceback" not in run.stderr


def test_where_the_caller_ignores_it_the_command_does_too() -> None:
    code = CODE.format(module="typer", program="moert", arguments=["--version"]).replace(
        "default_int_handler", "SIG_IGN"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith("moert ")


def test_the_installed_commands_begin_there() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for program in ASKED:
        assert f'{program} = "{program}.__main__:main"' in text


# Too little memory to begin with

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
@pytest.mark.parametrize(
    "megabytes", [40, 159, 170, 250, *(pytest.param(each, marks=pytest.mark.slow) for each in (100, 200, 300, 400))]
)
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
    assert f"at least {needed} MB are needed to begin, and this process may have 20 MB of memory" in reason


def test_the_least_is_in_the_docs() -> None:
    text = " ".join((ROOT / "docs/commands.md").read_text(encoding="utf-8").split())
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


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.ENOMEM, "x"), RuntimeError("can't start new thread")])
def test_a_conversion_that_finds_no_memory_says_so_in_json_too(
    error: Exception, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def command(*words: object, **settings: object) -> None:
        raise error

    monkeypatch.setattr(cli, "app", command)
    assert cli._exit_code(["quantize", "--json"]) == console.USAGE
    found = capfd.readouterr()
    assert found.err.startswith("moeconv: the system gives no more memory: ")
    assert json.loads(found.out)["error"]["kind"] == "OutOfMemory"
