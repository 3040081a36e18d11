"""The hash function: packs, functions that are kept, hits and recalls, evictions, and the rows that come of them."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moeconv.eviction import replay
from moert.beside.sida.foresight import BeforePasses, Foresight, HashAhead, HashAndGate
from moert.engine.engine import Engine
from moert.experts.names import Policies, succession_of
from moert.experts.policy import EVICTION, F64, Demand
from moert.experts.predictors import GateAhead, Predictor, Situation, Transitions
from moert.experts.replay import belady, demands_of, recorder_of
from moert.kernels.backend import I64
from moert.models.ffn import Routed
from moert.models.kv import Recent
from moert.pack.codec import F32
from moert.pack.learnt import HASH, HashFunction
from moert.pack.model_spec import LayerKey, StackName
from moert.pack.paths import PATHS, TRACE, Trace, TransitionTable
from moert.pack.reader import MANIFEST, Pack, is_pack
from recipes.bench import controls
from recipes.bench.controls import Foreseen
from recipes.bench.program import own_recipe
from recipes.bench.result import Row
from recipes.bench.routing import Replaced
from recipes.bench.sized import TRAINING, sized
from recipes.bench.stream_packs import DEMO
from recipes.bench.streamed import THREADS

# The packs that `make bench-hash` runs: those of the reference models, each with a trained hash function; and the
# text that they are asked about. Each is made where it is not there yet.

FOLDER = Path("build/bench/hash")
REFERENCES = DEMO.with_name("references")
LENGTHS = ("short", "middle", "long")


@dataclass(frozen=True)
class Subject:
    """A reference model, held-out `inputs` of its `data`, `new_tokens` that are written behind each at most, and what
    its answers are judged by. `edges`: tokens up to which an input is short, and middle; of running text, as many of
    its first tokens as are read for each of LENGTHS."""

    name: str
    data: str
    edges: tuple[int, ...]
    inputs: int
    new_tokens: int
    metric: str

    @property
    def pack(self) -> Path:
        return FOLDER / f"{self.name}.pack"

    @property
    def is_text(self) -> bool:
        """Whether it goes on with running text."""
        return len(self.edges) == len(LENGTHS)


SUBJECTS = {
    "g2p": Subject("g2p", "g2p", (7, 10), sized(150, 4), sized(24, 8), "rouge2"),
    "marks": Subject("marks", "marks", (42, 68), 12, 160, "calib_data/marked_words.py"),
    "wiki": Subject("wiki", "wiki", (16, 64, 256), 3, 32, "perplexity"),
    "wikids": Subject("wikids", "wiki", (16, 64, 256), 3, 32, "perplexity"),
}


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def with_function(subject: Subject) -> Path:
    """The pack with a hash function, trained by `moeconv train-hash` as it is by default."""
    if not is_pack(subject.pack):
        copied = source(subject)
        FOLDER.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(subject.pack, ignore_errors=True)
        shutil.copytree(copied, subject.pack, copy_function=os.link, ignore=shutil.ignore_patterns(MANIFEST))
        shutil.copy(copied / MANIFEST, subject.pack)
    if HASH not in Pack.open(subject.pack).manifest.files:
        say(f"{subject.name}: a hash function is trained")
        command = [sys.executable, "-m", "moeconv", "train-hash", str(subject.pack)]
        command += ["--metric", subject.metric, *TRAINING]
        subprocess.run(command, check=True)
    return subject.pack


def source(subject: Subject) -> Path:
    """Returns the pack of `make demo` or `make report`; where there is none, one made by the same recipe."""
    name = f"{subject.name}.pack"
    for folder in (DEMO, REFERENCES, FOLDER / "converted"):
        if is_pack(folder / name):
            return folder / name
    return _converted(subject)


def _converted(subject: Subject) -> Path:
    from moeconv.conversion.additions import profile_paths
    from moeconv.conversion.conversion import Conversion
    from moeconv.progress import bar

    say(f"{subject.name}: converted by its recipe")
    (FOLDER / "converted").mkdir(parents=True, exist_ok=True)
    settings = own_recipe(subject.name, FOLDER / "converted").settings
    Conversion(settings, say, bar, profiled_next=True).run()
    profile_paths(
        Pack.open(settings.out), calib=None, heldout=None, seed=None, samples=settings.samples, context=None, say=say,
    )  # fmt: skip
    return settings.out


def function_of(pack: Path) -> HashFunction:
    return HashFunction.from_bytes(Pack.open(pack).read_file(HASH))


def heldout(subject: Subject) -> list[dict[str, str]]:
    """Samples, the last one first: training a function judges its epochs by the first ones."""
    path = Path(f"build/data/{subject.data}/heldout.jsonl")
    return [json.loads(line) for line in reversed(path.read_text(encoding="utf-8").splitlines())]


def inputs(subject: Subject, length: str | None = None, count: int | None = None) -> list[list[int]]:
    """Token ids of held-out inputs of this length; None: as they come, and of running text the longest."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(subject.pack / "tokenizer.json"))
    found: list[list[int]] = []
    for row in heldout(subject):
        ids = tokenizer.encode(row.get("input") or row["text"].strip()).ids
        if subject.is_text:
            most = subject.edges[LENGTHS.index(length or "long")]
            ids = ids[:most] if len(ids) >= most else []
        elif length is not None and _length(len(ids), subject.edges) != length:
            continue
        if ids:
            found.append(ids)
        if len(found) == (count or subject.inputs):
            break
    return found


