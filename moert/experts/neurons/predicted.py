"""Runs of each expert only the blocks with a neuron that the pack's predictor names: all others count as zero."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from moert.experts.demand import Demand, Listener
from moert.experts.executor import announce, by_expert
from moert.experts.neurons.scores import Bools, Scores, blocks_with, neurons_in
from moert.experts.neurons.slots import BlockCache, Lent
from moert.kernels.backend import I32, I64, ROWS, Backend
from moert.pack.codec import F32
from moert.pack.model_spec import ExpertKey, LayerKey
from moert.pack.neurons import NeuronLayout
from moert.pack.parts import Ffn
from moert.stats import ExpertCounters, NeuronCounters


class PredictedExperts:
    """An ExpertRunner of moert.models. What a token gets depends on what its own scores name alone, not on what is in
    memory or runs beside it. `blocks` caches whole blocks, rows and behind them columns."""

    def __init__(
        self, ffn: Ffn, layouts: Mapping[ExpertKey, NeuronLayout], scores: Scores, blocks: BlockCache,
        biases: Mapping[ExpertKey, F32], backend: Backend, counters: tuple[ExpertCounters, NeuronCounters],
        listeners: Iterable[Listener] = (),
    ) -> None:  # fmt: skip
        """`biases` [d_model] of down, of experts that have some."""
        self.listeners = list(listeners)
        self._ffn, self._layouts, self._scores, self._blocks = ffn, layouts, scores, blocks
        self._biases, self._backend, (self._asked, self._counters) = biases, backend, counters

    def run(self, at: LayerKey, hidden: F32, experts: I64, weights: F32, out: F32, x: F32) -> None:
        """See moert.models.ffn.ExpertRunner. Raises PackError if something can't be read."""
        needed, counts, tokens, share = by_expert(experts, weights)
        keys, start = announce(Demand(at, tuple(needed)), self.listeners), 0
        compressed = self._scores.compressed(at, hidden)
        for key, count in zip(keys, counts, strict=True):
            mine = slice(start, start + count)
            self._add(key, hidden, compressed, tokens[mine], share[mine], out)
            start += count

    def _add(self, key: ExpertKey, hidden: F32, compressed: F32, tokens: I32, weights: F32, out: F32) -> None:
        """out[tokens] += weights[:, None] · expert(hidden[tokens])"""
        layout, bias = self._layouts[key], self._biases.get(key)
        parts = [tokens[at : at + ROWS] for at in range(0, len(tokens), ROWS)]
        named = [self._named(key, layout, compressed[mine]) for mine in parts]
        base, offsets = self._fetch(key, np.stack([by_any(blocks) for blocks in named]))
        columns = base[layout.rows_bytes :]
        for at, (mine, blocks) in enumerate(zip(parts, named, strict=True)):
            there = np.where(by_any(blocks), offsets, -1)
            fired = self._backend.fire(layout, base, there, hidden[mine], self._ffn)
            if len(mine) > 1:
                fired[~neurons_in(layout, blocks)] = 0
            self._counters.fired += int(np.count_nonzero(fired))
            made = self._backend.project(layout, columns, there, fired, bias)
            out[mine] += weights[at * ROWS : (at + 1) * ROWS, None] * made

    def _named(self, key: ExpertKey, layout: NeuronLayout, compressed: F32) -> Bools:
        """Blocks that are named for each token: [tokens, n_blocks]."""
        neurons = self._scores.named(key, compressed)
        blocks, counters = blocks_with(layout, neurons), self._counters
        lacking = layout.n_blocks * layout.per_block - layout.d_ff
        counters.neurons += neurons.size
        counters.named += int(np.count_nonzero(neurons))
        counters.computed += layout.per_block * int(np.count_nonzero(blocks))
        counters.computed -= lacking * int(np.count_nonzero(blocks[:, -1]))
        return blocks

    def _fetch(self, key: ExpertKey, named: Bools) -> Lent:
        """Where the blocks lie that any part of the tokens names: [parts, n_blocks]."""
        counters = self._counters
        missed = counters.blocks - counters.block_hits
        lent = self._blocks.fetch(key, by_any(named).nonzero()[0])
        self._asked.requests += 1
        self._asked.hits += counters.blocks - counters.block_hits == missed
        return lent


def by_any(of_tokens: Bools) -> Bools:
    """[tokens, n] → [n]: whether it holds for any of them."""
    found: Bools = of_tokens[0]
    return found if len(of_tokens) == 1 else np.any(of_tokens, axis=0, out=np.empty_like(found))
