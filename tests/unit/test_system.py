"""moert info --system, on machines that are folders."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from moert.command import cli, description
from moert.command.description import system_facts, system_lines
from moert.experts.drive import drive_key
from moert.kernels import library
from moert.kernels.speed import MOST_BYTES
from moert.machine import usable_cores


def machine(root: Path, **files: str) -> Path:
    """Writes files whose path is given with __ for /."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3}, raising=False)


@pytest.mark.parametrize(
    ("where", "quota", "expected"),
    [("outer/inner", "150000 100000", 2), ("outer", "300000 100000", 3), ("outer/inner", "max 100000", 4),
     ("outer", "5000 100000", 1), ("elsewhere", "100000 100000", 4)],
)  # fmt: skip
def test_a_quota_is_found_in_any_group_above(
    tmp_path: Path, four_cores: None, where: str, quota: str, expected: int
) -> None:
    machine(tmp_path, proc__self__cgroup="0::/outer/inner\n")
    folder = tmp_path / "sys/fs/cgroup" / where
    folder.mkdir(parents=True)
    (folder / "cpu.max").write_text(quota + "\n")
    assert usable_cores(tmp_path) == expected


@pytest.mark.parametrize(("quota", "expected"), [("200000", 2), ("-1", 4)])
def test_a_quota_of_the_older_kind(tmp_path: Path, four_cores: None, quota: str, expected: int) -> None:
    """The group's path is the host's, not there within the container."""
    root = machine(tmp_path, proc__self__cgroup="4:memory:/job\n3:cpu,cpuacct:/job\n")
    folder = root / "sys/fs/cgroup/cpu"
    folder.mkdir(parents=True)
    (folder / "cpu.cfs_quota_us").write_text(quota)
    (folder / "cpu.cfs_period_us").write_text("100000")
    assert usable_cores(root) == expected


def test_the_facts_of_a_machine(tmp_path: Path, four_cores: None) -> None:
    root = machine(
        tmp_path,
        proc__cpuinfo="processor\t: 0\nmodel name\t: Fast One 9000\n",
        proc__meminfo="MemTotal:       2000 kB\nMemFree: 7 kB\nMemAvailable:   1000 kB\n",
        proc__self__cgroup="0::/\n",
        sys__kernel__mm__transparent_hugepage__enabled="always [madvise] never\n",
    )
    (root / "sys/fs/cgroup").mkdir(parents=True)
    (root / "sys/fs/cgroup/memory.max").write_text("1024000\n")
    facts = system_facts(root)
    assert facts["processor"] == "Fast One 9000"
    assert facts["memory"] == {
        "total_bytes": 2048000, "available_bytes": 1024000, "limit_bytes": 1024000, "free_bytes": 1024000,
    }  # fmt: skip
    assert facts["transparent_huge_pages"] == "madvise"
    assert facts["threads"] == facts["cores"]["usable"] == 4
    assert "4 usable: 4 by affinity, no quota" in "\n".join(system_lines(facts))


def test_a_machine_that_tells_nothing(tmp_path: Path) -> None:
    facts = system_facts(tmp_path)
    assert facts["transparent_huge_pages"] is None
    assert facts["cores"]["quota"] is None
    assert "unknown (transparent)" in "\n".join(system_lines(facts))


def test_missing_kernels_are_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "PATH", tmp_path / "_native.so")
    facts = system_facts()
    assert facts["native_kernels"]["missing"] == "_native.so was not built"
    assert facts["instruction_sets"] == []
    assert "kernels          no native kernels: _native.so was not built" in "\n".join(system_lines(facts))
    assert "install a C compiler, then moert again" in "\n".join(system_lines(facts))


def test_one_instruction_set_is_chosen() -> None:
    if library.load() is None:
        pytest.skip("no native kernels")
    chosen = [each for each in system_facts()["instruction_sets"] if each["chosen"]]
    assert len(chosen) == 1
    assert chosen[0]["runs"]
    assert f"{chosen[0]['name']:<14} chosen" in "\n".join(system_lines(system_facts()))


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._exit_code(["info", "--system", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == set(system_facts())
    assert cli._exit_code(["info", "--system"]) == 0
    assert capsys.readouterr().out.startswith("processor  ")


@pytest.mark.parametrize("arguments", [["info"], ["info", "some.pack", "--system"]])
def test_a_pack_or_the_system(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._exit_code(arguments) == 2
    assert "give PACK or --system" in capsys.readouterr().err


@pytest.mark.parametrize("most_bytes", [8 << 20, pytest.param(MOST_BYTES, marks=pytest.mark.slow)])
def test_how_fast_the_kernels_are_is_measured(most_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(description, "MOST_BYTES", most_bytes)
    facts = system_facts()
    speeds = facts["kernel_bytes_per_s"]
    if library.load() is None:
        assert speeds is None
        return
    assert set(speeds) == {"2", "3", "4", "8", "16"}
    assert set(facts["trellis_bytes_per_s"]) == {"1", "1.5", "2", "2.5", "3", "4"}
    assert all(speed > 0 for speed in (*speeds.values(), *facts["trellis_bytes_per_s"].values()))
    assert " GB/s at 4 bits" in "\n".join(system_lines(facts))


def test_without_kernels_or_a_known_drive_no_speed_is_made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "PATH", tmp_path / "_native.so")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    facts = system_facts()
    assert (facts["kernel_bytes_per_s"], facts["drive"]) == (None, None)
    assert "weights          not measured" in "\n".join(system_lines(facts))


def test_a_drive_that_was_read_from_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"settings": "direct,4", "speeds": {"direct,1": 1e9, "direct,4": 3e9}, "piece_bytes": 2_000_000}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "moert").mkdir()
    key = drive_key(tmp_path)
    (tmp_path / "moert/drives.json").write_text(json.dumps({"version": 1, "drives": {key: known}}))
    monkeypatch.chdir(tmp_path)
    facts = system_facts()
    assert facts["drive"] == {
        "io": "direct,4", "bytes_per_s": 3e9, "alone_bytes_per_s": 1e9, "piece_bytes": 2_000_000,
    }  # fmt: skip
    line = "3,000 MB/s here (direct,4), 1,000 MB/s where one thread reads, in pieces of 2.00 MB"
    assert f"drive            {line}" in system_lines(facts)
