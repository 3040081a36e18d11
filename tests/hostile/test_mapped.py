"""Files that become shorter, or that their drive no longer gives, while they are in use: one line, never a signal."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_packs import DECODER_SHAPE, write_pack

from moert.command import cli
from moert.kernels import library
from moert.pack.manifest import BACKBONE
from moert.pack.reader import Pack

ROOT = Path(cli.__file__).parent.parent
native = pytest.mark.skipif(library.missing() is not None, reason="needs the kernels")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pack(tmp_path_factory.mktemp("mapped") / "tiny.pack", DECODER_SHAPE.but(eos=()).spec, paths=False)


@pytest.fixture
def pack(sound: Path, tmp_path: Path) -> Path:
    return shutil.copytree(sound, tmp_path / "tiny.pack")


def python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """In a process of its own, which a signal may end."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, check=False,
        timeout=300,
    )  # fmt: skip


# The backbone is read, not mapped.

CUT_WHEN_OPEN = """
import os, sys
from moert.command import cli
from moert.models import backbone
inner, turn = backbone.StoredWeights._tensor, [0]
def cut_first(self, name, allocate):
    turn[0] += 1
    if turn[0] == int(sys.argv[1]):
        os.truncate(sys.argv[3] + "/backbone.safetensors", int(sys.argv[2]))
    return inner(self, name, allocate)
backbone.StoredWeights._tensor = cut_first
cli.main(["run", sys.argv[3], "abc", "--max-new-tokens", "2"])
"""


@pytest.mark.parametrize("turn", [1, 2, 12])
@pytest.mark.parametrize("kept", [0, 4096])
def test_a_backbone_that_is_cut_while_it_is_read(pack: Path, turn: int, kept: int) -> None:
    done = python(CUT_WHEN_OPEN, turn, kept, pack)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"moert: {BACKBONE}: read ")
    assert "copy the pack again" in done.stderr


FAILING_DRIVE = """
import errno, io, os, sys
from moert.command import cli
from moert.pack import files
class Failing(io.FileIO):
    def fails(self):
        if os.readlink(f"/proc/self/fd/{self.fileno()}").endswith(sys.argv[1]):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
    def read(self, nbytes=-1):
        self.fails()
        return super().read(nbytes)
    def readinto(self, buffer):
        self.fails()
        return super().readinto(buffer)
files.FileIO = Failing
cli.main(["run", sys.argv[2], "abc", "--max-new-tokens", "2"])
"""


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
@pytest.mark.parametrize("name", [BACKBONE, "tokenizer.json", "manifest.json"])
def test_a_drive_that_fails_is_said_with_the_name_of_the_file(pack: Path, name: str) -> None:
    done = python(FAILING_DRIVE, name, pack)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert f"{name} in the pack at {pack} can't be read: Input/output error" in done.stderr
    assert len(done.stderr.splitlines()) == 1


# Fences.

FENCED = """
import os, sys
from moert.kernels.memory import breaks, mapped
path = sys.argv[1]
open(path, "wb").write(bytes(range(1, 129)) * 512)
fd, lost = os.open(path, os.O_RDONLY), []
place, mapping = mapped(fd, 65536)
mapping.path, mapping.lost = path, lost
assert place[65535] == 128 and not mapping.is_broken and breaks() == 0
os.truncate(path, 16384)
assert place[16383] == 128 and not mapping.is_broken
assert not place[16384:].any() and mapping.is_broken and breaks() == 1
assert place[0] == 1
assert mapped(fd, 65536) is None
del place, mapping
assert lost == [path]
print("well")
"""


@native
def test_what_is_gone_of_a_fenced_file_reads_as_zeros_and_is_said(tmp_path: Path) -> None:
    done = python(FENCED, tmp_path / "file")
    assert (done.returncode, done.stdout) == (0, "well\n"), done.stderr


