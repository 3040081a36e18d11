"""`make bench-size`: conversions of models of published sizes, each a whole process in a control group of memory.

OLMoE-1B-7B lies on the disk, at --olmoe or made there first; Mixtral-8x7B is made when it is read, cut after --layers,
and what all of its layers would take is extrapolated. Numbers are random, so the loss that is measured means nothing;
what it takes does. Writes build/bench/size.json."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch

from moeconv.artifacts import REPORT
from moeconv.errors import ConversionError
from moeconv.quantizers import QUANTIZERS
from moeconv.quantizers.coder import ExpertCoder, batches
from moeconv.report.writer import read_report
from moeconv.source.archs import Description
from moeconv.source.checkpoint import Checkpoint
from moeconv.source.outline import CONFIG
from moeconv.source.tensors import INDEX
from moert.pack.errors import PackError
from moert.pack.model_spec import ExpertKey
from moert.pack.reader import Pack
from recipes.bench.program import as_program
from recipes.bench.result import Row, context, table, write
from recipes.bench.shape_numbers import described
from recipes.bench.shapes import depth_of, write_outline
from recipes.bench.sized import sized
from recipes.bench.virtual import SEED, VIRTUAL, mark
from tests.cgroups import Group, missing

# A whole conversion as a process of its own in a control group of memory: how long it took, and what it held.

LOOKS_EVERY_S = 0.1


@dataclass(frozen=True)
class Ran:
    """`resident_peak_bytes`: VmHWM of the process, the pages of files that it had mapped included; `group_peak_bytes`:
    the most that was charged to its group, the page cache included, so at most the limit. `read_bytes`: from the disk;
    `steps`: what the pack's report says, name → seconds. `failed`: the last lines, if it did not end well."""

    wall_s: float
    cpu_s: float
    read_bytes: int
    resident_peak_bytes: int
    group_peak_bytes: int
    steps: Mapping[str, float]
    failed: str | None = None


def conversion(arguments: Sequence[str], virtual: bool) -> list[str]:
    """The command line of moeconv with these arguments."""
    return [sys.executable, "-m", "recipes.bench.virtual" if virtual else "moeconv", *arguments]


def run(command: Sequence[str], out: Path, memory_bytes: int) -> Ran:
    """Runs it to its end, its messages into OUT.log; `out` is the pack that it writes."""
    log = out.with_name(f"{out.name}.log")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.getcwd()}
    with Group(memory_bytes) as group, open(log, "wb") as messages:
        started = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=messages, stderr=messages, env=environment, preexec_fn=lambda: group.add(0)
        )
        peak, status, usage = 0, 0, None
        while usage is None:
            peak = max(peak, _resident_peak_bytes(process.pid))
            ended, status, used = os.wait4(process.pid, os.WNOHANG)
            usage = used if ended else None
            time.sleep(0 if ended else LOOKS_EVERY_S)
        wall_s = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        killed = group.oom_kills
        cpu_s, read_bytes, charged = usage.ru_utime + usage.ru_stime, usage.ru_inblock * 512, group.peak_bytes
    failed = None
    if process.returncode:
        last = log.read_text(errors="replace").strip().splitlines()[-3:]
        failed = f"exit code {process.returncode}{', out of memory' if killed else ''}: {' / '.join(last)}"
    return Ran(wall_s, cpu_s, read_bytes, peak, charged, _steps(out), failed)


