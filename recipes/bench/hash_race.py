"""Speeds on imitated drives: what reading ahead by the hash function and eviction that foresees are worth (SiDA,
Figures 9 and 11), Mixtral-offloading's ablation, and whether the default is ever slower than reading nothing ahead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from moert.experts.names import DEFAULT_EVICTION, DEFAULT_PREDICTOR
from moert.pack.manifest import BACKBONE
from moert.pack.reader import Pack
from recipes.bench.devices import PROCESS_BYTES
from recipes.bench.hash_packs import Subject
from recipes.bench.race import Device, Entry, Outcome, of_setting, race
from recipes.bench.result import Row, row_of_runs
from recipes.bench.stream_packs import expert_bytes, layer_bytes, prompts
from recipes.bench.stream_rows import ratios
from recipes.bench.streamed import Setting

SHARES = (0.25, 0.5, 0.75)
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
    return of_setting(called(side, share), setting, WARM_TOKENS, _memory_bytes(pack, share))


def _memory_bytes(pack: Path, share: float) -> int:
    """Of every process at this budget."""
    backbone = Pack.open(pack).manifest.files[BACKBONE].nbytes
    return int(share * expert_bytes(pack)) + backbone + PROCESS_BYTES + FUNCTION_BYTES


def _prompts(subject: Subject) -> Path:
    return prompts(subject.pack, subject.data)


def raced(
    subject: Subject, device: Device, seconds: float, rounds: int, shares: Sequence[float] = SHARES
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


def race_rows(where: str, outcomes: Mapping[str, Outcome], shares: Sequence[float] = SHARES) -> Iterator[Row]:
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
