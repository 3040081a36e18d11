"""What `moert bench` does, between the command line and the measuring."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from moert.bench.measure import BenchRun, BenchSettings, measure
from moert.bench.summary import summarize, summary_lines
from moert.beside.flash.runner import PREDICTED, check_neurons
from moert.command.description import system_facts
from moert.command.prompts import Longest, Source, read_records
from moert.engine.budget import HASH_ROUTING, room_within
from moert.errors import DrawingImpossible, InputInvalid, said
from moert.experts.names import check_hash, check_predictor
from moert.pack.messages import in_one_line, shown
from moert.pack.reader import MANIFEST, Pack


def bench(
    packs: Sequence[Path],
    settings: BenchSettings,
    texts: Sequence[str] | None = None,
    plot: str | Path | None = None,
    as_json: bool = False,
    overwrite: bool = False,
) -> None:
    """Prints for each pack a table and one JSON line, or that line alone, as soon as it was measured. With `plot`, the
    figures follow as tables, and as pictures in that folder, which has no others, or `overwrite` says that it may.
    Raises PackError, RunError."""
    if plot is not None and settings.engine.neurons == PREDICTED:
        raise DrawingImpossible(
            f"--plot draws what becomes of whole experts, and {said('neurons', PREDICTED)} reads none: leave one out"
        )
    folder = None if plot is None else _folder(plot, packs, overwrite)
    for path in packs:
        engine = settings.engine
        pack = Pack.open(path, room_within(engine.limit))
        check_predictor(pack, engine.predict)
        check_hash(pack, engine.routing == HASH_ROUTING)
        check_neurons(pack, engine.neurons)
    measured = []
    for path in packs:
        measured.append(measure(path, settings, texts))
        _show(summary_of(measured[-1]), as_json)
    if folder is not None:
        _show_figures(measured, settings, texts, folder, as_json)


def drives(packs: Sequence[Path], plot: str | Path | None, as_json: bool, overwrite: bool = False) -> None:
    """Prints how fast the drives of packs are; with `plot`, also draws it. Raises PackError, RunError."""
    from moert.bench.drive import bench_drives

    bench_drives(packs, None if plot is None else _folder(plot, packs, overwrite), as_json)


def _folder(plot: str | Path, packs: Sequence[Path], overwrite: bool) -> Path:
    """The folder for pictures, checked. Raises DrawingImpossible."""
    from moert.bench.plot import check_drawing

    if plot == "":
        raise DrawingImpossible("--plot has no folder: give the name of one, or leave it out")
    check_drawing(Path(plot), packs, overwrite)
    return Path(plot)


def _show(summary: dict[str, Any], as_json: bool) -> None:
    if not as_json:
        print("\n".join(map(in_one_line, summary_lines(summary))), end="\n\n")
    print(json.dumps(summary), flush=True)


def _show_figures(
    measured: Sequence[BenchRun], settings: BenchSettings, texts: Sequence[str] | None, folder: Path, as_json: bool
) -> None:
    from moert.bench.plot import draw
    from moert.bench.sweeps import all_figures

    facts = system_facts()
    machine = f"Machine: {facts['processor']}, {facts['cores']['usable']} cores."
    figures = [
        replace(figure, caption=f"{figure.caption} {machine}") for figure in all_figures(measured, settings, texts)
    ]
    if not as_json:
        print("", "\n\n".join(shown(figure.table()) for figure in figures), sep="\n", flush=True)
    paths = [draw(figure, folder) for figure in figures]
    if not as_json:
        print("", in_one_line(f"pictures: {', '.join(map(str, paths))}"), sep="\n")


def texts_of(prompt: str | None, path: Path | None, longest: Longest) -> list[str] | None:
    """What --prompt or --input gives; None for the built-in texts. Raises InputInvalid."""
    if prompt is not None and path is not None:
        raise InputInvalid("--prompt and --input exclude each other: give one of them")
    if path is None:
        return None if prompt is None else [prompt]
    return [record.prompt for record in read_records(Source(path, longest), sys.stdin, lambda text: None)]


def summary_of(measured: BenchRun) -> dict[str, Any]:
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
