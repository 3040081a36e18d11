"""Experts that come first: into the expert cache before the first request (EdgeMoE, Yi et al. 2023), and to a second
device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from moert.experts.cache import ExpertCache
from moert.experts.names import trace_of
from moert.experts.policy import Demand, LayerOrder
from moert.pack.model_spec import ExpertKey, LayerKey, ModelSpec
from moert.pack.paths import DROPPED, Trace
from moert.pack.reader import Pack

Popularity = Mapping[LayerKey, npt.NDArray[np.float64]]
"""For each layer the share of its tokens that went to each expert [num_experts]."""


def popularity(trace: Trace | None, spec: ModelSpec) -> Popularity:
    """Returns the popularity in a pack's trace, as Fiddler counts it; without a trace all experts of a layer are
    equal."""
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
    """Returns experts, the most popular first, equal ones by layer and number."""
    keys = [at.expert(number) for at in order for number in range(len(shares[at]))]
    return sorted(keys, key=lambda key: (-float(shares[key.at][key.expert]), key))


def first(
    shares: Popularity, order: LayerOrder, nbytes: Callable[[ExpertKey], int], room_bytes: int
) -> list[ExpertKey]:
    """Returns the first experts that fit into a room together: an encoder's layer by layer, since its first pass goes
    through all layers, then the most popular; equal ones by layer and number."""
    ranked = by_popularity(shares, order)
    ranked.sort(key=lambda key: (key.stack == "decoder", key.stack == "encoder" and key.layer))
    ends = accumulate(map(nbytes, ranked))
    return [key for key, end in zip(ranked, ends, strict=True) if end <= room_bytes]


def fill(pack: Pack, cache: ExpertCache, note: Callable[[str], None]) -> None:
    """Has the first experts read into an empty cache until a request begins.

    In the decoder each expert counts as demanded once: else experts of layers that the first pass has still to reach
    would leave first. Raises PackError for a damaged trace.
    """
    spec = pack.manifest.model
    shares = popularity(trace_of(pack, note), spec)
    keys = first(shares, spec.moe_layers(), cache.nbytes, cache.capacity_bytes)
    layers = spec.moe_layers("decoder") or spec.moe_layers()
    cache.fill(keys, [Demand(at, tuple(range(spec.moe.n))) for at in layers])
