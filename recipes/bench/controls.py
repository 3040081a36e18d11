"""Policies that nobody runs a pack with: baselines of papers, and controls that say what prediction can bring.

A program hands them to an engine as objects: `Engine.open(pack, policies=Policies(eviction=..., predictor=...))`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from moert.beside.sida.foresight import BeforePasses, Foresight
from moert.engine.engine import Engine
from moert.experts.names import Policies, succession_of
from moert.experts.policy import F64, Candidates, EvictionPolicy, ExpectedWait, LayerOrder, Succession, place_of
from moert.experts.predictors import Prediction, Predictor, Situation, of_any_token, of_one_token, ranked
from moert.pack.model_spec import LayerKey
from moert.pack.paths import TransitionTable
from moert.pack.reader import Pack


class FirstInFirstOut:
    """Evicts the expert that was loaded first: SiDA's own set-up (Du et al. 2023)."""

    def worth(self, candidates: Candidates, present: LayerKey) -> npt.NDArray[Any]:
        return candidates.loaded_at


class LastInFirstOut:
    """Evicts the expert that was loaded last, so that the first ones stay: a fixed preload buffer (STI)."""

    def worth(self, candidates: Candidates, present: LayerKey) -> npt.NDArray[Any]:
        return -candidates.loaded_at


class Foresees(Protocol):
    """Names the layers that the present pass has still to reach, and for each the probability that the pass demands
    each expert, [layers, num_experts]."""

    def coming(self) -> tuple[Sequence[LayerKey], F64]: ...


class Foretold:
    """Foresees by a pack's hash function."""

    def __init__(self, foresight: Foresight, order: LayerOrder) -> None:
        self._foresight, self._order = foresight, order

    def coming(self) -> tuple[Sequence[LayerKey], F64]:
        found = {at: likely for at in self._order if (likely := self._foresight.likely(at)) is not None}
        return list(found), np.array(list(found.values())) if found else np.zeros((0, 0))


class Foreseen:
    """Keeps experts that the present pass is foreseen to demand: ExpectedWait, but for layers that the pass has still
    to reach the probability of a demand comes from `foresees` (SiDA: experts that the table of a batch lacks leave).
    Without `foresees` ExpectedWait alone decides."""

    def __init__(
        self, order: LayerOrder, foresees: Foresees | None = None, succession: Succession | None = None
    ) -> None:
        self._expected, self.foresees = ExpectedWait(order, succession), foresees
        self._n_places = 1 + max(place_of(at) for at in order)

    def worth(self, candidates: Candidates, present: LayerKey) -> npt.NDArray[Any]:
        visits = self._expected.visits(candidates)
        layers, likely = ([], np.zeros((0, 0))) if self.foresees is None else self.foresees.coming()
        if layers:
            table = np.full((self._n_places, likely.shape[1]), np.nan)
            table[[place_of(at) for at in layers]] = likely
            sooner = table[candidates.place, candidates.expert]
            visits = np.where(np.isnan(sooner), visits, sooner + (1.0 - sooner) * (1.0 + visits))
        return -(candidates.wait + candidates.interval * (visits - 1.0))


class Silent:
    """Predicts nothing: with it a pack's hash function can be at work while nothing is read ahead."""

    def predict(self, situation: Situation) -> Prediction:
        return []


class Oracle:
    """Predicts the exact future from a recorded trace: the most that prediction can bring.

    The trace holds layers and the experts that each demanded, in the order of execution. Each call moves one layer on;
    the first is about the second layer, since nobody asks about the first.
    """

    def __init__(self, trace: Sequence[tuple[LayerKey, Sequence[int]]]) -> None:
        self._trace = trace
        self._first = next((at for at, _ in trace if at.stack == "decoder"), None)
        self._place = 0

    def predict(self, situation: Situation) -> Prediction:
        """Raises ValueError for another layer than the trace has next."""
        self._place += 1
        if self._place >= len(self._trace):
            return []
        at, experts = self._trace[self._place]
        if situation.at != at:
            if situation.at == self._first and at == self._trace[0][0]:
                return []  # a new request began with its encoder
            raise ValueError(f"asked about {situation.at}, the trace has {at}")
        return [(expert, 1.0) for expert in experts]


class Shuffled:
    """Predicts as another predictor does, with each expert's number exchanged for another one's, always the same: as
    many predictions at the same price, of the wrong experts. What it brings is not prediction."""

    def __init__(self, predictor: Predictor, num_experts: int, seed: int = 0) -> None:
        self._predictor = predictor
        self._numbers = list(range(num_experts))
        random.Random(seed).shuffle(self._numbers)

    def predict(self, situation: Situation) -> Prediction:
        return [(self._numbers[expert], probability) for expert, probability in self._predictor.predict(situation)]


class Popularity:
    """Predicts each layer's experts by how often calibration text went to them, whatever happened before."""

    def __init__(self, tables: TransitionTable) -> None:
        self._tables = tables

    def predict(self, situation: Situation) -> Prediction:
        share = self._tables.probabilities(situation.at)
        return ranked(of_any_token(of_one_token(share, situation.top_k), situation.n_tokens))


FORESEEN = "foreseen"
EVICTION: Mapping[str, type[FirstInFirstOut] | type[LastInFirstOut]] = {
    "fifo": FirstInFirstOut, "lifo": LastInFirstOut,
}  # fmt: skip


def opened(pack: str, eviction: str, predict: str, **settings: Any) -> Engine:
    """Opens an engine whose policies may be controls: `eviction` "fifo", "lifo" or "foreseen". See Engine.open for
    the rest."""
    policy: EvictionPolicy | None = EVICTION[eviction]() if eviction in EVICTION else None
    if eviction != FORESEEN:
        named = eviction if policy is None else "auto"
        return Engine.open(pack, eviction=named, predict=predict, policies=Policies(eviction=policy), **settings)
    read = Pack.open(pack)
    order = read.manifest.model.moe_layers()
    keeping = Foreseen(order, succession=succession_of(read, lambda note: None))
    silent = Silent() if predict == "none" else None
    engine = Engine.open(
        pack, predict="hash" if silent else predict, policies=Policies(silent, eviction=keeping), **settings
    )
    if isinstance(listener := engine.model.foresight, BeforePasses):
        looks, cache, experts = listener.needed, engine.cache, len(engine.cached_bytes)
        listener.needed = lambda: looks() or cache.n_resident < experts  # type: ignore[method-assign]
        keeping.foresees = Foretold(listener.foresight, order)
    return engine
