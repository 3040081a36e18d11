"""Three newcomers, with nothing but a page each: a laptop with a GGUF file, a CI job, and a board with 1 GB.

They type the commands of the page as it has them, the programs as `pip install` leaves them.
"""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cgroups import Group, missing
from chat_packs import ENDLESS, write_chat_pack
from conversions import words
from converting import journals
from gguf_files import in_16_bits, write_gguf
from tiny import tiny_olmoe

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(sys.executable).parent
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
Done = subprocess.CompletedProcess[str]


class Page:
    """A page of docs/, or a section of it: the commands that it shows, and its blocks of other languages."""

    def __init__(self, name: str, heading: str = "") -> None:
        text = (ROOT / "docs" / name).read_text(encoding="utf-8")
        self._text = re.split(r"^## ", text.partition(f"## {heading}\n")[2], flags=re.MULTILINE)[0] if heading else text

    def command(self, begin: str) -> list[str]:
        """Returns the first command that begins with these words."""
        return shlex.split(re.findall(rf"^    ({begin}\b.*)$", self._text, re.MULTILINE)[0])

    def block(self, language: str) -> str:
        return re.findall(rf"^```{language}\n(.*?)```", self._text, re.MULTILINE | re.DOTALL)[0]


def variables(**more: str) -> dict[str, str]:
    """Returns the environment of someone who has installed this checkout."""
    paths = os.pathsep.join(filter(None, (more.pop("first", ""), str(ROOT))))
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": paths, **more}


def typed(line: list[str], folder: Path, stdin: str = "", enter: Callable[[], None] | None = None, **more: str) -> Done:
    return subprocess.run(
        [str(PROGRAMS / line[0]), *line[1:]], cwd=folder, input=stdin, env=variables(**more), capture_output=True,
        text=True, check=False, timeout=600, preexec_fn=enter,
    )  # fmt: skip


@pytest.fixture
def downloaded(tmp_path: Path) -> Path:
    """A folder with a GGUF file as `model.gguf`, and text of 120 paragraphs."""
    model = tiny_olmoe(tmp_path / "elsewhere" / "olmoe", max_position_embeddings=4096)
    in_16_bits(model)
    folder = tmp_path / "here"
    folder.mkdir()
    write_gguf(model, folder / "model.gguf", **{"tokenizer.chat_template": TEMPLATE})
    shutil.rmtree(model.parent)
    (folder / "text.txt").write_text("\n\n".join(words(random.Random(row), 60) for row in range(120)))
    return folder


@pytest.mark.slow
def test_a_laptop_converts_a_gguf_file_chats_and_serves(downloaded: Path) -> None:
    page = Page("first-conversion.md")
    checked = typed(page.command("moeconv check"), downloaded)
    assert (checked.returncode, checked.stdout.splitlines()[0]) == (0, "model.gguf: olmoe, supported")
    converted = typed(page.command("moeconv quantize"), downloaded)
    assert converted.returncode == 0, converted.stderr
    assert re.search(r"at 95% the held-out loss was to stay under [0-4]\.\d\d%", converted.stdout)
    hints = re.findall(r"^    (moert .*?)   ", converted.stdout, re.MULTILINE)
    assert [shlex.split(hint)[:2] for hint in hints] == [["moert", "run"], ["moert", "chat"], ["moert", "info"]]
    ran = typed(page.command("moert run"), downloaded)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert len(ran.stdout) > 10
    talked = typed(page.command("moert chat"), downloaded, stdin="hello\nand more\n/bye\n")
    assert talked.returncode == 0, talked.stderr
    assert len(talked.stdout.splitlines()) >= 2
    assert "loss" in typed(["moert", "info", "model.pack"], downloaded).stdout
    with served(page.command("moert serve"), downloaded) as url:
        program = page.block("python").replace("http://127.0.0.1:8080", url)
        asked = typed(["python", "-c", program], downloaded)
    assert (asked.returncode, asked.stderr) == (0, "")
    alone = typed(["moert", "run", "model.pack", "Who are you?", "--chat", "--max-new-tokens", "64"], downloaded)
    assert asked.stdout == alone.stdout


