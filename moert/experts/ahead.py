"""Reads ahead: while one layer computes, a predictor names experts of the next, and those worth it are read."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from moert.experts.cache.cache import ExpertCache
from moert.experts.demand import Arrivals, Demand
from moert.pack.codec import F32
from moert.pack.model_spec import ExpertKey, LayerKey, ModelSpec, StackName
from moert.pack.paths import F64
from moert.predict.foresight import Foresight
from moert.predict.predictor import Prediction, Predictor, Selected, Situation
from moert.predict.worth import Worth
from moert.stats import ExpertCounters, ReadAhead

_DEPTH = 8
"""Layers that are looked ahead at most, where they are foreseen."""
_LIKELY = 0.5  # such experts of layers that come soon do not leave for others that are read ahead
_UNWEIGHED = 2  # without a Worth: at most this many times top_k predicted experts are read for each token


class Asked(Protocol):
    """What is asked of a router (moert.models.router.Router)."""

    def guess(self, x: F32) -> F32: ...


class Copying(Protocol):
    """What is told of predictions beside the cache in memory (moert.beside.gpu.tiers.CopyAhead)."""

    def wants(self) -> bool: ...

    def expect(self, at: LayerKey, prediction: Prediction, n_tokens: int) -> None: ...


class Lookahead:
    """Call, for each layer, `demanded` when its router has decided, then `look` to predict the next layer's.

    With `worth` only experts whose reading is expected to save time are read, and none while reading ahead makes tokens
    slower. Without it the likeliest ones are always read: for recorded futures and controls.
    """

    def __init__(
        self, spec: ModelSpec, nbytes: Mapping[ExpertKey, int], cache: ExpertCache, counters: ExpertCounters,
        predictor: Predictor, worth: Worth | None, foresight: Foresight | None = None,
    ) -> None:  # fmt: skip
        """`foresight` names what layers further away will ask for, and the first one of a pass."""
        self.routers: Mapping[LayerKey, Asked] = {}
        """The model's, for predictors that ask them early."""
        self.copies: Copying | None = None
        """Who copies what is predicted to a device."""
        self.reads = True
        """Whether what is predicted is read from the drive."""
        self._cache, self._counters, self._predictor, self._worth = cache, counters, predictor, worth
        self._top_k, self._order = spec.moe.router.top_k, spec.moe_layers()
        self._places = {at: index for index, at in enumerate(self._order)}
        self._first = {at.stack: index for at, index in reversed(self._places.items())}
        self._nbytes = {at: [nbytes[at.expert(number)] for number in range(spec.moe.n)] for at in self._order}
        self._n_experts = len(nbytes)
        self._history: list[Selected] = []
        self._asked_s = self._asked_stall_s = 0.0
        self._asked_about: LayerKey | None = None
        self._token_s: float | None = None
        self._read = (0, 0.0)  # bytes and seconds of reading so far
        self._foresight, self._depth = foresight, 1 if foresight is None else _DEPTH
        self._foreseen_s = self._foreseeing_s = 0.0  # what that takes of a pass, for each layer
        self._early: dict[LayerKey, list[int]] = {}  # experts of layers further away, of which reading was begun
        if foresight is not None:
            foresight.needed, foresight.told = self._needed, self._begins

    @property
    def figures(self) -> ReadAhead:
        return ReadAhead() if self._worth is None else self._worth.figures

    def forget(self) -> None:
        """The present request is over: what comes next does not follow from it."""
        self._asked_about = self._token_s = None
        self._history = []
        self._early.clear()
        self._cache.predict(())

    def demanded(self, demand: Demand, arrivals: Arrivals) -> None:
        """What came after the last `look`."""
        if self._worth is None:
            return
        nbytes, begun = self._nbytes[demand.at], self._begun(demand.at, arrivals)
        came_early = sum(nbytes[expert] for expert in begun if expert in demand.experts)
        self._worth.lacked(came_early + arrivals.missing * nbytes[0])
        if self._asked_about != demand.at:
            return
        self._asked_about = None
        window_s = time.perf_counter() - self._asked_s - (self._counters.stall_s - self._asked_stall_s)
        self._worth.observe(demand.experts, begun, arrivals.missing, max(0.0, window_s))

    def look(self, present: LayerKey, experts: Selected, x: F32) -> None:
        """`experts`: what each token selected; x [tokens, d_model] as the layer's experts find it. Called once all that
        this layer needs is on its way."""
        place = self._places[present]
        if place == self._first[present.stack]:
            self._history = []
            self._time_token(present.stack, len(experts))
        pays, copies = self._pays(), self.copies
        if not pays and (copies is None or not copies.wants()):
            return
        started = time.perf_counter()
        self._history = [*self._history[-1:], experts]
        following = place + 1 if place + 1 < len(self._order) else self._first.get("decoder", 0)
        at = self._order[following]
        if following > place and at.stack == present.stack:
            n_tokens = len(experts)
            situation = Situation(at, self._history, n_tokens, self._top_k, lambda: self._scores(at, x))
        else:  # the first layer of another token, or of the decoder
            n_tokens = 1
            situation = Situation(at, [], n_tokens, self._top_k)
        prediction = self._predictor.predict(situation)
        if pays:
            self._read_ahead(prediction, following, n_tokens)
        if copies is not None:
            copies.expect(at, prediction, n_tokens)
        if self._worth is not None and len(experts) == 1:
            self._worth.asked(time.perf_counter() - started + self._foreseeing_s)

    def _pays(self) -> bool:
        return self.reads and self._cache.n_resident < self._n_experts and (self._worth is None or self._worth.asks())

    def _needed(self) -> bool:
        """A pass is about to begin: will anybody ask what it demands?"""
        self._foreseen_s = time.perf_counter()
        return self._pays()

    def _begins(self, stack: StackName, n_tokens: int) -> None:
        """It was foreseen what a pass of so many tokens will ask for; its first layer is to run."""
        if self._foresight is None or stack not in self._first or not self._pays():
            return
        place, layers = self._first[stack], sum(at.stack == stack for at in self._order)
        self._foreseeing_s = (time.perf_counter() - self._foreseen_s) / layers if n_tokens == 1 else self._foreseeing_s
        self._history = []
        self._read_ahead(self._foresight.ranked(self._order[place]), place, n_tokens)

    def _read_ahead(self, prediction: Prediction, place: int, n_tokens: int) -> None:
        """Of the layer at this place in the order, then of those after it as far as they are foreseen."""
        keys, keep = list[ExpertKey](), list[ExpertKey]()
        for ahead, at in enumerate(self._order[place : place + self._depth], 1):
            if ahead > 1 and self._foresight is not None:
                prediction = self._foresight.ranked(at)
                if not prediction or (self._worth is not None and self._worth.busy_layers >= ahead):
                    break
            keys += [at.expert(number) for number in self._wanted(at, prediction, ahead, n_tokens)]
            if self._foresight is not None:
                keep += self._keep(at, prediction, n_tokens)
        self._cache.predict(keys, keep)

    def _wanted(self, at: LayerKey, prediction: Prediction, ahead: int, n_tokens: int) -> list[int]:
        """What to read of a layer that is so many ahead."""
        ranked = self._absent(at, prediction)
        if self._worth is None:
            return [expert for expert, _ in ranked[: _UNWEIGHED * self._top_k * n_tokens]]
        if ahead > 1:
            return self._worth.further(ranked, self._nbytes[at], ahead)
        wanted = self._worth.wanted(ranked, self._nbytes[at])
        self._asked_about, self._asked_s, self._asked_stall_s = at, time.perf_counter(), self._counters.stall_s
        return wanted

    def _absent(self, at: LayerKey, prediction: Prediction) -> Prediction:
        """What is not in memory."""
        absent = self._cache.absent([at.expert(number) for number, _ in prediction])
        return [each for each, is_absent in zip(prediction, absent, strict=True) if is_absent]

    def _keep(self, at: LayerKey, prediction: Prediction, n_tokens: int) -> list[ExpertKey]:
        """What is more likely than not to be asked for."""
        most = prediction[: self._top_k * n_tokens]
        return [at.expert(number) for number, probability in most if probability >= _LIKELY]

    def _begun(self, at: LayerKey, arrivals: Arrivals) -> list[int]:
        """Experts of the layer that were begun to be read since it was first foreseen."""
        for key in arrivals.begun:
            self._early.setdefault(key.at, []).append(key.expert)
        return self._early.pop(at, [])

    def _scores(self, at: LayerKey, x: F32) -> F64 | None:
        router = self.routers.get(at)
        if router is None:
            return None
        return router.guess(x).astype(np.float64)

    def _time_token(self, stack: StackName, n_tokens: int) -> None:
        """A pass begins: tells the price how long the last one took, if that and this are of a single token."""
        if self._worth is None:
            return
        now, counters = time.perf_counter(), self._counters
        if stack == "decoder" and n_tokens == 1:
            if self._token_s is not None:
                self._worth.token(now - self._token_s)
            self._token_s = now
        else:
            self._token_s = None
        nbytes, seconds = self._read
        if counters.bytes_read > nbytes:
            self._worth.drive(counters.bytes_read - nbytes, counters.read_s - seconds)
        self._read = (counters.bytes_read, counters.read_s)
