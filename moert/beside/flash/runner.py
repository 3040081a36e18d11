"""Runners of single neurons: they run only the neurons of experts that fire, or that the pack's predictor names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from moert.beside.flash.keeping import KEEPING, Shares, all_to_blocks, room_for, shares
from moert.beside.flash.store import (
    BlockCache,
    BlockReader,
    Lent,
    NeuronCounters,
    Pieces,
    Rows,
    RowStore,
)
from moert.beside.wishes import Wishes
from moert.errors import NotFinite, PredictorMissing, SettingInvalid, said
from moert.experts.ahead import Lookahead
from moert.experts.cache import ExpertCache
from moert.experts.names import AUTO_PREDICTOR
from moert.experts.policy import Demand, Listener
from moert.experts.replay import AUTO_EVICTION
from moert.experts.store import ExpertStore, IoSettings
from moert.experts.streaming import Holding, Needs, announce, by_expert
from moert.kernels.backend import I32, I64, ROWS, Backend, Floats
from moert.machine import return_freed
from moert.pack.codec import F32
from moert.pack.layout import NeuronLayout
from moert.pack.learnt import PREDICTOR, NeuronPredictor, load_predictor
from moert.pack.model_spec import ExpertKey, LayerKey
from moert.pack.parts import Ffn
from moert.pack.reader import Pack
from moert.stats import ExpertCounters

EXACT, PREDICTED = "exact", "predicted"
NEURONS = (EXACT, PREDICTED)
"""Which neurons of an expert count: all, or those that the pack's predictor names."""


