"""`make bench-fill`: the expert cache filled before the first request (`--tune fill=used`) beside an empty one, in
turns, on imitated drives.

Each run opens a pack anew, waits as long as a user may who types a question, and writes an answer: time to its first
token, its speed, and its hits. Then the same without waiting, as `moert run` does, from opening to the end of the
answer. Both ways write the same tokens, or the bench fails. Writes build/bench/fill.json.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from moert.engine.engine import Engine
from recipes.bench.program import as_program, need
from recipes.bench.race import DEVICES, Device
from recipes.bench.result import Row, context, row_of_runs, table, write
from recipes.bench.runner import Runner, serve
from recipes.bench.sized import sized
from recipes.bench.stream_packs import DEMO
from recipes.bench.streamed import THREADS
from tests.cgroups import Group, missing

MODELS = sized(("wiki", "g2p"), ("wiki",))
DRIVES, SHARES = sized(("ssd", "board"), ("ssd",)), sized((25, 50), (50,))
RUNS, IDLE_S = sized((8, 1.0), (1, 0.1))
NEW_TOKENS, PROMPT_TOKENS = sized(33, 4), 32
EMPTY, FILLED = WAYS = ("none", "used")
SOONER = 0.95
FIGURES = {"first_ms": ("first token", "ms"), "speed": ("decode", "tokens/s"), "hits": ("hits", "")}


class Session:
    """A process that reads no faster than its group may. See recipes.bench.runner."""

    def answer(self, pack: str, way: str, percent: int, text: str, idle_s: float) -> dict[str, Any]:
        """Opens the pack, waits, and answers → its figures."""
        started = time.perf_counter()
        with Engine.open(pack, cache=f"{percent}%", io="direct,2", threads=THREADS, fill=way) as engine:
            ids = engine.encode(text)[:PROMPT_TOKENS]
            time.sleep(idle_s)
            answer = engine.generate(ids, max_new_tokens=NEW_TOKENS, ignore_eos=True)
            first_s, whole_s = answer.time_to_first_token_s, time.perf_counter() - started
            return {
                "first_ms": 1e3 * first_s, "speed": (NEW_TOKENS - 1) / (answer.total_s - first_s), "whole_s": whole_s,
                "hits": engine.counters.hits / engine.counters.requests, "tokens": answer.tokens,
            }  # fmt: skip


def texts(name: str) -> list[str]:
    """Returns the beginnings of held-out texts, one more than RUNS: the first warms up."""
    lines = Path(f"build/data/{name}/heldout.jsonl").read_text(encoding="utf-8").splitlines()[: 1 + RUNS]
    return [(row.get("input") or row["text"].strip())[: 16 * PROMPT_TOKENS] for row in map(json.loads, lines)]


def rows_of(name: str, device: Device, percent: int) -> Iterator[Row]:
    """Yields the figures of both ways, and those of the filled cache beside those of an empty one. Raises ValueError
    where they write different answers."""
    pack, where = DEMO / f"{name}.pack", f"{name}, {device.name}, {percent}%"
    command = [sys.executable, "-m", "recipes.bench.fill", "session"]
    with Group(None, device.read_bps, pack) as group, Runner(command, enter=partial(group.add, 0)) as runner:
        for idle_s in (IDLE_S, 0.0):
            pairs = list[dict[str, Any]]()
            for number, text in enumerate(texts(name)):
                order = WAYS[:: 1 if number % 2 else -1]
                pairs.append({way: runner.ask("answer", str(pack), way, percent, text, idle_s) for way in order})
                if pairs[-1][EMPTY]["tokens"] != pairs[-1][FILLED]["tokens"]:
                    raise ValueError(f"{where}: with a filled cache the answer is another one")
            counted = pairs[1:]
            if not idle_s:
                ratios = [pair[FILLED]["whole_s"] / pair[EMPTY]["whole_s"] for pair in counted]
                yield row_of_runs(f"{where}: at once, from opening to the end: filled to empty", ratios, "×")
                continue
            for key, (figure, unit) in FIGURES.items():
                for way, called in zip(WAYS, ("empty", "filled"), strict=True):
                    yield row_of_runs(f"{where}: {figure}, {called}", [pair[way][key] for pair in counted], unit)
                if key == "hits":  # may be none
                    continue
                ratios = [pair[FILLED][key] / pair[EMPTY][key] for pair in counted]
                ratio = row_of_runs(f"{where}: {figure}, filled to empty", ratios, "×")
                yield ratio.at_most(SOONER) if key == "first_ms" else ratio


def main() -> int:
    if sys.argv[1:] == ["session"]:
        serve(Session)
        return 0
    if lacking := missing(reads=Path(__file__)):
        raise SystemExit(f"bench-fill imitates drives with control groups, but {lacking}")
    need([DEMO / "summary.json"], "demo")
    rows = list[Row]()
    for name in MODELS:
        for drive in DRIVES:
            for percent in SHARES:
                found = [*rows_of(name, DEVICES[drive], percent)]
                print(table(found), end="\n\n", file=sys.stderr, flush=True)
                rows += found
    settings = {"runs": RUNS, "idle": IDLE_S, "new tokens": NEW_TOKENS, "threads": THREADS}
    print(table(rows))
    print(f"written to {write('fill', context(settings), rows)}")
    return 0


if __name__ == "__main__":
    as_program(main, __doc__, "[session]")
