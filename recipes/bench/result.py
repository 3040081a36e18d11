"""What a bench hands over: its rows as build/bench/NAME.json, and the same printed as a table."""

from __future__ import annotations

import json
import math
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from moert.command.description import machine_facts
from moert.kernels import auto_name, library
from moert.pack.files import write_atomically
from recipes.bench.sized import SMOKE

STARTED_S = time.monotonic()
FOLDER = Path("build/bench")
PACKAGES = ("numpy", "torch", "transformers")
TEXT = (":(exclude)docs", ":(exclude)*.md")


@dataclass(frozen=True)
class Row:
    """One figure. `spread` is the distance between the quartiles of `runs` repetitions, in the same unit; None where
    the figure does not vary or was taken once. `low` to `high` is its 95% interval, from `n` samples. `aim` says what
    `value` should be, `met` whether it is. What is not known is None.
    """

    name: str
    value: float
    unit: str
    spread: float | None = None
    runs: int = 1
    aim: str | None = None
    met: bool | None = None
    low: float | None = None
    high: float | None = None
    n: int | None = None

    def at_most(self, limit: float) -> Row:
        """This row with the aim that its value is `limit` or less."""
        return replace(self, aim=f"≤ {limit:g}", met=self.value <= limit)

    def at_least(self, limit: float) -> Row:
        """This row with the aim that its value is `limit` or more."""
        return replace(self, aim=f"≥ {limit:g}", met=self.value >= limit)

    def within(self, low: float, high: float, n: int | None = None) -> Row:
        """This row with its 95% interval, and the samples that it is from."""
        return replace(self, low=low, high=high, n=n)


@dataclass(frozen=True)
class Result:
    """A result file: where and with what a bench ran, and what came out."""

    context: Mapping[str, Any]
    rows: Sequence[Row]

    @cached_property
    def by_name(self) -> Mapping[str, Row]:
        """Raises ValueError where two rows have one name."""
        found = {row.name: row for row in self.rows}
        if len(found) < len(self.rows):
            names = [row.name for row in self.rows]
            raise ValueError(f"two rows are called {next(name for name in names if names.count(name) > 1)!r}")
        return found


def row_of_runs(name: str, values: Sequence[float], unit: str) -> Row:
    """The median of repeated measurements, warm-up left out by the caller. Raises ValueError without any."""
    if not values:
        raise ValueError(f"{name}: no runs to take the median of")
    spread = None
    if len(values) > 1:
        first, _, third = statistics.quantiles(values, n=4, method="inclusive")
        spread = third - first
    return Row(name, statistics.median(values), unit, spread, len(values))


def context(settings: Mapping[str, Any], packages: Sequence[str] = ()) -> dict[str, Any]:
    """Where and with what a bench ran; `packages` are those whose versions matter beside numpy, torch, transformers.

    With `--smoke` the commit counts as changed, so that nothing of it is kept. `seconds` counts from the import of this
    module, with which a bench starts.
    """
    commit, changed = _commit()
    return {
        "commit": commit,
        "changed": changed or SMOKE,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - STARTED_S),
        "hardware": _hardware(),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in (*PACKAGES, *packages)},
        "settings": dict(settings),
    }


def write(name: str, where: Mapping[str, Any], rows: Sequence[Row], folder: Path = FOLDER) -> Path:
    """Writes `folder`/NAME.json from a context and rows, in one step, and returns its path. A row takes a line, without
    the fields that are None; the context names those that came to no number, which cost no other row."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    if lost := [row.name for row in rows if not math.isfinite(row.value)]:
        print(f"no number: {'; '.join(lost)}", file=sys.stderr, flush=True)
        where, rows = {**where, "no number": lost}, [row for row in rows if row.name not in lost]
    lines = [_json({field: value for field, value in asdict(row).items() if value is not None}) for row in rows]
    content = f'{{"context": {_json(where, indent=1)},\n"rows": [\n' + ",\n".join(lines) + "\n]}\n"
    write_atomically(path, content.encode())
    return path


def read(path: Path) -> Result:
    """What `write` has written. Raises ValueError where the file is anything else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return Result(found["context"], [Row(**row) for row in found["rows"]])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no result file: {error}") from None


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned columns, and a last line that counts the aims."""
    cells = [("", "value", "unit", "spread", "runs", "aim", "met")]
    for row in rows:
        spread = "" if row.spread is None else _figure(row.spread)
        met = "" if row.met is None else ("yes" if row.met else "NO")
        cells.append((row.name, _figure(row.value), row.unit, spread, str(row.runs), row.aim or "", met))
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    lines = []
    for line in cells:
        padded = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        for column in (1, 3, 4):
            padded[column] = line[column].rjust(widths[column])
        lines.append("  ".join(padded).rstrip())
    aims = [row.met for row in rows if row.met is not None]
    return "\n".join([*lines, f"{sum(aims)} of {len(aims)} aims met"])


def _figure(value: float) -> str:
    """Four significant digits, large numbers with separators."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:#.4g}" if value != int(value) else f"{value:.0f}"


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False)


def _commit() -> tuple[str, bool]:
    """The hash of HEAD, followed by "+" and true if files differ from it; text can't change a figure and is not looked
    at. "unknown" and true outside a checkout."""
    try:
        head, changes = (
            subprocess.run(["git", *command], capture_output=True, text=True, check=True).stdout.strip()
            for command in (["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain", "--", ".", *TEXT])
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown", True
    return (f"{head}+", True) if changes else (head, False)


def _hardware() -> dict[str, Any]:
    """Processor, cores and memory that this process may use, and the instruction set of the native kernels."""
    facts = machine_facts()
    return {
        "processor": facts["processor"],
        "cores": facts["cores"]["usable"],
        "memory_gib": round(facts["memory"]["total_bytes"] / 2**30),
        "isa": isa(),
    }


def isa() -> str:
    """The widest instruction set of the native kernels that runs here."""
    return "none" if library.load() is None else auto_name()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
