"""`make bench-methods`: the methods of five papers beside each other, and together.

An imitated drive of 500 MB/s, room for half of the experts' bytes at mixed widths, or for one layer on demand. In
turns: experts that are read when they are needed, then one method after the other, then all that are on by default.
Packs of wiki and g2p promise 5%, but for those of 4 bits. Rows say tokens/s, bytes read a token, and the speed beside
the cache alone. OLMoE's shape has the routing of wiki, and experts of a real size. Writes build/bench/methods.json.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from recipes.bench.program import as_program
from recipes.bench.race import (
    CACHE,
    DEVICES,
    IO_QEXP,
    MOERT,
    ON_DEMAND,
    Outcome,
    alive,
    bench,
    memory_bytes,
    ours,
    race,
)
from recipes.bench.result import Row, row_of_runs, table
from recipes.bench.sized import sized
from recipes.bench.stream_packs import DEMO, expert_bytes, reference, shaped
from recipes.bench.stream_rows import ratios

SHARE = 0.5
SECONDS, ROUNDS = sized((1.5, 7), (0.1, 1))
DEVICE = DEVICES["ssd"]
NEVER_SLOWER = 0.98

CACHE_ALONE = replace(CACHE, name="the cache alone", eviction="lru")
EVICTION = replace(CACHE, name="eviction by expected use")
EVERYTHING = replace(MOERT, name="everything by default")
METHODS = (
    replace(IO_QEXP, name="4 bits, on demand"),
    replace(ON_DEMAND, name="mixed bits, on demand"),
    CACHE_ALONE,
    replace(CACHE, name="the latest of each layer", eviction="layer-lru"),
    replace(CACHE, name="eviction by frequency and distance", eviction="paper"),
    EVICTION,
    replace(MOERT, name="path tables read ahead", predictor="transitions"),
    replace(MOERT, name="routers read ahead", predictor="gate"),
    EVERYTHING,
)


def rows_of(where: str, raced: Mapping[str, Outcome]) -> list[Row]:
    """Returns tokens/s and bytes a token of each, and the speed beside the cache alone."""
    rows, outcomes = list[Row](), {name.removesuffix(f" {SHARE:.0%}"): each for name, each in raced.items()}
    for name, outcome in outcomes.items():
        about = f"{where}: {name}"
        rows.append(row_of_runs(f"{about}: decode", outcome.speeds, "tokens/s"))
        read = [each.bytes_read / each.tokens / 1e6 for each in outcome.segments]
        rows.append(row_of_runs(f"{about}: read", read, "MB a token"))
        if CACHE_ALONE.name in outcomes and name != CACHE_ALONE.name:
            rows.append(row_of_runs(f"{about}: to the cache", ratios(outcome, outcomes[CACHE_ALONE.name]), "×"))
    if {EVICTION.name, EVERYTHING.name} <= outcomes.keys():
        beside = ratios(outcomes[EVERYTHING.name], outcomes[EVICTION.name])
        rows.append(row_of_runs(f"{where}: default to nothing read ahead", beside, "×").at_least(NEVER_SLOWER))
    return rows


def result_rows(names: Sequence[str], failed: list[str]) -> list[Row]:
    rows = list[Row]()
    for name in names:
        model = shaped(baselines=True) if name == SHAPED else reference(name)
        rows.append(Row(f"{model.name}: experts", expert_bytes(model.mixed) / 1e6, "MB"))
        entries = [ours(each, model, SHARE, memory_bytes(model, SHARE)) for each in METHODS]
        rows += rows_of(model.name, alive(model.name, race(DEVICE, entries, SECONDS, ROUNDS), failed))
        print(table(rows), end="\n\n", file=sys.stderr, flush=True)
    return rows


SHAPED = "olmoe-shaped"
NAMES = sized(("wiki", "g2p", SHAPED), ("g2p",))


def main() -> int:
    packs = [DEMO / f"{name}.pack" for name in ("g2p", "wiki")]
    settings = {"share": SHARE, "seconds": SECONDS, "rounds": ROUNDS}
    return bench("methods", packs, partial(result_rows, NAMES), settings)


if __name__ == "__main__":
    as_program(main, __doc__)