@contextmanager
def served(line: list[str], folder: Path) -> Iterator[str]:
    """Starts a server on a free port, yields its address, and ends it by SIGTERM."""
    started = [str(PROGRAMS / line[0]), *line[1:], "--port", "0"]
    process = subprocess.Popen(started, cwd=folder, env=variables(), stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[0]
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_a_job_converts_by_a_recipe_goes_on_after_a_kill_and_fails_by_its_exit_code(downloaded: Path) -> None:
    page = Page("recipes.md", "In a CI job")
    command, recipe = page.command("moeconv recipe run"), downloaded / "model.toml"
    recipe.write_text(page.block("toml"))
    killed = measured_then_killed(command, downloaded)
    done = typed(command, downloaded)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["passed"], result["failures"], "error" in result) == (True, [], False)
    assert (downloaded / "build" / "model.pack" / "manifest.json").exists()
    (journal,) = journals(downloaded / "build" / "model.work")
    assert journal.read_text().splitlines()[: len(killed)] == killed

    recipe.write_text(re.sub(r"expert_bytes_at_most = .*", "expert_bytes_at_most = 10", page.block("toml")))
    before = journal.read_text()
    missed = typed(command, downloaded)
    result = json.loads(missed.stdout)
    assert (missed.returncode, result["error"]["code"], result["error"]["kind"]) == (3, 3, "TargetMissed")
    assert result["failures"] == [result["error"]["message"]]
    assert journal.read_text() == before, "it measured again"

    recipe.write_text(page.block("toml").replace("text.txt", "no.txt"))
    refused = typed(command, downloaded)
    error = json.loads(refused.stdout)["error"]
    assert (refused.returncode, error["code"], error["kind"]) == (2, 2, "CalibrationError")
    assert refused.stderr.splitlines()[-1] == f"moeconv: {error['message']}"
    assert f"### {error['kind']}\n" in (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")


def measured_then_killed(command: list[str], folder: Path) -> list[str]:
    """Kills a conversion when it has measured something. Returns the whole lines of its journal."""
    started = [str(PROGRAMS / command[0]), *command[1:]]
    process = subprocess.Popen(
        started, cwd=folder, env=variables(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    lines: list[str] = []
    while len(lines) < 5:
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.01)
        lines = [line for file in journals(folder / "build" / "model.work") for line in file.read_text().split("\n")]
    process.kill()
    process.wait()
    (file,) = journals(folder / "build" / "model.work")
    return file.read_text().split("\n")[:-1]


@pytest.fixture
def board(tmp_path: Path) -> tuple[Path, str]:
    """A folder with a pack that was made elsewhere, and one of packages that can't be imported."""
    write_chat_pack(tmp_path / "elsewhere.pack", ENDLESS)
    folder, lacking = tmp_path / "board", tmp_path / "lacking"
    shutil.copytree(tmp_path / "elsewhere.pack", folder / "model.pack")
    shutil.rmtree(tmp_path / "elsewhere.pack")
    lacking.mkdir()
    for name in ("torch", "transformers", "moeconv", "datasets"):
        (lacking / f"{name}.py").write_text(f"raise ModuleNotFoundError('no {name} on this board', name='{name}')\n")
    return folder, str(lacking)


def test_a_board_runs_a_pack_in_the_memory_that_a_refusal_names(board: tuple[Path, str]) -> None:
    folder, lacking = board
    page = Page("small-machines.md")

    def on_board(line: list[str], memory_bytes: int = 10**9) -> Done:
        if missing() is not None:
            return typed(line, folder, first=lacking)
        with Group(memory_bytes=memory_bytes) as group:
            done = typed(line, folder, first=lacking, enter=lambda: group.add(0))
            assert group.oom_kills == 0
            return done

    told = on_board(page.command("moert info"))
    usual = re.search(r"^smallest memory  (\d+) bytes", told.stdout, re.MULTILINE)
    assert usual is not None, told
    first, second = re.findall(r"^    (moert run .*)$", (ROOT / "docs" / "small-machines.md").read_text(), re.MULTILINE)
    ran = on_board(shlex.split(first))
    assert (ran.returncode, ran.stderr) == (0, "")
    refused = on_board(shlex.split(second))
    named = re.search(r"too small: a usual request .* needs --memory (\d+) ", refused.stderr)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert named is not None, refused.stderr
    assert abs(int(named[1]) - int(usual[1])) <= 4_000_000
    exact = [*shlex.split(first)[:-1], named[1]]
    again = on_board(exact, int(named[1]))
    assert (again.returncode, again.stdout) == (0, ran.stdout), again.stderr
