"""The feed-forward part of a layer: experts that a router chooses, or one network for all tokens."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Protocol

import numpy as np

from moert.kernels.backend import I64, ROWS, Backend, Expert
from moert.models.router import Router
from moert.pack.codec import F32
from moert.pack.model_spec import LayerKey
from moert.pack.parts import Ffn

Routers = MutableMapping[LayerKey, Router]
"""Of each layer with experts; a layer asks the one that stands here when it runs."""


class ExpertRunner(Protocol):
    """Runs the experts of a layer; how it comes by their weights is its own affair."""

    def run(self, at: LayerKey, hidden: F32, experts: I64, weights: F32, out: F32) -> None:
        """out [tokens, d_model] += for each token the sum of weight times expert(hidden); see Routed for the rest."""
        ...


class MoeFfn:
    """x += experts(norm(x)), as the layer's router says; the norm is part of the router."""

    def __init__(self, at: LayerKey, routers: Routers, runner: ExpertRunner) -> None:
        self._at, self._routers, self._runner = at, routers, runner

    def __call__(self, x: F32, lengths: Sequence[int]) -> None:
        """x [tokens, d_model], sequences of `lengths` tokens one after the other."""
        self._runner.run(self._at, *self._routers[self._at].route(x, lengths), x)


class DenseFfn:
    """x += ffn(norm(x))"""

    def __init__(self, part: Ffn, norm: F32, eps: float, ffn: Expert, backend: Backend) -> None:
        self._part, self._norm, self._eps, self._ffn, self._backend = part, norm, eps, ffn, backend

    def __call__(self, x: F32, lengths: Sequence[int]) -> None:
        """x [tokens, d_model]; which sequence a token belongs to makes no difference."""
        for start in range(0, len(x), ROWS):
            rows = x[start : start + ROWS]
            n = len(rows)
            hidden, ones = self._backend.norm(rows, self._norm, self._eps), np.ones(n, np.float32)
            self._backend.mixture([self._ffn], [n], np.arange(n, dtype=np.int32), ones, hidden, rows, self._part)
