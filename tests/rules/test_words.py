"""Docstrings name things: the word "what" stands for a noun that was left out. Its count may only fall."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MOST = {"moert": 7, "moeconv": 21, "recipes": 296, "tests": 413, "calib_data": 2}
"""In docstrings below each folder. Lower a number when you have lowered the count."""


def docstrings(tree: ast.Module) -> Iterator[str]:
    """Yields the docstrings of a module, its classes and functions, and the texts below its attributes."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ast.get_docstring(node) or ""
            for above, below in zip(node.body, node.body[1:], strict=False):
                if isinstance(above, (ast.Assign, ast.AnnAssign)) and isinstance(below, ast.Expr):
                    yield below.value.value if isinstance(below.value, ast.Constant) else ""


def count(text: str) -> int:
    """Returns how often the word stands in the docstrings of a file's text."""
    found = re.compile(r"\bwhat\b", re.IGNORECASE)
    return sum(len(found.findall(each)) for each in docstrings(ast.parse(text))) if found.search(text) else 0


def test_docstrings_name_things() -> None:
    found = {
        name: sum(count(path.read_text(encoding="utf-8")) for path in sorted((ROOT / name).rglob("*.py")))
        for name in MOST
    }
    assert {name: number for name, number in found.items() if number > MOST[name]} == {}


def test_quantizer_has_one_spelling() -> None:
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=True).stdout
    history = {"CHANGELOG.md", "recipes/LOG.md"}
    texts = {name: (ROOT / name).read_bytes() for name in listed.splitlines() if (ROOT / name).is_file()}
    assert [name for name in texts if re.search(rb"uanti[s]", texts[name]) and name not in history] == []


def test_the_count_sees_every_kind_of_docstring() -> None:
    text = '"""What."""\nA = 1\n"""what it is"""\nclass B:\n    """whatever"""\n    C = 1\n    """what C is"""\n'
    assert count(text + '    def d(self):\n        """Does what."""\n') == 4
    assert count("x = 'what'  # what\n") == 0
