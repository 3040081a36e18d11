"""Systems that lack parts of Linux: the programs still load, and do without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moeconv.measure.workdir import WorkDir
from moeconv.writer import DirectoryLock
from moert import machine
from moert.experts.store import OpenFiles


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
