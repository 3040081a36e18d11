"""What the README says about commands and files is true."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from readme_help import README, ROOT, commands, rendered

TEXT = README.read_text(encoding="utf-8")
COMMANDS = [
    "moert run", "moert bench", "moert info", "moeconv quantize", "moeconv plan", "moeconv report",
    "moeconv profile-paths", "moeconv verify", "moeconv recipe run",
]  # fmt: skip


def tree() -> list[Path]:
    """The paths of the annotated tree: one name a line, two spaces of indent for each level, then its description."""
    block = re.search(r"## Where things are\n\n```\n(.*?)```", TEXT, re.DOTALL)
    assert block, "README.md has no annotated tree"
    paths: list[Path] = []
    above: list[str] = []
    for line in block[1].splitlines():
        indent = (len(line) - len(line.lstrip())) // 2
        name = line.split()[0]
        above[indent:] = [name.rstrip("/")]
        paths.append(Path(*above))
    return paths


def test_the_commands_are_there() -> None:
    assert commands(TEXT) == COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_what_the_program_prints(command: str) -> None:
    block = re.search(rf"<!-- help: {command} -->\n```\n(.*?)```\n<!-- end -->", TEXT, re.DOTALL)
    assert block, f"README.md has no help of {command}: run make readme"
    assert block[1] == rendered(command), "run make readme"


def test_every_path_of_the_tree_exists() -> None:
    assert [str(path) for path in tree() if not (ROOT / path).exists()] == []


def test_every_package_folder_is_in_the_tree() -> None:
    packages = {
        path.parent.relative_to(ROOT) for name in ("moert", "moeconv") for path in (ROOT / name).rglob("__init__.py")
    }
    assert sorted(str(path) for path in packages - set(tree())) == []


def test_every_module_at_the_top_of_a_package_is_in_the_tree() -> None:
    modules = {path.relative_to(ROOT) for name in ("moert", "moeconv") for path in (ROOT / name).glob("*.py")}
    named = {path for path in modules if path.name != "__init__.py"}
    assert sorted(str(path) for path in named - set(tree())) == []


def test_every_folder_of_tests_is_in_the_tree() -> None:
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "tests").glob("*/*.py")}
    assert sorted(str(path) for path in folders - set(tree())) == []


def test_every_link_leads_somewhere() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", TEXT)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_make_targets_that_the_readme_names_exist() -> None:
    listed = subprocess.run(["make", "-s", "-C", str(ROOT)], capture_output=True, text=True, check=True).stdout
    named = set(re.findall(r"(?:^    |`)make ([a-z-]+)", TEXT, re.MULTILINE))
    assert {"demo", "test"} <= named
    assert {name for name in named if f"make {name} " not in listed} == set()
