"""What the thread is worth that works on the next batch while one runs (SiDA, §3.1): batches of prompts with it and
without, in turns."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from moert.engine import Engine
from tests.bench.hash_kept import routings
from tests.bench.hash_packs import Subject, inputs
from tests.bench.result import Row, row_of_runs
from tests.bench.streamed import THREADS

BATCH, BATCHES, ROUNDS = 8, 6, 5
NEVER_SLOWER = 0.98


def beforehand_rows(subject: Subject) -> Iterator[Row]:
    """Half of the experts in memory; by the routers, with reading ahead by the function, and by the function alone."""
    texts = inputs(subject, count=BATCH * BATCHES)
    batches = [texts[start : start + BATCH] for start in range(0, len(texts), BATCH)]
    for what, routing in routings(subject).items():
        with Engine.open(
            subject.pack, cache="50%", predictor="hash", eviction="foreseen", routing=routing, threads=THREADS,
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
