"""The generated part of docs/architecture.md: every file of both packages, by the first sentence of its docstring.

`python tests/rules/architecture_text.py --write` brings it up to date; without --write it only says whether it differs.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from pages import brought_up_to_date

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURE = ROOT / "docs" / "architecture.md"
PACKAGES = ("moert", "moeconv")
_BLOCK = re.compile(r"(## Where things are\n\n```\n).*?(recipes/ )", re.DOTALL)
_NAME_WIDTH = 27


def first_sentence(path: Path) -> str:
    """Returns the first sentence of a file's docstring, in one line without its full stop."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n\n")[0].split())
    return re.split(r"(?<=[a-z)`])[.] (?=[A-Z])", text)[0].rstrip(".")


def lines(folder: Path, depth: int) -> Iterator[str]:
    """Yields a line for a package, its files and the packages in it."""
    indent = "  " * depth
    yield f"{indent + folder.name + '/':{_NAME_WIDTH}}{first_sentence(folder / '__init__.py')}"
    within = sorted((each for each in folder.iterdir() if (each / "__init__.py").exists()), key=lambda each: each.name)
    for path in sorted(folder.glob("*.py")):
        if path.name != "__init__.py":
            yield f"{indent + '  ' + path.name:{_NAME_WIDTH}}{first_sentence(path)}"
    for each in within:
        yield from lines(each, depth + 1)


def regenerated(text: str) -> str:
    """Returns the page with both packages as they are now."""
    tree = "".join(f"{line.rstrip()}\n" for name in PACKAGES for line in lines(ROOT / name, 0))
    return _BLOCK.sub(lambda match: f"{match[1]}{tree}{match[2]}", text)


if __name__ == "__main__":
    raise SystemExit(brought_up_to_date(ARCHITECTURE, regenerated(ARCHITECTURE.read_text(encoding="utf-8"))))
