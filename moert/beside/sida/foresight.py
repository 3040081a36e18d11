"""A pack's hash function at work: the experts that a pass will demand, before its first layer.

From top to bottom: the thread that works on prompts that wait, the function's answer for the present pass, the pool of
this answer and a router's, predictors made of them, and the whole with its memory. Source: SiDA (Du et al. 2023).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate, islice
from typing import NamedTuple

import numpy as np

from moert.beside.sida.network import Heard, Recalled, network_bytes, readers, recalled_bytes
from moert.engine.seams import Routing
from moert.errors import HashMissing, SettingInvalid, said
from moert.experts.ahead import Lookahead
from moert.experts.names import AUTO_PREDICTOR, DEFAULT_PREDICTOR, of_this_model
from moert.experts.policy import Demand
from moert.experts.predictors import Prediction, Situation, of_any_token, of_one_token, ranked
from moert.kernels import reference
from moert.kernels.backend import Backend, Matrix
from moert.machine import step_back
from moert.models.ffn import LearnedRouter, Routed, Router
from moert.models.kv import Recent
from moert.pack.codec import F32
from moert.pack.learnt import HASH, HashFunction
from moert.pack.model_spec import LayerKey, ModelSpec, StackName
from moert.pack.paths import F64
from moert.pack.reader import Pack

_MOST_BYTES = 4 << 20
"""Bytes of the work on prompts that wait; once they are reached no more is worked out beforehand."""
_TOGETHER = 256
"""Tokens of prompts that are worked out at once: short prompts one by one would keep the model's thread from Python's
lock."""
_CLOSE_S = 10.0

Prompt = tuple[int, ...]


class Ready(NamedTuple):
    """The work on a prompt: y [tokens, w], and the decoder network's memory of it."""

    made: F32
    recalled: Recalled | None

    @property
    def nbytes(self) -> int:
        return self.made.nbytes + (0 if self.recalled is None else self.recalled.nbytes)


class Beforehand:
    """Work on prompts that wait: `work` is called by one other thread, which is started when there is something to do
    and gets idle time."""

    def __init__(self, work: Callable[[Sequence[Prompt]], Sequence[Ready]]) -> None:
        self.used = 0
        """Prompts that had been worked out when they began."""
        self._work = work
        self._waiting: list[Prompt] = []
        self._ready: dict[Prompt, Ready] = {}
        self._told: list[Sequence[int]] | None = None  # the last call's prompts; None once one has begun
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._closed = False

    def expect(self, prompts: Iterable[Sequence[int]]) -> None:
        """Sets the prompts that wait, the next one first; earlier ones that are not among them are dropped. Repeating a
        call costs nothing."""
        told = list(prompts)
        with self._lock:
            if told == self._told:
                return
            self._told, asked = told, list(dict.fromkeys(map(tuple, told)))
            self._ready = {prompt: self._ready[prompt] for prompt in asked if prompt in self._ready}
            self._waiting = [prompt for prompt in asked if prompt not in self._ready]
            if self._waiting and self._thread is None and not self._closed:
                thread = threading.Thread(target=self._serve, name="moert-foresee", daemon=True)
                with suppress(RuntimeError):  # the system allows no more
                    thread.start()
                    self._thread = thread
            if self._waiting:  # each waking takes Python's lock from the model's thread
                self._wake.notify()

    def take(self, prompt: Prompt) -> Ready | None:
        """Returns the work on a prompt that begins now; None where there was no time for it yet."""
        with self._lock:
            self._told = None
            found = self._ready.pop(prompt, None)
            self._waiting = [other for other in self._waiting if other != prompt]
            self.used += found is not None
        return found

    def close(self) -> None:
        """Ends the thread after its present work."""
        with self._lock:
            self._closed = True
            self._waiting, thread = [], self._thread
            self._wake.notify()
        if thread is not None:
            thread.join(_CLOSE_S)

    def _serve(self) -> None:
        step_back()
        while prompts := self._next():
            found: dict[Prompt, Ready] = {}
            with suppress(MemoryError):  # running these prompts will raise it, if memory is still short then
                found = dict(zip(prompts, self._work(prompts), strict=True))
            with self._lock:
                self._ready.update((prompt, found[prompt]) for prompt in self._waiting if prompt in found)
                self._waiting = [prompt for prompt in self._waiting if prompt not in prompts]

    def _next(self) -> list[Prompt]:
        """Waits for prompts, and returns the first with as many behind it as are worked out together; none once
        closed."""
        with self._lock:
            while not self._closed:
                if self._waiting and sum(each.nbytes for each in self._ready.values()) < _MOST_BYTES:
                    together = sum(end <= _TOGETHER for end in accumulate(map(len, self._waiting)))
                    return self._waiting[: max(1, together)]
                self._wake.wait()
        return []


