"""Runs experts neuron by neuron: what `gate` and `up` give says which columns of `down` are wanted, and only these are
read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

import numpy as np

from moert.experts.ahead import Lookahead
from moert.experts.cache.cache import ExpertCache
from moert.experts.demand import Demand, Listener
from moert.experts.executor import announce, by_expert
from moert.experts.neurons.keeping import I64
from moert.experts.neurons.slots import BlockCache
from moert.experts.neurons.store import Rows
from moert.kernels.backend import I32, ROWS, Backend
from moert.pack.codec import F32
from moert.pack.model_spec import ExpertKey, LayerKey
from moert.pack.neurons import NeuronLayout
from moert.pack.parts import Ffn
from moert.stats import NeuronCounters


class FiringExperts:
    """An ExpertRunner of moert.models, as CachedExperts: answers are those of whole experts bit by bit, since what does
    not fire adds nothing. `rows` caches gate and up of experts, `columns` blocks of down."""

    def __init__(
        self, ffn: Ffn, rows: ExpertCache, columns: BlockCache, biases: Mapping[ExpertKey, F32], backend: Backend,
        counters: NeuronCounters, ahead: Lookahead | None, listeners: Iterable[Listener] = (),
    ) -> None:  # fmt: skip
        """`biases` [d_model] of down, of experts that have some."""
        self.listeners = list(listeners)
        self._rows, self._columns, self._backend = rows, columns, backend
        self._counters, self._ahead = counters, ahead
        self._ffn, self._biases = ffn, biases

    def run(self, at: LayerKey, hidden: F32, experts: I64, weights: F32, out: F32, x: F32) -> None:
        """See moert.models.ffn.ExpertRunner. Raises PackError if something can't be read."""
        needed, counts, tokens, share = by_expert(experts, weights)
        keys, start = announce(Demand(at, tuple(needed)), self.listeners, self._rows, self._ahead), 0
        for place, (key, count) in enumerate(zip(keys, counts, strict=True)):
            mine = slice(start, start + count)
            with self._rows.lease([key], keys[place + 1 :]) as lease:
                if self._ahead is not None and place + 1 == len(keys):
                    self._ahead.look(at, experts, x)
                self._add(key, cast(Rows, lease.expert(0)), hidden, tokens[mine], share[mine], out)
            start += count

    def _add(self, key: ExpertKey, rows: Rows, hidden: F32, tokens: I32, weights: F32, out: F32) -> None:
        """out[tokens] += weights[:, None] · expert(hidden[tokens])"""
        layout, bias, many = rows.layout, self._biases.get(key), len(tokens) > ROWS
        lent = self._columns.fetch_all(key) if many else None
        for start in range(0, len(tokens), ROWS):
            mine = tokens[start : start + ROWS]
            fired = self._backend.fire(layout, rows.buffer, rows.offsets, hidden[mine], self._ffn)
            self._counters.neurons += fired.size
            self._counters.fired += int(np.count_nonzero(fired))
            columns = self._columns.fetch(key, fired_blocks(layout, fired)) if lent is None else lent
            parts = self._backend.project(layout, columns.base, columns.offsets, fired, bias)
            out[mine] += weights[start : start + ROWS, None] * parts


def fired_blocks(layout: NeuronLayout, fired: F32) -> I64:
    """Blocks, ascending, of which some neuron fired for some token: fired [tokens, d_ff] is not 0 there."""
    neurons = fired[0] if len(fired) == 1 else fired.any(axis=0)
    found = np.zeros(layout.n_blocks, np.bool_)
    found[neurons.nonzero()[0] // layout.per_block] = True
    return found.nonzero()[0]
