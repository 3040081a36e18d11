"""Neurons that fire: recorded and replayed, curves over rooms and windows, room for them, orders in which they lie."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from moeconv.order import Bits, NeuronOrder, by_frequency, together, touched
from moert.beside.flash.keeping import I64, KEEPING, Blocks, Hits, Keeping
from moert.pack.codec import F32, U8
from moert.pack.files import atomic_write
from moert.pack.model_spec import ExpertKey, LayerKey, ModelSpec
from recipes.bench.result import Row

if TYPE_CHECKING:
    from moert.engine.engine import Engine

# Which neurons fire while the decoder of a trained model writes, or are named by its predictor: written down, and
# put in the place of those of a model of another shape.
# A *visit* is a layer and a token. Every model here goes to one expert a layer and token.

Found = F32 | Bits
"""What neurons give, or whether they are named. [tokens, d_ff]"""
SHIFT = 97
"""Tokens between copies of a pattern that lie side by side."""
LEAST = np.float32(1e-3)
"""What a neuron gives that is to fire, and did not."""


@dataclass(frozen=True)
class Firings:
    """`experts` [layers, visits]: where each token went; `packed` [layers, visits, d_ff / 8]: which of that expert's
    neurons fired, or were named, eight to a byte."""

    experts: I64
    packed: U8
    n_experts: int
    d_ff: int

    @classmethod
    def load(cls, path: Path) -> Firings:
        with np.load(path) as found:
            n_experts, d_ff = found["sizes"].tolist()
            return cls(found["experts"], found["packed"], n_experts, d_ff)

    def save(self, path: Path) -> None:
        with atomic_write(path) as fresh, fresh.open("wb") as stream:
            sizes = np.array([self.n_experts, self.d_ff])
            np.savez(stream, experts=self.experts, packed=self.packed, sizes=sizes)

    @property
    def n_layers(self) -> int:
        return len(self.experts)

    @property
    def visits(self) -> int:
        return self.experts.shape[1]

    def fired(self, layer: int) -> Bits:
        """[visits, d_ff]"""
        return np.unpackbits(self.packed[layer], axis=1, count=self.d_ff).astype(np.bool_)

    @property
    def share(self) -> float:
        """Of an expert's neurons, how many fire for a token."""
        return float(np.mean([self.fired(layer).mean() for layer in range(self.n_layers)]))


class Recorder:
    """Stays in an engine that runs experts neuron by neuron, and hears what fires, or where a predictor names neurons,
    what is named. Tokens that come several at once are left out."""

    def __init__(self, engine: Engine) -> None:
        self._spec, self._at = engine.spec, LayerKey("decoder", 0)
        self._seen: dict[LayerKey, list[tuple[int, U8]]] = {at: [] for at in engine.spec.moe_layers("decoder")}
        self.on = False
        _change(engine.runner, self._begin, self._keep)

    def firings(self) -> Firings:
        moe, layers = self._spec.moe, list(self._seen.values())
        assert len({len(layer) for layer in layers}) == 1, "each token goes to one expert of each layer"
        return Firings(
            np.array([[expert for expert, _ in layer] for layer in layers]),
            np.stack([np.stack([bits for _, bits in layer]) for layer in layers]), moe.n, moe.ffn.d_ff,
        )  # fmt: skip

    def _begin(self, key: ExpertKey, tokens: I64) -> None:
        self._key = key

    def _keep(self, fired: Found) -> Found:
        if self.on and self._key.stack == "decoder" and len(fired) == 1:
            self._seen[self._key.at].append((self._key.expert, np.packbits(fired[0] != 0)))
        return fired


