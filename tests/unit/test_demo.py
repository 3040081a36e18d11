"""The demo's table goes into README.md and leaves everything else there as it was."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

DEMO = Path(__file__).resolve().parents[2] / "recipes" / "demo.py"


@pytest.mark.parametrize("before", ["", "| old |\n"])
def test_only_the_marked_block_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str) -> None:
    spec = importlib.util.spec_from_file_location("demo", DEMO)
    assert spec is not None
    assert spec.loader is not None
    demo = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, "demo", demo)
    spec.loader.exec_module(demo)
    monkeypatch.chdir(tmp_path)
    rest = "text\n<!-- help: moert run -->\nhelp\n<!-- end -->\n"
    Path("README.md").write_text(f"top\n<!-- demo -->\n{before}<!-- end -->\n{rest}")
    demo.write_readme("| new |")
    assert Path("README.md").read_text() == f"top\n<!-- demo -->\n| new |\n<!-- end -->\n{rest}"
