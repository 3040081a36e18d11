"""One noun per file, files of one subject, and a first line that says what is in them."""

from __future__ import annotations

import ast
from pathlib import Path

from longest import LONGEST

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES = 800
SOURCES = sorted(path for name in ("moert", "moeconv") for path in (ROOT / name).rglob("*.py"))
ALL = SOURCES + sorted(path for name in ("recipes", "calib_data") for path in (ROOT / name).rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_files_are_short() -> None:
    assert [name_of(path) for path in SOURCES if len(path.read_text(encoding="utf-8").splitlines()) >= MAX_LINES] == []


def test_every_module_says_what_it_is() -> None:
    """In a first line of more than ten letters."""
    for path in ALL:
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        assert len((docstring or "").partition("\n")[0]) > 10, name_of(path)


def test_no_drawer_for_odds_and_ends() -> None:
    drawers = {"utils", "util", "helpers", "helper", "common", "misc"}
    assert [name_of(path) for path in ALL if drawers & {path.stem, path.parent.name}] == []


def test_no_empty_rooms() -> None:
    """A package has modules or packages beside its __init__, or its __init__ has code."""
    for path in SOURCES:
        if path.name == "__init__.py":
            others = [other for other in path.parent.rglob("*.py") if other != path]
            assert others or len(ast.parse(path.read_text(encoding="utf-8")).body) > 1, name_of(path)


def test_the_longest_tests_are_there() -> None:
    assert {f"test_{name}.py" for name in LONGEST} <= {path.name for path in (ROOT / "tests").rglob("test_*.py")}


def test_no_path_of_a_machine_and_no_registry() -> None:
    """Nothing in the repository depends on where it lies or on which registry serves it."""
    names = ["/wo" + "rk/", "/ro" + "ot/", "/ho" + "me/", "pypi" + ".org", "pythonhosted" + ".org"]
    checked = [
        *ALL,
        *ROOT.glob("*.toml"),
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        ROOT / "Makefile",
        *(ROOT / ".ci").iterdir(),
    ]
    checked += sorted((ROOT / "recipes").rglob("*.toml")) + sorted((ROOT / "calib_data").rglob("*.toml"))
    found = [
        (name_of(path), name) for path in checked for name in names if name in path.read_text(encoding="utf-8").lower()
    ]
    assert found == []


def test_no_local_name_hides_a_function_that_is_called() -> None:
    """`rows = rows()` is an error only when it runs, and types of programs are not checked."""
    found = []
    for path in ALL:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            nodes = [*ast.walk(function)]
            inner = {
                id(each) for node in nodes if isinstance(node, ast.comprehension) for each in ast.walk(node.target)
            }
            inner |= {
                id(each)
                for node in nodes
                if isinstance(node, (ast.FunctionDef, ast.Lambda)) and node is not function
                for each in ast.walk(node)
            }
            names = [node for node in nodes if isinstance(node, ast.Name) and id(node) not in inner]
            bound = {node.id for node in names if isinstance(node.ctx, ast.Store)} & functions
            called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
            found += [f"{name_of(path)}: {function.name}: {name}" for name in bound & called]
    assert found == []
