"""How often experts are found in memory without reading ahead: eviction that foresees beside the others and Belady's
rule, in the runtime; and Mixtral-offloading's k latest experts of each layer, on the trace in a pack."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moert.engine.engine import Engine
from moert.experts.names import succession_of
from moert.experts.policy import EVICTION, F64, Demand
from moert.experts.replay import demands_of, reads_of_belady, replay
from moert.kernels.backend import I64
from moert.pack.codec import F32
from moert.pack.model_spec import LayerKey, StackName
from moert.pack.paths import TRACE, Trace
from moert.pack.reader import Pack
from recipes.bench.controls import Foreseen
from recipes.bench.hash_watch import opened, read, watch
from recipes.bench.result import Row

SHARES = (0.25, 0.5, 0.75)
POLICIES = ("auto", "foreseen")
BELADY, PERFECT = "Belady", "foreseen without error"
ENCODER_AIM, WON_AIM = 3.0, 50.0
"""Points behind Belady at most, and of what `auto` lacks of Belady, what is won at least."""
KS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


class Found:
    """By stack: experts that were demanded, and found."""

    def __init__(self) -> None:
        self.asked, self.hits = Counter[StackName](), Counter[StackName]()

    def rate(self, stack: StackName | None = None) -> float:
        """None: of both stacks."""
        if stack is None:
            return self.hits.total() / self.asked.total()
        return self.hits[stack] / self.asked[stack]


class Counting(Found):
    """Looks on in an engine: what is counted until another stack asks belongs to the one before."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._counters = engine.counters
        self._stack: StackName = "decoder"
        self._requests = self._hits = 0
        watch(engine, self._hear)

    def settle(self) -> None:
        requests, hits = self._counters.requests, self._counters.hits
        self.asked[self._stack] += requests - self._requests
        self.hits[self._stack] += hits - self._hits
        self._requests, self._hits = requests, hits

    def _hear(self, at: LayerKey, x: F32, experts: I64) -> None:
        if at.stack != self._stack:
            self.settle()
            self._stack = at.stack


@dataclass(frozen=True)
class Compared:
    """In the same room, for the same text: `found` by policy, and by BELADY. `perfect`: the hit rate of both stacks
    under `foreseen` if the function were always right about the present pass."""

    found: Mapping[str, Found]
    perfect: float


def hit_rates(pack: Path, texts: Sequence[Sequence[int]], new_tokens: int, share: float) -> Compared:
    found: dict[str, Found] = {}
    for policy in POLICIES:
        trace: list[Demand] = []
        with opened(pack, eviction=policy, cache=f"{100 * share:g}%", trace=trace) as engine:
            counting = found[policy] = Counting(engine)
            for ids in texts:
                read(engine, ids, new_tokens)
            counting.settle()
            capacity = engine.cache.capacity_bytes
    read_pack = Pack.open(pack)
    return Compared({**found, BELADY: _belady(trace, read_pack, capacity)}, _perfectly(trace, read_pack, capacity))


def _belady(trace: Sequence[Demand], pack: Pack, capacity_bytes: int) -> Found:
    nbytes = {entry.key: entry.file_bytes for entry in pack.manifest.experts}
    reads = iter(reads_of_belady(trace, nbytes, capacity_bytes).tolist())
    found = Found()
    for demand in trace:
        for _ in demand.experts:
            found.asked[demand.at.stack] += 1
            found.hits[demand.at.stack] += next(reads) == 0
    return found


class Perfect:
    """Foresees what the present pass will demand, and nothing of the next: a hash function that is never wrong."""

    def __init__(self, trace: Sequence[Demand], experts: int) -> None:
        self._trace, self._experts, self._at = trace, experts, 0
        self._ends = [len(trace)] * len(trace)  # of the pass that a demand belongs to
        for at in reversed(range(len(trace) - 1)):
            here, after = trace[at].at, trace[at + 1].at
            goes_on = here.stack == after.stack and here.layer < after.layer
            self._ends[at] = self._ends[at + 1] if goes_on else at + 1

    def __iter__(self) -> Iterator[Demand]:
        for at, demand in enumerate(self._trace):
            self._at = at
            yield demand

    def coming(self) -> tuple[Sequence[LayerKey], F64]:
        demands = self._trace[self._at + 1 : self._ends[self._at]]
        likely = np.zeros((len(demands), self._experts))
        for row, demand in zip(likely, demands, strict=True):
            row[list(demand.experts)] = 1.0
        return [demand.at for demand in demands], likely


def _perfectly(trace: Sequence[Demand], pack: Pack, capacity_bytes: int) -> float:
    spec, nbytes = pack.manifest.model, {entry.key: entry.file_bytes for entry in pack.manifest.experts}
    perfect = Perfect(trace, spec.moe.n)
    policy = Foreseen(spec.moe_layers(), perfect, succession_of(pack, lambda note: None))
    return replay(perfect, nbytes, capacity_bytes, policy).hit_rate


def eviction_rows(name: str, share: float, compared: Compared) -> Iterator[Row]:
    """Of each stack, and of both together, which is what Belady's rule is best at: one may win what the other loses."""
    found = compared.found
    for stack in sorted(found[BELADY].asked, reverse=True):
        where = f"{name}, {stack}, {share:.0%}"
        yield from _rate_rows(where, {policy: each.rate(stack) for policy, each in found.items()})
        if stack == "encoder":
            left = found[BELADY].rate(stack) - found["foreseen"].rate(stack)
            yield Row(f"{where}: foreseen, behind Belady", 100 * left, "points").at_most(ENCODER_AIM)
    where, rates = f"{name}, {share:.0%}", {policy: each.rate() for policy, each in found.items()}
    yield from _rate_rows(where, {**rates, PERFECT: compared.perfect})
    lacking, won = rates[BELADY] - rates["auto"], rates["foreseen"] - rates["auto"]
    if lacking > 0:
        yield Row(f"{where}: won by foreseen", 100 * won / lacking, "% of what auto lacks").at_least(WON_AIM)


def _rate_rows(where: str, rates: Mapping[str, float]) -> Iterator[Row]:
    yield from (Row(f"{where}: hits under {policy}", 100 * rate, "%") for policy, rate in rates.items())


def k_rows(name: str, pack: Pack) -> Iterator[Row]:
    """Mixtral-offloading's figure: hits where each layer has room for k experts; beside it, the same room for the
    latest of all layers together. k from what one token needs on."""
    spec = pack.manifest.model
    trace, order = Trace.from_bytes(pack.read_file(TRACE)), spec.moe_layers()
    nbytes = {entry.key: entry.file_bytes for entry in pack.manifest.experts}
    demands = list(demands_of(trace, spec, (trace.decoder_tokens + 1) // 2))
    for k in (k for k in KS if spec.moe.router.top_k <= k < spec.moe.n):
        capacity = int(k * sum(nbytes.values()) / spec.moe.n)
        for policy in ("layer-lru", "lru"):
            rate = replay(demands, nbytes, capacity, EVICTION[policy](order)).hit_rate
            yield Row(f"{name}, k = {k}: hits under {policy}", 100 * rate, "%")
