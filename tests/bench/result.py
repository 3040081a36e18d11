"""What a bench hands over: its rows as build/bench/NAME.json, and the same printed as a table."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

FOLDER = Path("build/bench")
PACKAGES = ("numpy", "torch", "transformers")


@dataclass(frozen=True)
class Row:
    """One figure. `spread` is the distance between the quartiles of `runs` repetitions, in the same unit; None where
    the figure does not vary or was taken once. `aim` says what `value` should be, `met` whether it is; None without.
    """

    name: str
    value: float
    unit: str
    spread: float | None = None
    runs: int = 1
    aim: str | None = None
    met: bool | None = None

    def at_most(self, limit: float) -> Row:
        """This row with the aim that its value is `limit` or less."""
        return Row(*self._measured, aim=f"≤ {limit:g}", met=self.value <= limit)

    def at_least(self, limit: float) -> Row:
        """This row with the aim that its value is `limit` or more."""
        return Row(*self._measured, aim=f"≥ {limit:g}", met=self.value >= limit)

    @property
    def _measured(self) -> tuple[str, float, str, float | None, int]:
        return self.name, self.value, self.unit, self.spread, self.runs


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
    """Where and with what a bench ran; `packages` are those whose versions matter beside numpy, torch, transformers."""
    return {
        "commit": _commit(),
        "hardware": f"{_processor()}, {len(os.sched_getaffinity(0))} cores, {_memory_gib():.0f} GiB",
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in (*PACKAGES, *packages)},
        "settings": dict(settings),
    }


def write(name: str, where: Mapping[str, Any], rows: Sequence[Row], folder: Path = FOLDER) -> Path:
    """Writes `folder`/NAME.json from a context and rows, in one step, and returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path, part = folder / f"{name}.json", folder / f"{name}.json.part"
    content = {"context": dict(where), "rows": [asdict(row) for row in rows]}
    part.write_text(json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    part.replace(path)
    return path


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


def _commit() -> str:
    """The short hash of HEAD, with "+" if tracked files were changed since; "unknown" outside a checkout."""
    try:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run(["git", "diff", "--quiet", "HEAD"], capture_output=True).returncode
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+" if changed else "")


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
