"""`moert info`: what a pack holds, or what this machine has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from moert.errors import RunError
from moert.pack.shown import in_one_line


def info(
    pack: Annotated[
        Path | None, typer.Argument(metavar="PACK", help="Directory of the pack.", show_default=False)
    ] = None,
    system: Annotated[
        bool, typer.Option("--system", help="Print what this machine has and which native kernels it runs instead.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print what a pack holds, what it lost, and the smallest memory it runs in; or facts about this machine."""
    if (pack is None) != system:
        raise RunError("moert info tells about a pack or about this machine: give either PACK or --system")
    if pack is None:
        _print_system(as_json)
        return
    from moert.budget.opening import room_within
    from moert.command.description import describe, description_lines
    from moert.pack.reader import Pack

    opened = Pack.open(pack, room_within(None))
    print(json.dumps(describe(opened), indent=1) if as_json else "\n".join(map(in_one_line, description_lines(opened))))


def _print_system(as_json: bool) -> None:
    from moert.command.system import system_facts, system_lines

    facts = system_facts()
    print(json.dumps(facts, indent=1) if as_json else "\n".join(map(in_one_line, system_lines(facts))))