class FiringExperts:
    """An ExpertRunner of moert.models, as CachedExperts: answers are those of whole experts bit by bit, since neurons
    that do not fire add nothing. `rows` caches gate and up of experts, `columns` blocks of down."""

    def __init__(
        self, ffn: Ffn, rows: ExpertCache, columns: BlockCache, biases: Mapping[ExpertKey, F32], backend: Backend,
        counters: NeuronCounters, ahead: Lookahead | None, listeners: Iterable[Listener] = (),
    ) -> None:  # fmt: skip
        """`biases` [d_model]: of down, for experts that have one."""
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
        """Adds for each of these tokens: out[tokens] += weights[:, None] · expert(hidden[tokens])"""
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
    """Returns the blocks, ascending, of which some neuron fired for some token: fired [tokens, d_ff] is not 0 there."""
    neurons = fired[0] if len(fired) == 1 else fired.any(axis=0)
    found = np.zeros(layout.n_blocks, np.bool_)
    found[neurons.nonzero()[0] // layout.per_block] = True
    return found.nonzero()[0]


class _Pieces(Holding):
    """Experts in blocks of neurons: some are kept beside the cache, in a cache of blocks."""

    def __init__(
        self, pack: Pack, whole: ExpertStore, backend: Backend, counters: ExpertCounters, keeping: str, way: str
    ) -> None:
        """`keeping`: a name of moert.beside.flash.keeping; `way`: which neurons count. Raises PackError."""
        super().__init__(pack, whole, backend)
        self.counters = NeuronCounters(way=way)
        self.pieces = Pieces(pack, counters, whole.io)
        self.store = RowStore(self.pieces)
        reader = BlockReader(self.pieces, whole=way == PREDICTED)
        self.blocks = BlockCache(self.pieces.layers, reader, self.counters, KEEPING[keeping])

    def shares(self, room_bytes: int) -> Shares:
        """Divides a room for experts."""
        raise NotImplementedError

    @property
    def all_bytes(self) -> int:
        """Bytes of all experts."""
        return self.blocks.all_bytes

    def cache_bytes(self, room_bytes: int) -> int:
        return self.shares(room_bytes).rows_bytes

    def resize(self, room_bytes: int) -> None:
        self.blocks.resize(self.shares(room_bytes).blocks_bytes)

    @property
    def held_bytes(self) -> int:
        return self.blocks.held_bytes

    def expects(self) -> None:
        self.pieces.expect()

    def reads(self, io: IoSettings) -> None:
        super().reads(io)
        self.pieces.io = io

    @property
    def io(self) -> str:
        return str(self.pieces.io)

    def figures(self) -> dict[str, Any]:
        return self.counters.figures()


class Firing(_Pieces):
    """Rows of experts are cached as whole experts are, columns in blocks."""

    def __init__(
        self, pack: Pack, whole: ExpertStore, backend: Backend, counters: ExpertCounters, keeping: str
    ) -> None:
        """See _Pieces. Raises PackError."""
        super().__init__(pack, whole, backend, counters, keeping, EXACT)
        spec, layers = pack.manifest.model, self.pieces.layers
        self.nbytes = {key: self.store.nbytes(key) for keys in layers.values() for key in keys}
        top_k = spec.moe.router.top_k
        demand = {at: sum(sorted(self.nbytes[key] for key in keys)[-top_k:]) for at, keys in layers.items()}
        self._least = max(demand.values())
        self._token = sum(nbytes for at, nbytes in demand.items() if at.stack == "decoder")
        self._all, self._ffn = sum(self.nbytes.values()), spec.moe.ffn
        self._asked = top_k / spec.moe.n

    @property
    def all_bytes(self) -> int:
        """Bytes of all rows and all blocks."""
        return self._all + self.blocks.all_bytes

    def needs(self, token_bytes: int) -> Needs:
        """Of a token: room in which the rows that it can ask for in all layers of the decoder stay, whatever fires."""
        stays = room_for(self._token, self.blocks.one_bytes, self._asked)
        return Needs(min(stays, self.all_bytes), self.all_bytes, ", and what fires of the columns of down")

    def shares(self, room_bytes: int) -> Shares:
        columns = self.blocks
        return shares(room_bytes, self._all, self._least, columns.all_bytes, columns.one_bytes, self._asked)

    def runner(self, cache: ExpertCache, ahead: Lookahead | None, listeners: Iterable[Listener]) -> FiringExperts:
        """Returns the ExpertRunner; reads the biases of all experts for it. Raises PackError."""
        biases = self.pieces.biases()
        return FiringExperts(self._ffn, cache, self.blocks, biases, self.backend, self.counters, ahead, listeners)


Bools = npt.NDArray[np.bool_]


class Scores:
    """A predictor's scores of neurons in float32; each token gets the same bits as alone, see Backend.linear."""

    def __init__(self, predictor: NeuronPredictor, backend: Backend) -> None:
        self._backend = backend
        self._compress = {at: backend.matrix(Floats("F16", layer.compress)) for at, layer in predictor.layers.items()}
        self._heads = {
            at.expert(number): backend.matrix(Floats("F16", heads), bias)
            for at, layer in predictor.layers.items()
            for number, (heads, bias) in enumerate(zip(layer.heads, layer.bias.copy(), strict=True))
        }
        self._threshold: Mapping[ExpertKey, float] = {
            at.expert(number): least
            for at, layer in predictor.layers.items()
            for number, least in enumerate(layer.threshold.tolist())
        }

    def compressed(self, at: LayerKey, x: F32) -> F32:
        """Returns the compressed input [tokens, rank] of a layer's experts, x [tokens, features]."""
        return self._backend.linear(x, self._compress[at])

    def named(self, key: ExpertKey, compressed: F32) -> Bools:
        """Returns which neurons of an expert are named [tokens, d_ff], from compressed [tokens, rank]. Raises
        NotFinite."""
        scores = self._backend.linear(compressed, self._heads[key])
        if not np.isfinite(scores).all():
            raise NotFinite(
                f"{PREDICTOR} gives numbers that are not finite for expert {key}: run without it, or train it again "
                "(moeconv train-neurons)"
            )
        found: Bools = scores >= self._threshold[key]
        return found


def blocks_with(layout: NeuronLayout, neurons: Bools) -> Bools:
    """Returns which blocks [tokens, n_blocks] have one of these neurons [tokens, d_ff]."""
    found = np.zeros((len(neurons), layout.n_blocks), np.bool_)
    if len(neurons) == 1:
        found[0, neurons[0].nonzero()[0] // layout.per_block] = True
        return found
    rows, places = neurons.nonzero()
    found[rows, places // layout.per_block] = True
    return found


def neurons_in(layout: NeuronLayout, blocks: Bools) -> Bools:
    """Returns all neurons [tokens, d_ff] of these blocks [tokens, n_blocks]."""
    return blocks.repeat(layout.per_block, axis=1)[:, : layout.d_ff]


class PredictedExperts:
    """An ExpertRunner of moert.models for named neurons. A token's result depends on the neurons that its own scores
    name alone, not on the contents of memory or on tokens beside it. `blocks` caches whole blocks, rows and behind them
    columns."""

    def __init__(
        self, ffn: Ffn, layouts: Mapping[ExpertKey, NeuronLayout], scores: Scores, blocks: BlockCache,
        biases: Mapping[ExpertKey, F32], backend: Backend, counters: tuple[ExpertCounters, NeuronCounters],
        listeners: Iterable[Listener] = (),
    ) -> None:  # fmt: skip
        """`biases` [d_model]: of down, for experts that have one."""
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
        """Adds for each of these tokens: out[tokens] += weights[:, None] · expert(hidden[tokens])"""
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
        """Returns the blocks that are named for each token [tokens, n_blocks], and counts neurons."""
        neurons = self._scores.named(key, compressed)
        blocks, counters = blocks_with(layout, neurons), self._counters
        lacking = layout.n_blocks * layout.per_block - layout.d_ff
        counters.neurons += neurons.size
        counters.named += int(np.count_nonzero(neurons))
        counters.computed += layout.per_block * int(np.count_nonzero(blocks))
        counters.computed -= lacking * int(np.count_nonzero(blocks[:, -1]))
        return blocks

    def _fetch(self, key: ExpertKey, named: Bools) -> Lent:
        """Brings in the blocks that any part of the tokens names [parts, n_blocks], and returns their places."""
        counters = self._counters
        missed = counters.blocks - counters.block_hits
        lent = self._blocks.fetch(key, by_any(named).nonzero()[0])
        self._asked.requests += 1
        self._asked.hits += counters.blocks - counters.block_hits == missed
        return lent


def by_any(of_tokens: Bools) -> Bools:
    """Returns for each column [n] whether it holds for any of the tokens [tokens, n]."""
    found: Bools = of_tokens[0]
    return found if len(of_tokens) == 1 else np.any(of_tokens, axis=0, out=np.empty_like(found))


class Naming(_Pieces):
    """Whole blocks are cached, and no expert: all room is for blocks."""

    def __init__(
        self, pack: Pack, whole: ExpertStore, backend: Backend, counters: ExpertCounters, keeping: str,
        predictor: NeuronPredictor,
    ) -> None:  # fmt: skip
        """See _Pieces. Raises PackError."""
        super().__init__(pack, whole, backend, counters, keeping, PREDICTED)
        self.nbytes = dict.fromkeys(self.pieces.layouts, 0)
        self.notes = [fidelity(predictor)]
        self._part = predictor.kept.blocks
        self._asked, self._ffn, self._scores = counters, pack.manifest.model.moe.ffn, Scores(predictor, backend)

    def needs(self, token_bytes: int) -> Needs:
        """Of its experts' blocks, a token asks for those that are named."""
        return Needs(int(self._part * token_bytes), self.all_bytes)

    def shares(self, room_bytes: int) -> Shares:
        return all_to_blocks(room_bytes, self.blocks.all_bytes, self.blocks.one_bytes)

    def runner(self, cache: ExpertCache, ahead: Lookahead | None, listeners: Iterable[Listener]) -> PredictedExperts:
        """Returns the ExpertRunner; reads the biases of all experts for it. Raises PackError."""
        assert ahead is None, "there are no whole experts to read ahead"
        counters = self._asked, self.counters
        return PredictedExperts(
            self._ffn, self.pieces.layouts, self._scores, self.blocks, self.pieces.biases(), self.backend, counters,
            listeners,
        )  # fmt: skip


def held_in_blocks(
    pack: Pack, whole: ExpertStore, backend: Backend, counters: ExpertCounters, keeping: str, neurons: str
) -> Holding:
    """Returns the Holding of a pack whose experts lie in blocks of neurons. Raises PackError."""
    if neurons == EXACT:
        return Firing(pack, whole, backend, counters, keeping)
    predictor = load_predictor(pack)
    assert predictor is not None, "see check_neurons"
    found = Naming(pack, whole, backend, counters, keeping, predictor)
    del predictor  # the kernels have copies
    return_freed()
    return found


def check_settings(wishes: Wishes) -> None:
    """Raises SettingInvalid for names that there are not, and settings that have no effect beside others."""
    for name, known in (("keep_neurons", tuple(KEEPING)), ("neurons", NEURONS)):
        if getattr(wishes, name) not in known:
            raise SettingInvalid(name, f"{getattr(wishes, name)!r} is none of {', '.join(known)}")
    if wishes.neurons != PREDICTED:
        return
    for name, harmless in (("predict", (AUTO_PREDICTOR, "none")), ("eviction", (AUTO_EVICTION,))):
        if getattr(wishes, name) not in harmless:
            asked, why = said("neurons", PREDICTED), "reads no whole experts, only blocks of their neurons"
            raise SettingInvalid(name, f"{getattr(wishes, name)!r} is about experts, and {asked} {why}: leave it out")


def check_neurons(pack: Pack, neurons: str) -> None:
    """Raises SettingInvalid or PredictorMissing where the pack lacks the layout or the predictor that this setting
    needs."""
    if neurons != PREDICTED:
        return
    if not pack.has_neurons:
        raise SettingInvalid(
            "neurons",
            f"{PREDICTED!r} needs experts in blocks of neurons, and the pack at {pack.root} has them whole: convert "
            f"the model again with moeconv quantize --layout neuron, or use {said('neurons', EXACT)}",
        )
    if PREDICTOR not in pack.manifest.files:
        raise PredictorMissing(
            f"{said('neurons', PREDICTED)} needs a predictor of neurons, and the pack at {pack.root} has no "
            f"{PREDICTOR} (moeconv train-neurons adds it); or use {said('neurons', EXACT)}"
        )


def fidelity(predictor: NeuronPredictor) -> str:
    """Returns a note for the user on answers made with this predictor."""
    loss, cost = predictor.loss, "what that loses was not measured"
    if loss is not None:
        between = f"[{100 * loss.low:.1f}%, {100 * loss.high:.1f}%]"
        cost = f"held-out loss {100 * loss.loss:.1f}% {between}, that of the widths included"
    return f"only neurons that the pack's predictor names are read and computed: {cost}"