def _length(tokens: int, edges: Sequence[int]) -> str:
    return LENGTHS[sum(tokens > edge for edge in edges)]


# What is left of a model's performance where the hash function takes the place of its routers (SiDA, Table 3).

KEPT_AIM = 0.98
ROUTINGS = {"routers": "exact", "hash": "hash"}
WINDOWS = sized(24, 2)
SAMPLES = 4
"""Times as many inputs as elsewhere."""


def routings(subject: Subject) -> dict[str, str]:
    """Those that are possible: the function takes the place of routers only that weigh by a softmax."""
    score = Pack.open(subject.pack).manifest.model.moe.router.score
    return {what: routing for what, routing in ROUTINGS.items() if score == "softmax" or routing == "exact"}


def kept_rows(subject: Subject) -> list[Row]:
    """The same text with the routers and with the function, all experts in memory; nothing where it can't be."""
    judged = {what: judged_by(subject, routing) for what, routing in routings(subject).items()}
    if len(judged) < len(ROUTINGS):
        return []
    exact, hashed = judged["routers"], judged["hash"]
    what = "perplexity" if subject.is_text else Path(subject.metric).stem
    kept = exact / hashed if subject.is_text else hashed / exact
    return [
        *(Row(f"{subject.name}: {what} with {each}", value, "") for each, value in judged.items()),
        Row(f"{subject.name}: kept", kept, "of its performance").at_least(KEPT_AIM),
    ]


def judged_by(subject: Subject, routing: str, change: Callable[[Engine], object] = lambda engine: None) -> float:
    """Returns the metric of its answers, or its perplexity. `change` is called with the engine before it reads."""
    with Engine.open(subject.pack, routing=routing, predict="none", threads=THREADS, notify=lambda _: None) as engine:
        change(engine)
        return _perplexity(engine, inputs(subject, "long", WINDOWS)) if subject.is_text else _metric(engine, subject)


def _perplexity(engine: Engine, windows: Sequence[Sequence[int]]) -> float:
    nats = count = 0.0
    for ids in windows:
        engine.reserve(len(ids), 1)
        logits = engine.model.forward_all(list(ids)).astype(np.float64)[:-1]
        logs = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
        nats -= float(logs[np.arange(len(logs)), ids[1:]].sum())
        count += len(logs)
    return math.exp(nats / count)


