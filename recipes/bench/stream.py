"""`make bench-stream`: small devices imitated by control groups; this engine beside the paper's baselines, llama.cpp.

A device is a limit on reading from the disk; a budget is a share of the bytes of the experts in mixed widths. The
baselines of EdgeMoE §4 are settings of our engine: IO-FREE (16 bits, all in memory), IO-EXP (16 bits, each expert read
when it is demanded), IO-QEXP (the same with 4 bits), and one like STI (4 bits, a buffer as large as our cache that
keeps what it was first filled with); beside it, 4 bits in a cache as large as ours under LRU and under LFU. Everything
but the experts is the same for all of them. The model of OLMoE's shape is routed by a recording of a trained one
(recipes/bench/routing.py), but beside llama.cpp, which can't be told where to go, both use the routers of the random
weights. All read past the page cache, except llama.cpp.

Writes build/bench/stream.json.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from moert.pack.reader import Pack
from recipes.bench import race as races
from recipes.bench.llama import file_of
from recipes.bench.program import as_program, need
from recipes.bench.race import (
    BUDGETED,
    DEVICES,
    IN_MEMORY,
    IO_FREE,
    MOERT,
    RESIDENT,
    UNBUDGETED,
    Device,
    Outcome,
    alive,
    memory_bytes,
    race,
    read_ahead,
    tell,
)
from recipes.bench.result import Row, context, row_of_runs, table, write
from recipes.bench.shaped import OLMOE
from recipes.bench.sized import sized
from recipes.bench.stream_packs import DEMO, REFERENCES, Packs, reference, shaped, texts
from recipes.bench.stream_rows import against_rows, bound_rows, llama_rows, memory_rows, speed_rows
from recipes.bench.streamed import THREADS
from tests.cgroups import missing

LLAMA = Path("build/peers/llama/bin/python")
SAME_AS_Q2_K = "Q2_K"
Q2_K_BITS = 8 * 84 / 256  # a block of 256 weights takes 84 bytes, and experts are in nothing else
HALF = 0.5  # the budget of baselines that read a prompt, of llama.cpp, and of starts
STARTS = sized(3, 1)
PLANNED_S = {"g2p": 90, "wiki": 90, "olmoe-shaped": 300, "llama": 60}
"""About how long a part takes on one device, until the parts before it have shown how fast this machine is."""
DEPTHS = (2, 4, 16)  # reads at once


@dataclass(frozen=True)
class Sizes:
    """Seconds of a turn, turns that count, budgets, tokens of a prompt."""

    seconds: float = sized(2.0, 0.1)
    reference_seconds: float = sized(0.5, 0.1)
    rounds: int = sized(3, 1)
    shares: Sequence[float] = sized((0.25, 0.5, 0.75), (0.5,))
    prompt: int = sized(128, 16)


def disk_bytes_per_s(path: Path) -> float:
    """How fast the experts of a pack are read here without a limit, many at once if that is faster; small ones come
    slower than large ones."""
    from moert.experts.probe import read_for
    from moert.experts.store import IoSettings

    pack = Pack.open(path)
    files = itertools.cycle([pack.file(entry.path) for entry in pack.manifest.experts])
    return max(read_for(files, IoSettings(True, threads), 1.0) for threads in DEPTHS)


def streaming(device: Device, packs: Packs, sizes: Sizes, seconds: float) -> dict[str, Outcome]:
    """Ours and the baselines under a budget, at every budget, those that have none, and all in memory."""
    prompt = sizes.prompt if packs.routing else 0  # texts of the reference models are shorter
    most = memory_bytes(packs, max(sizes.shares))
    entries = [races.ours(each, packs, None, None) for each in IN_MEMORY]
    entries += [races.ours(each, packs, None, most, prompt) for each in UNBUDGETED]
    for share in sizes.shares:
        for each in BUDGETED:
            reads = prompt if each is MOERT or share == HALF else 0
            entries.append(races.ours(each, packs, share, memory_bytes(packs, share), reads))
    return race(device, entries, seconds, sizes.rounds)


def start_rows(where: str, device: Device, packs: Packs, failed: list[str]) -> list[Row]:
    """From the start of a process to its first token with half the experts' room, nothing known of the drive."""
    setting = replace(MOERT.setting(packs, HALF), io=None, routing=None)
    try:
        taken = [races.start(device, setting, memory_bytes(packs, HALF)) for _ in range(STARTS)]
    except RuntimeError as error:
        tell(f"{where}: start", error, failed)
        return []
    return [row_of_runs(f"{where}: {MOERT.name} {HALF:.0%}: start to first token", taken, "s")]


