"""What `moert bench` does, between the command line and the measuring."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moert.bench.figures import Figure
from moert.bench.measure import BenchSettings, Measurement, measure
from moert.bench.summary import summarize, summary_lines
from moert.errors import InputInvalid
from moert.pack.reader import MANIFEST
from moert.prompts import read_records
from moert.system import system_facts


def bench(
    packs: Sequence[Path],
    settings: BenchSettings,
    texts: Sequence[str] | None = None,
    plot: Path | None = None,
    as_json: bool = False,
) -> None:
    """Prints for each pack a table and one JSON line, or that line alone. With `plot`, pictures go into that folder,
    and their figures come first, as tables. Raises PackError, RunError."""
    if plot is not None:
        from moert.bench.plot import check_drawing

        check_drawing(plot, packs)
    measured = [measure(pack, settings, texts) for pack in packs]
    if plot is not None:
        from moert.bench.plot import draw
        from moert.bench.sweeps import all_figures

        figures = all_figures(measured, settings, texts)
        paths = [draw(figure, plot) for figure in figures]
        if not as_json:
            print("\n\n".join([*map(Figure.table, figures), f"pictures: {', '.join(map(str, paths))}"]), end="\n\n")
    for each in measured:
        summary = summary_of(each)
        if not as_json:
            print("\n".join(summary_lines(summary)), end="\n\n")
        print(json.dumps(summary), flush=True)


def texts_of(prompt: str | None, path: Path | None) -> list[str] | None:
    """What --prompt or --input gives; None for the built-in texts. Raises InputInvalid."""
    if prompt is not None and path is not None:
        raise InputInvalid("--prompt and --input exclude each other: give one of them")
    if path is None:
        return None if prompt is None else [prompt]
    texts = [record.prompt for record in read_records(path, sys.stdin, lambda text: None)]
    if not texts:
        raise InputInvalid(f"{path} has no prompts: give a line for each, or leave --input out")
    return texts


def summary_of(measured: Measurement) -> dict[str, Any]:
    manifest = (measured.pack.root / MANIFEST).read_bytes()
    facts = system_facts()
    hardware = {
        "processor": facts["processor"],
        "cores": facts["cores"]["usable"],
        "memory_bytes": facts["memory"]["total_bytes"],
        "memory_limit_bytes": facts["memory"]["limit_bytes"],
        "instruction_set": next((each["name"] for each in facts["instruction_sets"] if each["chosen"]), None),
        "platform": sys.platform,
    }
    return summarize(measured, hardware, hashlib.sha256(manifest).hexdigest())
