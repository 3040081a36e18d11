"""`make bench-size`: conversions of models of published sizes, each a whole process in a control group of memory.

OLMoE-1B-7B lies on the disk, at --olmoe or made there first; Mixtral-8x7B is made when it is read, cut after --layers,
and what all of its layers would take is extrapolated. Numbers are random, so the loss that is measured means nothing;
what it takes does. Writes build/bench/size.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path

from moeconv.source.archs import Description
from moeconv.source.outline import CONFIG
from moeconv.source.tensors import INDEX
from recipes.bench.result import Row, context, table, write
from recipes.bench.shape_list import described
from recipes.bench.shapes import depth_of, write_outline
from recipes.bench.size_bounds import Bounds, coding_s, measured
from recipes.bench.size_rows import Aim, growth_rows, rows_of, step_rows
from recipes.bench.size_run import Ran, conversion, forget, run
from recipes.bench.sized import sized
from recipes.bench.virtual import SEED
from recipes.bench.virtual_run import VIRTUAL, mark
from tests.cgroups import missing

GIB = 1 << 30
FOLDER = Path("build/bench/size")
TEXT = Path("build/data/wiki/calibration.jsonl")
PLAIN = ("--bits", "4", "--quantizer", "group")
WINDOWS, CONTEXT = sized(64, 4), 256
FITTED = (
    "--loss", "5%", "--quantizer", "gptq", "--signal", "fisher", "--memory", "4GB", "--calib", str(TEXT),
    "--context", str(CONTEXT), "--samples", str(WINDOWS * 3 // 4), "--sweep-samples", str(WINDOWS // 4),
    "--heldout-samples", str(WINDOWS // 4), "--confidence", "none",
)  # fmt: skip
PARTS = ("plain", "fitted", "cut", "mixtral", "growth")
SMALL_PARTS = ("plain", "fitted", "growth")
"""With `--smoke`: a small model that is made when it is read, as `cut` has it, is for no text, since it fits memory."""


class Bench:
    """Runs conversions one after the other. `failed`: what did not end well."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.failed: list[str] = []

    def convert(self, name: str, model: Path, arguments: Sequence[str], memory_bytes: int) -> Ran | None:
        """None, and a line in `failed`, for one that did not end well. The pack is removed."""
        out = self.folder / f"{name}.pack"
        _remove(out)
        forget(model)
        command = conversion(["quantize", str(model), *arguments, "--out", str(out)], (model / VIRTUAL).is_file())
        print(f"{name}: moeconv {' '.join(command[3:])}", file=sys.stderr, flush=True)
        ran = run(command, out, memory_bytes)
        _remove(out)
        if ran.failed is not None:
            self.failed.append(f"{name}: {ran.failed}")
            print(self.failed[-1], file=sys.stderr, flush=True)
            return None
        return ran

    def virtual(self, model: str, layers: int) -> Path:
        """A folder for which weights are made when they are read."""
        folder = self.folder / f"{model}-{layers}"
        write_outline(model, layers, folder)
        mark(folder, depth_of(model), SEED)
        return folder


def plain_rows(bench: Bench, olmoe: Path, bounds: Bounds) -> list[Row]:
    name = "OLMoE, 4 bits, no text"
    ran = bench.convert("olmoe-plain", olmoe, PLAIN, 2 * 10**9)
    if ran is None:
        return []
    spec = _described(olmoe).spec
    read_s = _nbytes(olmoe) / bounds.read_bytes_per_s
    written_s = spec.weights_per_expert() * len(spec.expert_keys()) * 4.5 / 8 / bounds.written_bytes_per_s
    coded_s = coding_s(olmoe, "group", 4) * len(spec.expert_keys())
    rows = rows_of(name, ran, Aim(240, 2 * 10**9), max(read_s, written_s, coded_s))
    return [
        *rows,
        Row(f"{name}: reading all once, at the disk's speed", read_s, "s"),
        Row(f"{name}: writing the experts, at the disk's speed", written_s, "s"),
        Row(f"{name}: coding the experts, on all cores", coded_s, "s"),
    ]


def fitted_rows(bench: Bench, olmoe: Path, bounds: Bounds) -> list[Row]:
    name = f"OLMoE, --loss 5%, {WINDOWS} windows of {CONTEXT}"
    ran = bench.convert("olmoe-fitted", olmoe, FITTED, 4 * GIB)
    if ran is None:
        return []
    pass_s = max(_nbytes(olmoe) / bounds.read_bytes_per_s, _flops(olmoe) / max(bounds.flops_per_s.values()))
    rows = rows_of(name, ran, Aim(90 * 60, 4 * GIB))
    return [*rows, Row(f"{name}: a pass of the text at its bound", pass_s, "s"), *step_rows(name, ran, pass_s)]


def mixtral_rows(bench: Bench, layers: Sequence[int]) -> list[Row]:
    found = _cut(bench, "mixtral", layers, 6 * 10**9)
    peaks = {f"Mixtral, {count} layers": ran.group_peak_bytes / 1e9 for count, ran in found.items()}
    rows = [Row(f"{name}: most memory of its group", peak, "GB").at_most(6) for name, peak in peaks.items()]
    return [*rows, *_growth("Mixtral, made when read", found, depth_of("mixtral"))]


