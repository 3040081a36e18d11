"""Who runs in `make bench-stream`: this engine, and the paper's baselines as settings of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moert.experts.names import DEFAULT_PREDICTOR
from recipes.bench.stream_packs import PIECE, Packs, expert_bytes, layer_bytes
from recipes.bench.streamed import Setting

Room = Literal["budget", "layer", "two layers", "all"]


@dataclass(frozen=True)
class Contender:
    """`pack`: which widths. `room` for experts: the budget's, of one token's demand of a layer or two, or for all.
    `warm_tokens` are written before anything counts."""

    name: str
    pack: Literal["mixed", "int4", "half"]
    room: Room
    eviction: str
    predictor: str
    warm_tokens: int

    def setting(self, packs: Packs, share: float | None) -> Setting:
        """`share`: the budget as a share of the bytes of the mixed widths' experts."""
        pack = {"mixed": packs.mixed, "int4": packs.int4, "half": packs.half}[self.pack]
        return Setting(
            pack=str(pack),
            cache_bytes=self._cache_bytes(packs, pack, share),
            eviction=self.eviction,
            predict=self.predictor,
            routing=None if packs.routing is None else str(packs.routing),
            prompts=None if packs.prompts is None else str(packs.prompts),
            new_tokens=packs.new_tokens or PIECE,
        )

    def _cache_bytes(self, packs: Packs, pack: Path, share: float | None) -> int | None:
        if self.room == "all":
            return None
        least = layer_bytes(pack)
        if self.room != "budget":
            return least if self.room == "layer" else 2 * least
        if share is None:
            raise ValueError(f"{self.name} needs a budget")
        return max(least, int(share * expert_bytes(packs.mixed)))


MOERT = Contender("moert", "mixed", "budget", "auto", DEFAULT_PREDICTOR, warm_tokens=48)
IO_EXP = Contender("IO-EXP", "half", "layer", "lru", "none", warm_tokens=1)
IO_QEXP = Contender("IO-QEXP", "int4", "layer", "lru", "none", warm_tokens=1)
ON_DEMAND = Contender("mixed bits, on demand", "mixed", "layer", "lru", "none", warm_tokens=1)
PRELOAD = Contender("mixed bits, + preload", "mixed", "two layers", "lru", DEFAULT_PREDICTOR, warm_tokens=16)
CACHE = Contender("mixed bits, + cache", "mixed", "budget", "auto", "none", warm_tokens=48)
STI = Contender("STI-like", "int4", "budget", "lifo", "none", warm_tokens=16)
INT4_LRU = Contender("INT4, LRU", "int4", "budget", "lru", "none", warm_tokens=32)
INT4_LFU = Contender("INT4, LFU", "int4", "budget", "lfu", "none", warm_tokens=32)
IO_FREE = Contender("IO-FREE", "half", "all", "lru", "none", warm_tokens=128)
RESIDENT = Contender("moert, all in memory", "mixed", "all", "lru", "none", warm_tokens=128)

BUDGETED = (MOERT, CACHE, STI, INT4_LRU, INT4_LFU)
UNBUDGETED, IN_MEMORY = (IO_EXP, IO_QEXP, ON_DEMAND, PRELOAD), (IO_FREE, RESIDENT)
"""From IO-EXP over ON_DEMAND and PRELOAD to CACHE and MOERT each part of the engine comes in turn (EdgeMoE Fig. 16); in
equal room CACHE reads nothing ahead, and MOERT does what it does by default."""
