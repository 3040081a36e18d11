"""Runs the experts that a router selected, bringing each into memory once per layer and forward pass."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from moert.experts.ahead import Lookahead
from moert.experts.belady import Recorder
from moert.experts.cache import HANDED_OVER_BYTES, ExpertCache
from moert.experts.lease import Lease
from moert.experts.replay import Step
from moert.kernels.backend import ROWS, Backend
from moert.pack.model_spec import ExpertKey, Stack
from moert.pack.reader import Pack

WAVE_BYTES = 1 << 20
"""Experts that run in one call; larger ones run one by one, while the next are read."""


class CachedExperts:
    """The ExpertRunner of moert.models: experts from the cache, in ascending order, so that answers don't depend on it.

    `ahead` reads the next layer's likely experts while this layer computes; None: nothing is read before it is
    demanded. `recorder` and `trace` collect the demand of each layer, the one in little memory and up to a limit.
    """

    def __init__(
        self, pack: Pack, cache: ExpertCache, backend: Backend, ahead: Lookahead | None,
        recorder: Recorder | None = None, trace: list[Step] | None = None,
    ) -> None:  # fmt: skip
        self.trace = trace
        self._recorder = recorder
        self._cache, self._backend, self._ahead = cache, backend, ahead
        manifest = pack.manifest
        mean_bytes = sum(entry.file_bytes for entry in manifest.experts) / len(manifest.experts)
        self._overlaps = mean_bytes >= HANDED_OVER_BYTES
        self._moe = manifest.model.moe
        self._keys = {
            (stack, layer): [ExpertKey(stack, layer, expert) for expert in range(self._moe.num_experts)]
            for stack, layer in manifest.model.moe_layers()
        }

    def run(self, stack: Stack, layer: int, hidden: Tensor, experts: Tensor, weights: Tensor, out: Tensor) -> None:
        """See moert.models.moe.ExpertRunner. Raises PackError if an expert can't be read."""
        if len(hidden) == 1:
            taken = experts[0] >= 0
            self.run_one(stack, layer, hidden, experts[0][taken].tolist(), weights[0][taken], out)
            return
        chosen = experts.flatten()
        order = chosen.argsort(stable=True)[int((chosen < 0).sum()) :]  # without those that were dropped
        taken = chosen[order].bincount()
        needed = taken.nonzero().flatten()
        keys, counts = self._begin(stack, layer, needed.tolist()), taken[needed].tolist()
        tokens, weights = order // experts.shape[1], weights.flatten()[order]
        first = row = 0
        for stop in self._waves(keys, counts, len(hidden)):
            with self._cache.lease(keys[first:stop], keys[stop:]) as lease:
                if self._ahead is not None and stop == len(keys):
                    self._ahead.look(stack, layer, experts.numpy(), out)
                for rows in _pieces(counts[first:stop]):
                    until = row + sum(rows)
                    self._backend.run_all(
                        lease.all(), rows, tokens[row:until], weights[row:until], hidden, out, self._moe
                    )
                    row = until
            first = stop

    def _waves(self, keys: list[ExpertKey], counts: list[int], tokens: int) -> Iterator[int]:
        """Where to end each group of experts that run in one call. Small ones run together, as far as the cache has
        room to read ahead beside them; with many tokens each has enough to do alone."""
        nbytes = rows = 0
        most = min(WAVE_BYTES, self._cache.capacity_bytes // 2)
        for place, (key, count) in enumerate(zip(keys, counts, strict=True)):
            nbytes, rows = nbytes + self._cache.nbytes(key), rows + count
            if place and (nbytes > most or rows > tokens or tokens > ROWS):
                yield place
                nbytes, rows = self._cache.nbytes(key), count
        if keys:
            yield len(keys)

    def run_one(
        self, stack: Stack, layer: int, hidden: Tensor, experts: list[int], weights: Tensor, out: Tensor
    ) -> None:
        """The same for one token, whose experts are in memory all at once."""
        with self._cache.lease(self._begin(stack, layer, experts)) as lease:
            if self._ahead is not None:
                self._ahead.look(stack, layer, np.array([experts]), out)
            ready = lease.ready()
            if self._overlaps and len(ready) < len(experts):
                self._run_as_they_come(lease, ready, hidden, weights, out)
            else:
                self._backend.mix(lease.all(), weights, hidden, out, self._moe)

    def _run_as_they_come(self, lease: Lease, ready: list[int], hidden: Tensor, weights: Tensor, out: Tensor) -> None:
        """Computes with the experts that are there while others are read; added up in their order all the same."""
        missing = [place for place in range(len(weights)) if place not in ready]
        parts = torch.empty(len(weights), hidden.shape[1])
        self._backend.parts([lease.expert(place) for place in ready], hidden, self._moe, parts[: len(ready)])
        for row, place in enumerate(missing, len(ready)):
            self._backend.parts([lease.expert(place)], hidden, self._moe, parts[row : row + 1])
        order = torch.tensor([*ready, *missing]).argsort()
        self._backend.add_parts(parts[order], weights, out)

    def _begin(self, stack: Stack, layer: int, needed: list[int]) -> list[ExpertKey]:
        """The router has decided: `needed`, ascending, each once."""
        begun, missing = self._cache.begin_layer(stack, layer, needed)
        if self._ahead is not None:
            self._ahead.spoken(stack, layer, needed, begun, missing)
        if self._recorder is not None:
            self._recorder.add(stack, layer, needed)
        if self.trace is not None:
            self.trace.append(Step(stack, layer, tuple(needed)))
        table = self._keys[stack, layer]
        return [table[expert] for expert in needed]


def _pieces(counts: list[int]) -> list[list[int]]:
    """Rows of each expert in calls that get no more than ROWS: one call, but for an expert alone with more."""
    if sum(counts) <= ROWS:
        return [counts]
    assert len(counts) == 1
    return [[min(ROWS, counts[0] - start)] for start in range(0, counts[0], ROWS)]
