"""Reading ahead: while one layer computes, a predictor names experts of the next ones, and those worth it are read."""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from moert.experts.cache import ExpertCache
from moert.experts.policy import Arrivals, Demand
from moert.experts.predictors import Prediction, Predictor, Selected, Situation
from moert.pack.codec import F32
from moert.pack.model_spec import ExpertKey, LayerKey, ModelSpec, StackName
from moert.pack.paths import F64
from moert.stats import ExpertCounters, ReadAhead

_WARM_TOKENS = 32  # before the first trial, while the cache fills
_BLOCK_TOKENS = 4  # timed together, so that rare long stalls count and single outliers don't
_PERIOD_TOKENS = (8, 16, 32, 64)  # in the stages of a trial
_CLEAR = 3.0  # standard deviations
_GAIN = 0.99  # without clear evidence reading ahead must take at least 1% less time
_PAUSE = 32  # tokens without a trial for each token that the trial gave to the losing side
_MOST_DOUBLINGS = 6


class Switch:
    """The switch of reading ahead: `on` says whether the next token is to run with it.

    A trial times tokens with and without reading ahead, in up to four stages. Each stage has four periods in the order
    present, other, other, present, so that a steady drift adds as much to both. After each stage a rank test (Mann and
    Whitney 1947) over blocks of tokens decides if its result is clear; after the last stage the smaller median decides,
    and a draw switches reading ahead off. The winner then runs for 32 times as many tokens as the loser had, and twice
    as many each time that it wins again, up to 2,048 times. So the slower way gets 48 to 240 tokens of the first trial,
    3% of the tokens after it, and one in 2,000 while the same way goes on winning.
    """

    def __init__(self) -> None:
        self.on = True
        self._blocks: dict[bool, list[float]] = {True: [], False: []}
        self._block_s, self._in_block = 0.0, 0
        self._winner = True
        self._wins = 0  # of the same way, one after the other
        self._stage: int | None = None  # of a trial
        self._period = 0
        self._left = _WARM_TOKENS

    def token(self, seconds: float) -> None:
        """Records the time of one generated token [s], which ran with or without reading ahead as `on` said. Callers
        leave out tokens of a prompt."""
        if self._stage is not None:
            self._block_s += seconds
            self._in_block += 1
            if self._in_block == _BLOCK_TOKENS:
                self._blocks[self.on].append(self._block_s)
                self._block_s, self._in_block = 0.0, 0
        self._left -= 1
        if not self._left:
            self._turn()

    def _turn(self) -> None:
        """Begins the next step after a period or a pause: a period, the verdict on a stage, or a trial."""
        if self._stage is None:
            self._blocks = {True: [], False: []}
            self._begin(0)
        elif self._period == 3:
            self._judge(self._stage)
        else:
            self._period += 1
            self.on = self._winner if self._period == 3 else not self._winner
            self._left = _PERIOD_TOKENS[self._stage]

    def _begin(self, stage: int) -> None:
        self._stage, self._period, self._left = stage, 0, _PERIOD_TOKENS[stage]

    def _judge(self, stage: int) -> None:
        slower = rank_test(self._blocks[True], self._blocks[False])
        if abs(slower) >= _CLEAR:
            self._keep(slower < 0)
        elif stage + 1 == len(_PERIOD_TOKENS):
            self._keep(bool(np.median(self._blocks[True]) < _GAIN * np.median(self._blocks[False])))
        else:
            self._begin(stage + 1)

    def _keep(self, on: bool) -> None:
        self._wins = self._wins + 1 if on is self._winner else 0
        self._stage, self._winner, self.on = None, on, on
        lost = len(self._blocks[not on]) * _BLOCK_TOKENS
        self._left = (_PAUSE * lost) << min(self._wins, _MOST_DOUBLINGS)


def rank_test(these: Sequence[float], those: Sequence[float]) -> float:
    """Returns how many standard deviations `these` are larger than `those`, by the ranks of both (normal
    approximation)."""
    ordered = sorted(those)
    above = sum((bisect_left(ordered, value) + bisect_right(ordered, value)) / 2 for value in these)
    n, m = len(these), len(those)
    return float((above - n * m / 2) / (n * m * (n + m + 1) / 12) ** 0.5)


_MOST = 16  # candidates that are looked at
_BUCKETS = 10
_PRIOR = 8  # observations that a predictor's own claim counts for
_MEMORY = 256  # observations of a bucket after which old ones fade
_WASTE = 0.25  # of a read's time: the worth of its room to the expert that had to leave
_HASTE = 0.1  # of a read's time: its least saving, even if begun just before the router decides
_PACE = 1e-9  # seconds per byte, until reads were timed
_WINDOW_RATE, _DRIVE_RATE, _MISSED_RATE = 1 / 16, 1 / 8, 1 / 64
_LACKING_RATE, _ASKING_RATE = 1 / 8, 1 / 16