def _metric(engine: Engine, subject: Subject) -> float:
    from moeconv.measure.metrics import find_metric

    metric, scores = find_metric(subject.metric), list[tuple[float, ...]]()
    assert metric.judge is not None
    samples = heldout(subject)[: SAMPLES * subject.inputs]
    prompts = [sample["input"] for sample in samples]
    answers = engine.generate_many(prompts, max_new_tokens=subject.new_tokens)
    for answer, sample in zip(answers, samples, strict=True):
        scores.append(metric.judge(answer.text, sample["target"]))
    return metric.value(np.array(scores))


# Looks on while the runtime reads held-out text: what each layer's router chooses, and what was said of it before.

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
        listener_of(engine).needed = lambda: True  # type: ignore[method-assign]
    return engine


def watch(engine: Engine, hear: Hear) -> None:
    """`hear` is called when a layer has decided and the hash function knows of it, before its experts run: when the
    runtime looks ahead."""
    routers, watched = engine.model.routers, dict[LayerKey, Watched]()
    for at in engine.spec.moe_layers():
        routers[at] = watched[at] = Watched(at, routers[at])
    engine.runner.listeners.append(lambda demand: hear(demand.at, *watched[demand.at].asked))


def listener_of(engine: Engine) -> BeforePasses:
    found = engine.model.foresight
    assert isinstance(found, BeforePasses)
    return found


def foresight_of(engine: Engine) -> Foresight:
    return listener_of(engine).foresight


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
        both = HashAndGate(self._foresight)
        engine.runner.listeners.append(lambda demand: both.pool.came(demand.at, demand.experts))
        self._predictors = predictors(engine.pack, self._foresight, both)
        self._layers: Mapping[StackName, Sequence[LayerKey]] = {
            name: engine.spec.moe_layers(name) for name in engine.spec.stacks
        }
        self._history: list[I64] = []
        self._said: dict[LayerKey, dict[tuple[str, str], list[int]]] = defaultdict(dict)
        self.found: Counter[tuple[StackName, str, str, int]] = Counter()
        self.all: Counter[tuple[StackName, str, str]] = Counter()
        listener_of(engine).begins = self._begins  # type: ignore[method-assign]
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


def predictors(pack: Pack, foresight: Foresight, both: HashAndGate) -> dict[str, Predictor]:
    """By the names that rows call them. Tables know the two layers before the one that is asked for; further ahead,
    only how often each expert is chosen."""
    found: dict[str, Predictor] = {
        "gate": GateAhead(), "hash": HashAhead(foresight), BOTH: both,
    }  # fmt: skip
    if PATHS in pack.manifest.files:
        found["tables"] = Transitions(TransitionTable.from_bytes(pack.read_file(PATHS)))
    return found


# How often experts are found in memory without reading ahead: eviction that foresees beside the others and Belady's
# rule, in the runtime; and Mixtral-offloading's k latest experts of each layer, on the trace in a pack.

EVICTION_SHARES = (0.25, 0.5, 0.75)
POLICIES = ("auto", "foreseen")
BELADY, PERFECT = "Belady", "foreseen without error"
ENCODER_AIM, WON_AIM = 3.0, 50.0
"""Points behind Belady at most, and of what `auto` lacks of Belady, what is won at least."""
KS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


class Found:
    """By stack: experts that were demanded, and found."""

    def __init__(self) -> None:
        self.asked, self.hits = Counter[StackName](), Counter[StackName]()

    def rate(self, stack: StackName | None = None) -> float:
        """None: of both stacks."""
        if stack is None:
            return self.hits.total() / self.asked.total()
        return self.hits[stack] / self.asked[stack]