_CATCH_UP = 256
"""Most tokens that are read again after a longer time without forecasts, unless answers depend on the function."""
_EXPECTED = 16
"""Most waiting prompts that are worked out beforehand."""
_SAMPLE = 256
_FAR = -600  # e to this is still a number
"""Tokens of a prompt that the demand of all of them is estimated from."""


class _Said(NamedTuple):
    """The forecast for the present pass: `demanded` [layers, experts], and `shares` [layers, experts] of its only
    token."""

    stack: StackName
    demanded: F64
    shares: F64 | None


class Foresight:
    """Forecasts of the experts that a pass demands. `routes`: the function takes the place of the routers, so that it
    is run for each pass, and for all tokens."""

    def __init__(
        self, function: HashFunction, spec: ModelSpec, backend: Backend, top_k: int, routes: bool,
        spare: Backend | None = None,
    ) -> None:  # fmt: skip
        """`spare`: a backend that nobody else uses, for prompts that wait."""
        self.embed: Matrix | None = None
        """The model's embedding [vocab, d_model]."""
        self._top_k, self._routes, self._backend = top_k, routes, backend
        self._readers = readers(function, backend)
        self._layers = {name: spec.moe_layers(name) for name in function.stacks}
        self._places = {at: place for layers in self._layers.values() for place, at in enumerate(layers)}
        self._made: F32 | None = None  # [tokens, width], the network's output for the present pass
        self._said: _Said | None = None
        self._next = 0  # the layer that runs next, of those with experts
        self._ranked: dict[LayerKey, Prediction] = {}
        self.before = None if spare is None else self.beforehand(spare)
        """The work on prompts that wait, if another thread does it."""

    # Called before passes: see BeforePasses. `needed`: somebody will call `likely`, `shares` or `ranked`.

    def begin(self) -> Heard:
        """Returns the record of a new sequence."""
        reader = self._readers.get("decoder")
        assert reader is not None
        return Heard(reader.begin)

    def encodes(self, sequences: Sequence[Sequence[int]], heard: Sequence[Heard], needed: bool = True) -> None:
        """Runs the encoder's network on sequences that the encoder is about to read."""
        self._forget()
        if (reader := self._readers.get("encoder")) is None or not (self._routes or needed):
            for each in heard:
                each.encoded = None
            return
        counts = [len(ids) for ids in sequences]
        parts = {place: ready.made for place, ids in enumerate(sequences) if (ready := self._ready(ids)) is not None}
        rest = [place for place in range(len(sequences)) if place not in parts]
        if rest:
            rows = self._embedded([token for place in rest for token in sequences[place]])
            made = reader.encode(rows, [counts[place] for place in rest])
            parts.update(zip(rest, np.split(made, np.cumsum([counts[place] for place in rest])[:-1]), strict=True))
        made = np.concatenate([parts[place] for place in range(len(sequences))])
        decoder = self._readers.get("decoder")
        if decoder is not None:
            for each, rows in zip(heard, np.split(made, np.cumsum(counts)[:-1]), strict=True):
                each.encoded = decoder.shown(np.ascontiguousarray(rows))
        self._keep("encoder", made, needed)

    def decodes(self, sequences: Sequence[Sequence[int]], heard: Sequence[Heard], needed: bool = True) -> None:
        """Runs the decoder's network on tokens that the decoder is about to read, behind those it has read."""
        self._forget()
        for ids, each in zip(sequences, heard, strict=True):
            each.ids += ids
        if (reader := self._readers.get("decoder")) is None or not (self._routes or needed):
            return
        parts: dict[int, F32] = {}
        for place, (ids, each) in enumerate(zip(sequences, heard, strict=True)):
            if not each.done and len(each.ids) == len(ids) and (ready := self._ready(ids)) is not None:
                each.recalled, each.done, parts[place] = ready.recalled, len(ids), ready.made
        rest = [place for place in range(len(sequences)) if place not in parts]
        if rest:
            unread = [self._unread(heard[place], len(sequences[place])) for place in rest]
            rows, counts = self._embedded([token for ids in unread for token in ids]), [len(ids) for ids in unread]
            made = reader.read(rows, counts, [heard[place].recall() for place in rest])
            for place, part in zip(rest, np.split(made, np.cumsum(counts)[:-1]), strict=True):
                heard[place].done, parts[place] = len(heard[place].ids), part[-len(sequences[place]) :]
        made = np.concatenate([parts[place] for place in range(len(sequences))])
        self._keep("decoder", made, needed)

    def passed(self, at: LayerKey) -> None:
        """The router of this layer has decided."""
        self._next = self._places.get(at, -1) + 1

    def numbers(self, at: LayerKey) -> F32:
        """Returns the function's numbers for a layer, in place of its router's, [tokens of the pass, experts]. Raises
        NotFinite."""
        assert self._made is not None
        return self._readers[at.stack].of_layer(self._made, self._places[at])

    def expects(self, prompts: Iterable[Sequence[int]]) -> None:
        """Has prompts worked out beforehand that wait for other requests to end."""
        if self.before is not None:
            self.before.expect(islice(prompts, _EXPECTED))

    def beforehand(self, backend: Backend) -> Beforehand:
        """Returns work on waiting prompts with this backend, which nothing else uses."""
        stack: StackName = "encoder" if "encoder" in self._readers else "decoder"
        reader = self._readers[stack].on(backend)

        def work(prompts: Sequence[Prompt]) -> list[Ready]:
            assert self.embed is not None
            counts, recalled = list(map(len, prompts)), [reader.begin() for _ in prompts]
            rows = backend.rows(self.embed, [token for prompt in prompts for token in prompt])
            made = reader.encode(rows, counts) if stack == "encoder" else reader.read(rows, counts, recalled)
            parts = np.split(made, np.cumsum(counts)[:-1])
            return [
                Ready(part, None if stack == "encoder" else each) for part, each in zip(parts, recalled, strict=True)
            ]

        return Beforehand(work)

    @property
    def knows(self) -> bool:
        """Whether `likely`, `shares` and `ranked` know anything of the present pass."""
        return self._said is not None

    def likely(self, at: LayerKey) -> F64 | None:
        """Returns the probability that the present pass demands each expert of a layer that it has still to reach,
        [num_experts]; None for other layers, and where nothing is known."""
        return None if self._said is None else self._row(self._said, self._said.demanded, at)

    def shares(self, at: LayerKey) -> F64 | None:
        """Returns a distribution over the experts [num_experts] of a layer that the only token of the present pass has
        still to reach; the token goes to top_k of them. None as in `likely`, and for more tokens."""
        return None if self._said is None else self._row(self._said, self._said.shares, at)

    def ranked(self, at: LayerKey) -> Prediction:
        """Returns `likely` as a prediction; an empty list where nothing is known."""
        if at not in self._ranked:
            likely = self.likely(at)
            if likely is None:
                return []
            self._ranked[at] = ranked(likely)
        return self._ranked[at]

    def _row(self, said: _Said, table: F64 | None, at: LayerKey) -> F64 | None:
        place = self._places.get(at)
        if table is None or place is None or at.stack != said.stack or place < self._next:
            return None
        found: F64 = table[place]
        return found

    def _unread(self, heard: Heard, new: int) -> list[int]:
        """Returns the tokens to read, at least the `new` ones at the end. A sequence that is too far behind begins
        anew."""
        behind = len(heard.ids) - heard.done
        if behind > max(_CATCH_UP, new) and not self._routes:
            heard.recalled = None
            return heard.ids[-max(_CATCH_UP, new) :]
        heard.recall()
        return heard.ids[heard.done :]

    def _embedded(self, ids: Sequence[int]) -> F32:
        assert self.embed is not None
        return self._backend.rows(self.embed, ids)

    def _ready(self, ids: Sequence[int]) -> Ready | None:
        return None if self.before is None else self.before.take(tuple(ids))

    def _forget(self) -> None:
        self._made, self._said, self._next = None, None, 0
        self._ranked.clear()

    def _keep(self, stack: StackName, made: F32, needed: bool) -> None:
        """Keeps the network's output for the present pass, and where `needed` the demands that follow from it."""
        self._made = made
        if not needed:
            return
        reader, n_tokens = self._readers[stack], len(made)
        if n_tokens == 1:
            shares = softmax(reader.numbers(made)[0])
            self._said = _Said(stack, of_each_token(shares, self._top_k), shares)
        else:
            if n_tokens > _SAMPLE:
                made = np.ascontiguousarray(made[np.linspace(0, n_tokens - 1, _SAMPLE).astype(np.int64)])
            self._said = _Said(stack, any_demands(reader.numbers(made), self._top_k, n_tokens), None)


