"""`python -m recipes.bench.hit_rates PACK...`: how often experts of the reference models are found in memory, by the
share of them that has room. Writes moeconv/plan/hit_rates.json, which `moeconv plan MODEL` answers with.

Each PACK is one of a model in recipes/models, profiled by `moeconv profile-paths`. What is replayed is the first half
of its trace, under the policy that does best there, which has learned from the second half, as in a pack
that runs text like that it was profiled with. Counted is what is asked for once the cache is warm; of an
encoder-decoder by both stacks, as moert counts hits, since a request passes both.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from moeconv.eviction import best_eviction, replay
from moeconv.plan.forecast import HIT_RATES, Kind, kind_of
from moert.experts.policy import EVICTION, Demand, Residency, Succession
from moert.experts.replay import demands_of
from moert.pack.files import write_atomically
from moert.pack.model_spec import ExpertKey, ModelSpec
from moert.pack.paths import TRACE, Trace
from moert.pack.reader import Pack
from recipes.bench.program import as_program

OUT = Path("moeconv/plan") / HIT_RATES
SHARES = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
WARM = 0.5
"""Of the demands that are replayed, those that are not counted."""


class Counted:
    """Passes demands on, and counts those after the first `warm`, and how many of them missed."""

    def __init__(self, demands: Sequence[Demand], warm: int) -> None:
        self._demands, self._warm, self._at = demands, warm, 0
        self.asked = self.missed = 0

    def __iter__(self) -> Iterator[Demand]:
        for at, demand in enumerate(self._demands):
            self._at = at
            if self._at >= self._warm:
                self.asked += len(demand.experts)
            yield demand

    def observe(
        self, demand: Demand, missing: Sequence[ExpertKey], victims: Sequence[ExpertKey], residency: Residency
    ) -> None:
        if self._at >= self._warm:
            self.missed += len(missing)

    @property
    def hit_rate(self) -> float:
        return 1 - self.missed / self.asked


def hit_rate(trace: Trace, spec: ModelSpec, nbytes: Mapping[ExpertKey, int], share: float) -> float:
    """Where `share` of the experts' bytes has room."""
    capacity, half = int(share * sum(nbytes.values())), (trace.decoder_tokens + 1) // 2
    name = best_eviction(trace, spec, nbytes, capacity)
    demands = list(demands_of(trace, spec, half))
    counted = Counted(demands, int(WARM * len(demands)))
    policy = EVICTION[name](spec.moe_layers(), Succession.of(trace, spec, half))
    replay(counted, nbytes, capacity, policy, counted.observe)
    return counted.hit_rate


def model_rates(name: str, pack: Pack) -> dict[str, Any]:
    """What hit_rates.json says of one model. Raises SystemExit for a pack without a trace."""
    if TRACE not in pack.manifest.files:
        raise SystemExit(f"{pack.root} has no {TRACE}: moeconv profile-paths {pack.root}")
    spec, trace = pack.manifest.model, Trace.from_bytes(pack.read_file(TRACE))
    nbytes = {entry.key: entry.file_bytes for entry in pack.manifest.experts}
    kind: Kind = kind_of(spec)
    return {
        "name": name,
        "kind": kind,
        "experts": spec.moe.n,
        "top_k": spec.moe.router.top_k,
        "layers": len(spec.moe_layers("decoder")),
        "tokens": (trace.decoder_tokens + 1) // 2,
        "rates": [[share, round(hit_rate(trace, spec, nbytes, share), 4)] for share in SHARES],
    }


def document(models: Iterable[Mapping[str, Any]]) -> str:
    """The file's text: a model's rates on one line each."""
    rows = ",\n".join(json.dumps(each) for each in models)
    return f'{{"made_by": "python -m recipes.bench.hit_rates", "models": [\n{rows}\n]}}\n'


def main() -> None:
    parser = argparse.ArgumentParser(description="Hit rates of the reference models, from the traces in their packs.")
    parser.add_argument("packs", nargs="+", type=Path, metavar="PACK", help="named as its model: wiki.pack")
    packs = parser.parse_args().packs
    write_atomically(OUT, document(model_rates(path.stem, Pack.open(path)) for path in packs).encode())
    print(f"written to {OUT}")


if __name__ == "__main__":
    as_program(main)
