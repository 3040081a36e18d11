"""`make bench-large`: whole models of published sizes in a tenth to a half of the memory that they need.

OLMoE-1B-7B at 4.5 bits and Qwen3-30B-A3B at 2.6, with random weights; the experts of all layers have the numbers of the
first layer's, which no drive and no cache knows. Each is routed by a recording of a trained model with 64 experts a
layer (recipes/bench/routing.py) in a control group of exactly `--memory`, and with `--routing persistent` by random
numbers that find as many experts in memory as Qwen3-30B-A3B's routers, under LRU by layer; beside llama.cpp, which
can't be told where to go, both use the routers of the random weights. A device is a limit on reading from the disk.

Writes build/bench/large.json.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from moert.pack.files import atomic_write
from moert.pack.model_spec import ModelSpec
from moert.pack.reader import Pack
from recipes.bench import race as races
from recipes.bench import routing
from recipes.bench.llama import file_of
from recipes.bench.program import as_program
from recipes.bench.race import Device, race, read_ahead
from recipes.bench.result import Row, context, row_of_runs, table, write
from recipes.bench.shape_numbers import config_of, described
from recipes.bench.shaped import DENSE, SEED, write_pack
from recipes.bench.sized import sized
from recipes.bench.stream import DEVICES, LLAMA, alive, disk_bytes_per_s, tell
from recipes.bench.stream_packs import add_paths, expert_bytes, texts, uniform_pack
from recipes.bench.stream_rows import bound_rows, llama_rows, prompt_rows, speed_rows, spent_rows
from recipes.bench.streamed import Setting
from tests.cgroups import missing

FOLDER = Path("build/bench/large")
ROUTED_LIKE = "wikids"
HELDOUT_WINDOWS, CALIBRATION_WINDOWS = sized((2, 4), (1, 1))
"""Of each stream."""
SECONDS, ROUNDS, STARTS = sized((8.0, 3, 3), (0.05, 1, 1))
WARM_TOKENS, TIMED_TOKENS, PROMPT_TOKENS = sized((16, 24, 2048), (2, 2, 64))
RECORDED, PERSISTENT = "recorded", "persistent"
SUFFIXES = {RECORDED: "", PERSISTENT: " (persistent routing)"}
"""Routings, and what the names of their rows say."""
ROUTINGS = sized((RECORDED,), (RECORDED, PERSISTENT))
MOERT, RESIDENT = "moert", "moert, all in memory"
GB = 10**9


@dataclass(frozen=True)
class Large:
    """`bits` for experts, `more` for every `every`-th of a layer, so that llama.cpp's type has as many in the mean."""

    model: str
    bits: int
    like: str
    memory_bytes: Sequence[int]
    more: int = 0
    every: int = 0

    @property
    def spec(self) -> ModelSpec:
        return described(config_of(self.model)).spec

    @property
    def pack(self) -> Path:
        return FOLDER / f"{self.model}.pack"

    def routes(self, routing: str = RECORDED) -> Path:
        return FOLDER / f"{self.model}-{'routing' if routing == RECORDED else routing}.npz"

    def make(self) -> None:
        """The pack and its routings, where they are not there. Raises OSError."""
        spec, random = self.spec, self.routes(PERSISTENT)
        widths = dict.fromkeys(spec.expert_keys(), self.bits)
        if self.every:
            widths |= {key: self.more for key in widths if key.expert % self.every == 0}
        write_pack(self.pack, widths, DENSE, spec, alike=True)
        if not random.exists():
            chosen = routing.persistent(spec, routing.PERSISTENT_TOKENS)
            nothing = np.zeros((*chosen.shape[:2], spec.moe.n), np.float16)
            with atomic_write(random) as fresh, fresh.open("wb") as stream:
                np.savez(stream, heldout=chosen, guesses=nothing)
        if not self.routes().exists():
            trained = uniform_pack(ROUTED_LIKE, 16)
            heldout, guesses = routing.like(trained, "heldout", HELDOUT_WINDOWS, spec)
            calibration, _ = routing.like(trained, "calibration", CALIBRATION_WINDOWS, spec)
            with atomic_write(self.routes()) as fresh, fresh.open("wb") as stream:
                np.savez(stream, heldout=heldout, guesses=guesses, calibration=calibration)
        with np.load(self.routes()) as recorded:
            add_paths(self.pack, recorded["calibration"])


MODELS = {
    "olmoe": Large("olmoe", 4, "Q4_K", sized((1 * GB, 2 * GB), (1 * GB,))),
    "qwen3": Large("qwen3", 2, "Q2_K", sized((2 * GB, 4 * GB), (1 * GB,)), more=3, every=8),
}
NAMES = sized(("ssd", "nvme"), ("nvme",))


