"""`make bench-hash`: knowing the experts beforehand, by the tables of SiDA (Du et al. 2023) and the figures of
Mixtral-offloading (Eliseev & Mazur 2023), on the reference models with functions that `moeconv train-hash` trained.

Parts: `hits` of the function on short, middle and long inputs; performance `kept` where it takes the place of the
routers; `memory` that a short input needs; the share of a pass that `choosing` takes; `recall` of what reads ahead;
`evictions`, and k latest experts of each layer; `speed` on imitated drives. All text is held out.

Writes build/bench/hashed.json."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moert.bench.measure import read_all
from moert.engine.engine import Engine
from moert.experts.names import DEFAULT_EVICTION, DEFAULT_PREDICTOR
from moert.experts.policy import Demand
from moert.pack.manifest import BACKBONE
from moert.pack.model_spec import ExpertKey
from moert.pack.reader import Pack
from recipes.bench.controls import opened
from recipes.bench.hash_measures import (
    EVICTION_SHARES,
    FOLDER,
    LENGTHS,
    SUBJECTS,
    Subject,
    eviction_rows,
    foresight_of,
    function_of,
    hit_rates,
    hit_rows,
    inputs,
    k_rows,
    kept_rows,
    read,
    recall_rows,
    routings,
    say,
    with_function,
)
from recipes.bench.program import as_program
from recipes.bench.race import DEVICES, PROCESS_BYTES, Device, Entry, Outcome, alive, of_setting, race, read_ahead
from recipes.bench.result import Row, context, row_of_runs, table, write
from recipes.bench.routing import Replaced
from recipes.bench.sized import sized
from recipes.bench.stream_packs import expert_bytes, layer_bytes, prompts
from recipes.bench.stream_rows import ratios
from recipes.bench.streamed import THREADS, Setting
from tests.cgroups import missing

# What a short input needs of the experts (SiDA, Figure 8), and what choosing them takes of a pass (Figure 3).

SAVED_AIM, SPEED_AIM = 80.0, 1.0
MEMORY_ROUNDS = sized(5, 1)
AT_ONCE = 10
"""Inputs of a round."""


def demanded(subject: Subject, length: str) -> list[float]:
    """Returns, of each input, the experts that it asks for from its start to its end, as a share of the bytes of
    all."""
    nbytes = {entry.key: entry.file_bytes for entry in Pack.open(subject.pack).manifest.experts}
    trace: list[Demand] = []
    shares = []
    with _open(subject.pack, trace=trace) as engine:
        for ids in inputs(subject, length):
            read(engine, ids, subject.new_tokens)
            asked = {key for demand in trace for key in demand.expert_keys()}
            shares.append(_share(asked, nbytes))
            trace.clear()
    return shares


def demanded_rows(subject: Subject, length: str) -> list[Row]:
    shares = demanded(subject, length)
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
        for number in range(MEMORY_ROUNDS):
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
            for _ in range(MEMORY_ROUNDS):
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


# Speeds on imitated drives: what reading ahead by the hash function and eviction that foresees are worth (SiDA,
# Figures 9 and 11), Mixtral-offloading's ablation, and whether the default is ever slower than reading nothing
# ahead.

RACED_SHARES = (0.25, 0.5, 0.75)
HALF = 0.5
WARM_TOKENS = 32
FUNCTION_BYTES = 50_000_000
"""For the function, widened, and what it makes of a prompt."""
DEMAND_AIM, NEVER_SLOWER = 4.0, 0.98


@dataclass(frozen=True)
class Side:
    """`layers`: room for one token's demand of so many layers, and for nothing beside; None: the budget's."""

    name: str
    predictor: str
    eviction: str
    layers: int | None = None


ON_DEMAND = Side("on demand", "none", "lru")
NONE = Side("none", "none", DEFAULT_EVICTION)
DEFAULT = Side("auto", DEFAULT_PREDICTOR, DEFAULT_EVICTION)
BEST = Side("hash, foreseen", "hash", "foreseen")
AT_A_BUDGET = (
    ON_DEMAND, Side("gate", "gate", DEFAULT_EVICTION), Side("tables", "transitions", DEFAULT_EVICTION),
    Side("hash", "hash", DEFAULT_EVICTION), Side("none, foreseen", "none", "foreseen"), BEST,
    Side("auto, foreseen", DEFAULT_PREDICTOR, "foreseen"),
)  # fmt: skip
NAIVE = Side("naive", "none", "lru", 1)
WITHOUT_CACHE = Side("without the cache", DEFAULT_PREDICTOR, "lru", 2)
RESIDENT = "all in memory"
EVERYTHING, WITHOUT_AHEAD = DEFAULT, NONE
ABLATION = {
    "everything": f"{EVERYTHING.name} {HALF:.0%}", "without reading ahead": f"{WITHOUT_AHEAD.name} {HALF:.0%}",
    "without the cache": WITHOUT_CACHE.name, "naive": NAIVE.name,
}  # fmt: skip


def called(side: Side, share: float) -> str:
    return side.name if side.layers else f"{side.name} {share:.0%}"


def entry_of(subject: Subject, side: Side, share: float) -> Entry:
    pack = subject.pack
    room = side.layers * layer_bytes(pack) if side.layers else max(layer_bytes(pack), int(share * expert_bytes(pack)))
    setting = Setting(
        str(pack), room, side.eviction, side.predictor, prompts=str(_prompts(subject)), new_tokens=subject.new_tokens,
        prefers="exact",
    )  # fmt: skip
    return of_setting(called(side, share), setting, WARM_TOKENS, with_function_bytes(pack, share))


def with_function_bytes(pack: Path, share: float) -> int:
    """Returns the memory of every process at this budget, with a hash function or without."""
    backbone = Pack.open(pack).manifest.files[BACKBONE].nbytes
    return int(share * expert_bytes(pack)) + backbone + PROCESS_BYTES + FUNCTION_BYTES


def _prompts(subject: Subject) -> Path:
    return prompts(subject.pack, subject.data)


def raced(
    subject: Subject, device: Device, seconds: float, rounds: int, shares: Sequence[float] = RACED_SHARES
) -> dict[str, Outcome]:
    """All sides on one drive; all of AT_A_BUDGET at half the experts' room, and what decides the aims at the others."""
    whole = Setting(
        str(subject.pack), None, "lru", "none", prompts=str(_prompts(subject)), new_tokens=subject.new_tokens,
        prefers="exact",
    )  # fmt: skip
    entries = [of_setting(RESIDENT, whole, WARM_TOKENS, None)]
    entries += [entry_of(subject, side, HALF) for side in (NAIVE, WITHOUT_CACHE)]
    for share in shares:
        sides = (NONE, DEFAULT, *(AT_A_BUDGET if share == HALF else (ON_DEMAND, BEST)))
        entries += [entry_of(subject, side, share) for side in sides]
    return race(device, entries, seconds, rounds)


def race_rows(where: str, outcomes: Mapping[str, Outcome], shares: Sequence[float] = RACED_SHARES) -> Iterator[Row]:
    """Nothing of those that are not in `outcomes`."""
    for name, outcome in outcomes.items():
        yield row_of_runs(f"{where}: {name}: decode", outcome.speeds, "tokens/s")
    for share in shares:
        best, default = outcomes.get(called(BEST, share)), outcomes.get(called(DEFAULT, share))
        for side in (ON_DEMAND, NAIVE):
            other = outcomes.get(called(side, share))
            if best is not None and other is not None:
                name = f"{where}: {called(BEST, share)} to {side.name}"
                yield row_of_runs(name, ratios(best, other), "× its speed").at_least(DEMAND_AIM)
        none = outcomes.get(called(NONE, share))
        if default is not None and none is not None:
            name = f"{where}: {called(DEFAULT, share)} to none"
            yield row_of_runs(name, ratios(default, none), "× its speed").at_least(NEVER_SLOWER)


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
    for share in EVICTION_SHARES:
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
    as_program(main)
