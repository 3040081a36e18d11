"""Counts of function calls."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from moert.engine.engine import Engine


def fewest_calls(pack: Path, settings: dict[str, Any]) -> int:
    """Returns the calls of Python functions in one token of 40, with settings of the engine."""
    counts: list[int] = []

    def counted(frame: object, event: str, _: object) -> None:
        counts[-1] += event == "call"

    with Engine.open(pack, **settings) as engine, engine.session() as session:
        session.add([3, 4, 5], max_new_tokens=40, ignore_eos=True)
        for _ in range(40):
            counts.append(0)
            sys.setprofile(counted)
            try:
                session.turn()
            finally:
                sys.setprofile(None)
    return min(counts)
