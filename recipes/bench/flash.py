"""`make bench-flash`: single neurons in place of whole experts, by the tables and curves of "LLM in a flash" (Alizadeh
et al., arXiv 2312.11514), on the reference models with ReLU.

Parts: `bytes` that are read for a token beside whole experts in the same room; `steps` from loading all that a token
needs to what is here, on imitated drives; `today`, the speed beside whole experts; `curves` of what a window leaves to
be loaded, and of hits; `order`, in which order neurons lie best; `shapes` of published models with recorded firings.
Races also say where a token's time goes, and what the process held. All text is held out.

Writes build/bench/flash.json.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from moert.pack.neurons import load_order
from moert.pack.reader import Pack
from recipes.bench.devices import tell
from recipes.bench.flash_bytes import bytes_rows
from recipes.bench.flash_curves import hit_rows, window_rows
from recipes.bench.flash_order import order_rows
from recipes.bench.flash_packs import COLUMNS, FOLDER, SUBJECTS, Subject, pack_of, say
from recipes.bench.flash_race import step_race, today_race
from recipes.bench.flash_shapes import SHAPES, recorded, shape_rows
from recipes.bench.readahead import read_ahead
from recipes.bench.result import Row, context, table, write
from recipes.bench.sized import sized
from recipes.bench.streamed import THREADS
from tests.cgroups import missing

SECONDS, ROUNDS = sized((0.5, 3), (0.05, 1))
STEPPED, STEP_DEVICES = ("opt",), ("ssd", "board")
"""Where everything is asked for at each token."""
SSD = "ssd"


def curves(subject: Subject) -> Iterator[Row]:
    firings, _ = recorded(subject)
    opened = Pack.open(pack_of(subject, COLUMNS))
    yield from window_rows(subject.name, firings)
    yield from hit_rows(subject.name, firings, opened.neurons(opened.manifest.experts[0].key).per_block)


def order(subject: Subject) -> Iterator[Row]:
    firings, _ = recorded(subject)
    yield from order_rows(subject.name, firings, load_order(Pack.open(pack_of(subject, COLUMNS))))


PARTS: Mapping[str, Callable[[Subject], Iterable[Row]]] = {"bytes": bytes_rows, "curves": curves, "order": order}
RACES = ("steps", "today", "shapes")


def pieces(asked: argparse.Namespace, failed: list[str]) -> Iterator[tuple[str, Callable[[], Iterable[Row]]]]:
    """What is to be done, by name."""
    subjects = [SUBJECTS[name] for name in asked.models]
    turn = (asked.seconds, asked.rounds, failed)
    for part, rows_of in PARTS.items():
        for subject in subjects if part in asked.parts else ():
            yield f"{subject.name}, {part}", lambda rows_of=rows_of, subject=subject: rows_of(subject)
    for subject in subjects:
        for device in STEP_DEVICES if "steps" in asked.parts and subject.name in STEPPED else ():
            yield f"{subject.name}, {device}, steps", lambda s=subject, d=device: step_race(s, d, *turn)
        if "today" in asked.parts:
            yield f"{subject.name}, {SSD}, today", lambda s=subject: today_race(s, SSD, *turn)
    for name, shape in SHAPES.items() if "shapes" in asked.parts else ():
        if shape.subject.name in asked.models:
            yield name, lambda shape=shape: shape_rows(shape, SSD, *turn)


def all_rows(asked: argparse.Namespace, failed: list[str]) -> list[Row]:
    """What fails costs its own rows."""
    rows = list[Row]()
    for name, piece in pieces(asked, failed):
        started, found = time.perf_counter(), list[Row]()
        try:
            found += piece()
        except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
            tell(name, error, failed)
        print(table(found), end="\n\n", file=sys.stderr, flush=True)
        say(f"{name}: {time.perf_counter() - started:.0f} s")
        rows += found
    return rows


def main() -> None:
    there = [name for name, subject in SUBJECTS.items() if subject.is_there]
    parser = argparse.ArgumentParser(description="Single neurons in place of whole experts.")
    parser.add_argument("--parts", nargs="+", choices=[*PARTS, *RACES], default=[*PARTS, *RACES])
    parser.add_argument("--models", nargs="+", choices=there, default=sized(there, ["g2p"]))
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of a turn")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    asked = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    if set(RACES) & set(asked.parts) and (lacking := missing(reads=FOLDER)):
        raise SystemExit(f"bench-flash imitates drives with control groups, but {lacking}")
    started, failed = time.perf_counter(), list[str]()
    with read_ahead(FOLDER) as ahead_kb:
        rows = all_rows(asked, failed)
    print(table(rows))
    settings = {
        "parts": asked.parts, "models": asked.models, "seconds": asked.seconds, "rounds": asked.rounds,
        "threads": THREADS, "read_ahead_kb": ahead_kb, "failed": failed,
        "took_s": round(time.perf_counter() - started),
    }  # fmt: skip
    whole = vars(asked) == vars(parser.parse_args([]))
    print(f"written to {write('flash' if whole else 'flash-part', context(settings), rows)}")
    if failed:
        raise SystemExit(f"failed: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
