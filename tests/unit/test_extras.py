"""Installed without its extras, every command says in one line what to install."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tiny import tiny_olmoe

from moeconv.command.cli import _exit_code
from moeconv.errors import missing_extra

WITHOUT = """
import sys
for name in sys.argv.pop(1).split(","):
    sys.modules[name] = None
from moeconv.command.cli import main
main(sys.argv[1:])
"""
CONVERT = "transformers,datasets,evaluate,jinja2,rouge_score,huggingface_hub,tomli"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, its pack and a recipe."""
    root = tmp_path_factory.mktemp("extras")
    tiny_olmoe(root / "m")
    assert _exit_code(["quantize", str(root / "m"), "--bits", "16", "--out", str(root / "m.pack"), "--json"]) == 0
    (root / "r.toml").write_text('model = "m"\ncalib = "text.jsonl"\n')
    (root / "text.jsonl").write_text('{"text": "ab"}\n')
    return root


@pytest.mark.parametrize(
    "arguments",
    [
        ["quantize", "m", "--calib", "text.jsonl"],
        ["quantize", "m", "--bits", "16"],
        ["plan", "work"],
        ["profile-paths", "m.pack"],
        ["verify", "m.pack", "--against", "m"],
        ["recipe", "run", "r.toml"],
    ],
    ids=" ".join,
)
def test_without_the_extra_one_line_says_what_to_install(arguments: list[str], folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, CONVERT, *arguments], cwd=folder, capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr == (
        "moeconv: this needs the package transformers, which is not installed: run pip install 'moert[convert]'\n"
    )


def test_a_package_of_no_extra_is_our_own_bug() -> None:
    assert missing_extra(ModuleNotFoundError("gone", name="moeconv.gone")) is None
    assert missing_extra(ModuleNotFoundError("no ray", name="ray.util")) == (
        "this needs the package ray, which is not installed: run pip install 'moert[cluster]'"
    )