def any_demands(numbers: F32, top_k: int, n_tokens: int) -> F64:
    """Returns the probability that at least one of `n_tokens` goes to each expert, [layers, experts], from numbers
    [sample, layers, experts], as a router's before its softmax, of an even sample of the tokens."""
    each = of_each_token(softmax(numbers).reshape(-1, numbers.shape[-1]), top_k)
    none_does = np.prod(1.0 - each.reshape(numbers.shape), axis=0)
    found: F64 = 1.0 - none_does ** (n_tokens / len(numbers))
    return found


def softmax(numbers: F32) -> F64:
    """Returns the softmax over the last axis; no share is 0, however far numbers are apart."""
    shifted = np.exp(np.maximum(numbers - numbers.max(axis=-1, keepdims=True), _FAR), dtype=np.float64)
    found: F64 = shifted / shifted.sum(axis=-1, keepdims=True)
    return found


def of_each_token(weights: F64, top_k: int) -> F64:
    """Returns `moert.experts.predictors.of_one_token` for each row of weights [tokens, experts], all above zero."""
    if top_k == 1:
        return weights
    descending = -np.sort(-weights, axis=1)
    rest = np.cumsum(descending[:, ::-1], axis=1)[:, ::-1]  # [i]: of all but the i largest
    left = top_k - np.arange(min(top_k, weights.shape[1]))
    fits = descending[:, : len(left)] * left < rest[:, : len(left)]
    full = np.where(fits.any(axis=1), fits.argmax(axis=1), len(left) - 1)
    rows = np.arange(len(weights))
    one = np.where(fits.any(axis=1), rest[rows, full] / left[full], descending[rows, len(left) - 1])
    found: F64 = np.minimum(weights / one[:, None], 1.0)
    return found


