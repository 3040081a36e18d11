"""`make bench-stream`: small devices imitated by control groups; this engine beside the paper's baselines, llama.cpp.

A device is a limit on reading from the disk; a budget is a share of the bytes of the experts in mixed widths. The
baselines of EdgeMoE §4 are settings of our engine: IO-FREE (16 bits, all in memory), IO-EXP (16 bits, each expert read
when it is demanded), IO-QEXP (the same with 4 bits), and one like STI (4 bits, a buffer as large as our cache that
keeps what it was first filled with). Everything but the experts is the same for all of them. The model of OLMoE's shape
is routed by a recording of a trained one (tests/bench/routing.py), but beside llama.cpp, which can't be told where to
go, both use the routers of the random weights. All read past the page cache, except llama.cpp.

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

from moert.pack.manifest import BACKBONE
from moert.pack.reader import Pack
from tests.bench import race as races
from tests.bench.contenders import BUDGETED, IN_MEMORY, MOERT, RESIDENT, UNBUDGETED
from tests.bench.llama import file_of
from tests.bench.race import Device, Outcome, race
from tests.bench.result import Row, context, table, write
from tests.bench.stream_packs import DEMO, REFERENCES, Packs, expert_bytes, reference, shaped
from tests.bench.stream_rows import against_rows, bound_rows, llama_rows, memory_rows, speed_rows
from tests.bench.streamed import PIECE, THREADS
from tests.cgroups import missing

LLAMA = Path("build/peers/llama/bin/python")
DEVICES = {
    "board": Device("board", 100_000_000),
    "ssd": Device("ssd", 500_000_000),
    "nvme": Device("nvme", None),
}
PROMPTS_ON = "ssd"  # on a slower device a prompt takes a baseline a minute
SAME_AS_Q2_K = "Q2_K"
PROCESS_BYTES = 300_000_000  # Python, torch, keys and values, activations: what a budget gets beside the weights
LLAMA_SHARE = 0.5
DEPTHS = (2, 4, 16)  # reads at once


@dataclass(frozen=True)
class Sizes:
    """Seconds of a turn, turns that count, budgets, tokens of a prompt."""

    seconds: float = 4.0
    reference_seconds: float = 1.0
    rounds: int = 3
    shares: Sequence[float] = (0.25, 0.5, 0.75)
    prompt: int = 128


def memory_bytes(packs: Packs, share: float) -> int:
    """What a process may hold at this budget."""
    backbone = Pack.open(packs.mixed).manifest.files[BACKBONE].nbytes
    return int(share * expert_bytes(packs.mixed)) + backbone + PROCESS_BYTES


def disk_bytes_per_s(packs: Packs) -> float:
    """How fast experts of mixed widths are read here without a limit, many at once if that is faster; small ones come
    slower than large ones."""
    from moert.experts.drive import IoSettings
    from moert.experts.probe import read_for

    pack = Pack.open(packs.mixed)
    files = itertools.cycle([pack.file(entry.path) for entry in pack.manifest.experts])
    return max(read_for(files, IoSettings(True, threads), 1.0) for threads in DEPTHS)


def streaming(device: Device, packs: Packs, sizes: Sizes, seconds: float) -> dict[str, Outcome]:
    """Ours and the baselines under a budget, at every budget, those that have none, and all in memory."""
    prompt = sizes.prompt if device.name == PROMPTS_ON and packs.routing else 0
    most = memory_bytes(packs, max(sizes.shares))
    entries = [races.ours(each, packs, None, None) for each in IN_MEMORY]
    entries += [races.ours(each, packs, None, most, prompt) for each in UNBUDGETED]
    for share in sizes.shares:
        entries += [races.ours(each, packs, share, memory_bytes(packs, share), prompt) for each in BUDGETED]
    return race(device, entries, seconds, sizes.rounds)


def model_rows(packs: Packs, devices: Sequence[Device], sizes: Sizes) -> list[Row]:
    seconds = sizes.seconds if packs.routing else sizes.reference_seconds
    disk = disk_bytes_per_s(packs)
    rows = [Row(f"{packs.name}: disk without a limit", disk / 1e6, "MB/s")]
    report(rows)
    for device in devices:
        where = f"{packs.name}, {device.name}"
        outcomes = streaming(device, packs, sizes, seconds)
        added = [*speed_rows(where, outcomes), *against_rows(where, device, outcomes, sizes.shares)]
        for share in sizes.shares:
            mine = f"{MOERT.name} {share:.0%}"
            bandwidth = min(disk, device.read_bps or disk)
            added += bound_rows(f"{where}: {mine}", outcomes[mine], outcomes[RESIDENT.name], bandwidth)
        if device.name == "ssd" and packs.routing:  # next to Python and torch, the reference models are nothing
            added += memory_rows(where, outcomes, sizes.shares)
        report(added)
        rows += added
    return rows


def beside_llama(packs: Packs, devices: Sequence[Device], sizes: Sizes) -> list[Row]:
    """The same weights in about as many bits, in processes of the same size. Both go where the random routers say."""
    limit = memory_bytes(packs, LLAMA_SHARE)
    setting = replace(MOERT.setting(packs, LLAMA_SHARE), routing=None, new_tokens=PIECE)
    rows = []
    for device in devices:
        entries = [
            races.of_setting(f"moert {LLAMA_SHARE:.0%}", setting, MOERT.warm_tokens, limit),
            races.of_llama(f"llama.cpp {SAME_AS_Q2_K}", LLAMA, file_of(SAME_AS_Q2_K), limit),
        ]
        where = f"{packs.name} (own routers), {device.name}, {limit / 1e6:.0f} MB"
        added = llama_rows(where, race(device, entries, sizes.seconds, sizes.rounds))
        report(added)
        rows += added
    return rows


def part_rows(name: str, devices: Sequence[Device], sizes: Sizes) -> list[Row]:
    """Raises RuntimeError if a program ended."""
    if name in REFERENCES:
        return model_rows(reference(name), devices, sizes)
    if name == "olmoe-shaped":
        return model_rows(shaped(), devices, sizes)
    subprocess.run([str(LLAMA), "-m", "tests.bench.llama", "make"], check=True, capture_output=True)
    return beside_llama(shaped(), devices, sizes)


def report(rows: Sequence[Row]) -> None:
    print(table(rows), end="\n\n", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="The runtime on imitated small devices, beside others.")
    parts = [*REFERENCES, "olmoe-shaped", "llama"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--devices", nargs="+", choices=list(DEVICES), default=list(DEVICES))
    parser.add_argument("--seconds", type=float, default=Sizes.seconds, help="of a turn")
    parser.add_argument("--rounds", type=int, default=Sizes.rounds)
    arguments = parser.parse_args()
    if lacking := missing(reads=Path(__file__)):
        raise SystemExit(f"bench-stream imitates devices with control groups, but {lacking}")
    if not (DEMO / "summary.json").exists():
        raise SystemExit("bench-stream runs the demo's packs, and they are missing: run `make demo`")
    started, rows = time.perf_counter(), list[Row]()
    sizes = Sizes(arguments.seconds, min(arguments.seconds, Sizes.reference_seconds), arguments.rounds)
    devices = [DEVICES[name] for name in arguments.devices]
    failed = []
    for name in arguments.parts:
        try:
            rows += part_rows(name, devices, sizes)
        except RuntimeError as error:  # a program ended; the others' figures took a long time
            print(f"{name} failed: {error}", file=sys.stderr, flush=True)
            failed.append(name)
    print(table(rows))
    if vars(arguments) == vars(parser.parse_args([])):
        settings = {
            **asdict(sizes),
            "threads": THREADS,
            "failed": failed,
            "took_s": round(time.perf_counter() - started),
        }
        print(f"written to {write('stream', context(settings), rows)}")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