class Replay:
    """Firings in the place of what fires in layers of another shape: neuron i fires where neuron i modulo d_ff did, so
    many tokens later for each copy beside. Recorded layers stand for as many of the others as it takes. An expert has
    the patterns of recorded ones of the same number, modulo their number."""

    def __init__(self, firings: Firings, layers: Sequence[LayerKey], n_experts: int, d_ff: int) -> None:
        self._n_experts, self._d_ff, self._visits = n_experts, d_ff, firings.visits
        self._layer = {at: place * firings.n_layers // len(layers) for place, at in enumerate(layers)}
        self._fired = [firings.fired(layer) for layer in range(firings.n_layers)]
        self._experts = firings.experts % n_experts
        self._next = dict.fromkeys(layers, 0)

    def begin(self, at: LayerKey, tokens: int) -> I64:
        """[tokens]: the recorded visits that stand for the next ones of a layer."""
        rows = np.arange(self._next[at], self._next[at] + tokens) % self._visits
        self._next[at] = (self._next[at] + tokens) % self._visits
        return rows

    def experts(self, at: LayerKey, rows: I64) -> I64:
        """[tokens, 1]"""
        chosen: I64 = self._experts[self._layer[at]][rows][:, None]
        return chosen

    def pattern(self, at: LayerKey, rows: I64) -> Bits:
        """[tokens, d_ff]"""
        fired = self._fired[self._layer[at]]
        copies = -(-self._d_ff // fired.shape[1])
        parts = [fired[(rows + copy * SHIFT) % self._visits] for copy in range(copies)]
        return np.concatenate(parts, axis=1)[:, : self._d_ff]

    def replace(self, engine: Engine) -> None:
        """From now on this engine's tokens go where recorded ones went, and where it runs experts neuron by neuron,
        these neurons fire, or are named."""
        runner: Any = engine.runner
        run = runner.run
        self._rows = self._mine = np.arange(0)

        def replayed(at: LayerKey, hidden: F32, experts: I64, weights: F32, out: F32, x: F32) -> None:
            self._rows = self.begin(at, len(hidden))
            run(at, hidden, self.experts(at, self._rows), weights, out, x)

        runner.run = replayed
        if engine.pack.has_neurons:
            _change(runner, self._begin, self._put)

    def _begin(self, key: ExpertKey, tokens: I64) -> None:
        self._at, self._mine = key.at, self._rows[tokens]

    def _put(self, found: Found) -> Found:
        mine, self._mine = self._mine[: len(found)], self._mine[len(found) :]
        pattern = self.pattern(self._at, mine)
        return pattern if found.dtype == np.bool_ else enforced(found, pattern)


def enforced(fired: F32, pattern: Bits) -> F32:
    """The same [tokens, d_ff] but for what is to fire and did not, or the other way round."""
    return np.where(pattern, np.where(fired == 0, LEAST, fired), np.float32(0))


def _change(runner: Any, begin: Callable[[ExpertKey, I64], None], changed: Callable[[Found], Found]) -> None:
    """`begin` gets each expert and its tokens before it runs; `changed` what is named, or where nothing is, what fires,
    [tokens, d_ff], and gives what is to be in its place."""
    from moert.beside.flash.runner import PredictedExperts

    add = runner._add

    def added(key: ExpertKey, first: Any, second: Any, tokens: I64, *others: Any) -> None:
        begin(key, tokens)
        add(key, first, second, tokens, *others)

    runner._add = added
    if isinstance(runner, PredictedExperts):
        scores: Any = runner._scores
        named = scores.named
        scores.named = lambda *arguments: changed(named(*arguments))
    else:
        runner._backend = _Changed(runner._backend, changed)


class _Changed:
    """A backend, but for what fires."""

    def __init__(self, backend: Any, changed: Callable[[Found], Found]) -> None:
        self._backend, self._changed = backend, changed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def fire(self, *arguments: Any) -> Found:
        return self._changed(self._backend.fire(*arguments))


# What recorded firings say of keeping neurons: what a window of tokens leaves to be loaded, and what hits under
# each way of keeping blocks, beside Belady's rule. Pure.

WINDOWS = (1, 2, 4, 8, 16, 32, 64)
ROOMS = (0.1, 0.25, 0.5, 0.75)
BELADY = "Belady"
_NEVER = 1 << 40


class Loads(NamedTuple):
    """What a window of the last tokens leaves to be read, and keeps: neurons for a token, each once."""

    loaded: float
    kept: float


def window_loads(experts: I64, fired: Bits, windows: Sequence[int]) -> list[Loads]:
    """Of one layer: experts [visits], and which of the neurons of each fired, [visits, d_ff]. A window of k keeps what
    fired for any of the last k tokens."""
    visits, d_ff = fired.shape
    last: dict[int, I64] = {}
    ages, rests = np.zeros(visits + 1, np.int64), np.zeros(visits + 1, np.int64)
    for visit, expert in enumerate(experts.tolist()):
        at = last.setdefault(expert, np.full(d_ff, -1))
        seen = at[fired[visit]]
        np.add.at(ages, np.where(seen < 0, visits, visit - seen), 1)
        at[fired[visit]] = visit
    for at in last.values():
        np.add.at(rests, visits - at[at >= 0], 1)
    first = int(ages[visits])
    ages[visits] = 0
    spans = np.arange(visits + 1)
    return [
        Loads(
            (first + int(ages[k + 1 :].sum())) / visits,
            int((np.minimum(spans, k) * (ages + rests)).sum()) / visits,
        )
        for k in windows
    ]  # fmt: skip


def visits_of(experts: I64, fired: Bits, per_block: int) -> tuple[list[I64], int]:
    """The blocks that each token asks a layer for, ascending, and how many blocks an expert has."""
    visits, d_ff = fired.shape
    n_blocks = -(-d_ff // per_block)
    padded = np.zeros((visits, n_blocks * per_block), np.bool_)
    padded[:, :d_ff] = fired
    asked = padded.reshape(visits, n_blocks, per_block).any(axis=2)
    return [row.nonzero()[0] + n_blocks * int(expert) for row, expert in zip(asked, experts, strict=True)], n_blocks


def kept_hits(visits: Sequence[I64], n_blocks: int, n_slots: int, keeping: Keeping) -> Hits:
    """As the runtime keeps blocks, at first none: of a token that asks for more than there are slots, the first ones
    stay."""
    blocks, asked, hits = Blocks(n_blocks, keeping), 0, 0
    blocks.resize(n_slots)
    for wanted in visits:
        asked += len(wanted)
        hits += int(np.count_nonzero(blocks.slot_of[wanted] >= 0))
        blocks.want(wanted[:n_slots])
    return Hits(asked, hits)


def best_hits(visits: Sequence[I64], n_blocks: int, n_slots: int) -> Hits:
    """By Belady's rule, which knows the future: after each token stays what is asked for again first, of what was there
    and what has come. Nothing has to stay, so that no way of keeping hits more often."""
    again, following = list[I64](), np.full(n_blocks, _NEVER)
    for visit in range(len(visits) - 1, -1, -1):
        again.append(following[visits[visit]])
        following[visits[visit]] = visit
    needed, asked, hits = np.full(n_blocks, _NEVER), 0, 0  # when residents are needed again
    for wanted, later in zip(visits, reversed(again), strict=True):
        asked += len(wanted)
        hits += int(np.count_nonzero(needed[wanted] < _NEVER))
        needed[wanted] = later
        if np.count_nonzero(needed < _NEVER) > n_slots:
            needed[np.argpartition(needed, n_slots)[n_slots:]] = _NEVER
    return Hits(asked, hits)


def window_rows(name: str, firings: Firings) -> Iterator[Row]:
    """The mean over all layers, as shares of an expert's neurons, and of all that a layer has."""
    found = [
        window_loads(experts, firings.fired(layer), WINDOWS) for layer, experts in enumerate(firings.experts)
    ]  # fmt: skip
    yield Row(f"{name}: fire for a token", 100 * firings.share, "% of an expert's neurons")
    for place, k in enumerate(WINDOWS):
        loaded, kept = (float(np.mean([getattr(layer[place], what) for layer in found])) for what in Loads._fields)
        yield Row(f"{name}: window of {k}: loaded", 100 * loaded / firings.d_ff, "% of an expert's neurons")
        share = 100 * kept / firings.d_ff / firings.n_experts
        yield Row(f"{name}: window of {k}: kept", share, "% of a layer's neurons")


def hit_rates(firings: Firings, per_block: int, room: float) -> Mapping[str, float]:
    """Hits of all layers together, each with room for so large a part of its blocks, by the way of keeping."""
    found = {name: [0, 0] for name in (*KEEPING, BELADY)}
    for layer, experts in enumerate(firings.experts):
        visits, of_expert = visits_of(experts, firings.fired(layer), per_block)
        n_blocks = of_expert * firings.n_experts
        n_slots = max(1, int(room * n_blocks))
        hits = {name: kept_hits(visits, n_blocks, n_slots, keeping) for name, keeping in KEEPING.items()}
        hits[BELADY] = best_hits(visits, n_blocks, n_slots)
        for name, one in hits.items():
            found[name][0] += one.hits
            found[name][1] += one.asked
    return {name: hits / max(1, asked) for name, (hits, asked) in found.items()}


def hit_rows(name: str, firings: Firings, per_block: int) -> Iterator[Row]:
    yield Row(f"{name}: block", per_block, "neurons")
    for room in ROOMS:
        for way, rate in hit_rates(firings, per_block, room).items():
            yield Row(f"{name}: room for {room:.0%} of blocks: {way}", 100 * rate, "% hits")


# How long it takes to manage neurons in memory: in slots, of which none is moved, as the runtime has them; and side by
# side, the last ones copied to the places of those that leave. A neuron is its rows and its column at 16 bits.

MANAGED = 256
"""Tokens, behind as many that fill the room."""
WINDOW = "window"


class SideBySide:
    """Neurons at the beginning of a room, without gaps (Alizadeh et al. 2023, section 3.3)."""

    def __init__(self, n_neurons: int, n_places: int, nbytes: int) -> None:
        self.room = np.zeros((n_places, nbytes), np.uint8)
        self.place_of: I64 = np.full(n_neurons, -1)
        self.count = self.moved_bytes = 0
        self._in: I64 = np.zeros(n_places, np.int64)

    def change(self, leaving: I64, coming: I64) -> None:
        """Removes neurons [n], and gives places behind the last one to others [m]."""
        count, places = self.count - len(leaving), self.place_of[leaving]
        self.place_of[leaving] = -1
        last = count + (self.place_of[self._in[count : self.count]] >= 0).nonzero()[0]
        free = places[places < count]
        self.room[free] = self.room[last]
        self.moved_bytes += len(free) * self.room.shape[1]
        self._put(self._in[last], free)
        self.count = count + len(coming)
        self._put(coming, np.arange(count, self.count))

    def _put(self, neurons: I64, places: I64) -> None:
        self.place_of[neurons], self._in[places] = places, neurons


def managed_rows(name: str, firings: Firings, spec: ModelSpec) -> Iterator[Row]:
    """Of all layers for a token, with room for half of the neurons of each."""
    moe, layers = spec.moe, spec.moe_layers("decoder")
    nbytes = 2 * len(moe.ffn.projections) * spec.expert_width
    replay, slots_s, copies_s, moved = Replay(firings, layers, moe.n, moe.ffn.d_ff), 0.0, 0.0, 0
    for at in layers:
        rows = replay.begin(at, 2 * MANAGED)
        visits, _ = visits_of(replay.experts(at, rows)[:, 0], replay.pattern(at, rows), 1)
        n_neurons = moe.n * moe.ffn.d_ff
        blocks, beside = Blocks(n_neurons, KEEPING[WINDOW]), SideBySide(n_neurons, n_neurons // 2, nbytes)
        blocks.resize(n_neurons // 2)
        for number, wanted in enumerate(visits):
            before, moved_before, started = blocks.slot_of.copy(), beside.moved_bytes, time.perf_counter()
            coming = blocks.want(wanted[: n_neurons // 2]).blocks
            wanted_at = time.perf_counter()
            leaving = ((before >= 0) & (blocks.slot_of < 0)).nonzero()[0]
            found_at = time.perf_counter()
            beside.change(leaving, coming)
            if number >= MANAGED:
                slots_s += wanted_at - started
                copies_s += time.perf_counter() - found_at
                moved += beside.moved_bytes - moved_before
    yield Row(f"{name}: managing slots", 1e3 * slots_s / MANAGED, "ms a token")
    yield Row(f"{name}: copying the last neurons", 1e3 * copies_s / MANAGED, "ms a token more")
    yield Row(f"{name}: bytes of copies", moved / 1e6 / MANAGED, "MB a token")


# Does it pay to lay neurons side by side that fire together? Orders of the first half of a recording are judged on the
# second; beside them those of calibration text. Pure.

SIZES = (2, 4, 8, 16, 32)
LEAST_VISITS = 64
"""Of an expert that is looked at."""
MOST_EXPERTS = 4
"""Of a layer that are looked at: those with the most tokens."""

ORDERS: Mapping[str, Callable[[Bits, int], I64]] = {
    "as given": lambda fired, size: np.arange(fired.shape[1]),
    "by frequency": lambda fired, size: by_frequency(fired.sum(axis=0)),
    "together": together,
}

IN_THE_PACK, COUNTED = "in the pack", "by frequency on calibration text"
"""As a conversion lays neurons for blocks of that size; as it did before it looked at which ones fire together."""


def closest_friends(fired: Bits) -> I64:
    """[d_ff]: the other neuron that fires most often when this one does."""
    columns = fired.astype(np.float32)
    both = columns.T @ columns
    np.fill_diagonal(both, -1)
    found: I64 = both.argmax(axis=1)
    return found


def as_trained(firings: Firings, order: NeuronOrder) -> Firings:
    """The same in the order of the checkpoint, recorded of a pack that has this one."""
    packed = np.empty_like(firings.packed)
    for layer, rows in enumerate(rows for at, rows in order.layers.items() if at.stack == "decoder"):
        fired = firings.fired(layer)
        found = np.empty_like(fired)
        np.put_along_axis(found, rows[firings.experts[layer]].astype(np.int64), fired, axis=1)
        packed[layer] = np.packbits(found, axis=1)
    return replace(firings, packed=packed)


def halves(firings: Firings) -> Iterator[tuple[int, int, Bits, Bits]]:
    """Of the experts that were asked most, by layer and number, the first and the second half of their tokens."""
    for layer, experts in enumerate(firings.experts):
        fired = firings.fired(layer)
        numbers, counts = np.unique(experts, return_counts=True)
        most = numbers[np.argsort(-counts, kind="stable")][:MOST_EXPERTS]
        for expert in most.tolist():
            mine = fired[experts == expert]
            if len(mine) >= LEAST_VISITS:
                yield layer, expert, mine[: len(mine) // 2], mine[len(mine) // 2 :]


def order_rows(
    name: str, firings: Firings, order: NeuronOrder | None = None,
    others: Mapping[str, Callable[[int], NeuronOrder]] = MappingProxyType({}),
) -> Iterator[Row]:  # fmt: skip
    """`order`: of the pack that was recorded; None: it has that of the checkpoint. `others`: by name, orders that were
    made of other text, for blocks of so many neurons."""
    parts = list(halves(firings if order is None else as_trained(firings, order)))
    if not parts:
        return
    for size in SIZES:
        shares = {what: [touched(b, of(a, size), size) for _, _, a, b in parts] for what, of in ORDERS.items()}
        for what, made in others.items():
            layers = [rows.astype(np.int64) for at, rows in made(size).layers.items() if at.stack == "decoder"]
            shares[what] = [touched(b, layers[layer][expert], size) for layer, expert, _, b in parts]
        for what, each in shares.items():
            share = float(np.mean(each))
            yield Row(f"{name}, blocks of {size}: {what}", 100 * share, "% of blocks", n=len(parts))
    friends = [closest_friends(first) for _, _, first, _ in parts]
    distinct = np.mean([len(np.unique(each)) / len(each) for each in friends])
    yield Row(f"{name}: neurons that are anyone's closest friend", 100 * float(distinct), "% of all", n=len(parts))
