"""A command that ends with a mistake: its line on stderr and, with --json, an object on stdout. For both programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn

USAGE = 2


def asks_json(arguments: Sequence[str] | None) -> bool:
    """Returns whether --json is among the options of a command line; None: that of this process."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    return "--json" in given[: given.index("--")] if "--" in given else "--json" in given


def failure(kind: str, message: str, code: int = USAGE) -> dict[str, Any]:
    """Returns the object that stands for a failure: `kind` is the name of the error in Python, or UsageError."""
    return {"error": {"code": code, "kind": kind, "message": message}}


def print_failure(kind: str, message: str, code: int = USAGE) -> None:
    """Prints that object as a line on stdout, if stdout can be written to."""
    with suppress(OSError, ValueError):
        print(json.dumps(failure(kind, message, code)), flush=True)


def begins_not(program: str, reason: str) -> NoReturn:
    """Ends a process that has too little memory to load its program."""
    sys.stderr.write(f"{program}: {reason}\n")
    if asks_json(None):
        print_failure("OutOfMemory", reason)
    raise SystemExit(USAGE) from None
