"""`make bench-less`: routing that prefers what was used lately, beside exact routing of the same packs.

What is asked for: bytes a token, and loss, with routing fitted to 0.5% and 1% beyond the widths' own loss; whole
conversions with --resident beside those without. What that gives: speed on imitated drives, with experts of the
reference models' size, of OLMoE's, and beside llama.cpp. What it must not touch: answers are the same with any room for
experts. And what the text is like that is written so.

Writes build/bench/less.json.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from moeconv.artifacts import ConversionReport
from recipes.bench import less_function, less_shaped
from recipes.bench.contenders import MOERT, RESIDENT
from recipes.bench.less_packs import BEYOND, PLAIN, SHARES, Level, converted, level_packs, levels, text_of
from recipes.bench.less_rows import against_alone, asked_rows, speed_rows
from recipes.bench.race import Device, Entry, of_setting, race
from recipes.bench.readahead import read_ahead
from recipes.bench.result import Row, context, table, write
from recipes.bench.sized import sized
from recipes.bench.stream import DEVICES, alive, disk_bytes_per_s, memory_bytes
from recipes.bench.stream_packs import Packs, expert_bytes, prompts
from recipes.bench.streamed import THREADS, Setting
from tests.cgroups import missing

ASKED = tuple(name for name in ("wiki", "wikids") if name in PLAIN)
RACED = sized(("ssd", "nvme"), ("nvme",))
SECONDS, ROUNDS, NEW_TOKENS = sized((3.0, 5, 192), (0.05, 1, 8))


def entries_of(name: str, packs: Mapping[float, Path], resident: Path) -> list[Entry]:
    """The plain pack routed exactly and with each level, and that of --resident; each has room for that share of its
    experts."""
    plain, asked = PLAIN[name], str(prompts(PLAIN[name], text_of(name)))

    def entry(what: str, pack: Path, share: float, prefers: str) -> Entry:
        setting = Setting(
            str(pack), int(share * expert_bytes(pack)), prompts=asked, new_tokens=NEW_TOKENS, prefers=prefers
        )
        return of_setting(f"{what} {share:.0%}", setting, MOERT.warm_tokens, memory_bytes(alike(name, pack), share))

    entries = [
        of_setting(
            RESIDENT.name, Setting(str(plain), None, predict="none", prompts=asked, new_tokens=NEW_TOKENS),
            RESIDENT.warm_tokens, None,
        )
    ]  # fmt: skip
    for share in SHARES:
        entries.append(entry("exact", plain, share, "exact"))
        entries += [entry(f"{100 * beyond:g}%", pack, share, f"{share:.0%}") for beyond, pack in packs.items()]
        entries.append(entry("--resident", resident, share, f"{share:.0%}"))
    return entries


def alike(name: str, pack: Path) -> Packs:
    """For what asks how much memory a pack gets."""
    return Packs(name, pack, pack, pack, None, None, NEW_TOKENS)


def raced_rows(
    name: str, found: Sequence[Level], resident: Path, devices: Sequence[str], failed: list[str]
) -> list[Row]:
    packs, room = level_packs(name, found), alike(name, PLAIN[name])
    larger = expert_bytes(resident) / expert_bytes(PLAIN[name])
    rows = [Row(f"{name}: experts of --resident to those of --loss alone", larger, "of their bytes")]
    for each in devices:
        device, where = DEVICES[each], f"{name}, {each}"
        disk = disk_bytes_per_s(room.mixed)
        outcomes = alive(where, race(device, entries_of(name, packs, resident), SECONDS, ROUNDS), failed)
        rows += speed_rows(where, outcomes, min(disk, device.read_bps or disk), limited(device))
    return rows


def limited(device: Device) -> bool:
    """Whether a drive is slow enough to be what a token waits for."""
    return device.read_bps is not None


def tell(rows: Sequence[Row]) -> Sequence[Row]:
    print(table(rows), end="\n\n", file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Routing that prefers what was used lately, beside exact routing.")
    parser.add_argument("--devices", nargs="+", choices=list(DEVICES), default=list(RACED))
    arguments = parser.parse_args()
    if lacking := missing(reads=Path(__file__)):
        raise SystemExit(f"bench-less imitates drives with control groups, but {lacking}")
    if absent := [str(path) for path in PLAIN.values() if not path.is_dir()]:
        raise SystemExit(f"{' and '.join(absent)} missing: run `make demo` and `make report`")
    started, failed, rows = time.perf_counter(), list[str](), list[Row]()
    made: dict[str, tuple[Path, ConversionReport]] = {name: converted(name) for name in PLAIN}
    found = {name: levels(name) for name in ASKED}
    for name in ASKED:
        rows += tell(asked_rows(name, found[name]))
    for name, (_, report) in made.items():
        rows += tell(against_alone(name, report))
    with read_ahead(next(iter(PLAIN.values()))) as ahead_kb:
        for name in ASKED:
            rows += tell(raced_rows(name, found[name], made[name][0], arguments.devices, failed))
        rows += tell(less_shaped.rows(level_packs("wiki", found["wiki"]), found["wiki"], arguments.devices, failed))
    rows += tell(less_function.rows({name: pack for name, (pack, _) in made.items()}))
    print(table(rows))
    settings = {
        "shares": SHARES, "beyond": BEYOND, "seconds": SECONDS, "rounds": ROUNDS, "threads": THREADS, "failed": failed,
        "devices": arguments.devices, "read_ahead_kb": ahead_kb, "took_s": round(time.perf_counter() - started),
    }  # fmt: skip
    print(f"written to {write('less', context(settings), rows)}")
    if failed:
        raise SystemExit(f"failed: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
