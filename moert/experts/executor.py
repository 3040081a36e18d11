"""Runs the experts that a router selected, bringing each into memory once per layer and forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor

from moert.experts.cache import ExpertCache
from moert.experts.replay import Step
from moert.kernels.reference import demanded, grouped_ffn
from moert.pack.model_spec import ExpertKey, Stack
from moert.pack.reader import Pack, Projection
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
        predictor: Predictor,
        prefetcher: Prefetcher | None,
        trace: list[Step] | None = None,
    ) -> None:
        self.trace = trace
        self._pack = pack
        self._cache = cache
        self._predictor = predictor
        self._prefetcher = prefetcher
        self._moe = pack.manifest.model.moe
        self._order = pack.manifest.model.moe_layers()
        self._places = {at: index for index, at in enumerate(self._order)}
        self._first = {stack: self._order.index((stack, layer)) for stack, layer in reversed(self._order)}
        self._history: list[Selected] = []

    def run(self, stack: Stack, layer: int, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """See moert.models.moe.ExpertRunner. Raises PackError if an expert can't be read."""
        needed = demanded(experts)
        if self._prefetcher is not None:
            self._prefetcher.cancel()
        self._cache.begin_layer(stack, layer, needed)
        if self.trace is not None:
            self.trace.append(Step(stack, layer, tuple(needed)))
        if self._prefetcher is not None and self._cache.n_resident < len(self._pack.manifest.experts):
            self._preload_next(stack, layer, experts.numpy(), self._prefetcher)

        def lease(expert: int) -> AbstractContextManager[Mapping[str, Projection]]:
            return self._lease(ExpertKey(stack, layer, expert))

        return grouped_ffn(hidden, experts, weights, self._moe.activation, lease)

    @contextmanager
    def _lease(self, key: ExpertKey) -> Iterator[Mapping[str, Projection]]:
        with self._cache.lease(key) as buffer:
            yield self._pack.projections(key, buffer)

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
