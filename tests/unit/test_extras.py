"""Installed without its extras, every command says in one line what to install."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from converting import running_text
from tiny import tiny_olmoe

import moeconv
from moeconv.command.cli import _exit_code
from moeconv.errors import missing_extra

CONVERT = (
    "torch", "transformers", "datasets", "evaluate", "huggingface_hub", "nltk", "pandas", "pyarrow", "rouge_score",
    "tomli",
)  # fmt: skip
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, its pack, a recipe, text, and a metric."""
    root = tmp_path_factory.mktemp("extras")
    tiny_olmoe(root / "m")
    assert _exit_code(["quantize", str(root / "m"), "--bits", "16", "--out", str(root / "m.pack"), "--json"]) == 0
    (root / "r.toml").write_text('model = "m"\ncalib = "text.jsonl"\n')
    running_text(root / "text.jsonl")
    (root / "text.parquet").write_bytes(b"PAR1")
    (root / "metric.py").write_text("import evaluate\n")
    return root


@pytest.fixture
def without(folder: Path, tmp_path: Path) -> Command:
    """Runs Python where these packages are as if they were not installed, for processes that it starts too."""

    def run(packages: Sequence[str], *arguments: str) -> subprocess.CompletedProcess[str]:
        for name in packages:
            (tmp_path / name).mkdir()
            error = f"raise ModuleNotFoundError(\"No module named '{name}'\", name='{name}')\n"
            (tmp_path / name / "__init__.py").write_text(error)
        environment = {**os.environ, "PYTHONPATH": str(tmp_path), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=environment)

    return run


@pytest.mark.parametrize(
    "arguments",
    [
        "quantize m --calib text.jsonl", "quantize m --bits 16", "plan work", "profile-paths m.pack",
        "train-hash m.pack", "train-neurons m.pack", "verify m.pack --against m", "recipe run r.toml",
    ],
)  # fmt: skip
def test_without_the_extra_one_line_says_what_to_install(arguments: str, without: Command) -> None:
    done = without(CONVERT, "-m", "moeconv", *arguments.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(
        r"moeconv: this needs the package (torch|transformers), which is not installed: run pip install "
        r"'moert\[convert\]'\n",
        done.stderr,
    )


@pytest.mark.parametrize(
    ("package", "arguments"),
    [
        ("torch", "m --calib text.jsonl"),
        ("pyarrow", "m --calib text.parquet"),
        pytest.param("transformers", "m --calib text.jsonl", marks=pytest.mark.slow),
        pytest.param("huggingface_hub", "some/model --bits 16", marks=pytest.mark.slow),
        pytest.param("evaluate", "m --calib text.jsonl --metric metric.py", marks=pytest.mark.slow),
        pytest.param("datasets", "m --calib hf:some/text", marks=pytest.mark.slow),
    ],
)
def test_one_line_names_the_package_that_is_missing(package: str, arguments: str, without: Command) -> None:
    done = without([package], "-m", "moeconv", "quantize", *arguments.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1] == (
        f"moeconv: this needs the package {package}, which is not installed: run pip install 'moert[convert]'"
    )
    assert "Traceback" not in done.stderr


def test_python_is_told_the_same(without: Command) -> None:
    program = "import moeconv\ntry: moeconv.quantize('m', bits='16')\nexcept moeconv.Error as error: print(error)"
    done = without(["torch"], "-c", program)
    assert done.stdout == (
        "this needs the package torch, which is not installed: run pip install 'moert[convert]'\n"
    ), done.stderr


def test_each_package_that_is_imported_comes_with_the_program_or_an_extra() -> None:
    imported = {
        name.split(".")[0]
        for path in Path(moeconv.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for name in ([each.name for each in node.names] if isinstance(node, ast.Import) else
                     [node.module or ""] if isinstance(node, ast.ImportFrom) else [])
    }  # fmt: skip
    base = {"moeconv", "moert", "numpy", "safetensors", "tokenizers", "tqdm", "typer", "typing_extensions"}
    unnamed = {name for name in imported - base - set(sys.stdlib_module_names)
               if missing_extra(ModuleNotFoundError("gone", name=name)) is None}  # fmt: skip
    assert unnamed == set()


def test_a_package_of_no_extra_is_our_own_bug() -> None:
    assert missing_extra(ModuleNotFoundError("gone", name="moeconv.gone")) is None
    assert missing_extra(ModuleNotFoundError("no ray", name="ray.util")) == (
        "this needs the package ray, which is not installed: run pip install 'moert[cluster]'"
    )
