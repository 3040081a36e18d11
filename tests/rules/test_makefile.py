"""The Makefile lists its targets, and every target is declared and described."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = {"setup", "demo", "test", "test-slow", "lint", "data", "recipes", "report", "readme", "clean"}


def test_make_alone_lists_every_target() -> None:
    listed = subprocess.run(["make", "-s", "-C", str(ROOT)], capture_output=True, text=True, check=True).stdout
    shown = set(re.findall(r"^  make ([a-z-]+) +\S", listed, re.MULTILINE))
    declared = re.search(r"^\.PHONY: (.*)$", TEXT, re.MULTILINE)
    assert declared
    assert shown == set(declared[1].split())
    assert shown >= TARGETS


@pytest.mark.parametrize(("pytest_status", "ok", "says"), [(5, True, True), (0, True, False), (1, False, False)])
def test_slow_tests_may_be_none(tmp_path: Path, pytest_status: int, ok: bool, says: bool) -> None:
    """pytest ends with 5 where it selected no test."""
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\nexit {pytest_status}\n")
    program.chmod(0o755)
    command = ["make", "-s", "-C", str(ROOT), "--old-file=setup", "test-slow", f"PY={program}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == ok
    assert ("no test is marked slow" in done.stdout) == says


def test_the_report_builds_what_it_reads_and_covers_both_models() -> None:
    command = ["make", "-s", "-n", "-C", str(ROOT), "--old-file=setup", "report", "PY=python"]
    steps = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    for name in ("g2p", "wiki"):
        data = steps.index(f"python calib_data/{name}.py --splits train calibration heldout")
        for module in ("baselines", "routing"):
            assert steps.index(f"python -m recipes.train.{module} {name}") > data


def test_torch_is_pinned_everywhere_alike() -> None:
    pins = set(re.findall(r"torch==[\d.]+", TEXT + (ROOT / ".ci/constraints.txt").read_text(encoding="utf-8")))
    assert pins == {"torch==2.13.0"}


def test_every_constraint_is_one_exact_version() -> None:
    seen: set[tuple[str, str]] = set()
    for line in (ROOT / ".ci/constraints.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        match = re.fullmatch(r'([A-Za-z0-9_.-]+)==[0-9][0-9a-z.]*(; python_version (?:<|>=) "3\.11")?', line)
        assert match, line
        place = (match[1].lower(), match[2] or "")
        assert place not in seen, line
        seen.add(place)
    for name, marker in seen:
        if not marker:
            assert (name, '; python_version < "3.11"') not in seen, name
