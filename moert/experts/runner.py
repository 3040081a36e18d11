"""The runner of experts that a router selected: brings each into memory once per layer and forward pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from moert.experts.ahead import Lookahead
from moert.experts.cache import HANDED_OVER_BYTES, ExpertCache, Lease
from moert.experts.policy import Demand, Listener
from moert.kernels.backend import I32, I64, ROWS, Backend
from moert.pack.codec import F32
from moert.pack.model_spec import ExpertKey, LayerKey
from moert.pack.reader import Pack

WAVE_BYTES = 1 << 20
"""Most bytes of experts that run in one call; larger ones run one by one, while the next are read."""


class CachedExperts:
    """The ExpertRunner of moert.models: experts from the expert cache, in ascending order, so that answers don't depend
    on it.

    `ahead` reads the next layer's likely experts while this layer computes; None: nothing is read before it is
    demanded. `listeners` are called with each demand.
    """

    def __init__(
        self, pack: Pack, cache: ExpertCache, backend: Backend, ahead: Lookahead | None,
        listeners: Iterable[Listener] = (),
    ) -> None:  # fmt: skip
        self.listeners = list(listeners)
        self._cache, self._backend, self._ahead = cache, backend, ahead
        manifest = pack.manifest
        self._overlaps = manifest.mean_expert_bytes >= HANDED_OVER_BYTES
        self._ffn = manifest.model.moe.ffn

    def run(self, at: LayerKey, hidden: F32, experts: I64, weights: F32, out: F32, x: F32) -> None:
        """See moert.models.ffn.ExpertRunner. Raises PackError if an expert can't be read."""
        needed, rows_of, tokens, share = by_expert(experts, weights)
        if len(hidden) == 1:
            self._run_one(at, hidden, needed, share, out, x)
            return
        keys = announce(Demand(at, tuple(needed)), self.listeners, self._cache, self._ahead)
        first = row = 0
        for stop in self._waves(keys, rows_of, len(hidden)):
            with self._cache.lease(keys[first:stop], keys[stop:]) as lease:
                if self._ahead is not None and stop == len(keys):
                    self._ahead.look(at, experts, x)
                for rows in _pieces(rows_of[first:stop]):
                    until = row + sum(rows)
                    self._backend.mixture(
                        lease.all(), rows, tokens[row:until], share[row:until], hidden, out, self._ffn
                    )
                    row = until
            first = stop

    def _waves(self, keys: list[ExpertKey], counts: list[int], tokens: int) -> Iterator[int]:
        """Yields the end of each group of experts that run in one call. Small ones run together, as far as the cache
        has room to read ahead beside them; with many tokens each has enough to do alone."""
        nbytes = rows = 0
        most = min(WAVE_BYTES, self._cache.capacity_bytes // 2)
        for place, (key, count) in enumerate(zip(keys, counts, strict=True)):
            nbytes, rows = nbytes + self._cache.nbytes(key), rows + count
            if place and (nbytes > most or rows > tokens or tokens > ROWS):
                yield place
                nbytes, rows = self._cache.nbytes(key), count
        if keys:
            yield len(keys)

    def _run_one(
        self, at: LayerKey, hidden: F32, experts: list[int], weights: F32, out: F32, x: F32
    ) -> None:  # fmt: skip
        """Runs the experts of one token, which are in memory all at once."""
        keys = announce(Demand(at, tuple(experts)), self.listeners, self._cache, self._ahead)
        with self._cache.lease(keys) as lease:
            if self._ahead is not None:
                self._ahead.look(at, np.array([experts]), x)
            if self._overlaps and len(ready := lease.ready()) < len(experts):
                self._run_as_they_come(lease, ready, hidden, weights, out)
            elif experts:
                ones, first = [1] * len(experts), np.zeros(len(experts), np.int32)
                self._backend.mixture(lease.all(), ones, first, weights, hidden, out, self._ffn)

    def _run_as_they_come(self, lease: Lease, ready: list[int], hidden: F32, weights: F32, out: F32) -> None:
        """Computes with experts that are in memory while others are read; adds results up in the experts' order all the
        same."""
        missing = [place for place in range(len(weights)) if place not in ready]
        parts = np.empty((len(weights), hidden.shape[1]), np.float32)
        self._backend.parts([lease.expert(place) for place in ready], hidden, parts[: len(ready)], self._ffn)
        for row, place in enumerate(missing, len(ready)):
            self._backend.parts([lease.expert(place)], hidden, parts[row : row + 1], self._ffn)
        order = np.argsort([*ready, *missing])
        self._backend.add_parts(parts[order], weights, out)


def announce(
    demand: Demand, listeners: Iterable[Listener], cache: ExpertCache | None = None, ahead: Lookahead | None = None
) -> list[ExpertKey]:
    """Passes a router's demand on to the expert cache, to reading ahead, and to all `listeners`; returns the demanded
    experts."""
    if cache is not None:
        arrivals = cache.begin(demand)
        if ahead is not None:
            ahead.demanded(demand, arrivals)
    for hear in listeners:
        hear(demand)
    return demand.expert_keys()


class ByExpert(NamedTuple):
    """Tokens by expert: the experts that they go to, ascending, how many go to each, and these tokens, expert after
    expert, with their weights."""

    needed: list[int]
    counts: list[int]
    tokens: I32
    weights: F32


def by_expert(experts: I64, weights: F32) -> ByExpert:
    """Returns the tokens of each expert; experts and weights [tokens, top_k], ascending, negative where a token was
    dropped."""
    if len(experts) == 1:  # sorting takes as long as running a small expert
        needed, share = experts[0].tolist(), weights[0]
        if min(needed) < 0:
            needed, share = [number for number in needed if number >= 0], share[experts[0] >= 0]
        return ByExpert(needed, [1] * len(needed), np.zeros(len(needed), np.int32), share)
    chosen = experts.reshape(-1)
    order = np.argsort(chosen, kind="stable")[np.count_nonzero(chosen < 0) :]
    needed, counts = np.unique(chosen[order], return_counts=True)
    tokens = (order // experts.shape[1]).astype(np.int32)
    return ByExpert(needed.tolist(), counts.tolist(), tokens, weights.reshape(-1)[order])


def _pieces(counts: list[int]) -> list[list[int]]:
    """Returns the rows of each expert in calls of at most ROWS: one call, except for a single expert with more."""
    if sum(counts) <= ROWS:
        return [counts]
    assert len(counts) == 1
    return [[min(ROWS, counts[0] - start)] for start in range(0, counts[0], ROWS)]
