"""The fuzzer: its inputs reach what they are meant for, and what a reader does wrong is found."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load, save

from moert.machine import peak_bytes
from tests.fuzz.described import described, file_of
from tests.fuzz.mutate import mutated
from tests.fuzz.registry import TARGETS
from tests.fuzz.registry import load as load_target
from tests.fuzz.run import FOLDER, MOST_KEPT_BYTES, trim
from tests.fuzz.target import Finding, Judge, Target, _peak_mb

ROOT = Path(__file__).resolve().parents[2]
NO_TARGET = {"packs"}  # what others are made from


class Refused(Exception):
    """What the readers here may raise."""


def judge(read: object, seconds: float = 5.0, megabytes: int = 400) -> Judge:
    return Judge(Target(read, (Refused,), lambda: [b"x"], seconds=seconds, megabytes=megabytes))  # type: ignore[arg-type]


def test_every_target_is_registered() -> None:
    found = {path.stem for path in (ROOT / "tests" / "fuzz" / "targets").glob("*.py")}
    assert found - NO_TARGET == {*TARGETS}


def test_the_inputs_that_fuzzing_begins_with_are_few_and_equal_each_time() -> None:
    total = 0
    for name in TARGETS:
        target = load_target(name)
        seeds = target.seeds()
        assert seeds == target.seeds(), name
        assert max(map(len, seeds)) <= target.longest, name
        total += sum(map(len, seeds))
    assert total < MOST_KEPT_BYTES


@pytest.mark.parametrize("name", TARGETS)
def test_some_input_is_accepted_and_none_is_a_finding(name: str) -> None:
    target = load_target(name)
    judged = Judge(target)
    for seed in target.seeds():
        judged(seed)
    assert judged.accepted


def test_what_may_be_raised_is_none() -> None:
    def read(body: bytes) -> None:
        if body == b"bad":
            raise Refused("this is why: do that")

    judged = judge(read)
    for body in (b"good", b"bad"):
        judged(body)
    assert (judged.tried, judged.accepted) == (2, 1)


def raising(error: BaseException) -> object:
    def read(body: bytes) -> None:
        raise error

    return read


@pytest.mark.parametrize(
    "error",
    [ValueError("x"), Refused("two\nlines"), Refused(""), Refused("x" * 30_000), SystemExit(1), BaseException("x")],
)
def test_other_errors_and_errors_that_are_not_one_line_are_findings(error: BaseException) -> None:
    with pytest.raises(Finding):
        judge(raising(error))(b"")


def test_time_and_memory_are_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(body: bytes) -> None:
        ends = time.process_time() + 0.05
        while time.process_time() < ends:
            pass

    with pytest.raises(Finding, match=r"takes 0\.\d s"):
        judge(slow, seconds=0.01)(b"")
    assert _peak_mb() > 0.9 * peak_bytes() / (1 << 20) > 1
    peaks = iter([100.0, 500.0, 500.0, 901.0])
    monkeypatch.setattr("tests.fuzz.target._peak_mb", lambda: next(peaks))
    sound = judge(lambda body: None, megabytes=400)
    sound(b"")
    with pytest.raises(Finding, match="takes 401 MB"):
        sound(b"")


@given(
    st.binary(max_size=60) | st.sampled_from([b'{"a":[1,2,{"b":"c"}],"d":null}\n\x00\x01', b"[[1]]"]), st.integers(0)
)
def test_changes_are_equal_for_equal_numbers_and_bounded(body: bytes, number: int) -> None:
    changed = mutated(body, Random(number), [b'{"x":[1]}'], 80)
    assert changed == mutated(body, Random(number), [b'{"x":[1]}'], 80)
    assert len(changed) <= 80


def test_changes_of_json_are_mostly_json() -> None:
    body = json.dumps({"a": [1, 2, {"b": "c"}], "d": None}).encode()
    changed = {mutated(body, Random(number), [body]) for number in range(300)}
    assert len(changed) > 200
    sound = 0
    for each in changed:
        try:
            json.loads(each)
            sound += 1
        except ValueError:
            continue
    assert sound > len(changed) / 3


def test_descriptions_stand_for_files() -> None:
    tensors = {"b": np.arange(6, dtype=np.uint16).reshape(2, 3), "a": np.ones(2, np.float32)}
    body = described(save(tensors, {"version": "1"}))
    found = load(file_of(body))
    assert all(np.array_equal(found[name], tensors[name]) for name in tensors)
    turned = load(file_of(body.replace(b"[2,3]", b"[3,9]")))
    assert turned["b"].shape == (3, 9)
    assert np.array_equal(turned["a"].shape, (2,))
    assert file_of(b"raw") == b"raw"


PROGRAM = """
from pathlib import Path
from tests.fuzz.job import Job
from tests.fuzz.plain import fuzz
from tests.fuzz.target import Target
def read(body):
    if body.startswith(b"y"):
        {does}
print(fuzz(Job("planted", 500, 60, 1, Path({folder!r})), Target(read, (), lambda: [b"xy", b"y"[:0]], seconds=0.2)))
"""


@pytest.mark.parametrize(
    ("does", "status", "named"), [("pass", 0, None), ("1 / 0", 1, "crash-"), ("while True: pass", 1, "last")]
)
def test_without_coverage_what_is_planted_is_found(tmp_path: Path, does: str, status: int, named: str | None) -> None:
    program = PROGRAM.format(does=does, folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    found = list((tmp_path / "findings").iterdir())
    assert [path.name.startswith(named) for path in found] == [True] if named else found == []
    assert all(path.read_bytes().startswith(b"y") for path in found)
    if status == 0:
        assert int(done.stdout) == 500


def test_what_is_kept_stays_small(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        for size in (10, 20, 3000):
            (folder / str(size)).write_bytes(bytes(size))
    trim(folders, 200)
    assert sorted(path.name for folder in folders for path in folder.iterdir()) == ["10", "10", "20", "20"]
    assert FOLDER == ROOT / "build" / "fuzz"