_FIRST = (0.8, 0.6)  # of the router, of the hash function
_RATE = 0.02
_LEAST = 1e-6  # smaller probabilities count as this


class Pool:
    """The logarithmic pool of two opinions, softmax(a · log p + b · log q) (Genest & Zidek 1986). After each decision
    of a layer a and b go a step up the likelihood of its choices under the pool, so that its claims also come out about
    right."""

    def __init__(self) -> None:
        self._weights: dict[LayerKey, F64] = {}
        self._asked: tuple[LayerKey, F64, F64] | None = None

    def both(self, at: LayerKey, router: F64, hashed: F64) -> F64:
        """Returns the pooled distribution over a layer's experts of two opinions, [num_experts], in any unit."""
        logs = np.log(np.maximum(np.stack([router, hashed]), _LEAST))
        weights = self._weights.get(at)
        if weights is None:
            weights = self._weights[at] = np.array(_FIRST)
        numbers = weights @ logs
        pooled = np.exp(numbers - numbers.max())
        pooled /= pooled.sum()
        self._asked = at, logs, pooled
        found: F64 = pooled
        return found

    def came(self, at: LayerKey, experts: Sequence[int]) -> None:
        """Learns from a layer's decision for one token."""
        if self._asked is not None and self._asked[0] == at and len(experts):
            _, logs, pooled = self._asked
            self._asked, weights = None, self._weights[at]
            weights += _RATE * (logs[:, list(experts)].mean(axis=1) - logs @ pooled)
            np.maximum(weights, 0.0, out=weights)