OUTSIDE = """
import mmap, os, sys
from moert.kernels.memory import mapped
path = sys.argv[1]
open(path, "wb").write(bytes(65536))
fd = os.open(path, os.O_RDONLY)
{before}
place, mapping = mapped(fd, 4096)
other = mmap.mmap(fd, 65536, mmap.MAP_PRIVATE, mmap.PROT_READ)
os.truncate(path, 4096)
{after}
print("still here", flush=True)
other[20000]
print("not killed")
"""


@native
@pytest.mark.parametrize("after", ["", "del place, mapping"])
def test_elsewhere_the_signal_does_what_it_did(tmp_path: Path, after: str) -> None:
    done = python(OUTSIDE.format(before="", after=after), tmp_path / "file")
    assert (done.returncode, done.stdout) == (-signal.SIGBUS, "still here\n"), done.stderr


@native
def test_the_handler_before_is_asked_elsewhere(tmp_path: Path) -> None:
    before = "import faulthandler; faulthandler.enable()"
    done = python(OUTSIDE.format(before=before, after=""), tmp_path / "file")
    assert (done.returncode, done.stdout) == (-signal.SIGBUS, "still here\n")
    assert "Bus error" in done.stderr


@native
def test_a_signal_that_somebody_sends_ends_the_process(tmp_path: Path) -> None:
    done = python(OUTSIDE.format(before="", after="os.kill(os.getpid(), 7 if sys.platform == 'linux' else 10)"),
                  tmp_path / "file")  # fmt: skip
    assert (done.returncode, done.stdout) == (-signal.SIGBUS, "")


MANY = """
import os, sys, threading
from moert.kernels.memory import mapped
path = sys.argv[1]
open(path, "wb").write(bytes(8192))
fd = os.open(path, os.O_RDONLY)
def turns():
    for _ in range(300):
        kept = [mapped(fd, 8192) for _ in range(20)]
        assert all(each is not None for each in kept)
threads = [threading.Thread(target=turns) for _ in range(4)]
for each in threads: each.start()
for each in threads: each.join()
print("well")
"""


@native
def test_fences_come_and_go_in_several_threads(tmp_path: Path) -> None:
    done = python(MANY, tmp_path / "file")
    assert (done.returncode, done.stdout) == (0, "well\n"), done.stderr


# A run whose experts are used where the page cache has them.

CUT_WHILE_MAPPED = """
import os, sys
from pathlib import Path
from moert.command import cli
from moert.experts import cache
from moert.experts import store
store.MAPPED_BYTES, store.TOGETHER_BYTES = 1, 0
pack, moves, early = sys.argv[1], sys.argv[2], sys.argv[3]
move = cache.ExpertCache._next_move
cache.ExpertCache._next_move = lambda self: move(self) if moves == "soon" and taken[0] >= int(early) else None
inner, taken = store.ExpertStore.check, [0]
def cut_then(self):
    inner(self)
    taken[0] += 1
    if taken[0] == int(early):
        assert len(self._mapped), "nothing is mapped"
        for path in Path(pack, "experts").rglob("*.safetensors"):
            os.truncate(path, 0)
store.ExpertStore.check = cut_then
cli.main(["run", pack, "hello world", "--max-new-tokens", "40", "--tune", "predict=none"])
"""


@native
@pytest.mark.skipif(sys.platform != "linux", reason="asks the page cache")
@pytest.mark.parametrize("moves", ["never", "soon"])
@pytest.mark.parametrize("when", [3, 7])
def test_experts_that_are_cut_while_they_are_mapped(pack: Path, moves: str, when: int) -> None:
    done = python(CUT_WHILE_MAPPED, pack, moves, when)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("moert: experts/D0")
    assert "copy the pack again" in lines[0]


def test_whole_files_that_are_gone_do_not_change_how_a_pack_is_read(pack: Path) -> None:
    opened = Pack.open(pack)
    os.truncate(pack / BACKBONE, 0)
    with pytest.raises(Exception, match=f"{BACKBONE} has 0 bytes"):
        opened.read_file(BACKBONE)
