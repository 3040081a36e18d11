"""What a short input needs of the experts (SiDA, Figure 8), and what choosing them takes of a pass (Figure 3)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from moert.bench.measure import read_all
from moert.engine.engine import Engine
from moert.experts.policy import Demand
from moert.pack.model_spec import ExpertKey
from moert.pack.reader import Pack
from recipes.bench.controls import opened
from recipes.bench.hash_kept import routings
from recipes.bench.hash_packs import LENGTHS, Subject, inputs
from recipes.bench.hash_watch import foresight_of, read
from recipes.bench.result import Row, row_of_runs
from recipes.bench.routing import Replaced
from recipes.bench.sized import sized
from recipes.bench.streamed import THREADS

SAVED_AIM, SPEED_AIM = 80.0, 1.0
ROUNDS = sized(5, 1)
AT_ONCE = 10
"""Inputs of a round."""


def demanded_rows(subject: Subject, length: str) -> list[Row]:
    """The experts that an input asks for from its start to its end, as a share of the bytes of all."""
    nbytes = {entry.key: entry.file_bytes for entry in Pack.open(subject.pack).manifest.experts}
    trace: list[Demand] = []
    shares = []
    with _open(subject.pack, trace=trace) as engine:
        for ids in inputs(subject, length):
            read(engine, ids, subject.new_tokens)
            asked = {key for demand in trace for key in demand.expert_keys()}
            shares.append(_share(asked, nbytes))
            trace.clear()
    saved = 100 * (1 - sum(shares) / len(shares))
    row = Row(f"{subject.name}, {length}: expert memory that is not needed", saved, "%", n=len(shares))
    return [row.at_least(SAVED_AIM) if length == LENGTHS[0] else row]


def _share(asked: set[ExpertKey], nbytes: dict[ExpertKey, int]) -> float:
    return sum(nbytes[key] for key in asked) / sum(nbytes.values())


def saved_speed_row(subject: Subject) -> Row:
    """Short inputs with room for a fifth of the experts, foreseen, beside all of them in memory, in turns."""
    texts = inputs(subject, LENGTHS[0], AT_ONCE)
    little: dict[str, Any] = {"cache": f"{100 - SAVED_AIM:g}%", "threads": THREADS, "routing": "exact"}
    with opened(str(subject.pack), "foreseen", "auto", notify=_quiet, **little) as saving, _open(subject.pack) as whole:
        for engine in (saving, whole):
            _taken(engine, texts, subject.new_tokens)
        read_all(whole)
        ratios = []
        for number in range(ROUNDS):
            order = (saving, whole) if number % 2 else (whole, saving)
            taken = {engine: _taken(engine, texts, subject.new_tokens) for engine in order}
            ratios.append(taken[whole] / taken[saving])
    name = f"{subject.name}, short: speed with {SAVED_AIM:g}% of expert memory saved"
    return row_of_runs(name, ratios, "of all in memory").at_least(SPEED_AIM)


def choosing_rows(subject: Subject) -> Iterator[Row]:
    """All experts in memory, inputs of middle length."""
    texts = inputs(subject, "middle", AT_ONCE)
    for what, routing in routings(subject).items():
        with _open(subject.pack, routing=routing) as engine:
            _taken(engine, texts, subject.new_tokens)
            read_all(engine)
            choosing = Choosing(engine)
            shares = []
            for _ in range(ROUNDS):
                before = choosing.seconds
                whole = _taken(engine, texts, subject.new_tokens)
                shares.append(100 * (choosing.seconds - before) / whole)
        yield row_of_runs(f"{subject.name}: choosing experts, with {what}", shares, "% of a pass")


class Choosing:
    """Seconds in routers, or in the function that takes their place. It stays in the engine."""

    def __init__(self, engine: Engine) -> None:
        self.seconds = 0.0
        for at, router in list(engine.model.routers.items()):
            timed: Any = Replaced(at, router)
            timed.route = self._timed(router.route)
            engine.model.routers[at] = timed
        if engine.model.foresight is not None:
            foresight: Any = foresight_of(engine)
            for name in ("encodes", "decodes"):
                setattr(foresight, name, self._timed(getattr(foresight, name)))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                self.seconds += time.perf_counter() - started

        return timed


def _open(pack: Path, **changes: Any) -> Engine:
    asked: dict[str, Any] = {"predict": "none", "threads": THREADS, "routing": "exact"}
    return Engine.open(pack, notify=_quiet, **{**asked, **changes})


def _quiet(line: str) -> None:
    pass


def _taken(engine: Engine, texts: Sequence[Sequence[int]], new_tokens: int) -> float:
    started = time.perf_counter()
    for ids in texts:
        read(engine, ids, new_tokens)
    return time.perf_counter() - started
