"""Statistics of firing neurons: how often each neuron of an expert fires on text, and which ones fire for a token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from moeconv.measure.scorers import Routed, Subject
from moeconv.measure.scoring import TextScorer
from moeconv.order import Bits, NeuronOrder, by_frequency, together, touched
from moeconv.progress import Bar, Progress
from moeconv.source.experts import Call, expert_inner
from moert.pack.codec import U8
from moert.pack.layout import U32
from moert.pack.model_spec import LayerKey

# Each neuron's firings on text, and the order of neurons that follows from them.
# A neuron fires where its input to the down matrix is not zero.

ROWS = 2048
"""Rows of an expert whose neurons are counted together."""
KEPT = 8192
"""Rows of an expert, the first ones, of which it is kept which neurons fire: half of them to group neurons by, the
others to judge by."""
WHAT = "which neurons fire"

I64 = npt.NDArray[np.int64]
Counts = Mapping[LayerKey, I64]
"""Layer with experts → how often each neuron fired [experts, d_ff], in the order of execution."""


class Reads(Protocol):
    """The part of a scorer of moeconv.measure.scorers that counting needs."""

    @property
    def n_samples(self) -> int: ...

    def routes(self) -> Iterator[Routed]: ...


class Counted:
    """Firings of one layer's experts: `counts` [experts, d_ff] of each neuron, and of each expert's first rows which
    neurons fired."""

    def __init__(self, experts: int, d_ff: int) -> None:
        self.counts: I64 = np.zeros((experts, d_ff), np.int64)
        self._kept: list[list[U8]] = [[] for _ in range(experts)]

    def see(self, expert: int, fired: Bits) -> None:
        """Counts rows of an expert [rows, d_ff]."""
        self.counts[expert] += fired.sum(axis=0)
        kept = self._kept[expert]
        kept.append(np.packbits(fired[: KEPT - sum(map(len, kept))], axis=1))

    def order(self, expert: int, size: int) -> tuple[I64, tuple[float, float]]:
        """Returns an expert's order of neurons [d_ff] for blocks of `size`: those together that fire together on one
        half of the rows, if they ask for fewer blocks on the other half than those by frequency on all text; else by
        frequency. With it the shares of blocks that both ask for; 0 where nothing was compared."""
        frequent = by_frequency(self.counts[expert])
        packed = np.concatenate([np.zeros((0, -(-len(frequent) // 8)), np.uint8), *self._kept[expert]])
        fired = np.unpackbits(packed, axis=1, count=len(frequent)).astype(np.bool_)
        half = len(fired) // 2
        if size == 1 or half == 0:
            return frequent, (0.0, 0.0)
        grouped = together(fired[:half], size)
        shares = touched(fired[half:], frequent, size), touched(fired[half:], grouped, size)
        return grouped if shares[1] < shares[0] else frequent, shares


def heard(subject: Subject, scorer: Reads, hear: Callable[[LayerKey, Call], None], bar: Bar) -> None:
    """Calls `hear` with the calls of each layer's experts while a model in memory reads a scorer's text, and writes its
    outputs if it has an encoder. The bar counts samples."""
    assert subject.layers is None, "a model that is run layer by layer answers its calls elsewhere"
    asked: dict[LayerKey, Call] = {}

    def keep(place: LayerKey, call: Call) -> None:
        asked[place] = call  # of text that is written token by token, the last call has the whole

    told = hear if subject.spec.encoder is None else keep  # without an encoder nothing is written
    with torch.inference_mode(), subject.calls.during(answer=told):
        for routed in scorer.routes():
            for place, call in asked.items():
                hear(place, call)
            asked.clear()
            bar.update(len(routed.samples))


def counted(subject: Subject, scorer: Reads, show: Progress) -> Iterator[tuple[LayerKey, Counted]]:
    """Yields the firings of each layer with experts, over all tokens of a scorer's text; of a model in memory, or layer
    by layer. Raises ConversionError if the disk refuses."""
    moe = subject.spec.moe
    layers = {place: Counted(moe.n, moe.ffn.d_ff) for place in subject.spec.moe_layers()}
    if subject.layers is None:
        with show(WHAT, scorer.n_samples, "sample") as bar:
            heard(subject, scorer, lambda place, call: _see(layers[place], subject, place, call), bar)
        yield from layers.items()
        return
    assert isinstance(scorer, TextScorer), "only decoders go layer by layer"
    calls = subject.layers.calls_of(scorer.texts.ids, scorer.texts.real, "what enters each layer")
    first = next(calls)  # all text has gone through all layers by then
    with show(WHAT, len(layers), "layer") as bar:
        for place, call in chain([first], calls):
            layer = layers.pop(place)
            _see(layer, subject, place, call)
            bar.update(1)
            yield place, layer


@torch.inference_mode()
def _see(layer: Counted, subject: Subject, place: LayerKey, call: Call) -> None:
    supply, ffn = subject.calls.supply, subject.spec.moe.ffn
    asked = call.rows(subject.spec.moe.n).nonzero()[:, 0].tolist()
    keys = [place.expert(number) for number in asked]
    supply.expect(keys)
    for key in keys:
        weights, biases = supply.weights(key), supply.biases(key)
        for rows in torch.split((call.chosen == key.expert).any(dim=1).nonzero()[:, 0], ROWS):
            layer.see(key.expert, (expert_inner(call.x[rows], weights, biases, ffn) != 0).numpy())


class Ordered(NamedTuple):
    """An order of neurons, how often each fires, and the shares of blocks that a token asks for, by frequency and by
    which neurons fire together, of each expert that was looked at."""

    order: NeuronOrder
    counts: Counts
    shares: Sequence[tuple[float, float]]

    def covered(self, most: float) -> float:
        """Returns the share of all firings that belong to the `most` frequent (0..1) neurons of their experts. 0..1"""
        ordered = [np.sort(fired, axis=1)[:, ::-1] for fired in self.counts.values()]
        first = sum(int(fired[:, : round(most * fired.shape[1])].sum()) for fired in ordered)
        return first / max(1, sum(int(fired.sum()) for fired in ordered))


def ordered(layers: Iterable[tuple[LayerKey, Counted]], size: int) -> Ordered:
    """Returns the order of neurons for blocks of `size`."""
    orders, counts, shares = dict[LayerKey, U32](), dict[LayerKey, I64](), list[tuple[float, float]]()
    for place, layer in layers:
        found = [layer.order(expert, size) for expert in range(len(layer.counts))]
        orders[place] = np.stack([order for order, _ in found]).astype(np.uint32)
        counts[place] = layer.counts
        shares += [each for _, each in found if each[0]]
    return Ordered(NeuronOrder(orders), counts, shares)
