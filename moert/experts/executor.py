"""Runs the experts that a router selected, bringing each into memory once per layer and forward pass."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from moert.experts.cache import ExpertCache
from moert.experts.replay import Step
from moert.kernels.backend import Backend
from moert.pack.model_spec import ExpertKey, Stack
from moert.pack.reader import Pack
from moert.predict.predictor import Predictor, Selected
from moert.prefetch import Prefetcher

_AHEAD = 2  # predicted experts to preload, as a multiple of what the next layer can need


class CachedExperts:
    """The ExpertRunner of moert.models: experts from the cache, in ascending order, so that answers don't depend on it.

    With a predictor and a prefetcher the next layer's likely experts are read while this layer computes. `trace`
    collects the demand of each layer if a list is given.
    """

    def __init__(
        self,
        pack: Pack,
        cache: ExpertCache,
        backend: Backend,
        predictor: Predictor,
        prefetcher: Prefetcher | None,
        trace: list[Step] | None = None,
    ) -> None:
        self.trace = trace
        self._pack = pack
        self._cache = cache
        self._backend = backend
        self._predictor = predictor
        self._prefetcher = prefetcher
        self._moe = pack.manifest.model.moe
        self._order = pack.manifest.model.moe_layers()
        self._keys = {
            (stack, layer): [ExpertKey(stack, layer, expert) for expert in range(self._moe.num_experts)]
            for stack, layer in self._order
        }
        self._places = {at: index for index, at in enumerate(self._order)}
        self._first = {stack: self._order.index((stack, layer)) for stack, layer in reversed(self._order)}
        self._history: list[Selected] = []

    def run(self, stack: Stack, layer: int, hidden: Tensor, experts: Tensor, weights: Tensor, out: Tensor) -> None:
        """See moert.models.moe.ExpertRunner. Raises PackError if an expert can't be read."""
        if len(hidden) == 1:
            taken = experts[0] >= 0
            self.run_one(stack, layer, hidden, experts[0][taken].tolist(), weights[0][taken], out)
            return
        for key in self._begin(stack, layer, demanded(experts), experts.numpy):
            rows, place = torch.where(experts == key.expert)
            with self._cache.lease([key]) as held:
                self._backend.run(held[0], rows, weights[rows, place], hidden, out, self._moe)
            del held  # or this expert would be alive while room is made for the next

    def run_one(
        self, stack: Stack, layer: int, hidden: Tensor, experts: list[int], weights: Tensor, out: Tensor
    ) -> None:
        """The same for one token, whose experts are in memory all at once."""
        keys = self._begin(stack, layer, experts, lambda: np.array([experts]))
        with self._cache.lease(keys) as held:
            self._backend.mix(held, weights, hidden, out, self._moe)

    def _begin(self, stack: Stack, layer: int, needed: list[int], routing: Callable[[], Selected]) -> list[ExpertKey]:
        """The router has decided: `needed`, ascending, each once; `routing` gives what each token selected."""
        if self._prefetcher is not None:
            self._prefetcher.cancel()
        self._cache.begin_layer(stack, layer, needed)
        if self.trace is not None:
            self.trace.append(Step(stack, layer, tuple(needed)))
        if self._prefetcher is not None and self._cache.n_resident < len(self._pack.manifest.experts):
            self._preload_next(stack, layer, routing(), self._prefetcher)
        table = self._keys[stack, layer]
        return [table[expert] for expert in needed]

    def _preload_next(self, stack: Stack, layer: int, experts: Selected, prefetcher: Prefetcher) -> None:
        place = self._places[stack, layer]
        if place == self._first[stack]:
            self._history = []
        self._history = [*self._history[-1:], experts]
        following = place + 1 if place + 1 < len(self._order) else self._first.get("decoder", 0)
        next_stack, next_layer = self._order[following]
        goes_on = following > place and next_stack == stack  # else the first layer of another token or of the decoder
        history, n_tokens = (self._history, len(experts)) if goes_on else ([], 1)
        likely = self._predictor.next_experts(next_stack, following - self._first[next_stack], history)
        most = min(len(likely), _AHEAD * self._moe.top_k * n_tokens)
        prefetcher.submit([ExpertKey(next_stack, next_layer, expert) for expert in likely[:most]])


def demanded(experts: Tensor) -> list[int]:
    """experts [tokens, top_k] → the ids that are needed, ascending, each once; -1 (dropped) is left out."""
    return sorted(set(experts.flatten().tolist()) - {-1})