class Counting(Found):
    """Looks on in an engine: what is counted until another stack asks belongs to the one before."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._counters = engine.counters
        self._stack: StackName = "decoder"
        self._requests = self._hits = 0
        watch(engine, self._hear)

    def settle(self) -> None:
        requests, hits = self._counters.requests, self._counters.hits
        self.asked[self._stack] += requests - self._requests
        self.hits[self._stack] += hits - self._hits
        self._requests, self._hits = requests, hits

    def _hear(self, at: LayerKey, x: F32, experts: I64) -> None:
        if at.stack != self._stack:
            self.settle()
            self._stack = at.stack


@dataclass(frozen=True)
class Compared:
    """In the same room, for the same text: `found` by policy, and by BELADY. `perfect`: the hit rate of both stacks
    under `foreseen` if the function were always right about the present pass."""

    found: Mapping[str, Found]
    perfect: float


def hit_rates(pack: Path, texts: Sequence[Sequence[int]], new_tokens: int, share: float) -> Compared:
    found: dict[str, Found] = {}
    for policy in POLICIES:
        trace: list[Demand] = []
        with opened(pack, eviction=policy, cache=f"{100 * share:g}%", trace=trace) as engine:
            counting = found[policy] = Counting(engine)
            for ids in texts:
                read(engine, ids, new_tokens)
            counting.settle()
            capacity = engine.cache.capacity_bytes
    read_pack = Pack.open(pack)
    return Compared({**found, BELADY: _belady(trace, read_pack, capacity)}, _perfectly(trace, read_pack, capacity))


def _belady(trace: Sequence[Demand], pack: Pack, capacity_bytes: int) -> Found:
    nbytes = {entry.key: entry.file_bytes for entry in pack.manifest.experts}
    reads = iter(belady(recorder_of(trace), nbytes, capacity_bytes)[1].tolist())
    found = Found()
    for demand in trace:
        for _ in demand.experts:
            found.asked[demand.at.stack] += 1
            found.hits[demand.at.stack] += next(reads) == 0
    return found


class Perfect:
    """Foresees what the present pass will demand, and nothing of the next: a hash function that is never wrong."""

    def __init__(self, trace: Sequence[Demand], experts: int) -> None:
        self._trace, self._experts, self._at = trace, experts, 0
        self._ends = [len(trace)] * len(trace)  # of the pass that a demand belongs to
        for at in reversed(range(len(trace) - 1)):
            here, after = trace[at].at, trace[at + 1].at
            goes_on = here.stack == after.stack and here.layer < after.layer
            self._ends[at] = self._ends[at + 1] if goes_on else at + 1

    def __iter__(self) -> Iterator[Demand]:
        for at, demand in enumerate(self._trace):
            self._at = at
            yield demand

    def coming(self) -> tuple[Sequence[LayerKey], F64]:
        demands = self._trace[self._at + 1 : self._ends[self._at]]
        likely = np.zeros((len(demands), self._experts))
        for row, demand in zip(likely, demands, strict=True):
            row[list(demand.experts)] = 1.0
        return [demand.at for demand in demands], likely


def _perfectly(trace: Sequence[Demand], pack: Pack, capacity_bytes: int) -> float:
    spec, nbytes = pack.manifest.model, {entry.key: entry.file_bytes for entry in pack.manifest.experts}
    perfect = Perfect(trace, spec.moe.n)
    policy = Foreseen(spec.moe_layers(), perfect, succession_of(pack, lambda note: None))
    return replay(perfect, nbytes, capacity_bytes, policy).hit_rate


def eviction_rows(name: str, share: float, compared: Compared) -> Iterator[Row]:
    """Of each stack, and of both together, which is what Belady's rule is best at: one may win what the other loses."""
    found = compared.found
    for stack in sorted(found[BELADY].asked, reverse=True):
        where = f"{name}, {stack}, {share:.0%}"
        yield from _rate_rows(where, {policy: each.rate(stack) for policy, each in found.items()})
        if stack == "encoder":
            left = found[BELADY].rate(stack) - found["foreseen"].rate(stack)
            yield Row(f"{where}: foreseen, behind Belady", 100 * left, "points").at_most(ENCODER_AIM)
    where, rates = f"{name}, {share:.0%}", {policy: each.rate() for policy, each in found.items()}
    yield from _rate_rows(where, {**rates, PERFECT: compared.perfect})
    lacking, won = rates[BELADY] - rates["auto"], rates["foreseen"] - rates["auto"]
    if lacking > 0:
        yield Row(f"{where}: won by foreseen", 100 * won / lacking, "% of what auto lacks").at_least(WON_AIM)


