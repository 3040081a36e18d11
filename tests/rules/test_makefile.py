"""The Makefile lists its targets, and every target is declared and described."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from recipes.train.report import MODELS
from recipes.train.train import PLANS

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = {
    "setup", "demo", "test", "test-slow", "test-anywhere", "lint", "data", "recipes", "report", "readme", "tables",
    "clean",
}  # fmt: skip


def test_make_alone_lists_every_target() -> None:
    listed = subprocess.run(["make", "-s", "-C", str(ROOT)], capture_output=True, text=True, check=True).stdout
    shown = set(re.findall(r"^  make ([a-z-]+) +\S", listed, re.MULTILINE))
    declared = re.search(r"^\.PHONY: (.*)$", TEXT, re.MULTILINE)
    assert declared
    assert shown == set(declared[1].split())
    assert shown >= TARGETS


@pytest.mark.parametrize("status", [0, 1, 5])
def test_slow_tests_fail_where_pytest_does_and_where_there_are_none(tmp_path: Path, status: int) -> None:
    """pytest ends with 5 where it selected no test."""
    program = script(tmp_path / "python", f"exit {status}")
    command = ["make", "-s", "-C", str(ROOT), "--old-file=setup", "test-slow", f"PY={program}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == (status == 0)


def script(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


FAST, SLOW = "3 passed, 2 skipped in 61.20s (0:01:01)", "7 passed, 3 deselected in 100.00s (0:01:40)"


@pytest.mark.parametrize("fails", ["", "test", "test-slow", "bench-smoke", "recipes-ci"])
def test_what_is_merged_has_passed_all_tests_and_says_so_at_its_end(tmp_path: Path, fails: str) -> None:
    """.ci/run with a make that only prints."""
    for name in ("chromium", "aarch64-linux-gnu-gcc", "qemu-aarch64"):
        script(tmp_path / name, "exit 0")
    said = f"test) echo '{FAST}';; test-slow) echo '{SLOW}';; *) echo '9 passed';;"
    script(tmp_path / "make", f"echo '+ {FAST}'\ncase \"$1\" in {said} esac\ntest \"$1\" != '{fails}'")
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run([ROOT / ".ci/run"], capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode == 0) == (fails == ""), done.stderr
    assert sum(line.startswith("Took: tools ") for line in done.stdout.splitlines()) == 1
    if not fails:
        assert done.stdout.splitlines()[-3:] == [f"make test-slow: {SLOW}", "make test:", FAST]


def test_the_report_builds_what_it_reads_and_covers_every_model() -> None:
    command = ["make", "-s", "-n", "-C", str(ROOT), "--old-file=setup", "report", "PY=python"]
    steps = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    for name in MODELS:
        data = steps.index(f"python calib_data/{PLANS[name].data}.py --splits train calibration heldout")
        for module in ("baselines", "routing"):
            assert steps.index(f"python -m recipes.train.{module} {name}") > data
    assert steps[-2:] == ["python -m recipes.train.report", "python -m recipes.demo marks wikids --name references"]


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


def test_every_test_has_a_time_limit(request: pytest.FixtureRequest) -> None:
    """A test that waits for what never comes would hold up all others."""
    assert request.config.pluginmanager.hasplugin("timeout")
    assert 0 < float(request.config.getini("timeout")) <= 600
    assert all(item.get_closest_marker("timeout") for item in request.session.items if item.get_closest_marker("slow"))
