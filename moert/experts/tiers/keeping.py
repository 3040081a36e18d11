"""Which experts stay on a device, by name; what lies there from the start follows from the same. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from moert.experts.policy.eviction import EvictionPolicy, ExpectedWait, LayerOrder, LeastRecentOfLayer
from moert.experts.policy.succession import Succession
from moert.experts.policy.usage import Candidates, place_of
from moert.pack.model_spec import ExpertKey, LayerKey, ModelSpec
from moert.pack.trace import DROPPED, Trace

Popularity = Mapping[LayerKey, npt.NDArray[np.float64]]
"""[num_experts] for each layer: of its tokens the share that went to each."""


class Keeping(NamedTuple):
    """A policy for who leaves, and experts in the order in which they are to be there at the start."""

    policy: EvictionPolicy
    first: Sequence[ExpertKey]


class Ranked:
    """Whoever stands further back in an order leaves first: what fits of its beginning stays for good, and what is
    copied beside it leaves again."""

    def __init__(self, order: Sequence[ExpertKey]) -> None:
        most = 1 + max(key.expert for key in order)
        self._worth = np.zeros((1 + max(place_of(key.at) for key in order), most), np.int64)
        for rank, key in enumerate(order):
            self._worth[place_of(key.at), key.expert] = len(order) - rank

    def worth(self, candidates: Candidates, present: LayerKey) -> npt.NDArray[Any]:
        found: npt.NDArray[Any] = self._worth[candidates.place, candidates.expert]
        return found


def popularity(trace: Trace | None, spec: ModelSpec) -> Popularity:
    """Counted in a pack's trace, as Fiddler does; without one, none is more popular than another."""
    even = np.full(spec.moe.n, spec.moe.router.top_k / spec.moe.n)
    if trace is None:
        return dict.fromkeys(spec.moe_layers(), even)
    found: dict[LayerKey, npt.NDArray[np.float64]] = {}
    for name, stack in trace.stacks.items():
        for place, at in enumerate(spec.moe_layers(name)):
            chosen = stack.experts[:, place]
            counts = np.bincount(chosen[chosen != DROPPED].astype(np.int64), minlength=spec.moe.n)
            found[at] = counts / max(1, len(chosen))
    return found


def by_popularity(shares: Popularity, order: LayerOrder) -> list[ExpertKey]:
    """The most popular first, of equal ones by layer and number."""
    keys = [at.expert(number) for at in order for number in range(len(shares[at]))]
    return sorted(keys, key=lambda key: (-float(shares[key.at][key.expert]), key))


def _expected(shares: Popularity, order: LayerOrder, succession: Succession | None) -> Keeping:
    return Keeping(ExpectedWait(order, succession), by_popularity(shares, order))


def _popular(shares: Popularity, order: LayerOrder, succession: Succession | None) -> Keeping:
    ranked = by_popularity(shares, order)
    return Keeping(Ranked(ranked), ranked)


def _lru(shares: Popularity, order: LayerOrder, succession: Succession | None) -> Keeping:
    return Keeping(LeastRecentOfLayer(), ())


def _layers(shares: Popularity, order: LayerOrder, succession: Succession | None) -> Keeping:
    by_layer = [at.expert(number) for at in reversed(order) for number in range(len(shares[at]))]
    return Keeping(Ranked(by_layer), by_layer)


DEFAULT_KEEP = "expected"
KEEPS: Mapping[str, Callable[[Popularity, LayerOrder, Succession | None], Keeping]] = {
    DEFAULT_KEEP: _expected,
    "popular": _popular,
    "lru": _lru,
    "layers": _layers,
}
"""Who is needed again last leaves, as eviction has it; the most popular of the trace stay (Fiddler); the latest of each
layer, who come as they are asked for (Mixtral-offloading); whole layers, the last ones (llama.cpp)."""
