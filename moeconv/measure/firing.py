"""How often each neuron of a model's experts fires on text, and the order of neurons that follows from it.

A neuron fires where what enters the down matrix is not zero; moeconv.measure.activity says more of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from moeconv.measure.scorers import Routed, Subject
from moeconv.measure.scorers.text import TextScorer
from moeconv.progress import Bar, Progress
from moeconv.source.experts import Call, expert_inner
from moert.pack.model_spec import LayerKey
from moert.pack.neurons import NeuronOrder

ROWS = 2048
"""Of an expert whose neurons are looked at together."""
WHAT = "which neurons fire"

I64 = npt.NDArray[np.int64]
Counts = Mapping[LayerKey, I64]
"""Of each layer with experts, in the order of execution: how often each neuron fired [experts, d_ff]."""


class Reads(Protocol):
    """A scorer of moeconv.measure.scorers."""

    @property
    def n_samples(self) -> int: ...

    def routes(self) -> Iterator[Routed]: ...


def heard(subject: Subject, scorer: Reads, hear: Callable[[LayerKey, Call], None], bar: Bar) -> None:
    """Tells what each layer's experts are asked while a model in memory reads a scorer's text, and writes where it
    writes. The bar counts samples."""
    assert subject.layers is None, "a model that is run layer by layer answers its calls elsewhere"
    asked: dict[LayerKey, Call] = {}

    def keep(place: LayerKey, call: Call) -> None:
        asked[place] = call  # of text that is written token by token the whole is asked about last

    told = hear if subject.spec.encoder is None else keep  # without an encoder nothing is written
    with torch.inference_mode(), subject.calls.answering(told):
        for routed in scorer.routes():
            for place, call in asked.items():
                hear(place, call)
            asked.clear()
            bar.update(len(routed.samples))


def firing_counts(subject: Subject, scorer: Reads, show: Progress) -> Counts:
    """Over all tokens of a scorer's text; of a model in memory, or layer by layer. Raises ConversionError for what the
    disk refuses."""
    spec = subject.spec
    counts: dict[LayerKey, I64] = {
        place: np.zeros((spec.moe.n, spec.moe.ffn.d_ff), np.int64) for place in spec.moe_layers()
    }

    def see(place: LayerKey, call: Call) -> None:
        _add(counts[place], subject, place, call)

    if subject.layers is None:
        with show(WHAT, scorer.n_samples, "sample") as bar:
            heard(subject, scorer, see, bar)
        return counts
    assert isinstance(scorer, TextScorer), "only decoders go layer by layer"
    calls = subject.layers.calls_of(scorer.texts.ids, scorer.texts.real, "what enters each layer")
    first = next(calls)  # all text has gone through all layers by then
    with torch.inference_mode(), show(WHAT, len(counts), "layer") as bar:
        for place, call in chain([first], calls):
            see(place, call)
            bar.update(1)
    return counts


def by_frequency(counts: Counts) -> NeuronOrder:
    """Those that fire most come first; those that fire equally often stay as they are."""
    orders = {at: np.argsort(-fired, axis=1, kind="stable") for at, fired in counts.items()}
    return NeuronOrder({at: order.astype(np.uint32) for at, order in orders.items()})


def covered(counts: Counts, most: float) -> float:
    """Share of all firings that are of the `most` frequent (0..1) neurons of their experts. 0..1"""
    ordered = [np.sort(fired, axis=1)[:, ::-1] for fired in counts.values()]
    first = sum(int(fired[:, : round(most * fired.shape[1])].sum()) for fired in ordered)
    return first / max(1, sum(int(fired.sum()) for fired in ordered))


def _add(counts: I64, subject: Subject, place: LayerKey, call: Call) -> None:
    supply, ffn = subject.calls.supply, subject.spec.moe.ffn
    asked = call.rows(subject.spec.moe.n).nonzero()[:, 0].tolist()
    keys = [place.expert(number) for number in asked]
    supply.expect(keys)
    for key in keys:
        weights, biases = supply.weights(key), supply.biases(key)
        for rows in torch.split((call.chosen == key.expert).any(dim=1).nonzero()[:, 0], ROWS):
            counts[key.expert] += (expert_inner(call.x[rows], weights, biases, ffn) != 0).sum(dim=0).numpy()