class Worth:
    """The worth of reading ahead: which predicted experts save time if they are read early.

    Calls for each layer of each token, in this order: `asks` (does calling the predictor pay?), `wanted` (which experts
    are read), `asked` (the time of both), then `lacked` and `observe` with the router's choice. After each token:
    `drive`, `token`. Where `wanted` was not called, `observe` does nothing.
    """

    def __init__(self) -> None:
        self.figures = ReadAhead()
        self._switch = Switch()
        self._pace: float | None = None
        self._window_s: float | None = None
        self._asking_s = 0.0  # time of one prediction
        self._lacking_bytes: float | None = None  # of a layer, when the predictor could be called
        self._missed = 0.5  # share of layers that still read something when the router has decided
        self._rates = [min(1.0, (at + 0.5) / _BUCKETS) for at in range(_BUCKETS + 1)]
        self._seen = [_PRIOR] * (_BUCKETS + 1)
        self._asked: Sequence[tuple[int, float]] | None = None
        self._busy_s = 0.0  # time of all reads since `wanted` was called

    def asks(self) -> bool:
        """Returns whether calling the predictor can pay: reading the bytes that the next layer will probably lack must
        take longer than the call."""
        if not self._switch.on:
            return False
        lacking = self._lacking_bytes
        return lacking is None or lacking * (self._pace or _PACE) > self._asking_s

    def asked(self, seconds: float) -> None:
        """Records the time of one prediction [s]."""
        self._asking_s = self._asking_s + _ASKING_RATE * (seconds - self._asking_s) if self._asking_s else seconds

    def lacked(self, nbytes: int) -> None:
        """Records how many bytes of a layer's demand were not in memory when the predictor could have been called."""
        known = self._lacking_bytes
        self._lacking_bytes = nbytes if known is None else known + _LACKING_RATE * (nbytes - known)

    def wanted(self, ranked: Sequence[tuple[int, float]], nbytes: Sequence[int]) -> list[int]:
        """Returns the experts to read ahead, in this order.

        `ranked`: (expert, claimed probability) of experts that are not in memory, most probable first; `nbytes`
        [num_experts]: bytes of that layer's experts.
        """
        if not self._switch.on:
            self._asked = None
            return []
        self._asked = ranked[:_MOST]
        self._busy_s = 0.0
        return self._chosen(self._asked, nbytes, self._window_s or 0.0)

    def further(self, ranked: Sequence[tuple[int, float]], nbytes: Sequence[int], layers: int) -> list[int]:
        """Returns, after `wanted`, the experts to read of a layer that is `layers` ahead, once all reads wanted so far
        have ended."""
        return self._chosen(ranked[:_MOST], nbytes, layers * (self._window_s or 0.0))

    @property
    def busy_layers(self) -> float:
        """The time of all reads wanted so far, in layers."""
        return self._busy_s / self._window_s if self._window_s else 0.0

    def _chosen(self, ranked: Sequence[tuple[int, float]], nbytes: Sequence[int], window: float) -> list[int]:
        rates, pace, missed = self._rates, self._pace or _PACE, self._missed
        chosen, start = [], self._busy_s
        for expert, claim in ranked:
            rate, takes = rates[int(claim * _BUCKETS)], nbytes[expert] * pace
            saved = window - start
            if saved > takes:
                saved = takes
            elif saved < _HASTE * takes:
                saved = _HASTE * takes
            if rate * saved > (1.0 - rate) * ((takes - saved) * missed + _WASTE * takes):
                chosen.append(expert)
                start += takes
        self._busy_s = start
        return chosen

    def observe(self, demanded: Collection[int], started: Sequence[int], missed: int, window_s: float) -> None:
        """Learns from the layer's demand, after `wanted`.

        `demanded`: the experts that the router chose; `started`: predicted experts whose reading began before that;
        `missed`: how many demanded experts are still to be read from the beginning; `window_s`: seconds that the drive
        had for reading ahead (from the prediction to the router's choice, less the time of demanded reads).
        """
        asked = self._asked
        if asked is None:
            return
        self._asked = None
        self._window_s = (
            window_s if self._window_s is None else self._window_s + _WINDOW_RATE * (window_s - self._window_s)
        )
        self._missed += _MISSED_RATE * ((missed > 0) - self._missed)
        rates, seen = self._rates, self._seen
        for expert, claim in asked:
            at = int(claim * _BUCKETS)
            if seen[at] < _MEMORY:
                seen[at] += 1
            rates[at] += ((expert in demanded) - rates[at]) / seen[at]
        figures = self.figures
        figures.missed += missed
        for expert in started:
            figures.read += 1
            figures.used += expert in demanded

    def drive(self, nbytes: int, seconds: float) -> None:
        """Records reads of `nbytes` bytes that took `seconds`, both summed over the reads."""
        if nbytes:
            pace = seconds / nbytes
            self._pace = pace if self._pace is None else self._pace + _DRIVE_RATE * (pace - self._pace)

    def token(self, seconds: float) -> None:
        """Records the time of one generated token [s]."""
        if self._switch.on:
            self.figures.tokens_on += 1
        else:
            self.figures.tokens_off += 1
        self._switch.token(seconds)


