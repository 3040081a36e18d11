"""Looks on while the runtime reads held-out text: what each layer's router chooses, and what was said of it before."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moert.beside.sida.foresight import Foresight, HashAhead, HashAndGate
from moert.engine.engine import Engine
from moert.experts.names import Policies
from moert.experts.predictors import GateAhead, Predictor, Situation, Transitions
from moert.kernels.backend import I64
from moert.models.router import Recent, Routed
from moert.pack.codec import F32
from moert.pack.model_spec import LayerKey, StackName
from moert.pack.paths import PATHS, TransitionTable
from moert.pack.reader import Pack
from recipes.bench import controls
from recipes.bench.routing import Replaced
from recipes.bench.streamed import THREADS

AHEAD = (1, 2, 10)
"""Layers, where a model has so many."""
READ = (1, 2, 3)
"""As many experts are read as are demanded, and so many times as many."""
WHOLE, BOTH = "before the first layer", "both"
Hear = Callable[[LayerKey, F32, I64], None]
"""Gets the stream x [tokens, d_model] as a layer with experts finds it, and what each token chose, [tokens, top_k]."""


class Watched(Replaced):
    """Keeps what its layer asked last, until that is demanded."""

    def route(self, x: F32, lengths: Sequence[int], recent: Sequence[Recent] = ()) -> Routed:
        routed = self.router.route(x, lengths, recent)
        self.asked = x, routed.experts
        return routed


def opened(pack: Path, **changes: Any) -> Engine:
    """Opens an engine whose hash function is asked before each pass, and that reads nothing ahead; by default its
    eviction foresees."""
    asked: dict[str, Any] = {"eviction": "foreseen", "threads": THREADS, "routing": "exact", **changes}
    eviction = asked.pop("eviction")
    if eviction == "foreseen":
        engine = controls.opened(str(pack), eviction, "none", notify=lambda line: None, **asked)
    else:
        silent = Policies(controls.Silent())
        engine = Engine.open(
            pack, eviction=eviction, predict="hash", policies=silent, notify=lambda line: None, **asked
        )
    if engine.model.foresight is not None:
        foresight_of(engine).needed = lambda: True
    return engine


def watch(engine: Engine, hear: Hear) -> None:
    """`hear` is called when a layer has decided and the hash function knows of it, before its experts run: when the
    runtime looks ahead."""
    routers, watched = engine.model.routers, dict[LayerKey, Watched]()
    for at in engine.spec.moe_layers():
        routers[at] = watched[at] = Watched(at, routers[at])
    engine.runner.listeners.append(lambda demand: hear(demand.at, *watched[demand.at].asked))


def foresight_of(engine: Engine) -> Foresight:
    found = engine.model.foresight
    assert isinstance(found, Foresight)
    return found


def read(engine: Engine, ids: Sequence[int], new_tokens: int) -> None:
    """An encoder reads these at once, and the decoder writes what it will; without one the decoder reads them one by
    one, as if they were written."""
    model = engine.model
    engine.reserve(len(ids), new_tokens + len(ids))
    if engine.spec.encoder is None:
        (state, first), *_ = model.begin([ids[:1]])
        model.read([state], [first])
        for token in ids[1:]:
            model.step(state, token)
        return
    state, logits = model.prefill(ids)
    for _ in range(new_tokens):
        token = int(logits.argmax())
        if token in engine.spec.tokens.eos:
            break
        logits = model.step(state, token)


class Hits:
    """Of the choices of all tokens, how many are among the first top_k, and the first 3 · top_k, experts that the hash
    function names for that token."""

    def __init__(self, engine: Engine) -> None:
        self._foresight = foresight_of(engine)
        self.counts: dict[StackName, Counter[str]] = defaultdict(Counter)
        watch(engine, self._hear)

    def _hear(self, at: LayerKey, x: F32, experts: I64) -> None:
        top_k = experts.shape[1]
        order = np.argsort(-self._foresight.numbers(at), axis=1, kind="stable")
        there = experts >= 0
        for name, count in (("first", top_k), ("more", 3 * top_k)):
            found = (order[:, :count, None] == experts[:, None, :]).any(1)
            self.counts[at.stack][name] += int((found & there).sum())
        self.counts[at.stack]["all"] += int(there.sum())

    def share(self, stack: StackName, name: str) -> float:
        return self.counts[stack][name] / self.counts[stack]["all"]


class Recalls:
    """Of the experts that a layer demands, how many were among those that a predictor named before."""

    def __init__(self, engine: Engine) -> None:
        self._routers, self._foresight = engine.model.routers, foresight_of(engine)
        self._predictors = predictors(engine.pack, self._foresight)
        self._layers: Mapping[StackName, Sequence[LayerKey]] = {
            name: engine.spec.moe_layers(name) for name in engine.spec.stacks
        }
        self._history: list[I64] = []
        self._said: dict[LayerKey, dict[tuple[str, str], list[int]]] = defaultdict(dict)
        self.found: Counter[tuple[StackName, str, str, int]] = Counter()
        self.all: Counter[tuple[StackName, str, str]] = Counter()
        self._foresight.told = self._begins
        watch(engine, self._hear)

    def recall(self, stack: StackName, when: str, who: str, times: int) -> float | None:
        """`when`: layers ahead, or WHOLE. None where nothing was ever said."""
        count = self.all[stack, when, who]
        return self.found[stack, when, who, times] / count if count else None

    def _begins(self, stack: StackName, tokens: int) -> None:
        """A pass was foreseen, and is to run."""
        self._history = []
        self._said.clear()
        for at in self._layers[stack]:
            self._say(at, WHOLE, "hash", [number for number, _ in self._foresight.ranked(at)])

    def _hear(self, at: LayerKey, x: F32, experts: I64) -> None:
        layers = self._layers[at.stack]
        place = layers.index(at)
        chosen = set(experts[experts >= 0].tolist())
        for (when, who), named in self._said.pop(at, {}).items():
            self.all[at.stack, when, who] += len(chosen)
            for times in READ:
                self.found[at.stack, when, who, times] += len(chosen & set(named[: times * len(chosen)]))
        self._history.append(experts)
        for ahead in AHEAD:
            if place + ahead < len(layers):
                self._predict(layers[place + ahead], ahead, x, experts)

    def _predict(self, at: LayerKey, ahead: int, x: F32, experts: I64) -> None:
        guess = self._routers[at].guess
        history = self._history[-2:] if ahead == 1 else []
        situation = Situation(at, history, len(experts), experts.shape[1], lambda: guess(x).astype(np.float64))
        for who, predictor in self._predictors.items():
            if who == BOTH and ahead > 1:  # there the runtime asks the hash function alone
                continue
            self._say(at, str(ahead), who, [number for number, _ in predictor.predict(situation)])

    def _say(self, at: LayerKey, when: str, who: str, named: list[int]) -> None:
        self._said[at][when, who] = named


def predictors(pack: Pack, foresight: Foresight) -> dict[str, Predictor]:
    """By the names that rows call them. Tables know the two layers before the one that is asked for; further ahead,
    only how often each expert is chosen."""
    found: dict[str, Predictor] = {
        "gate": GateAhead(), "hash": HashAhead(foresight), BOTH: HashAndGate(foresight),
    }  # fmt: skip
    if PATHS in pack.manifest.files:
        found["tables"] = Transitions(TransitionTable.from_bytes(pack.read_file(PATHS)))
    return found
