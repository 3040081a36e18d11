"""`make bench-workers`: a conversion layer by layer on a Ray cluster, with two workers of one core each beside one.

OLMoE-1B-7B cut after its first layers, made on the disk first; gptq, ranked by gradients, as bench-size converts it,
on less text: too little to promise a loss by, so that what is asked for is bits a weight. With one worker everything
has one core: the cluster, and the process that it works for.
Writes build/bench/workers.json.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from recipes.bench.program import as_program
from recipes.bench.result import Row, context, row_of_runs, table, write
from recipes.bench.size import CONTEXT, FITTED, Ran, forget, run, step_rows
from recipes.bench.sized import SMOKE, sized
from tests.cgroups import missing

FOLDER = Path("build/bench/workers")
AIM = 1.8
BITS = 3
COUNTS = (1, 2)
MEMORY_BYTES = 8 << 30  # of all processes of the cluster together


def arguments(windows: int) -> list[str]:
    """What moeconv quantize is told: as FITTED, with fewer windows and for a size."""
    found = [
        "signal=kl" if SMOKE and each == "signal=fisher" else each for each in FITTED
    ]  # what is shared out of a small model
    at = found.index("--loss")
    found[at : at + 2] = ["--bits-per-weight", str(BITS)]
    found[found.index("--samples") + 1] = str(max(1, windows * 3 // 4))
    for at, each in enumerate(found):
        name, sign, _ = each.partition("=")
        if sign and name in ("sweep-samples", "heldout-samples"):
            found[at] = f"{name}={max(1, windows // 4)}"
    return found


def rows_of(name: str, found: dict[int, Sequence[Ran]]) -> list[Row]:
    """Workers → their runs, as many of each, which took turns."""
    rows = [row_of_runs(f"{name}, {count} worker(s): time", [ran.wall_s for ran in runs], "s")
            for count, runs in found.items()]  # fmt: skip
    for count, runs in found.items():
        rows += step_rows(f"{name}, {count} worker(s)", runs[-1])
    ratios = [one.wall_s / two.wall_s for one, two in zip(found[1], found[2], strict=True)]
    return [*rows, row_of_runs(f"{name}: one worker's time, of that of two", ratios, "×").at_least(AIM)]


def converted(model: Path, count: int, windows: int) -> Ran:
    """Raises RuntimeError where the conversion failed."""
    out = FOLDER / f"{count}.pack"
    for folder in FOLDER.glob(f"{out.name}*"):
        if folder.is_dir():
            shutil.rmtree(folder)
    forget(model)
    command = [
        sys.executable,
        "-m",
        "recipes.bench.workers_run",
        str(count),
        "quantize",
        str(model),
        *arguments(windows),
    ]
    print(f"{count} worker(s)", file=sys.stderr, flush=True)
    ran = run([*command, "--tune", "cluster=auto", "--out", str(out)], out, MEMORY_BYTES)
    if ran.failed is not None:
        raise RuntimeError(f"{count} worker(s): {ran.failed}")
    return ran


def main() -> int:
    parser = argparse.ArgumentParser(description="Two Ray workers of one core each beside one.")
    parser.add_argument("--layers", type=int, default=1, help="after how many layers OLMoE is cut")
    parser.add_argument("--windows", type=int, default=sized(8, 4), help=f"of {CONTEXT} tokens")
    parser.add_argument("--rounds", type=int, default=1)
    asked = parser.parse_args()
    if (lacks := missing()) is not None:
        print(f"{lacks}: bench-workers converts inside such groups", file=sys.stderr)
        return 2
    if len(os.sched_getaffinity(0)) < max(COUNTS):
        print(f"bench-workers needs {max(COUNTS)} cores", file=sys.stderr)
        return 2
    FOLDER.mkdir(parents=True, exist_ok=True)
    model = FOLDER / f"olmoe-{asked.layers}"
    if not model.is_dir():
        shapes = [sys.executable, "-m", "recipes.bench.shapes", "olmoe", "--layers", str(asked.layers)]
        subprocess.run([*shapes, "--out", str(model)], check=True)
    found: dict[int, list[Ran]] = {count: [] for count in COUNTS}
    for _ in range(asked.rounds):
        for count in COUNTS:
            found[count].append(converted(model, count, asked.windows))
    rows = rows_of(f"OLMoE, {BITS} bits a weight, {asked.layers} layer(s)", dict(found))
    settings = {"layers": asked.layers, "windows": asked.windows, "rounds": asked.rounds, "page_cache": "cold"}
    print(table(rows))
    print(f"written to {write('workers', context(settings, ('ray',)), rows)}")
    return 0


if __name__ == "__main__":
    as_program(main)