class HashAhead:
    """The predictor of the hash function alone: it predicts nothing about passes that have not begun."""

    def __init__(self, foresight: Foresight) -> None:
        self._foresight = foresight

    def predict(self, situation: Situation) -> Prediction:
        return self._foresight.ranked(situation.at)


class HashAndGate:
    """The predictor of hash function and router: for one token the pool of both; before the first layer, for many
    tokens, and where one of both can't tell, the other's prediction."""

    def __init__(self, foresight: Foresight) -> None:
        self._foresight, self.pool = foresight, Pool()

    def predict(self, situation: Situation) -> Prediction:
        at, hashed = situation.at, self._foresight.shares(situation.at)
        foreseen = self._foresight.ranked(at)
        scores = situation.scores() if hashed is not None or not foreseen else None
        if scores is None:
            return foreseen
        weights = scores**2 if hashed is None else self.pool.both(at, scores, hashed)
        return ranked(of_any_token(of_one_token(weights, situation.top_k), situation.n_tokens))


class BeforePasses:
    """Listens before each pass of a model, see moert.models.model.Foresees: the function is run where it routes, or
    where `ahead` can make use of it."""

    def __init__(self, foresight: Foresight, ahead: Lookahead | None, routes: bool) -> None:
        self.foresight = foresight
        self._ahead, self._routes = ahead, routes

    def opened(self, embed: Matrix) -> None:
        self.foresight.embed = embed

    def begin(self) -> Heard:
        return self.foresight.begin()

    def encodes(self, sequences: Sequence[Sequence[int]], heard: Sequence[Heard]) -> None:
        self.foresight.encodes(sequences, heard, self.needed())
        self._announce("encoder", sequences)

    def decodes(self, sequences: Sequence[Sequence[int]], heard: Sequence[Heard]) -> None:
        self.foresight.decodes(sequences, heard, self.needed())
        self._announce("decoder", sequences)

    def expects(self, prompts: Iterable[Sequence[int]]) -> None:
        if self._routes or self.needed():
            self.foresight.expects(prompts)

    def needed(self) -> bool:
        """Whether somebody will make use of the demands of the pass that is about to begin."""
        return self._ahead is not None and self._ahead.needed()

    def begins(self, stack: StackName, tokens: int) -> None:
        """The demands of a pass of some tokens are known, and its first layer is about to run."""
        if self._ahead is not None:
            self._ahead.begins(stack, tokens)

    def _announce(self, stack: StackName, sequences: Sequence[Sequence[int]]) -> None:
        if self.foresight.knows:
            self.begins(stack, sum(map(len, sequences)))


class ForeseeingRouter:
    """A router whose numbers were predicted from the tokens, in place of a product (SiDA, Du et al. 2023): a softmax of
    the numbers chooses `top_k` experts for each token, and gives the chosen experts' weights."""

    def __init__(self, exact: LearnedRouter, backend: Backend, numbers: Callable[[], F32], top_k: int) -> None:
        self._exact, self._backend, self._numbers = exact, backend, numbers
        self._chooser = LearnedRouter(replace(exact.weights, part=replace(exact.weights.part, top_k=top_k)), backend)

    def route(self, x: F32, lengths: Sequence[int], recent: Sequence[Recent] = ()) -> Routed:
        chosen = self._chooser.choose(reference.softmax(self._numbers()), lengths)
        return Routed(self._backend.norm(x, self._exact.weights.norm), *chosen)

    def guess(self, x: F32) -> F32:
        return self._exact.guess(x)


