"""`make bench-many`: the cost of packs with thousands of experts before the first token. Writes build/bench/many.json.

The packs have as many experts as Qwen3-30B-A3B and DeepSeek-V3, but tiny ones: the measured cost grows with the number
of experts and not with their size. Each start is a process of its own; the page cache has the manifest. All is repeated
with a file for each layer in place of a file for each expert.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from moeconv.writer import Files
from moert.machine import held_bytes
from moert.pack.model_spec import ModelSpec
from moert.pack.reader import Pack
from recipes.bench.program import as_program
from recipes.bench.result import Row, context, row_of_runs, table, write
from recipes.bench.sized import sized
from tests.shapes import Shape
from tests.tiny_packs import DECODER_SHAPE, write_pack

FOLDER = Path("build/bench/many")
RUNS, COPIES = sized((7, 3), (1, 1))
PACKS = sized(
    {"6,144 experts (48 × 128)": (48, 128, 0.3, 20.0), "14,848 experts (58 × 256)": (58, 256, 0.8, None)},
    {"32 experts (2 × 16)": (2, 16, 0.3, 20.0)},
)
"""Layers, experts in each, seconds until an engine is ready at most, MB that it holds beside weights at most."""


def main() -> int:
    if sys.argv[1:2] == ["--start"]:
        print(json.dumps(started(sys.argv[2])))
        return 0
    rows = []
    for name, (layers, experts, *aims) in PACKS.items():
        rows += rows_of(name, layers, experts, "expert", *aims)
        rows += rows_of(f"{name}, a file for each layer", layers, experts, "layer", *aims)
    write("many", context({"runs": RUNS, "processes": "fresh"}), rows)
    print(table(rows))
    return 0


def rows_of(
    name: str, layers: int, experts: int, files: Files, most_s: float, most_mb: float | None
) -> list[Row]:  # fmt: skip
    pack = FOLDER / f"{layers}x{experts}-{files}.pack"
    if not (pack / "manifest.json").is_file():
        shutil.rmtree(pack, ignore_errors=True)
        write_pack(pack, spec_of(layers, experts), paths=False, files=files)
    runs = [_run(pack) for _ in range(RUNS + 1)][1:]
    opened, ready, held = ([run[what] for run in runs] for what in ("opened_s", "ready_s", "held_mb"))
    found = Pack.open(pack)
    begun = time.perf_counter()
    pieces = sum(1 for _ in found.verify_hashes())
    verified_s = time.perf_counter() - begun
    holds = row_of_runs(f"{name}: memory of the engine beside weights", held, "MB")
    return [
        row_of_runs(f"{name}: pack opened again", opened, "s"),
        row_of_runs(f"{name}: engine ready", ready, "s").at_most(most_s),
        holds if most_mb is None else holds.at_most(most_mb),
        Row(f"{name}: manifest", (pack / "manifest.json").stat().st_size / 1e6, "MB"),
        Row(f"{name}: all hashes checked", verified_s, "s", n=pieces),
        row_of_runs(f"{name}: copied", [_copied_s(pack) for _ in range(COPIES)], "s"),
    ]


def _copied_s(pack: Path) -> float:
    """Until it is on the disk; the page cache has the source."""
    out = pack.with_suffix(".copy")
    shutil.rmtree(out, ignore_errors=True)
    os.sync()
    started = time.perf_counter()
    shutil.copytree(pack, out)
    os.sync()
    taken = time.perf_counter() - started
    shutil.rmtree(out)
    return taken


def _run(pack: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "recipes.bench.many", "--start", str(pack)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def started(pack: str) -> dict[str, float]:
    """In this process, whose imports are done: an engine, what it holds, and the pack opened once more by itself."""
    from moert.engine.engine import Engine

    before, begun = held_bytes(), time.perf_counter()
    engine = Engine.open(pack, memory="1GB")
    ready_s, held, begun = time.perf_counter() - begun, held_bytes() - before, time.perf_counter()
    Pack.open(pack)
    opened_s = time.perf_counter() - begun
    weights = os.path.getsize(os.path.join(pack, "backbone.safetensors"))
    del engine
    return {"opened_s": opened_s, "ready_s": ready_s, "held_mb": (held - weights) / 1e6}


def spec_of(layers: int, experts: int) -> ModelSpec:
    shape: Shape = DECODER_SHAPE.but(decoder=(True,) * layers, num_experts=experts, top_k=8)
    return shape.spec


if __name__ == "__main__":
    as_program(main, __doc__, "[--start PACK]")
