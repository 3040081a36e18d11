"""A conversion that is killed or interrupted goes on where it was, and ends with the same pack."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from converting import Started, command, contents, journals, run, running_text
from tiny import tiny_olmoe

from moeconv.sweep.sensitivity import PROBES_A_TASK
from moert.pack.learnt import ORDER

OPTIONS = ("--loss", "5%")
ATTEMPTS = 5


class Undisturbed:
    """A conversion that nobody disturbed: its words but for where it writes, its pack, and how far it came."""

    def __init__(self, root: Path, options: tuple[str, ...] = OPTIONS, **model: Any) -> None:
        self.model, self.text = tiny_olmoe(root / "olmoe", **model), running_text(root / "text.jsonl")
        self.options = options
        done = run(self.words(root))
        assert done.returncode == 0, done.stderr
        self.steps = progress(root)
        self.pack = contents(root / "m.pack")
        self.journal = journals(root / "work")[0].read_text().splitlines()

    def words(self, root: Path, *more: str) -> list[str]:
        return command(self.model, self.text, root / "m.pack", root / "work", *self.options, *more)


def progress(root: Path) -> int:
    """Measurements in the journal and files of the pack, whole or not, so far: how far a conversion has come."""
    lines = sum(path.read_bytes().count(b"\n") for path in journals(root / "work"))
    folders = (files for pack in root.glob("*m.pack*") for _, _, files in os.walk(pack))  # which may go meanwhile
    return lines + sum(map(len, folders))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return Undisturbed(tmp_path_factory.mktemp("undisturbed"))


def moments(count: int, seed: int) -> list[float]:
    """Shares of a run, one drawn from each of `count` equal parts of it."""
    rng = random.Random(seed)
    return [(place + rng.random()) / count for place in range(count)]


def kill_and_resume(undisturbed: Undisturbed, root: Path, moment: float) -> bool:
    """False where the run was over before the moment came."""
    process = Started(undisturbed.words(root))
    while progress(root) < moment * undisturbed.steps and process.poll() is None:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    killed = process.wait() == -signal.SIGKILL
    before = [line for path in journals(root / "work") for line in path.read_text().split("\n")[:-1]]
    if killed:
        done = run(undisturbed.words(root))
        assert done.returncode == 0, done.stderr
    assert contents(root / "m.pack") == undisturbed.pack, f"killed at {moment:.3f}"
    after = journals(root / "work")[0].read_text().splitlines()
    assert after[: len(before)] == before
    names = [json.loads(line)["id"] for line in after]
    assert sorted(set(names)) == sorted(json.loads(line)["id"] for line in undisturbed.journal)
    twice = len(names) - len(set(names))  # of what is measured together, a kill may keep a part: all is done again
    assert twice < PROBES_A_TASK, "something was measured twice"
    assert not list(root.glob("*partial*"))
    return killed


@pytest.mark.parametrize("moment", moments(3, seed=1), ids="{:.2f}".format)
def test_a_killed_conversion_resumes_to_the_same_bytes(undisturbed: Undisturbed, tmp_path: Path, moment: float) -> None:
    kill_and_resume(undisturbed, tmp_path, moment)


@pytest.mark.slow
def test_killed_at_ten_moments_it_resumes_to_the_same_bytes(undisturbed: Undisturbed, tmp_path: Path) -> None:
    killed = 0
    for place, moment in enumerate(moments(10, seed=2)):
        root = tmp_path / str(place)
        root.mkdir()
        killed += kill_and_resume(undisturbed, root, moment)
        shutil.rmtree(root)
    assert killed >= 7, "most of the runs were over before they were killed"


@pytest.mark.slow
def test_killed_it_resumes_to_the_same_trellis_codes(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = Undisturbed(tmp_path / "whole", (*OPTIONS, "--quantizer", "trellis", "--bits", "1.5,2,4"))
    for place, moment in enumerate(moments(3, seed=4)):
        (tmp_path / str(place)).mkdir()
        kill_and_resume(whole, tmp_path / str(place), moment)


@pytest.mark.slow
def test_killed_it_resumes_to_the_same_order_of_neurons(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = Undisturbed(tmp_path / "whole", (*OPTIONS, "--layout", "columns"), hidden_act="relu")
    assert ORDER in whole.pack
    for place, moment in enumerate([0.02, *moments(3, seed=3)]):
        (tmp_path / str(place)).mkdir()
        kill_and_resume(whole, tmp_path / str(place), moment)


def interrupted(words: Callable[[Path], list[str]], seen: Callable[[Path], bool], folder: Path) -> Path:
    """Returns the folder of the first run that Ctrl-C reached: where others take the processor, one may end before."""
    for attempt in range(ATTEMPTS):
        root = folder / str(attempt)
        root.mkdir()
        process = Started(words(root))
        while not seen(root) and process.poll() is None:
            time.sleep(0.001)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=600)
        if process.returncode != 0:
            break
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert [line for line in err.splitlines() if line.startswith("moeconv: ")] == [
        "moeconv: interrupted; what was measured is kept, run the same command to go on"
    ]
    return root


def lines_in(work: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in journals(work))


@pytest.mark.parametrize("share", [0.6, 0.9], ids=["early", "late"])
def test_ctrl_c_between_measurements(undisturbed: Undisturbed, tmp_path: Path, share: float) -> None:
    """The journal of a run begins with the sweep's measurements and ends with those of the search."""
    wanted = int(share * len(undisturbed.journal))
    root = interrupted(undisturbed.words, lambda root: lines_in(root / "work") >= wanted, tmp_path)
    assert not (root / "m.pack").exists()
    assert wanted <= lines_in(root / "work") <= len(undisturbed.journal)
    done = run(undisturbed.words(root))
    assert done.returncode == 0, done.stderr
    assert contents(root / "m.pack") == undisturbed.pack


def test_ctrl_c_while_the_pack_is_written(tmp_path: Path) -> None:
    model = tiny_olmoe(tmp_path / "olmoe", num_experts=64, num_hidden_layers=4)

    def words(root: Path) -> list[str]:
        return command(model, None, root / "m.pack", root / "work", "--bits", "16")

    (tmp_path / "whole").mkdir()
    assert run(words(tmp_path / "whole")).returncode == 0
    root = interrupted(words, lambda root: len(list(root.glob("*.partial/experts/*/*"))) > 3, tmp_path)
    assert not (root / "m.pack").exists()
    assert run(words(root)).returncode == 0
    assert contents(root / "m.pack") == contents(tmp_path / "whole" / "m.pack")