class Foreseeing(Routing):
    """A pack's hash function in a run: `predicts` is the name of the predictor that it is part of, or None; where it
    `routes` it takes the place of the routers."""

    def __init__(self, pack: Pack, function: HashFunction, backend: Backend, asked: Asked, spare: Backend | None):
        """`spare`: a backend that nobody else uses; another thread works with it on prompts that wait."""
        super().__init__()
        spec, routed, routes = pack.manifest.model, function.routed, asked.routes
        usual = spec.moe.router.top_k
        top_k = routed.top_k if routes and routed is not None else usual
        self.foresight = Foresight(function, spec, backend, top_k, routes, spare)
        self.nbytes = network_bytes(pack.manifest.files[HASH].nbytes)
        self.request_bytes = partial(recalled_bytes, function)
        self._spare, self._routes = spare, routes
        self._pool: Pool | None = None
        if asked.predicts is not None:
            self.further = self.foresight.ranked
            self.predictor = self._predictor(asked.predicts)
        if routes:
            self.name, self.notes = "hash", [_loss_of(function)]
            self.reroute = partial(self._rerouted, top_k)
        self.listeners = [self._passed]

    def before_passes(self, ahead: Lookahead | None) -> BeforePasses:
        return BeforePasses(self.foresight, ahead if self.further is not None else None, self._routes)

    def close(self) -> None:
        if self.foresight.before is not None:
            self.foresight.before.close()
            self.foresight.before = None
        if self._spare is not None:
            self._spare.close()
            self._spare = None

    def _predictor(self, name: str) -> HashAhead | HashAndGate:
        if name != AUTO_PREDICTOR:
            return HashAhead(self.foresight)
        both = HashAndGate(self.foresight)
        self._pool = both.pool
        return both

    def _passed(self, demand: Demand) -> None:
        self.foresight.passed(demand.at)
        if self._pool is not None:
            self._pool.came(demand.at, demand.experts)

    def _rerouted(self, top_k: int, at: LayerKey, exact: LearnedRouter, backend: Backend) -> Router:
        return ForeseeingRouter(exact, backend, partial(self.foresight.numbers, at), top_k)


class Asked(NamedTuple):
    """The use of a hash function, see Foreseeing."""

    predicts: str | None
    routes: bool


def _loss_of(function: HashFunction) -> str:
    """Returns a note for the user on answers made with this routing."""
    loss = "what that loses was not measured"
    if function.routed is not None:
        loss = f"held-out loss {100 * function.routed.loss:.1f}%, that of the widths included"
    return f"the hash function takes the place of the routers: {loss}"


def function_of(pack: Pack, named: bool, routes: bool, notify: Callable[[str], None]) -> HashFunction | None:
    """Returns the pack's hash function, if it has one.

    `named`: it was asked for by name; one that is not for this model is left aside otherwise, and `notify` gets a line.
    `routes`: it is to take the place of the routers. Raises PackError, HashMissing, or SettingInvalid.
    """
    check_function(pack, routes)
    if HASH not in pack.manifest.files:
        return None
    return of_this_model(pack, HASH, HashFunction.from_bytes, None if named else notify)


def check_predictor(pack: Pack) -> None:
    """Raises HashMissing where the pack lacks a hash function to predict by."""
    _check(pack, said("predict", "hash"), said("predict", DEFAULT_PREDICTOR))


def check_function(pack: Pack, routes: bool) -> None:
    """Raises HashMissing, or SettingInvalid where the function's numbers can't take the routers' place."""
    if routes:
        _check(pack, said("routing", "hash"), said("routing", "exact"))
        routers = [experts.router for experts in pack.manifest.model.experts.values()]
        if any(router.identities or router.by_token is not None for router in routers):
            raise SettingInvalid("routing", "'hash' needs routers that choose, and among experts alone")
        score = routers[0].score
        if score != "softmax":
            raise SettingInvalid("routing", f"'hash' needs routers that weigh by a softmax, not by {score}")


def _check(pack: Pack, asked: str, instead: str) -> None:
    if HASH not in pack.manifest.files:
        raise HashMissing(
            f"{asked} needs a hash function, and the pack at {pack.root} has no {HASH} (moeconv train-hash adds it); "
            f"or use {instead}"
        )