def forget(folder: Path) -> None:
    """Has the system drop what its page cache holds of a folder's files, as far as nobody else uses them."""
    for file in folder.rglob("*.safetensors"):
        with open(file, "rb") as handle, contextlib.suppress(OSError):
            os.fsync(handle.fileno())
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _resident_peak_bytes(pid: int) -> int:
    """0 where the process has ended."""
    with contextlib.suppress(OSError):
        found = re.search(r"^VmHWM:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        return int(found[1]) * 1024 if found else 0
    return 0


def _steps(out: Path) -> Mapping[str, float]:
    if not (out / REPORT).is_file():
        return {}
    with contextlib.suppress(PackError, ConversionError):
        return {step.name: step.seconds for step in read_report(Pack.open(out)).steps}
    return {}


# Rows of `make bench-size`: what a conversion took beside what it is to take, and what a larger one would.

SHARE = 0.9
"""Of the bound: what is as good as an aim in seconds."""


@dataclass(frozen=True)
class Aim:
    """What a whole model is to take; None for what was not said. Memory is that of the group: a process's own figure
    has all that it mapped of files in it, however little of them is kept."""

    wall_s: float | None
    memory_bytes: int | None


def rows_of(name: str, ran: Ran, aim: Aim, bound_s: float | None = None) -> list[Row]:
    """Of one conversion that ended well. An aim in seconds is met too by what reaches SHARE of the bound."""
    wall = Row(f"{name}: time", ran.wall_s, "s")
    if aim.wall_s is not None:
        near = bound_s is not None and bound_s >= SHARE * ran.wall_s
        wall = Row(wall.name, ran.wall_s, "s", aim=f"≤ {aim.wall_s:g}", met=ran.wall_s <= aim.wall_s or near)
    charged = Row(f"{name}: most memory of the group, page cache included", ran.group_peak_bytes / 1e9, "GB")
    rows = [
        wall,
        Row(f"{name}: most memory of the process, mapped files included", ran.resident_peak_bytes / 1e9, "GB"),
        charged if aim.memory_bytes is None else charged.at_most(aim.memory_bytes / 1e9),
        Row(f"{name}: time of all cores", ran.cpu_s, "s"),
        Row(f"{name}: read from the disk", ran.read_bytes / 1e9, "GB"),
    ]
    if bound_s is not None:
        rows.append(Row(f"{name}: bound", bound_s, "s"))
        rows.append(Row(f"{name}: share of the bound", bound_s / ran.wall_s, "of its speed"))
    return rows


def step_rows(name: str, ran: Ran, pass_s: float | None = None) -> list[Row]:
    """Of each step of a conversion, beside the least that one pass of the text through the model takes, if known."""
    rows = []
    for step, seconds in ran.steps.items():
        rows.append(Row(f"{name}: {step}", seconds, "s"))
        if pass_s is not None:
            rows.append(Row(f"{name}: {step}, in passes at their bound", seconds / pass_s, "passes"))
    return rows


def line(walls_s: Mapping[int, float]) -> tuple[float, float]:
    """Layers → seconds as a beginning and what each layer adds, least squares of relative differences. Raises
    ValueError for fewer than two."""
    if len(walls_s) < 2:
        raise ValueError("a line goes through two points or more")
    layers, seconds = (np.array(values, np.float64) for values in zip(*sorted(walls_s.items()), strict=True))
    system = np.stack([1 / seconds, layers / seconds], 1)
    (start, each), *_ = np.linalg.lstsq(system, np.ones(len(seconds)), rcond=None)
    return float(start), float(each)


def growth_rows(name: str, walls_s: Mapping[int, float], whole: int) -> list[Row]:
    """Of a model cut after different numbers of layers: how far from a line it is, and what all layers would take. That
    is called extrapolated where they were not run."""
    start, each = line(walls_s)
    furthest = max(abs(seconds / (start + each * layers) - 1) for layers, seconds in walls_s.items())
    rows = [Row(f"{name}, {layers} layers: time", seconds, "s") for layers, seconds in sorted(walls_s.items())]
    rows.append(Row(f"{name}: each layer", each, "s"))
    rows.append(Row(f"{name}: beside its layers", start, "s"))
    if len(walls_s) > 2:
        rows.append(Row(f"{name}: furthest from a line", furthest, "of the time").at_most(0.1))
    least, most = min(walls_s), max(walls_s)
    alone = walls_s[most] / (most * walls_s[least] / least)
    rows.append(Row(f"{name}: time of {most} layers, of as many times {least}", alone, "×").at_most(1.2))
    if whole not in walls_s:
        taken = ", ".join(map(str, sorted(walls_s)))
        rows.append(Row(f"{name}: all {whole} layers, extrapolated from {taken}", start + each * whole, "s"))
    return rows


# What disk and cores allow a conversion: how fast bytes come and go, products are made, experts are coded.

READ_BYTES, WRITTEN_BYTES, BLOCK = sized(1 << 30, 64 << 20), sized(512 << 20, 16 << 20), 8 << 20
RUNS, CODED_BATCHES = sized((5, 3), (1, 1))


@dataclass(frozen=True)
class Bounds:
    """`flops_per_s`: of products of matrices, two for each multiplication and addition, by the type's name."""

    read_bytes_per_s: float
    written_bytes_per_s: float
    flops_per_s: dict[str, float]


def measured(model: Path, out: Path) -> Bounds:
    """Of the disk that a checkpoint is on, the one that packs go to, and all cores. `model` has a file of weights."""
    found = {name: product_flops_per_s(kind, 2048, (1024, 2048)) for name, kind in _KINDS.items()}
    return Bounds(read_bytes_per_s(model), written_bytes_per_s(out), found)


_KINDS = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def read_bytes_per_s(folder: Path) -> float:
    """From the beginning of its first file of weights, which the page cache has been asked to forget."""
    forget(folder)
    file, done, block = min(folder.glob("*.safetensors")), 0, bytearray(BLOCK)
    started = time.perf_counter()
    with open(file, "rb", buffering=0) as handle:
        while done < READ_BYTES and (n := handle.readinto(block)):
            done += n
    return done / (time.perf_counter() - started)


def written_bytes_per_s(folder: Path) -> float:
    """Until they are on the disk."""
    file, block = folder / "written", os.urandom(BLOCK)
    try:
        started = time.perf_counter()
        with open(file, "wb", buffering=0) as handle:
            for _ in range(WRITTEN_BYTES // BLOCK):
                handle.write(block)
            os.fsync(handle.fileno())
        return WRITTEN_BYTES / (time.perf_counter() - started)
    finally:
        file.unlink(missing_ok=True)


def product_flops_per_s(kind: torch.dtype, tokens: int, matrix: tuple[int, int]) -> float:
    """x [tokens, in] with a matrix [out, in], the fastest of some."""
    x, weight = torch.randn(tokens, matrix[1]).to(kind), torch.randn(matrix).to(kind)
    return 2 * tokens * matrix[0] * matrix[1] / min(_times_s(lambda: torch.nn.functional.linear(x, weight)))


def coding_s(model: Path, quantizer: str, bits: int) -> float:
    """Seconds for one expert, of several as a conversion codes them, when its weights are in memory already."""
    checkpoint = Checkpoint.open(model)
    wanted = [(key, (bits,) * len(checkpoint.spec.moe.ffn.projections)) for key in _experts(checkpoint)]
    some = batches(checkpoint.spec, wanted)[:CODED_BATCHES]
    each = []
    for batch in some:
        for key, _ in batch:
            checkpoint.expert(key)
        coder = ExpertCoder(checkpoint, QUANTIZERS[quantizer](None), None)
        started = time.perf_counter()
        coder.prepare(batch)
        each.append((time.perf_counter() - started) / len(batch))
    return statistics.median(each)


def _experts(checkpoint: Checkpoint) -> Sequence[ExpertKey]:
    return checkpoint.spec.expert_keys()[: checkpoint.spec.moe.n]


def _times_s(work: Callable[[], object]) -> list[float]:
    """The first is left out."""
    found = []
    for _ in range(RUNS + 1):
        started = time.perf_counter()
        work()
        found.append(time.perf_counter() - started)
    return found[1:]


GIB = 1 << 30
FOLDER = Path("build/bench/size")
TEXT = Path("build/data/wiki/calibration.jsonl")
PLAIN = ("--bits", "4", "--quantizer", "group")
WINDOWS, CONTEXT = sized(64, 4), 256
FITTED = (
    "--loss", "5%", "--quantizer", "gptq", "--tune", "signal=fisher", "--memory", "4GB", "--calib", str(TEXT),
    "--context", str(CONTEXT), "--samples", str(WINDOWS * 3 // 4), "--tune", f"sweep-samples={WINDOWS // 4}",
    "--tune", f"heldout-samples={WINDOWS // 4}", "--confidence", "none",
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
    as_program(main)