def model_rows(packs: Packs, device: Device, sizes: Sizes, failed: list[str]) -> list[Row]:
    where = f"{packs.name}, {device.name}"
    disk = disk_bytes_per_s(packs.mixed)
    seconds = sizes.seconds if packs.routing else sizes.reference_seconds
    outcomes = alive(where, streaming(device, packs, sizes, seconds), failed)
    rows = [Row(f"{where}: disk without a limit", disk / 1e6, "MB/s"), *speed_rows(where, outcomes)]
    rows += against_rows(where, device, outcomes, sizes.shares)
    for share in sizes.shares:
        mine = f"{MOERT.name} {share:.0%}"
        if mine in outcomes and RESIDENT.name in outcomes:
            bandwidth = min(disk, device.read_bps or disk)
            rows += bound_rows(f"{where}: {mine}", outcomes[mine], outcomes[RESIDENT.name], bandwidth)
    # Next to Python and its libraries, the reference models are nothing.
    if device.name == "ssd" and packs.routing and IO_FREE.name in outcomes:
        rows += memory_rows(where, outcomes, sizes.shares)
    return [*rows, *start_rows(where, device, packs, failed)]


def beside_llama(packs: Packs, device: Device, sizes: Sizes, failed: list[str]) -> list[Row]:
    """The same weights in about as many bits, which rows say, in groups of the same size, of which each takes what it
    can. Both write the same text and go where the random routers say."""
    limit = memory_bytes(packs, HALF)
    setting = replace(
        MOERT.setting(packs, HALF), cache_bytes=None, memory_bytes=limit, routing=None, texts=str(texts(OLMOE))
    )  # fmt: skip
    entries = [
        races.of_setting("moert", setting, MOERT.warm_tokens, limit, sizes.prompt),
        races.of_llama(f"llama.cpp {SAME_AS_Q2_K}", LLAMA, file_of(SAME_AS_Q2_K), limit, texts(OLMOE), sizes.prompt),
    ]
    where = f"{packs.name} (own routers), {device.name}, {limit / 1e6:.0f} MB"
    mine = Pack.open(packs.mixed).manifest.effective_bits()
    rows = llama_rows(where, alive(where, race(device, entries, sizes.seconds, sizes.rounds), failed))
    return [
        Row(f"{where}: effective bits of an expert's weight: moert", mine, "bits"),
        Row(f"{where}: effective bits of an expert's weight: {SAME_AS_Q2_K}", Q2_K_BITS, "bits"),
        *rows,
    ]


def part_rows(name: str, device: Device, sizes: Sizes, failed: list[str]) -> list[Row]:
    """Raises RuntimeError, OSError or CalledProcessError if a program ended or can't be started."""
    if name in REFERENCES:
        return model_rows(reference(name), device, sizes, failed)
    if name == "olmoe-shaped":
        return model_rows(shaped(), device, sizes, failed)
    subprocess.run([str(LLAMA), "-m", "recipes.bench.llama", "make"], check=True, capture_output=True)
    return beside_llama(shaped(), device, sizes, failed)


def all_rows(steps: Sequence[tuple[str, str]], sizes: Sizes) -> tuple[list[Row], list[str]]:
    """Rows of each part on each device, and which of these steps failed; says on stderr how far it is."""
    rows, failed, done = list[Row](), list[str](), 0
    started = time.perf_counter()
    whole = sum(PLANNED_S[part] for part, _ in steps)
    for number, (part, device) in enumerate(steps, 1):
        passed = time.perf_counter() - started
        left = (whole - done) * (passed / done if done else 1.0)
        print(f"[{number}/{len(steps)}] {part}, {device}; about {left / 60:.0f} min left", file=sys.stderr, flush=True)
        try:
            found = part_rows(part, DEVICES[device], sizes, failed)
        except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
            tell(f"{part}, {device}", error, failed)
        else:
            report(found)
            rows += found
        done += PLANNED_S[part]
    return rows, failed


def report(rows: Sequence[Row]) -> None:
    print(table(rows), end="\n\n", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="The runtime on imitated small devices, beside others.")
    parts = [*REFERENCES, "olmoe-shaped", "llama"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--devices", nargs="+", choices=list(DEVICES), default=sized(list(DEVICES), ["nvme"]))
    parser.add_argument("--seconds", type=float, default=Sizes.seconds, help="of a turn")
    parser.add_argument("--rounds", type=int, default=Sizes.rounds)
    arguments = parser.parse_args()
    if lacking := missing(reads=Path(__file__)):
        raise SystemExit(f"bench-stream imitates devices with control groups, but {lacking}")
    need([DEMO / "summary.json"], "demo")
    started = time.perf_counter()
    sizes = Sizes(arguments.seconds, min(arguments.seconds, Sizes.reference_seconds), arguments.rounds)
    with read_ahead(DEMO) as ahead_kb:
        rows, failed = all_rows([(part, device) for part in arguments.parts for device in arguments.devices], sizes)
    print(table(rows))
    if vars(arguments) == vars(parser.parse_args([])):
        settings = {
            **asdict(sizes),
            "threads": THREADS,
            "read_ahead_kb": ahead_kb,
            "failed": failed,
            "took_s": round(time.perf_counter() - started),
        }
        print(f"written to {write('stream', context(settings), rows)}")
    if failed:
        raise SystemExit(f"failed: {'; '.join(failed)}")


if __name__ == "__main__":
    as_program(main)