def routed_rows(
    large: Large, device: Device, memory_bytes: int, failed: list[str], routed: str = RECORDED
) -> list[Row]:  # fmt: skip
    """Routed by a recording, or at random, beside the same with all experts in memory."""
    where, routes = f"{_where(large, device, memory_bytes)}{SUFFIXES[routed]}", str(large.routes(routed))
    disk, eviction = disk_bytes_per_s(large.pack), "auto" if routed == RECORDED else "layer-lru"
    small = Setting(str(large.pack), None, eviction, routing=routes, memory_bytes=memory_bytes)
    free = Setting(str(large.pack), None, predict="none", routing=routes)
    entries = [
        races.of_setting(MOERT, small, WARM_TOKENS, memory_bytes, PROMPT_TOKENS, TIMED_TOKENS),
        races.of_setting(RESIDENT, free, WARM_TOKENS, None, PROMPT_TOKENS),
    ]
    outcomes = alive(where, race(device, entries, SECONDS, ROUNDS), failed)
    rows = speed_rows(where, outcomes)
    if MOERT in outcomes and RESIDENT in outcomes:
        mine, all_there, bytes_per_s = outcomes[MOERT], outcomes[RESIDENT], min(disk, device.read_bps or disk)
        rows += bound_rows(where, mine, all_there, bytes_per_s)
        rows += prompt_rows(where, mine, all_there, expert_bytes(large.pack) / bytes_per_s)
        rows += spent_rows(where, mine)
    try:
        unrouted = Setting(str(large.pack), None, io=None, memory_bytes=memory_bytes)
        taken = [races.start(device, unrouted, memory_bytes) for _ in range(STARTS)]
        rows.append(row_of_runs(f"{where}: start to first token", taken, "s"))
    except RuntimeError as error:
        tell(f"{where}: start", error, failed)
    return rows


def beside_llama(large: Large, device: Device, memory_bytes: int, failed: list[str]) -> list[Row]:
    """At equal bits, both where the random routers say. Raises CalledProcessError or OSError."""
    file = file_of(f"{large.model}-{large.like}", FOLDER)
    command = [str(LLAMA), "-m", "recipes.bench.llama", "like", str(large.pack), large.like, str(file)]
    subprocess.run(command, check=True, stdout=sys.stderr)
    written = texts(large.spec)
    setting = Setting(str(large.pack), None, memory_bytes=memory_bytes, texts=str(written))
    entries = [
        races.of_setting(MOERT, setting, WARM_TOKENS, memory_bytes),
        races.of_llama(f"llama.cpp {large.like}", LLAMA, file, memory_bytes, written),
    ]
    where = f"{_where(large, device, memory_bytes)} (own routers)"
    return llama_rows(where, alive(where, race(device, entries, SECONDS, ROUNDS), failed))


def _where(large: Large, device: Device, memory_bytes: int) -> str:
    return f"{large.model}, {device.name}, {memory_bytes / GB:g} GB"


def model_rows(large: Large, devices: Sequence[str], routings: Sequence[str], failed: list[str]) -> list[Row]:
    large.make()
    rows = [
        Row(f"{large.model}: experts", expert_bytes(large.pack) / GB, "GB"),
        Row(f"{large.model}: bits of an expert's weight", Pack.open(large.pack).manifest.effective_bits(), "bits"),
    ]
    for device in devices:
        for memory_bytes in large.memory_bytes:
            parts = {f"{each} routing": partial(routed_rows, routed=each) for each in routings}
            for name, part in {**parts, "beside llama.cpp": beside_llama}.items():
                try:
                    found = part(large, DEVICES[device], memory_bytes, failed)
                except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
                    tell(f"{_where(large, DEVICES[device], memory_bytes)}, {name}", error, failed)
                else:
                    print(table(found), end="\n\n", file=sys.stderr, flush=True)
                    rows += found
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description="Models of published sizes in little memory, beside llama.cpp.")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--devices", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--routing", nargs="+", choices=list(SUFFIXES), default=ROUTINGS)
    asked = parser.parse_args()
    if lacking := missing(reads=Path(__file__)):
        raise SystemExit(f"bench-large imitates devices with control groups, but {lacking}")
    failed: list[str] = []
    FOLDER.mkdir(parents=True, exist_ok=True)
    with read_ahead(FOLDER) as ahead_kb:
        rows = [
            row for model in asked.models for row in model_rows(MODELS[model], asked.devices, asked.routing, failed)
        ]
    settings = {"seed": SEED, "seconds": SECONDS, "rounds": ROUNDS, "prompt": PROMPT_TOKENS, "models": asked.models,
                "routing": asked.routing, "routed_like": ROUTED_LIKE, "read_ahead_kb": ahead_kb,
                "failed": failed}  # fmt: skip
    write("large", context(settings), rows)
    print(table(rows))
    return 1 if failed else 0


if __name__ == "__main__":
    as_program(main)