def cut_rows(bench: Bench, layers: Sequence[int]) -> list[Row]:
    """What `fitted` does, of the first layers alone."""
    name, found = "OLMoE, --loss 5%", _cut(bench, "olmoe", layers, 4 * GIB, FITTED)
    rows = [row for count, ran in found.items() for row in rows_of(f"{name}, {count} layers", ran, Aim(None, 4 * GIB))]
    steps = [row for count, ran in found.items() for row in step_rows(f"{name}, {count} layers", ran)]
    return [*rows, *steps, *_growth(name, found, depth_of("olmoe"))]


def growing_rows(bench: Bench, layers: Sequence[int]) -> list[Row]:
    return _growth("OLMoE, made when read", _cut(bench, "olmoe", layers, 4 * GIB), depth_of("olmoe"))


def _cut(
    bench: Bench, model: str, layers: Sequence[int], memory_bytes: int, how: Sequence[str] = PLAIN
) -> dict[int, Ran]:
    """Layers → the conversion of a model cut after them, where it ended well."""
    ran = {each: bench.convert(f"{model}-{each}", bench.virtual(model, each), how, memory_bytes) for each in layers}
    return {each: done for each, done in ran.items() if done is not None}


def _growth(name: str, found: Mapping[int, Ran], whole: int) -> list[Row]:
    walls_s = {count: ran.wall_s for count, ran in found.items()}
    return growth_rows(name, walls_s, whole) if len(walls_s) > 1 else []


def _described(model: Path) -> Description:
    return described(json.loads((model / CONFIG).read_text(encoding="utf-8")))


def _nbytes(model: Path) -> int:
    return sum(file.stat().st_size for file in model.glob("*.safetensors"))


def _flops(model: Path) -> float:
    """Of one pass of the windows through the model: two for each weight that a token meets."""
    spec = _described(model).spec
    dense = sum(prod(each.shape) for each in spec.tensors.values() if each.role not in (None, "embed"))
    experts = len(spec.moe_layers()) * spec.moe.router.top_k * spec.weights_per_expert()
    return 2.0 * WINDOWS * CONTEXT * (dense + experts)


def _remove(out: Path) -> None:
    """A pack, and what its conversion kept beside it."""
    for folder in out.parent.glob(f"{out.name}*"):
        if folder.is_dir():
            shutil.rmtree(folder)


def _there(olmoe: Path) -> None:
    """Writes it where it is not. Raises CalledProcessError."""
    if not (olmoe / INDEX).is_file():
        command = [sys.executable, "-m", "recipes.bench.shapes", "olmoe", "--out", str(olmoe)]
        subprocess.run(command, check=True)


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Convert models of published sizes in little memory.")
    parser.add_argument("--olmoe", type=Path, default=FOLDER / "olmoe", help="where OLMoE-1B-7B lies, or is written to")
    parser.add_argument("--layers", default=sized("1,2,4", "1"), help="after how many layers Mixtral is cut")
    parser.add_argument(
        "--growth", default=sized("1,2,4,8,16", "1,2"), help="after how many layers OLMoE is cut to see how time grows"
    )
    parser.add_argument(
        "--cut", default=sized("1,2", "1"), help="after how many layers OLMoE is cut to see what a loss takes"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=sized(PARTS, SMALL_PARTS))
    parser.add_argument("--out", type=Path, default=FOLDER, help="where packs are written, and removed again")
    return parser.parse_args()


def main() -> int:
    if (lacks := missing()) is not None:
        print(f"{lacks}: bench-size converts inside such groups", file=sys.stderr)
        return 2
    asked = _asked()
    asked.out.mkdir(parents=True, exist_ok=True)
    _there(asked.olmoe)
    bench, bounds = Bench(asked.out), measured(asked.olmoe, asked.out)
    texts = (asked.layers, asked.growth, asked.cut)
    layers, growth, cut = ([int(each) for each in text.split(",")] for text in texts)
    parts: dict[str, Callable[[], list[Row]]] = {
        "plain": lambda: plain_rows(bench, asked.olmoe, bounds),
        "fitted": lambda: fitted_rows(bench, asked.olmoe, bounds),
        "cut": lambda: cut_rows(bench, cut),
        "mixtral": lambda: mixtral_rows(bench, layers),
        "growth": lambda: growing_rows(bench, growth),
    }
    rows = bound_rows(bounds) + [row for part in asked.parts for row in parts[part]()]
    settings = {"seed": SEED, "mixtral_layers": layers, "growth_layers": growth, "parts": list(asked.parts)}
    write("size", context({**settings, "failed": bench.failed, "page_cache": "cold"}), rows)
    print(table(rows))
    return 1 if bench.failed else 0


def bound_rows(bounds: Bounds) -> list[Row]:
    rows = [
        Row("disk: reading", bounds.read_bytes_per_s / 1e6, "MB/s"),
        Row("disk: writing", bounds.written_bytes_per_s / 1e6, "MB/s"),
    ]
    return rows + [Row(f"products in {name}", each / 1e9, "GFLOP/s") for name, each in bounds.flops_per_s.items()]


if __name__ == "__main__":
    sys.exit(main())
