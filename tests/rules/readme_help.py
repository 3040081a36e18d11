"""The generated parts of docs/commands.md: `--help` of each command, without colour, 100 columns wide.

`python tests/rules/readme_help.py --write` brings it up to date; without --write it only says whether it differs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from pages import brought_up_to_date

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ROOT / "docs" / "commands.md"
_BLOCK = re.compile(r"(<!-- help: (?P<command>[^>]+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def rendered(command: str) -> str:
    """What `command --help` prints, e.g. for "moert run"."""
    program, *rest = command.split()
    environment = {
        **{name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "CI", "GITHUB_ACTIONS")},
        "COLUMNS": "100",
        "TERMINAL_WIDTH": "100",
        "NO_COLOR": "1",
        "TERM": "dumb",
        "PYTHONIOENCODING": "utf-8",
        "LC_ALL": "C.UTF-8",
    }
    code = f"import sys; sys.argv[0] = {program!r}; from {program}.__main__ import main; main()"
    found = subprocess.run(
        [sys.executable, "-c", code, *rest, "--help"],
        env=environment, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, encoding="utf-8",
        check=False,
    )  # fmt: skip
    if found.returncode:
        raise RuntimeError(f"{command} --help failed:\n{found.stderr}")
    return "\n".join(line.rstrip() for line in found.stdout.strip("\n").splitlines()).strip("\n") + "\n"


def commands(text: str) -> list[str]:
    """The commands whose help the text shows."""
    return [match["command"] for match in _BLOCK.finditer(text)]


def regenerated(text: str) -> str:
    """The text with every help block as the programs print it now."""
    return _BLOCK.sub(lambda match: f"{match[1]}```\n{rendered(match['command'])}```\n{match[3]}", text)


if __name__ == "__main__":
    raise SystemExit(brought_up_to_date(COMMANDS, regenerated(COMMANDS.read_text(encoding="utf-8"))))
