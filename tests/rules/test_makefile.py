"""The Makefile lists its targets, and every target is declared and described."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = {"setup", "demo", "test", "test-slow", "lint", "data", "recipes", "readme", "clean"}


def test_make_alone_lists_every_target() -> None:
    listed = subprocess.run(["make", "-s", "-C", str(ROOT)], capture_output=True, text=True, check=True).stdout
    shown = set(re.findall(r"^  make ([a-z-]+) +\S", listed, re.MULTILINE))
    declared = re.search(r"^\.PHONY: (.*)$", TEXT, re.MULTILINE)
    assert declared
    assert shown == set(declared[1].split())
    assert shown >= TARGETS


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
