"""In a clean clone every target of the Makefile makes what its programs read, before they run."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TARGETS = re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
DATA = {path.stem for path in (ROOT / "calib_data").glob("*.toml")}
MADE_BY = {"recipes/demo.py": {"build/data/g2p", "build/data/wiki", "build/demo"}}
OWN = ("build/bench", "build/quant", "build/report", "build/smoke", "build/talk", "build/train", "build/wheels")
"""What programs make themselves."""


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All that make looks at, and nothing that it has made."""
    out = tmp_path_factory.mktemp("clone")
    kept = shutil.ignore_patterns("build", ".venv", ".git", "__pycache__", "*.so", ".*_cache", "models", ".hypothesis")
    shutil.copytree(ROOT, out, dirs_exist_ok=True, ignore=kept)
    return out


def steps(clone: Path, target: str) -> list[str]:
    """The commands of a target, in order."""
    made = subprocess.run(["make", "-n", "-C", str(clone), target], capture_output=True, text=True, check=True)
    return made.stdout.replace("\\\n", " ").splitlines()


def made_by(command: str) -> set[str]:
    """What a command leaves under build/."""
    made = {f"build/data/{name}" for name in DATA if f"calib_data/{name}.py" in command}
    made |= {path for name, paths in MADE_BY.items() if program(command) == ROOT / name for path in paths}
    made |= {match.rstrip("/") for match in re.findall(r"touch (build/\S+)", command)}
    return made


def program(command: str) -> Path | None:
    """The file of this repository that a command runs in Python."""
    module = re.search(r"python3? -m ((?:tests|recipes)\.[\w.]+)", command)
    script = re.search(r"python3? ((?:calib_data|recipes|tests|moert)/\S+\.py)", command)
    name = f"{module[1].replace('.', '/')}.py" if module else script[1] if script else None
    return None if name is None else ROOT / name


def imported(path: Path) -> Iterator[Path]:
    """The benches' own modules that a file imports."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            found = ROOT / f"{name.replace('.', '/')}.py"
            if name.startswith("recipes.bench.") and found.is_file():
                yield found


def closure(path: Path) -> set[Path]:
    seen, left = set[Path](), [path]
    while left:
        if (found := left.pop()) not in seen:
            seen.add(found)
            left += imported(found)
    return seen


def reads_data(path: Path) -> bool:
    """Whether a module reads calibration sets, by path or through the converter."""
    return re.search(r"build/data|moeconv\.calibration", path.read_text(encoding="utf-8")) is not None


def literals(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def needs(command: str) -> set[str]:
    """What a command reads under build/: paths that its program and the modules that this imports name, the data of the
    models that the command names or, if it names none, that they name, and the data of the recipes that are run."""
    found = set[str]()
    for recipe in re.findall(r"recipes/\w+\.toml", command):
        calib = re.search(r'^calib *= *"(\w+)"', (ROOT / recipe).read_text(encoding="utf-8"), re.MULTILINE)
        found |= {f"build/data/{calib[1]}"} if calib and calib[1] in DATA else set()
    path = program(command)
    if path is None or path.parent.name == "calib_data" or path.name == "demo.py":
        return found  # these make what they read
    modules, named = closure(path), DATA.intersection(command.split())
    found |= {f"build/data/{name}" for name in named}
    data = not named and any(map(reads_data, modules))
    for text in (text for module in modules for text in literals(module)):
        if data and text in DATA:
            found.add(f"build/data/{text}")
        if re.fullmatch(r"build/[\w./-]*[\w-]", text) and not text.startswith(OWN):
            found.add(text)
    return found


def covers(made: set[str], need: str) -> bool:
    """A file that is touched last, FOLDER/.built, stands for its folder."""
    folders = {path.removesuffix("/.built") for path in made}
    return any(need == folder or need.startswith(f"{folder}/") for folder in folders)


def test_what_a_target_reads_is_made_before(clone: Path) -> None:
    for target in TARGETS:
        made = set[str]()
        for command in steps(clone, target):
            missing = {need for need in needs(command) if not covers(made, need)}
            assert not missing, f"{target}: {command} reads {missing}, which nothing has made"
            made |= made_by(command)


def test_packages_and_kernels_are_there_before_anything_runs(clone: Path) -> None:
    """What runs in .venv comes after its making; what runs a model comes after the kernels are compiled."""
    for target in TARGETS:
        commands = steps(clone, target)
        run = [number for number, command in enumerate(commands) if command.startswith(".venv/bin/")]
        if run:
            venv = next(number for number, command in enumerate(commands) if "-m venv .venv" in command)
            assert venv < run[0], target
        of_models = [number for number in run if re.search(r"recipes\.bench\.|recipes.demo", commands[number])]
        if of_models:
            kernels = [number for number in run if commands[number].endswith("moert/kernels/build.py")]
            assert kernels, target
            assert kernels[0] < of_models[0], target


def test_the_benches_are_read_as_deeply_as_needed() -> None:
    assert needs(".venv/bin/python -m recipes.bench.quant") >= {"build/data/marks", "build/data/g2p", "build/peers"}
    assert needs(".venv/bin/python -m recipes.bench.speed") >= {"build/demo", "build/peers/llama"}
    assert needs(".venv/bin/moeconv recipe run recipes/g2p.toml") == {"build/data/g2p"}
    assert needs(".venv/bin/python calib_data/marks.py") == set()
    assert {"bench-quant", "bench-peers", "recipes", "report"} <= {*TARGETS}


def test_a_target_that_lacks_its_data_is_found(clone: Path) -> None:
    commands = [command for command in steps(clone, "bench-quant") if "calib_data/marks.py" not in command]
    made = set[str]().union(*(made_by(command) for command in commands))
    assert not covers(made, "build/data/marks")
    assert covers(made, "build/data/wiki")
