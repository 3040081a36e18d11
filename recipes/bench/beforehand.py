"""`make bench-beforehand`: what the thread is worth that works on the next batch while one runs (SiDA, §3.1), on
reference models with functions that `moeconv train-hash` trained: batches of prompts with it and without, in turns.

Writes build/bench/beforehand.json.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence

from moert.engine.engine import Engine
from recipes.bench.controls import opened
from recipes.bench.hash_measures import FOLDER, SUBJECTS, Subject, inputs, routings, with_function
from recipes.bench.program import as_program
from recipes.bench.result import Row, context, row_of_runs, table, write
from recipes.bench.sized import sized
from recipes.bench.streamed import THREADS

MODELS = sized(("g2p", "wiki"), ("g2p",))
"""Those that `make demo` converts: one that encodes whole inputs, and one that reads on."""

BATCH, BATCHES, ROUNDS = 8, sized(6, 2), sized(31, 2)
NEVER_SLOWER = 0.98


def beforehand_rows(subject: Subject) -> Iterator[Row]:
    """Half of the experts in memory; by the routers, with reading ahead by the function, and by the function alone. Of
    running text the middle length, behind which there is room to write."""
    texts = inputs(subject, "middle" if subject.is_text else None, BATCH * BATCHES)
    batches = [texts[start : start + BATCH] for start in range(0, len(texts), BATCH)]
    for what, routing in routings(subject).items():
        with opened(
            str(subject.pack), "foreseen", "hash", cache="50%", routing=routing, threads=THREADS,
            notify=lambda line: None,
        ) as engine:  # fmt: skip
            _taken(engine, batches, subject.new_tokens, ahead=True)
            ratios = []
            for number in range(ROUNDS):
                order = (True, False) if number % 2 else (False, True)
                taken = {ahead: _taken(engine, batches, subject.new_tokens, ahead) for ahead in order}
                ratios.append(taken[False] / taken[True])
        name = f"{subject.name}: batches of {BATCH}, the next one worked out beforehand, with {what}"
        yield row_of_runs(name, ratios, "× the speed without").at_least(NEVER_SLOWER)


def _taken(engine: Engine, batches: Sequence[Sequence[list[int]]], new_tokens: int, ahead: bool) -> float:
    started = time.perf_counter()
    for batch, behind in zip(batches, [*batches[1:], []], strict=True):
        for _ in engine.generate_many(batch, max_new_tokens=new_tokens, coming=behind if ahead else []):
            pass
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description="Batches whose next one is worked out beforehand, beside others.")
    parser.add_argument("--models", nargs="+", choices=list(SUBJECTS), default=list(MODELS))
    asked = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    rows = list[Row]()
    for subject in (SUBJECTS[name] for name in asked.models):
        with_function(subject)
        rows += beforehand_rows(subject)
    print(table(rows))
    settings = {"models": asked.models, "batch": BATCH, "batches": BATCHES, "rounds": ROUNDS, "threads": THREADS}
    print(f"written to {write('beforehand', context(settings), rows)}")


if __name__ == "__main__":
    as_program(main)
