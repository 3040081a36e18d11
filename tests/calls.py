"""Counts of function calls."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import moert
from moert.engine.engine import Engine

_OURS = str(Path(moert.__file__).parent)


def calls_of_tokens(pack: Path, settings: dict[str, Any], count: int = 40) -> list[Counter[tuple[str, str, int]]]:
    """Returns for each token the calls of Python functions, by file, name and line, with settings of the engine."""
    found: list[Counter[tuple[str, str, int]]] = []

    def counted(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            code = frame.f_code
            found[-1][code.co_filename, code.co_name, code.co_firstlineno] += 1

    with Engine.open(pack, **settings) as engine, engine.session() as session:
        session.add([3, 4, 5], max_new_tokens=count, ignore_eos=True)
        for _ in range(count):
            found.append(Counter())
            sys.setprofile(counted)
            try:
                session.turn()
            finally:
                sys.setprofile(None)
    return found


def fewest_calls(pack: Path, settings: dict[str, Any]) -> int:
    """Returns the calls of Python functions in one token of 40, with settings of the engine."""
    return min(each.total() for each in calls_of_tokens(pack, settings))


def functions_of_tokens(pack: Path, settings: dict[str, Any], reads: bool) -> list[tuple[int, int]]:
    """Returns how many of moert's functions tokens pass, and in how many files, the fewest first: of tokens that read
    an expert, or of those that do not."""
    found = []
    for calls in calls_of_tokens(pack, settings, 150)[1:]:
        ours = [each for each in calls if each[0].startswith(_OURS)]
        if reads == any(name == "read_all" for _, name, _ in ours):
            found.append((len(ours), len({file for file, *_ in ours})))
    return sorted(found)
