"""`make bench-hash`: knowing the experts beforehand, by the tables of SiDA (Du et al. 2023) and the figures of
Mixtral-offloading (Eliseev & Mazur 2023), on the reference models with functions that `moeconv train-hash` trained.

Parts: `hits` of the function on short, middle and long inputs; performance `kept` where it takes the place of the
routers; `memory` that a short input needs; the share of a pass that `choosing` takes; `recall` of what reads ahead;
`evictions`, and k latest experts of each layer; `speed` on imitated drives. All text is held out.

Writes build/bench/hashed.json.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from moert.pack.reader import Pack
from recipes.bench.devices import DEVICES, alive
from recipes.bench.hash_evictions import SHARES, eviction_rows, hit_rates, k_rows
from recipes.bench.hash_kept import kept_rows
from recipes.bench.hash_memory import choosing_rows, demanded_rows, saved_speed_row
from recipes.bench.hash_packs import FOLDER, LENGTHS, SUBJECTS, Subject, function_of, inputs, say, with_function
from recipes.bench.hash_race import race_rows, raced
from recipes.bench.hash_rows import hit_rows, recall_rows
from recipes.bench.readahead import read_ahead
from recipes.bench.result import Row, context, table, write
from recipes.bench.sized import sized
from recipes.bench.streamed import THREADS
from tests.cgroups import missing

SECONDS, ROUNDS = sized((0.5, 5), (0.05, 1))


def function_rows(subject: Subject) -> Iterator[Row]:
    """What the function is."""
    manifest, function = Pack.open(subject.pack).manifest, function_of(subject.pack)
    nbytes = manifest.files["hash.safetensors"].nbytes
    yield Row(f"{subject.name}: hash function", nbytes / 1e6, "MB")
    yield Row(f"{subject.name}: hash function, of the pack", 100 * nbytes / manifest.nbytes(), "%")
    yield Row(f"{subject.name}: features", next(iter(function.stacks.values())).width, "")


def memory_rows(subject: Subject) -> Iterator[Row]:
    for length in LENGTHS:
        yield from demanded_rows(subject, length)
    yield saved_speed_row(subject)


def evictions(subject: Subject) -> Iterator[Row]:
    texts = inputs(subject)
    for share in SHARES:
        yield from eviction_rows(subject.name, share, hit_rates(subject.pack, texts, subject.new_tokens, share))
    yield from k_rows(subject.name, Pack.open(subject.pack))


PARTS: Mapping[str, Callable[[Subject], Iterable[Row]]] = {
    "hits": hit_rows, "kept": kept_rows, "memory": memory_rows, "choosing": choosing_rows, "recall": recall_rows,
    "evictions": evictions,
}  # fmt: skip
SPEED = "speed"


def speed_rows(
    subjects: Sequence[Subject], devices: Sequence[str], asked: argparse.Namespace, failed: list[str]
) -> Iterator[Row]:
    for subject in subjects:
        for device in devices:
            where = f"{subject.name}, {device}"
            say(where)
            outcomes = alive(where, raced(subject, DEVICES[device], asked.seconds, asked.rounds), failed)
            yield from race_rows(where, outcomes)


def all_rows(asked: argparse.Namespace, failed: list[str]) -> list[Row]:
    subjects, rows = [SUBJECTS[name] for name in asked.models], list[Row]()
    for subject in subjects:
        with_function(subject)
        rows += function_rows(subject)
    for part in (part for part in PARTS if part in asked.parts):
        for subject in subjects:
            started = time.perf_counter()
            found = list(PARTS[part](subject))
            print(table(found), end="\n\n", file=sys.stderr, flush=True)
            say(f"{subject.name}, {part}: {time.perf_counter() - started:.0f} s")
            rows += found
    if SPEED in asked.parts:
        found = list(speed_rows(subjects, asked.devices, asked, failed))
        print(table(found), end="\n\n", file=sys.stderr, flush=True)
        rows += found
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Knowing the experts beforehand, by the tables of those who did.")
    parts = [*PARTS, SPEED]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--models", nargs="+", choices=list(SUBJECTS), default=sized(list(SUBJECTS), ["g2p"]))
    parser.add_argument("--devices", nargs="+", choices=list(DEVICES), default=sized(list(DEVICES), ["nvme"]))
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of a turn")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    asked = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    if SPEED in asked.parts and (lacking := missing(reads=FOLDER)):
        raise SystemExit(f"bench-hash imitates drives with control groups, but {lacking}")
    started, failed = time.perf_counter(), list[str]()
    with read_ahead(FOLDER) as ahead_kb:
        rows = all_rows(asked, failed)
    print(table(rows))
    settings = {
        "parts": asked.parts, "models": asked.models, "devices": asked.devices, "seconds": asked.seconds,
        "rounds": asked.rounds, "threads": THREADS, "read_ahead_kb": ahead_kb, "failed": failed,
        "took_s": round(time.perf_counter() - started),
    }  # fmt: skip
    whole = vars(asked) == vars(parser.parse_args([]))
    print(f"written to {write('hashed' if whole else 'hashed-part', context(settings), rows)}")
    if failed:
        raise SystemExit(f"failed: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
