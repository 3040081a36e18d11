"""The start and the end of a bench as a program: --help, and one line for everything that a user can mend."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from moeconv.command.recipe import Recipe

MISTAKE = 2


class Missing(Exception):
    """Files that a bench needs are not there. The message is one line that names them and how they are made."""


def need(paths: Iterable[Path], target: str) -> None:
    """Raises Missing unless all paths are there; `make TARGET` makes them."""
    if absent := [str(path) for path in paths if not path.exists()]:
        raise Missing(f"{' and '.join(absent)} missing: run `make {target}`")


def own_recipe(name: str, out: Path) -> Recipe:
    """Returns a recipe of this project, whose metric may be a program that lies beside it; its pack goes to `out`."""
    from moeconv.command.recipe import Recipe

    return Recipe.load(Path(f"recipes/{name}.toml"), out, allow_code=True)


def as_program(main: Callable[[], int | None], about: str | None = None, takes: str = "") -> NoReturn:
    """Calls `main` and ends the process with the status that it returns (None: 0), or with 2 after one line for an
    error that a user can mend. A program without a parser of its own gives its docstring as `about`, which --help
    prints, and the form of its arguments as `takes`; without a form, arguments are refused."""
    name, given = Path(sys.argv[0]).stem, sys.argv[1:]
    if about is not None:
        usage = f"usage: python -m recipes.bench.{name} {takes}".rstrip()
        if given[:1] in (["-h"], ["--help"]):
            print(f"{usage}\n\n{inspect.cleandoc(about)}")
            sys.exit(0)
        if given and not takes:
            _end(name, f"takes no argument {given[0]}; {usage}")
        if not given and takes and not takes.startswith("["):
            _end(name, f"takes arguments; {usage}")
    try:
        sys.exit(main())
    except Exception as error:
        from moert.pack.errors import Error

        if isinstance(error, (Error, Missing)):
            _end(name, str(error))
        if isinstance(error, FileNotFoundError) and error.filename is not None:
            _end(name, f"{error.filename} is not there")
        raise


def _end(name: str, message: str) -> NoReturn:
    print(f"{name}: {message}", file=sys.stderr)
    sys.exit(MISTAKE)