_DEPTH = 8
"""Most layers that are looked ahead, where their experts are foreseen."""
_LIKELY = 0.5  # so probable experts of coming layers do not leave for others that are read ahead
_UNWEIGHED = 2  # without a Worth: at most this many times top_k predicted experts are read for each token


class Guesses(Protocol):
    """The part of a router (moert.models.ffn.Router) that is called before its layer runs."""

    def guess(self, x: F32) -> F32: ...


class Copying(Protocol):
    """Copies predicted experts from the cache to another place."""

    def wants(self) -> bool: ...

    def expect(self, at: LayerKey, prediction: Prediction, n_tokens: int) -> None: ...


@dataclass(frozen=True)
class Further:
    """The helpers of a Lookahead beside the cache. `routers`: the model's, for predictors that call them early.
    `foreseen` returns the experts of layers further away, and of the first layer of a pass. `copies`: copies predicted
    experts to another place. `reads`: whether predicted experts are read from the drive. `worth`: see Lookahead."""

    routers: Mapping[LayerKey, Guesses] = field(default_factory=dict)
    foreseen: Callable[[LayerKey], Prediction] | None = None
    copies: Copying | None = None
    reads: bool = True
    worth: Worth | None = None


class Lookahead:
    """Predictions of coming layers, and the reads that they begin. For each layer call `demanded` when its router has
    decided, then `look` to predict the next layer's demand.

    With `worth` only experts whose reading is expected to save time are read, and none while reading ahead makes tokens
    slower. Without `worth` the likeliest experts are always read: for recorded futures and controls.
    """

    def __init__(
        self, spec: ModelSpec, nbytes: Mapping[ExpertKey, int], cache: ExpertCache, counters: ExpertCounters,
        predictor: Predictor, further: Further,
    ) -> None:  # fmt: skip
        self._cache, self._counters, self._predictor = cache, counters, predictor
        self._further, self._worth = further, further.worth
        self._top_k, self._layers = spec.moe.router.top_k, spec.moe_layers()
        self._places = {at: index for index, at in enumerate(self._layers)}
        self._first = {at.stack: index for at, index in reversed(self._places.items())}
        self._nbytes = {at: [nbytes[at.expert(number)] for number in range(spec.moe.n)] for at in self._layers}
        self._n_experts = len(nbytes)
        self._history: list[Selected] = []
        self._about: LayerKey | None = None  # the layer of the latest prediction, until it has run
        self._asked = 0.0, 0.0  # when that was made, and the time that the model had waited for experts by then
        self._token_s: float | None = None  # when the last pass began, if it was of one token of this request
        self._read = 0, 0.0  # bytes and seconds of reading before the last pass
        self._foreseen_s = self._foreseeing_s = 0.0  # when the last forecast began; the time of one, for each layer
        self._early: dict[LayerKey, list[int]] = {}  # experts of layers further away whose reading has begun

    @property
    def figures(self) -> ReadAhead:
        return ReadAhead() if self._worth is None else self._worth.figures

    def forget(self) -> None:
        """Forgets the present request, which is over: the next tokens do not follow from it."""
        self._about = self._token_s = None
        self._history = []
        self._early.clear()
        self._cache.predict(())

    def demanded(self, demand: Demand, arrivals: Arrivals) -> None:
        """Compares a layer's demand with the last prediction, and passes the result to `worth`."""
        if self._worth is None:
            return
        nbytes, begun = self._nbytes[demand.at], self._begun(demand.at, arrivals)
        came_early = sum(nbytes[expert] for expert in begun if expert in demand.experts)
        self._worth.lacked(came_early + arrivals.missing * nbytes[0])
        if self._about != demand.at:
            return
        self._about, (began_s, stall_s) = None, self._asked
        window_s = time.perf_counter() - began_s - (self._counters.stall_s - stall_s)
        self._worth.observe(demand.experts, begun, arrivals.missing, max(0.0, window_s))

    def look(self, present: LayerKey, experts: Selected, x: F32) -> None:
        """Predicts the next layer's demand and begins to read ahead. `experts`: each token's selection in the present
        layer; x [tokens, d_model] as the layer's experts find it. Called once the reads that this layer needs are under
        way."""
        place = self._places[present]
        if place == self._first[present.stack]:
            self._history = []
            if self._worth is not None:
                self._begin_pass(present.stack == "decoder" and len(experts) == 1, self._worth)
        pays, copies = self._pays(), self._further.copies
        if not pays and (copies is None or not copies.wants()):
            return
        started = time.perf_counter()
        self._history = [*self._history[-1:], experts]
        following = place + 1 if place + 1 < len(self._layers) else self._first.get("decoder", 0)
        at = self._layers[following]
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

    def needed(self) -> bool:
        """Returns whether a forecast of the pass that is about to begin would be used, and notes the time."""
        self._foreseen_s = time.perf_counter()
        return self._pays()

    def begins(self, stack: StackName, n_tokens: int) -> None:
        """Reads ahead for the first layer of a pass of `n_tokens`, which is to run next and whose demand was
        foreseen."""
        foreseen = self._further.foreseen
        if foreseen is None or stack not in self._first or not self._pays():
            return
        place = self._first[stack]
        if n_tokens == 1:
            n_layers = sum(at.stack == stack for at in self._layers)
            self._foreseeing_s = (time.perf_counter() - self._foreseen_s) / n_layers
        self._history = []
        self._read_ahead(foreseen(self._layers[place]), place, n_tokens)

    def _begin_pass(self, of_one_token: bool, worth: Worth) -> None:
        """Reports to `worth` the time of the last pass, if both are of one token, and the reads since."""
        now, counters = time.perf_counter(), self._counters
        if of_one_token and self._token_s is not None:
            worth.token(now - self._token_s)
        self._token_s = now if of_one_token else None
        nbytes, seconds = self._read
        if counters.bytes_read > nbytes:
            worth.drive(counters.bytes_read - nbytes, counters.read_s - seconds)
        self._read = counters.bytes_read, counters.read_s

    def _pays(self) -> bool:
        worth = self._worth
        return self._further.reads and self._cache.n_resident < self._n_experts and (worth is None or worth.asks())

    def _read_ahead(self, prediction: Prediction, place: int, n_tokens: int) -> None:
        """Has predicted experts read: of the layer at this place in the order, then of later layers as far as they are
        foreseen."""
        keys, keep, foreseen = list[ExpertKey](), list[ExpertKey](), self._further.foreseen
        depth = 1 if foreseen is None else _DEPTH
        for ahead, at in enumerate(self._layers[place : place + depth], 1):
            if ahead > 1 and foreseen is not None:
                prediction = foreseen(at)
                if not prediction or (self._worth is not None and self._worth.busy_layers >= ahead):
                    break
            keys += [at.expert(number) for number in self._wanted(at, prediction, ahead, n_tokens)]
            if foreseen is not None:
                keep += self._keep(at, prediction, n_tokens)
        self._cache.predict(keys, keep)

    def _wanted(self, at: LayerKey, prediction: Prediction, ahead: int, n_tokens: int) -> list[int]:
        """Returns the experts to read of a layer that is `ahead` layers away."""
        ranked = self._absent(at, prediction)
        if self._worth is None:
            return [expert for expert, _ in ranked[: _UNWEIGHED * self._top_k * n_tokens]]
        if ahead > 1:
            return self._worth.further(ranked, self._nbytes[at], ahead)
        wanted = self._worth.wanted(ranked, self._nbytes[at])
        self._about, self._asked = at, (time.perf_counter(), self._counters.stall_s)
        return wanted

    def _absent(self, at: LayerKey, prediction: Prediction) -> Prediction:
        """Returns the part of a prediction that is not in memory."""
        absent = self._cache.absent([at.expert(number) for number, _ in prediction])
        return [each for each, is_absent in zip(prediction, absent, strict=True) if is_absent]

    def _keep(self, at: LayerKey, prediction: Prediction, n_tokens: int) -> list[ExpertKey]:
        """Returns the experts that the layer will more likely than not demand."""
        most = prediction[: self._top_k * n_tokens]
        return [at.expert(number) for number, probability in most if probability >= _LIKELY]

    def _begun(self, at: LayerKey, arrivals: Arrivals) -> list[int]:
        """Returns the layer's experts whose reading has begun since the layer was first foreseen."""
        for key in arrivals.begun:
            self._early.setdefault(key.at, []).append(key.expert)
        return self._early.pop(at, [])

    def _scores(self, at: LayerKey, x: F32) -> F64 | None:
        router = self._further.routers.get(at)
        if router is None:
            return None
        return router.guess(x).astype(np.float64)
