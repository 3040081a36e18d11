"""A whole `moert run` while somebody breaks the pack, the disk or the process: one line, whole answers, a clean end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tiny_packs import DECODER_SHAPE, PROMPTS, write_pack

from moert.command import cli
from moert.engine.engine import Engine
from moert.engine.generation import GenerationSettings
from moert.pack.manifest import BACKBONE
from moert.pack.reader import Pack

ROOT = Path(cli.__file__).parent.parent
NEW = 12
SETTINGS = GenerationSettings(max_new_tokens=NEW)
IO = ("--tune", "io=direct,2", "--tune", "threads=1")
STREAMED = ("--tune", "cache=20%", *IO)
ENDED = {signal.SIGINT: 130, signal.SIGTERM: 143}
PATIENCE_S = 600
SLOW_DISK = """
import time
from moert.experts import cache
from moert.experts import store
read_into, cache._CLOSE_S = store.read_into, 0.5
def slowly(fd, into, offset):
    time.sleep({seconds})
    return read_into(fd, into, offset)
store.read_into, store.TOGETHER_BYTES = slowly, 0
"""


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack that never ends by itself."""
    return write_pack(tmp_path_factory.mktemp("faults") / "endless.pack", DECODER_SHAPE.but(eos=()).spec, paths=False)


@pytest.fixture(scope="module")
def expected(original: Path) -> dict[str, list[int]]:
    with Engine.open(original, predict="none") as engine:
        return {prompt: engine.generate(prompt, SETTINGS).result.tokens for prompt in PROMPTS}


@pytest.fixture
def pack(original: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return shutil.copytree(original, tmp_path / "endless.pack")


class Run:
    """`moert run` in a process of its own, after the statements in `before`."""

    def __init__(self, *arguments: object, before: str = "", **streams: object) -> None:
        code = f"import sys\n{before}\nfrom moert.command import cli\ncli.main(sys.argv[1:])"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, "run", *map(str, arguments)],
            **{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams},
            cwd=ROOT,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # tests run in the background ignore it
        )  # type: ignore[call-overload]

    def ask(self, prompt: str) -> None:
        self.process.stdin.write(json.dumps({"prompt": prompt}).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self) -> list[int]:
        line = self.process.stdout.readline()
        assert line, self.end()
        tokens: list[int] = json.loads(line)["tokens"]
        return tokens

    def end(self) -> tuple[int, str, str]:
        """(exit code, the rest of stdout, stderr)"""
        out, errors = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, (out or b"").decode(), errors.decode()


@pytest.fixture
def run() -> Iterator[Callable[..., Run]]:
    started: list[Run] = []

    def start(*arguments: object, **options: object) -> Run:
        started.append(Run(*arguments, **options))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.wait()


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4096)


def flip(path: Path) -> None:
    body = bytearray(path.read_bytes())
    body[5000] ^= 1
    path.write_bytes(body)


