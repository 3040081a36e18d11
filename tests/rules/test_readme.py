"""What README.md and docs/ say about commands, files and Python is true."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest
from architecture_text import ARCHITECTURE, regenerated
from models_text import MODELS
from models_text import text as models_text
from python_text import PYTHON
from python_text import text as python_text
from readme_help import COMMANDS as HELP
from readme_help import ROOT, commands, rendered
from recipes_text import EXAMPLES, LIMITS, RECIPES, recipes_text
from tune_text import TUNE
from tune_text import text as tune_text

import moeconv
import moert
from moeconv.command.recipe import KEYS, Expectations, Recipe
from moeconv.conversion.settings import ENTRIES
from moeconv.source.archs import FAMILIES
from moeconv.tuned import TUNED
from moert.command.settings import SETTINGS
from moert.engine.engine import Engine
from moert.engine.generation import GenerationSettings
from moert.engine.settings import EngineSettings

README = ROOT / "README.md"
TEXTS = {
    path: path.read_text(encoding="utf-8")
    for path in [README, ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
}
COMMANDS = [
    "moert", "moert run", "moert chat", "moert serve", "moert score", "moert bench", "moert info", "moeconv",
    "moeconv check", "moeconv quantize", "moeconv plan", "moeconv report", "moeconv profile-paths",
    "moeconv train-hash", "moeconv train-neurons", "moeconv verify", "moeconv recipe run",
]  # fmt: skip
MOST_LINES = 121
_BESIDE = {"group_size": {"quantizer": '"group"'}, "piece_bytes": {"layout": '"columns"'}}
"""What an example of a key needs beside it."""


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def tree() -> list[Path]:
    """The paths of the annotated tree: one name a line, two spaces of indent for each level, then its description."""
    block = re.search(r"## Where things are\n\n```\n(.*?)```", TEXTS[ARCHITECTURE], re.DOTALL)
    assert block, "docs/architecture.md has no annotated tree"
    paths: list[Path] = []
    above: list[str] = []
    for line in block[1].splitlines():
        indent = (len(line) - len(line.lstrip())) // 2
        name = line.split()[0]
        above[indent:] = [name.rstrip("/")]
        paths.append(Path(*above))
    return paths


def anchors(text: str) -> set[str]:
    """What links to headings are called: lower case, no punctuation, hyphens for spaces."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def help_of(command: str) -> str:
    block = re.search(rf"<!-- help: {command} -->\n```\n(.*?)```\n<!-- end -->", TEXTS[HELP], re.DOTALL)
    assert block, f"docs/commands.md has no help of {command}: run make readme"
    return block[1]


def typed(text: str) -> list[str]:
    """The lines of moert and moeconv that a text shows as to be typed, continued ones as one."""
    lines = re.findall(r"^    (?:\.venv/bin/)?((?:moert|moeconv) .*)$", text.replace("\\\n", " "), re.MULTILINE)
    return [re.sub(r"\s+#.*", "", line) for line in lines]


def test_the_readme_is_short() -> None:
    assert len(TEXTS[README].splitlines()) < MOST_LINES


def test_the_commands_are_there() -> None:
    assert commands(TEXTS[HELP]) == COMMANDS
    assert [name_of(path) for path, text in TEXTS.items() if path != HELP and commands(text)] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_what_the_program_prints(command: str) -> None:
    assert help_of(command) == rendered(command), "run make readme"


def test_every_command_that_a_text_shows_has_its_options() -> None:
    lines = [line for text in TEXTS.values() for line in typed(text)]
    assert len(lines) > 5
    for line in lines:
        command = next(name for name in sorted(COMMANDS, key=len, reverse=True) if line.startswith(f"{name} "))
        assert command not in ("moert", "moeconv"), line
        known = set(re.findall(r"--[a-z-]+", help_of(command)))
        assert set(re.findall(r"(?<!\S)--[a-z-]+", line)) <= known, line


def test_every_setting_that_a_text_tunes_is_there() -> None:
    named = {name for text in TEXTS.values() for name in re.findall(r"--tune ([a-z][a-z-]*)", text)}
    assert len(named) > 5
    assert named <= {each.called for each in (*SETTINGS, *TUNED) if not each.usual} | {"help"}


def test_no_text_has_an_option_that_is_tuned() -> None:
    tuned = {each.called for each in (*SETTINGS, *TUNED) if not each.usual}
    own = {name for command in COMMANDS for name in re.findall(r"--([a-z-]+)", help_of(command))}
    for path, text in TEXTS.items():
        if path != HELP:
            assert set(re.findall(r"(?<![\w-])--([a-z][a-z-]*)", text)) & (tuned - own) == set(), path


