"""Ctrl-C while Python still loads a program: no traceback, whichever module it comes in."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE = """
import os, signal, sys

class CtrlC:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # tests run in the background ignore it
sys.meta_path.insert(0, CtrlC())
sys.argv = [{program!r}, *{arguments!r}]
from {program}.__main__ import main
main()
"""
ASKED = {"moert": ["info", "--system"], "moeconv": ["plan", "no such folder", "--loss", "5%"]}


@pytest.mark.parametrize("program", ASKED)
@pytest.mark.parametrize("module", ["typer", "PROGRAM.command.cli", "PROGRAM.errors", "moert.pack.errors"])
def test_it_ends_quietly(program: str, module: str) -> None:
    code = CODE.format(module=module.replace("PROGRAM", program), program=program, arguments=ASKED[program])
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode in (130, -signal.SIGINT), run.stderr
    assert "Traceback" not in run.stderr


def test_where_the_caller_ignores_it_the_command_does_too() -> None:
    code = CODE.format(module="typer", program="moert", arguments=["--version"]).replace(
        "default_int_handler", "SIG_IGN"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith("moert ")


def test_the_installed_commands_begin_there() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for program in ASKED:
        assert f'{program} = "{program}.__main__:main"' in text