def another(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link_to_itself(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def forbidden(path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("nothing is forbidden to root")
    path.chmod(0)


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "deleted": (Path.unlink, "is missing from the pack at"),
    "cut": (cut, "copy the pack again"),
    "emptied": (lambda path: os.truncate(path, 0), "read 0 of"),
    "one bit": (flip, "checksum differs from the manifest"),
    "overwritten": (another, "its header is not that of expert"),
    "directory": (directory, "can't be read: Is a directory"),
    "pipe": (pipe, "can't be read"),
    "link to itself": (link_to_itself, "can't be read: Too many levels of symbolic links"),
    "forbidden": (forbidden, "can't be read: Permission denied"),
}


@pytest.mark.parametrize(
    ("damage", "predict"), [*((damage, "none") for damage in DAMAGES), ("deleted", "gate"), ("one bit", "gate")]
)
def test_experts_that_are_damaged_between_two_prompts(
    pack: Path, expected: dict[str, list[int]], run, damage: str, predict: str
) -> None:
    change, said = DAMAGES[damage]
    experts = Pack.open(pack).manifest.experts
    process = run(pack, "--input", "-", "--json", "--max-new-tokens", NEW, "--tune", f"predict={predict}", *STREAMED)
    process.ask(PROMPTS[0])
    assert process.answer() == expected[PROMPTS[0]]
    for entry in experts:
        change(pack / entry.path)
    process.ask(PROMPTS[1])
    code, out, errors = process.end()
    lines = [line for line in errors.splitlines() if "holds less than one token demands" not in line]
    assert code == 2, errors
    assert len(lines) == 1
    assert lines[0].startswith("moert: experts/")
    assert said in lines[0]
    assert "moert: " + json.loads(out)["error"]["message"] == lines[0]


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_damage_to_what_nobody_asks_for_again_changes_nothing(
    pack: Path, expected: dict[str, list[int]], run, kernels: str
) -> None:
    """All of it: nothing that is computed with is a view of a mapped file."""
    arguments = (
        "--max-new-tokens",
        NEW,
        "--tune",
        "predict=none",
        "--tune",
        "cache=100%",
        "--tune",
        f"kernels={kernels}",
        *IO,
    )
    process = run(pack, "--input", "-", "--json", *arguments)
    process.ask(PROMPTS[0])
    assert process.answer() == expected[PROMPTS[0]]
    shutil.rmtree(pack / "experts")
    os.truncate(pack / BACKBONE, 0)
    process.ask(PROMPTS[0])
    assert process.answer() == expected[PROMPTS[0]]
    assert process.end() == (0, "", "")


@pytest.mark.parametrize(
    ("sent", "predict", "slow_s"),
    [(signal.SIGINT, "none", 0.0), (signal.SIGINT, "gate", 0.05), (signal.SIGTERM, "gate", 0.05)],
)
def test_a_signal_in_the_middle_of_an_answer_ends_it_cleanly(
    pack: Path, run, sent: signal.Signals, predict: str, slow_s: float
) -> None:
    before = SLOW_DISK.format(seconds=slow_s) if slow_s else ""
    process = run(pack, "abc", "--max-new-tokens", 10**6, "--tune", f"predict={predict}", *STREAMED, before=before)
    assert process.process.stdout.read(1)  # it writes
    process.process.send_signal(sent)
    code, _, errors = process.end()
    assert code == ENDED[sent]
    assert "Traceback" not in errors
    assert len(errors.splitlines()) <= 1  # that the cache is small


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_whole_answers(pack: Path, expected: dict[str, list[int]], run, sent) -> None:
    process = run(pack, "--input", "-", "--json", "--max-new-tokens", NEW, "--tune", "predict=gate", *STREAMED)
    for _ in range(200):
        process.ask(PROMPTS[0])
    assert process.answer() == expected[PROMPTS[0]]
    process.process.send_signal(sent)
    code, out, errors = process.end()
    assert code == ENDED[sent]
    assert all(json.loads(line)["tokens"] == expected[PROMPTS[0]] for line in out.splitlines())
    assert "Traceback" not in errors


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_disk_that_is_dead_does_not_keep_the_process_alive(pack: Path, run, sent) -> None:
    before = SLOW_DISK.format(seconds="print('reading', flush=True) or 10**6")
    process = run(pack, "abc", "--max-new-tokens", 5, *STREAMED, before=before)
    assert process.process.stdout.readline() == b"reading\n"
    process.process.send_signal(sent)
    code, _, errors = process.end()
    assert code == ENDED[sent]
    assert "Traceback" not in errors


def test_a_slow_disk_changes_no_token(pack: Path, expected: dict[str, list[int]], run) -> None:
    before = SLOW_DISK.format(seconds=0.002)
    process = run(
        pack, PROMPTS[1], "--json", "--max-new-tokens", NEW, "--tune", "predict=gate", *STREAMED, before=before
    )
    code, out, errors = process.end()
    assert code == 0, errors
    assert json.loads(out)["tokens"] == expected[PROMPTS[1]]


FAILING = """
import errno, os
from moert.experts import store
read_into, store._PAUSES_S, turn = store.read_into, (0.001,) * 3, [0]
def sometimes(fd, into, offset):
    turn[0] += 1
    if {fails}:
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    return read_into(fd, into, offset)
store.read_into, store.TOGETHER_BYTES = sometimes, 0
"""


def test_a_disk_with_bad_moments_changes_no_token(pack: Path, expected: dict[str, list[int]], run) -> None:
    arguments = (pack, PROMPTS[1], "--json", "--max-new-tokens", NEW, "--tune", "predict=gate", *STREAMED)
    code, out, errors = run(*arguments, before=FAILING.format(fails="turn[0] % 3 == 0")).end()
    assert code == 0, errors
    assert json.loads(out)["tokens"] == expected[PROMPTS[1]]
    code, out, errors = run(*arguments, before=FAILING.format(fails="turn[0] > 20")).end()
    assert (code, list(json.loads(out))) == (2, ["error"])
    assert errors.splitlines()[-1].endswith("can't be read: Input/output error")
    assert "Traceback" not in errors


@pytest.mark.parametrize("asked", [("abc",), ("abc", "--json"), ("--input", "-")], ids=" ".join)
def test_stdout_that_is_full_is_one_line(pack: Path, run, asked: tuple[str, ...]) -> None:
    with open("/dev/full", "wb") as full:
        process = run(pack, *asked, "--max-new-tokens", 3, "--tune", "cache=100%", *IO, stdout=full)
        process.ask("abc")
        code, _, errors = process.end()
    assert (code, errors) == (2, "moert: stdout: No space left on device\n")


def test_nothing_is_written_beside_the_answer(pack: Path, expected: dict[str, list[int]], run, monkeypatch) -> None:
    """A full or missing place for temporary files and caches is no obstacle, nor is a pack that can't be written."""
    for name in ("TMPDIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.setenv(name, "/dev/full/none")
    before = sorted(path.relative_to(pack) for path in pack.rglob("*"))
    process = run(pack, PROMPTS[0], "--json", "--max-new-tokens", NEW, *STREAMED, "--tune", "io=auto")
    code, out, errors = process.end()
    assert code == 0, errors
    assert json.loads(out)["tokens"] == expected[PROMPTS[0]]
    assert sorted(path.relative_to(pack) for path in pack.rglob("*")) == before