def test_the_page_of_settings_is_what_there_is() -> None:
    assert TEXTS[TUNE] == tune_text(), "run make readme"


def test_the_python_of_the_readme_is_what_there_is() -> None:
    block = re.search(r"```python\n(.*?)```", TEXTS[README], re.DOTALL)
    assert block
    takes = {
        "quantize": (inspect.signature(moeconv.quantize), {*ENTRIES}),
        "load": (inspect.signature(moert.load), {field.name for field in fields(EngineSettings)}),
        "generate": (inspect.signature(Engine.generate), {field.name for field in fields(GenerationSettings)}),
        "stream": (inspect.signature(Engine.stream), {field.name for field in fields(GenerationSettings)}),
        "chat": (inspect.signature(Engine.chat), {field.name for field in fields(GenerationSettings)}),
    }
    called = set()
    for call in (node for node in ast.walk(ast.parse(block[1])) if isinstance(node, ast.Call)):
        if isinstance(call.func, ast.Attribute):
            called.add(call.func.attr)
            signature, settings = takes[call.func.attr]
            named = {keyword.arg for keyword in call.keywords}
            assert named <= settings | {*signature.parameters}, ast.unparse(call)
    assert called == {*takes}


def test_every_family_has_a_section() -> None:
    assert {*re.findall(r"^## `([\w-]+)`$", TEXTS[MODELS], re.MULTILINE)} == {*FAMILIES}


def test_what_is_said_of_families_is_what_they_say() -> None:
    assert TEXTS[MODELS] == models_text(), "run make readme"


def test_what_is_said_of_python_is_what_the_docstrings_say() -> None:
    assert TEXTS[PYTHON] == python_text(), "run make readme"


def test_every_key_of_a_recipe_is_explained(tmp_path: Path) -> None:
    assert TEXTS[RECIPES] == recipes_text(), "run make readme"
    named = re.findall(r"^\| `(\w+)` \| .+ \| `.+` \| .+ \|$", TEXTS[RECIPES], re.MULTILINE)
    assert sorted(named) == sorted({*KEYS, *(field.name for field in fields(Expectations))})
    whole = re.search(r"```toml\n(.*?)```", TEXTS[RECIPES], re.DOTALL)
    assert whole
    texts = [whole[1]]
    for key, example in EXAMPLES.items():
        beside = {"model": '"m"', "calib": '"wiki"'} | _BESIDE.get(key, {}) | {key: example}
        texts.append("\n".join(f"{name} = {value}" for name, value in beside.items()))
    texts += [f'model = "m"\ncalib = "wiki"\nexpect = {{{key} = {one}}}' for key, (one, _) in LIMITS.items()]
    for text in texts:
        (tmp_path / "r.toml").write_text(text)
        Recipe.load(tmp_path / "r.toml", tmp_path)


def test_every_path_of_the_tree_exists() -> None:
    assert [str(path) for path in tree() if not (ROOT / path).exists()] == []


def test_the_tree_has_every_file_of_the_packages_as_its_docstring_says() -> None:
    assert TEXTS[ARCHITECTURE] == regenerated(TEXTS[ARCHITECTURE]), "run make readme"


def test_every_folder_of_tests_is_in_the_tree() -> None:
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "tests").glob("*/*.py")}
    assert sorted(str(path) for path in folders - set(tree())) == []


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_every_link_leads_somewhere(path: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", TEXTS[path])
    for place, heading in links:
        target = (path.parent / place).resolve() if place else path
        assert target.exists(), f"{place} is not there"
        if heading:
            assert heading in anchors(target.read_text(encoding="utf-8")), f"{place} has no heading {heading}"


def test_the_readme_leads_to_every_text() -> None:
    links = {(README.parent / place).resolve() for place in re.findall(r"\]\((?!https?:)([^)#]+)", TEXTS[README])}
    assert {path for path in TEXTS if path != README} <= links


def test_make_targets_that_the_texts_name_exist() -> None:
    listed = subprocess.run(["make", "-s", "-C", str(ROOT)], capture_output=True, text=True, check=True).stdout
    named = {path: set(re.findall(r"(?:^    |`)make ([a-z-]+)", text, re.MULTILINE)) for path, text in TEXTS.items()}
    assert {"demo", "test"} <= named[README]
    assert {name for names in named.values() for name in names if f"make {name} " not in listed} == set()


def test_a_dead_anchor_and_an_unknown_option_are_seen() -> None:
    assert anchors("# Limits, and `this`\n```\n# no heading\n```\n") == {"limits-and-this"}
    assert typed("    moert run x \\\n        --memory 1GB  # so\nmoert run y\n") == [
        "moert run x          --memory 1GB"
    ]
