"""Reads ahead: while one layer computes, a predictor names experts of the next, and those worth it are read."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from moert.experts.cache import ExpertCache
from moert.pack.model_spec import ExpertKey, ModelSpec, Stack
from moert.pack.paths import F64
from moert.predict.predictor import Predictor, Selected, Situation
from moert.predict.worth import Worth
from moert.stats import ExpertCounters, ReadAhead

_UNWEIGHED = 2  # without a Worth: at most this many times top_k predicted experts are read for each token


class Lookahead:
    """Call, for each layer, `spoken` when its router has selected experts, then `look` to predict the next layer's.

    With `worth` only experts whose reading is expected to save time are read, and none while reading ahead makes tokens
    slower. Without it the likeliest ones are always read: for recorded futures and controls.
    """

    def __init__(
        self, spec: ModelSpec, nbytes: Mapping[ExpertKey, int], cache: ExpertCache, counters: ExpertCounters,
        predictor: Predictor, worth: Worth | None,
    ) -> None:  # fmt: skip
        self.guesses: Mapping[tuple[Stack, int], Callable[[Tensor], Tensor]] = {}
        """The model's routers (Model.guesses), for predictors that ask them."""
        self._cache, self._counters, self._predictor, self._worth = cache, counters, predictor, worth
        self._top_k, self._order = spec.moe.top_k, spec.moe_layers()
        self._places = {at: index for index, at in enumerate(self._order)}
        self._first = {stack: self._order.index((stack, layer)) for stack, layer in reversed(self._order)}
        self._nbytes = {
            (stack, layer): [nbytes[ExpertKey(stack, layer, expert)] for expert in range(spec.moe.num_experts)]
            for stack, layer in self._order
        }
        self._n_experts = len(nbytes)
        self._history: list[Selected] = []
        self._asked_s = self._asked_stall_s = 0.0
        self._asked_about: tuple[Stack, int] | None = None
        self._token_s: float | None = None
        self._read = (0, 0.0)  # bytes and seconds of reading so far

    @property
    def figures(self) -> ReadAhead:
        return ReadAhead() if self._worth is None else self._worth.figures

    def forget(self) -> None:
        """The present request is over: what comes next does not follow from it."""
        self._asked_about = self._token_s = None
        self._history = []
        self._cache.predict(())

    def spoken(
        self, stack: Stack, layer: int, demanded: Collection[int], begun: Sequence[ExpertKey], missing: int
    ) -> None:
        """The router has decided. `begun`: reads that were begun ahead; `missing`: how many are still to be read."""
        if self._worth is None:
            return
        nbytes = self._nbytes[stack, layer]
        came_early = sum(nbytes[key.expert] for key in begun if key.expert in demanded)
        self._worth.lacked(came_early + missing * nbytes[0])
        if self._asked_about != (stack, layer):
            return
        self._asked_about = None
        window_s = time.perf_counter() - self._asked_s - (self._counters.stall_s - self._asked_stall_s)
        self._worth.observe(demanded, [key.expert for key in begun], missing, max(0.0, window_s))

    def look(self, stack: Stack, layer: int, experts: Selected, x: Tensor) -> None:
        """`experts`: what each token selected; x [tokens, d_model] as the layer's experts find it. Called once all that
        this layer needs is on its way."""
        place = self._places[stack, layer]
        if place == self._first[stack]:
            self._history = []
            self._time_token(stack, len(experts))
        if self._cache.n_resident == self._n_experts or (self._worth is not None and not self._worth.asks()):
            return
        started = time.perf_counter()
        self._history = [*self._history[-1:], experts]
        following = place + 1 if place + 1 < len(self._order) else self._first.get("decoder", 0)
        next_stack, next_layer = at = self._order[following]
        goes_on = following > place and next_stack == stack  # else the first layer of another token or of the decoder
        prediction = self._predictor.predict(
            Situation(
                next_stack, following - self._first[next_stack], self._history if goes_on else [],
                len(experts) if goes_on else 1, self._top_k, lambda: self._scores(at, x) if goes_on else None,
            )
        )  # fmt: skip
        absent = self._cache.absent([ExpertKey(next_stack, next_layer, expert) for expert, _ in prediction])
        ranked = [each for each, is_absent in zip(prediction, absent, strict=True) if is_absent]
        if self._worth is None:
            most = _UNWEIGHED * self._top_k * (len(experts) if goes_on else 1)
            wanted = [expert for expert, _ in ranked[:most]]
        else:
            wanted = self._worth.wanted(ranked, self._nbytes[at])
            self._asked_about, self._asked_s, self._asked_stall_s = at, time.perf_counter(), self._counters.stall_s
        self._cache.predict([ExpertKey(next_stack, next_layer, expert) for expert in wanted])
        if self._worth is not None and len(experts) == 1:
            self._worth.asked(time.perf_counter() - started)

    def _scores(self, at: tuple[Stack, int], x: Tensor) -> F64 | None:
        guess = self.guesses.get(at)
        if guess is None:
            return None
        with torch.inference_mode():
            scores: F64 = guess(x).double().numpy()
        return scores

    def _time_token(self, stack: Stack, n_tokens: int) -> None:
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