def _rate_rows(where: str, rates: Mapping[str, float]) -> Iterator[Row]:
    yield from (Row(f"{where}: hits under {policy}", 100 * rate, "%") for policy, rate in rates.items())


def k_rows(name: str, pack: Pack) -> Iterator[Row]:
    """Mixtral-offloading's figure: hits where each layer has room for k experts; beside it, the same room for the
    latest of all layers together. k from what one token needs on."""
    spec = pack.manifest.model
    trace, order = Trace.from_bytes(pack.read_file(TRACE)), spec.moe_layers()
    nbytes = {entry.key: entry.file_bytes for entry in pack.manifest.experts}
    demands = list(demands_of(trace, spec, (trace.decoder_tokens + 1) // 2))
    for k in (k for k in KS if spec.moe.router.top_k <= k < spec.moe.n):
        capacity = int(k * sum(nbytes.values()) / spec.moe.n)
        for policy in ("layer-lru", "lru"):
            rate = replay(demands, nbytes, capacity, EVICTION[policy](order)).hit_rate
            yield Row(f"{name}, k = {k}: hits under {policy}", 100 * rate, "%")


# What is named beforehand, as rows: hits of the hash function by the length of an input (SiDA, Table 4), and recall
# by how far ahead and how many experts are read (Mixtral-offloading's figure).

HIT_AIMS = {"short": 97.0, "middle": 95.0, "long": 90.0}
AHEAD_AIM, WHOLE_AIM = 85.0, 60.0
AIMED = ("wiki", "decoder", "1", "both")
WHO = ("gate", "hash", "both", "tables")


def hit_rows(subject: Subject) -> Iterator[Row]:
    for length in LENGTHS:
        with opened(subject.pack) as engine:
            hits, texts = Hits(engine), inputs(subject, length)
            for ids in texts:
                read(engine, ids, subject.new_tokens)
            top_k = engine.spec.moe.router.top_k
        for stack, counts in sorted(hits.counts.items(), reverse=True):
            where = f"{subject.name}, {stack}, {length}"
            for name, count in (("first", top_k), ("more", 3 * top_k)):
                row = Row(f"{where}: among the {_first(count)}", 100 * hits.share(stack, name), "%", n=counts["all"])
                aimed = stack == "encoder" and name == "more"
                yield row.at_least(HIT_AIMS[length]) if aimed else row


def _first(count: int) -> str:
    return "first" if count == 1 else f"first {count}"


def recall_rows(subject: Subject) -> Iterator[Row]:
    with opened(subject.pack) as engine:
        recalls = Recalls(engine)
        for ids in inputs(subject):
            read(engine, ids, subject.new_tokens)
        stacks: list[StackName] = [name for name in engine.spec.stacks if engine.spec.moe_layers(name)]
    for stack in sorted(stacks, reverse=True):
        for when in (WHOLE, *map(str, AHEAD)):
            for who in WHO:
                for times in READ:
                    found = recalls.recall(stack, when, who, times)
                    if found is not None:
                        yield _aimed(subject.name, stack, when, who, times, found)


def _aimed(name: str, stack: StackName, when: str, who: str, times: int, found: float) -> Row:
    ahead = when if when == WHOLE else f"{when} ahead"
    row = Row(f"{name}, {stack}, {ahead}: {who}, {times} × as many", 100 * found, "%")
    if times == 1 and (name, stack, when, who) == AIMED:
        return row.at_least(AHEAD_AIM)
    return row.at_least(WHOLE_AIM) if times == 1 and when == WHOLE and stack == "decoder" else row
