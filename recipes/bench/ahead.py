"""`make bench-ahead`: whether reading ahead pays, and whether it beats LRU over experts of two bits, in equal room.

Experts have OLMoE's size, and the recorded routing of a trained model, on each imitated drive. In turns: the next
layer's router names experts to read ahead (`--tune predict=gate`); nothing is read ahead (`none`); all experts have two
bits, under LRU, without reading ahead, in the same number of bytes. Writes build/bench/ahead.json.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from recipes.bench import race as races
from recipes.bench.program import as_program
from recipes.bench.race import CACHE, DEVICES, INT4_LRU, MOERT, alive, memory_bytes, race
from recipes.bench.result import Row, row_of_runs, table
from recipes.bench.shaped import DENSE, write_pack
from recipes.bench.sized import sized
from recipes.bench.stream_packs import DEMO, Packs, expert_bytes, shaped
from recipes.bench.stream_rows import ratios, speed_rows

SHARES = sized((0.25, 0.5, 0.75), (0.5,))
SECONDS, ROUNDS = sized((1.5, 5), (0.1, 1))
NAMES = sized(tuple(DEVICES), ("nvme",))
GATE, NONE = replace(MOERT, name="gate", predictor="gate"), replace(CACHE, name="none")
INT2 = replace(INT4_LRU, name="INT2, LRU")


def packs() -> Packs:
    """Returns the model with mixed widths, and in the place of four bits two for all experts."""
    found = shaped(baselines=False)
    found = replace(found, int4=found.int4.with_name("2bits.pack"))
    write_pack(found.int4, 2, DENSE)
    return found


def device_rows(model: Packs, name: str, failed: list[str]) -> list[Row]:
    """Returns the speed of each at all shares on one drive, and of reading ahead beside both others."""
    where = f"{model.name}, {name}"
    entries = [
        races.ours(each, model, share, memory_bytes(model, share)) for share in SHARES for each in (GATE, NONE, INT2)
    ]
    outcomes = alive(where, race(DEVICES[name], entries, SECONDS, ROUNDS), failed)
    rows = speed_rows(where, outcomes)
    for share in SHARES:
        mine = outcomes.get(f"{GATE.name} {share:.0%}")
        for other in (NONE.name, INT2.name):
            theirs = outcomes.get(f"{other} {share:.0%}")
            if mine is not None and theirs is not None:
                what = f"{where}: {GATE.name} {share:.0%} to {other}"
                rows.append(row_of_runs(what, ratios(mine, theirs), "× its speed"))
    print(table(rows), end="\n\n", file=sys.stderr, flush=True)
    return rows


def result_rows(names: Sequence[str], failed: list[str]) -> list[Row]:
    model = packs()
    rows = [
        Row(f"{model.name}: experts, {what}", expert_bytes(pack) / 1e6, "MB")
        for what, pack in (("mixed widths", model.mixed), ("INT2", model.int4))
    ]
    return [*rows, *(row for name in names for row in device_rows(model, name, failed))]


def main() -> int:
    settings = {"shares": SHARES, "seconds": SECONDS, "rounds": ROUNDS}
    return races.bench("ahead", [DEMO / "wiki.pack"], partial(result_rows, NAMES), settings)


if __name__ == "__main__":
    as_program(main, __doc__)
