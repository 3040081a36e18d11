"""Single neurons: packs and their subjects, bytes that are read, and the rows that come of them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moeconv.writer import add_to_pack
from moert.beside.flash.runner import PREDICTED, Firing
from moert.engine.engine import Engine
from moert.pack.files import write_atomically
from moert.pack.learnt import PREDICTOR, load_predictor
from moert.pack.manifest import BACKBONE
from moert.pack.reader import Pack, is_pack
from recipes.bench.race import PROCESS_BYTES, Outcome
from recipes.bench.result import Row, row_of_runs
from recipes.bench.sized import TRAINING, sized
from recipes.bench.stream_packs import expert_bytes
from recipes.bench.stream_rows import ratios
from recipes.bench.streamed import THREADS, Spent

if TYPE_CHECKING:
    from moeconv.measure.firing import Counted
    from moert.pack.learnt import NeuronPredictor
    from moert.pack.model_spec import LayerKey

# What `make bench-flash` runs: reference models with ReLU, whole and by neurons, at four bits, and held-out text.

FOLDER = Path("build/bench/flash")
MODELS = Path("recipes/models")
WHOLE, COLUMNS, BUNDLED = "expert", "columns", "neuron"
"""Layouts, as --layout calls them: each expert whole; in blocks of neurons whose columns lie apart from their rows, or
beside them."""
BITS = 4
ORDER_INPUTS, ORDER_WINDOWS, CONTEXT = sized(2000, 50), sized(100, 2), 256
"""Of calibration text, that say in which order neurons lie: inputs, or windows of so many tokens."""


@dataclass(frozen=True)
class Subject:
    """A reference model and held-out `inputs` of its `data`, of running text the first `prompt_tokens`, behind each of
    which at most `new_tokens` are written; `recorded` inputs for what is looked at without an engine. `sparse`: it was
    trained so that few neurons fire. `metric`: what a predictor's loss is judged by. `dense`: each token goes through
    all of it. `predicted`: a predictor is trained."""

    name: str
    data: str
    sparse: bool
    inputs: int
    recorded: int
    new_tokens: int
    metric: str
    prompt_tokens: int | None = None
    dense: bool = False
    predicted: bool = True

    @property
    def is_there(self) -> bool:
        return (MODELS / self.name).is_dir()


MARKED = "calib_data/marked_words.py"
SUBJECTS = {
    "opt": Subject("opt", "wiki", True, 24, 64, 64, "perplexity", prompt_tokens=16),
    "g2p": Subject("g2p", "g2p", False, sized(60, 4), sized(400, 20), 24, "rouge2"),
    "marks": Subject("marks", "marks", False, 6, 100, 160, MARKED, predicted=False),
    "marks_sparse": Subject("marks_sparse", "marks", True, 6, 100, 160, MARKED),
}


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def pack_of(subject: Subject, layout: str, ordered: bool = True) -> Path:
    """All experts at four bits in groups, all else as in the checkpoint; made anew where that is another one. By
    neurons, if `ordered` they lie as a conversion lays them; else as in the checkpoint."""
    from moeconv.artifacts import uniform
    from moeconv.conversion.settings import neurons_of
    from moeconv.conversion.taught import guessed_block
    from moeconv.measure.firing import ordered as ordered_by
    from moeconv.packing.emit import Label, emit
    from moeconv.quantizers import QUANTIZERS
    from moeconv.quantizers.coder import ExpertCoder
    from moeconv.source.checkpoint import Checkpoint

    checkpoint = Checkpoint.open(MODELS / subject.name)
    neurons = neurons_of(layout, checkpoint.spec, mxfp4=False)
    ordered = ordered and neurons is not None
    out = FOLDER / f"{subject.name}-{layout}{'-ordered' if ordered else ''}.pack"
    creator = f"recipes.bench.flash {checkpoint.sha256} {neurons}{' ordered together' if ordered else ''}"
    if is_pack(out) and Pack.open(out).manifest.creator == creator:
        return out
    say(f"{out} is written")
    shutil.rmtree(out, ignore_errors=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    coder, order = ExpertCoder(checkpoint, QUANTIZERS["group"](None), None, neurons=neurons), None
    if ordered and neurons is not None:
        block = guessed_block(checkpoint.spec, coder.quantizer.group_size, neurons)
        order = ordered_by(counted_of(subject).items(), block).order
    emit(coder, uniform(checkpoint.spec, BITS), out, seed=0, label=Label(creator), order=order)
    return out


@cache
def counted_of(subject: Subject) -> Mapping[LayerKey, Counted]:
    """Returns which neurons of the unquantized model fire on calibration text."""
    from moeconv.calibration import Sample
    from moeconv.measure.firing import counted
    from moeconv.measure.metrics import METRICS
    from moeconv.measure.scoring import Extent, build_scorer, load_tokenizer
    from moeconv.measure.trial import LoadedModel
    from moeconv.progress import unseen
    from moeconv.source.checkpoint import Checkpoint

    say(f"{subject.name}: neurons that fire are counted")
    lines = Path(f"build/data/{subject.data}/calibration.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    samples = [Sample(row.get("text", row.get("input", "")), row.get("target", "")) for row in rows]
    loaded, tokenizer = (
        LoadedModel(Checkpoint.open(MODELS / subject.name)),
        load_tokenizer(MODELS / subject.name / "tokenizer.json"),
    )
    extent = Extent(ORDER_INPUTS if subject.prompt_tokens is None else ORDER_WINDOWS, CONTEXT, None)
    scorer = build_scorer(loaded, tokenizer, samples, METRICS["perplexity"], extent)
    return dict(counted(loaded, scorer, unseen))


def predicting(subject: Subject, layout: str) -> Path:
    """The pack with a predictor, trained once by `moeconv train-neurons` as it is by default. Raises
    CalledProcessError."""
    bundled = pack_of(subject, BUNDLED)
    if PREDICTOR not in Pack.open(bundled).manifest.files:
        say(f"{subject.name}: a predictor is trained")
        command = [sys.executable, "-m", "moeconv", "train-neurons", str(bundled), "--calib", subject.data]
        command += ["--against", str(MODELS / subject.name), "--metric", subject.metric, *TRAINING]
        subprocess.run(command, check=True, stdout=sys.stderr)
    out = pack_of(subject, layout)
    if PREDICTOR not in Pack.open(out).manifest.files:
        add_to_pack(out, Pack.open(out).manifest, PREDICTOR, Pack.open(bundled).read_file(PREDICTOR))
    return out


def inputs(subject: Subject, count: int | None = None) -> list[list[int]]:
    """Token ids of held-out inputs, the last of the text first, which no training chose its epochs by."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(MODELS / subject.name / "tokenizer.json"))
    lines = Path(f"build/data/{subject.data}/heldout.jsonl").read_text(encoding="utf-8").splitlines()
    found: list[list[int]] = []
    for line in reversed(lines):
        row = json.loads(line)
        ids = tokenizer.encode(row.get("input") or row["text"].strip()).ids[: subject.prompt_tokens]
        if len(ids) == subject.prompt_tokens or (subject.prompt_tokens is None and ids):
            found.append(ids)
        if len(found) == (count or subject.inputs):
            break
    return found


def prompts_file(subject: Subject) -> Path:
    """The same, as a session of recipes/bench/streamed.py reads them."""
    out = FOLDER / f"{subject.name}-prompts.jsonl"
    write_atomically(out, "".join(f"{json.dumps(ids)}\n" for ids in inputs(subject)).encode())
    return out


def room_of(subject: Subject, share: float) -> int:
    """Bytes for experts, the same for all layouts: a share of those of the whole ones."""
    return int(share * expert_bytes(pack_of(subject, WHOLE)))


def memory_bytes(subject: Subject, share: float) -> int:
    """What a process may hold with such room."""
    backbone = Pack.open(pack_of(subject, WHOLE)).manifest.files[BACKBONE].nbytes
    return room_of(subject, share) + backbone + PROCESS_BYTES


# Bytes that are read for each token while a model writes: whole experts, neurons that fire, neurons that are named
# by a predictor, all in the same room. No figure depends on the drive.

SHARES = (0.25, 0.5, 0.75)


@dataclass
class Written:
    """What was written behind each input, and what it took; `requests` and `blocks` count what was asked for, each once
    for a token, `neurons` and `fired` those of the experts that it went to. `holds_rows`: whether gate and up of all
    experts had room."""

    answers: list[list[int]] = field(default_factory=list)
    tokens: int = 0
    bytes_read: int = 0
    requests: int = 0
    neurons: int = 0
    fired: int = 0
    blocks: int = 0
    block_hits: int = 0
    holds_rows: bool = False

    @property
    def bytes_per_token(self) -> float:
        return self.bytes_read / self.tokens


@contextmanager
def opened(pack: Path, **changes: Any) -> Iterator[Engine]:
    """An engine that reads past the page cache, and nothing ahead."""
    asked: dict[str, Any] = {"predict": "none", "threads": THREADS, "io": "direct"}
    with Engine.open(pack, notify=lambda line: None, **{**asked, **changes}) as engine:
        yield engine


def write_texts(
    engine: Engine, texts: Sequence[Sequence[int]], new_tokens: int, follow: Sequence[Sequence[int]] | None = None
) -> Written:
    """Writes behind each text. `follow`: the tokens that are read in place of those that are written. What prompts take
    does not count."""
    model, found, eos = engine.model, Written(), engine.spec.tokens.eos
    firing = engine.holding if isinstance(engine.holding, Firing) else None
    for number, ids in enumerate(texts):
        engine.reserve(len(ids), new_tokens)
        state, logits = model.prefill(ids)
        read, fired = replace(engine.counters), None if firing is None else replace(firing.counters)
        answer: list[int] = []
        for place in range(new_tokens if follow is None else len(follow[number])):
            answer.append(int(logits.argmax()))
            token = answer[-1] if follow is None else follow[number][place]
            if token in eos:
                break
            logits = model.step(state, token)
            found.tokens += 1
        found.answers.append(answer)
        found.bytes_read += engine.counters.bytes_read - read.bytes_read
        found.requests += engine.counters.requests - read.requests
        if firing is not None and fired is not None:
            found.holds_rows = engine.cache.capacity_bytes >= sum(firing.nbytes.values())
            for name in ("neurons", "fired", "blocks", "block_hits"):
                more = getattr(firing.counters, name) - getattr(fired, name)
                setattr(found, name, getattr(found, name) + more)
    return found


def bytes_rows(subject: Subject) -> Iterator[Row]:
    """All engines read the same tokens: those that the model writes with everything in memory."""
    texts, columns, whole = inputs(subject), pack_of(subject, COLUMNS), pack_of(subject, WHOLE)
    trained = pack_of(subject, COLUMNS, ordered=False)
    with opened(columns) as engine:
        alone = write_texts(engine, texts, subject.new_tokens)
    with opened(trained) as engine:
        unordered = write_texts(engine, texts, subject.new_tokens, alone.answers)

    def read(pack: Path, share: float, **changes: Any) -> Written:
        with opened(pack, cache=room_of(subject, share), **changes) as engine:
            write_texts(engine, texts[:1], subject.new_tokens, alone.answers[:1])
            return write_texts(engine, texts, subject.new_tokens, alone.answers)

    asked = asked_for(alone, columns, whole)
    yield from asked_rows(subject, asked)
    found = {share: (read(whole, share), read(columns, share)) for share in SHARES}
    for share, (experts, neurons) in found.items():
        differ = sum(mine != theirs for mine, theirs in zip(neurons.answers, alone.answers, strict=True))
        yield from read_rows(subject, share, asked, experts, neurons, differ)
    both = {share: (neurons, read(trained, share)) for share, (_, neurons) in found.items()}
    yield from in_order_rows(subject, (alone, unordered), both)
    if subject.predicted:
        bundled = predicting(subject, BUNDLED)
        predictor = load_predictor(Pack.open(bundled))
        assert predictor is not None
        yield from predictor_rows(subject, predictor, Pack.open(bundled).manifest.nbytes())
        for share, (experts, _) in found.items():
            named = read(bundled, share, neurons=PREDICTED, keep_neurons="window")
            yield from predicted_rows(subject, share, asked, experts, named)


def asked_for(written: Written, columns: Path, whole: Path) -> Asked:
    """By each token, whatever is in memory."""
    opened, expert = Pack.open(columns), Pack.open(whole).manifest.experts[0]
    piece = opened.neurons(opened.manifest.experts[0].key).columns_bytes
    return Asked(
        activity=written.fired / written.neurons,
        experts_bytes=written.requests * expert.file_bytes / written.tokens,
        columns_bytes=written.blocks * piece / written.tokens,
    )


# What `make bench-flash` found, as rows with the aims of each. Pure.

SPARSE_AIM, ELSE_AIM = 0.10, 0.22
"""Of whole experts' bytes, where what fires is read: half of the activity and three points, where about 10% and 37%
fire."""
BESIDE_ACTIVITY = 0.05
"""What may be read beside all of the activity, where a predictor names what is read."""
LOSS_AIM = 1.0
STEPS_AIMS: Mapping[str, float] = {"ssd": 5.0, "board": 8.0}
TODAY_AIM, DECIDING_AIM = 1.5, 10.0
HALF = 0.5
OF = "of their bytes"
NAIVE, TODAY, NEURONS, NAMED = "naive", "whole experts", "neurons", "predicted neurons"


@dataclass(frozen=True)
class Asked:
    """`activity`: of the neurons of the experts that a token goes to, those that fire. Bytes that a token asks for: of
    whole experts, and of the columns of blocks with a neuron that fires."""

    activity: float
    experts_bytes: float
    columns_bytes: float


def asked_rows(subject: Subject, asked: Asked) -> list[Row]:
    """With gate and up in memory, and nothing else."""
    return [
        Row(f"{subject.name}: neurons that fire", 100 * asked.activity, "%"),
        Row(f"{subject.name}: whole experts ask for", asked.experts_bytes / 1e3, "kB a token"),
        Row(f"{subject.name}: columns ask for", asked.columns_bytes / 1e3, "kB a token"),
        _exactly(
            subject, Row(f"{subject.name}: columns, of whole experts", asked.columns_bytes / asked.experts_bytes, OF)
        ),
    ]  # fmt: skip


def _exactly(subject: Subject, row: Row) -> Row:
    """With the aim of what reads only what fires: with gate and up in memory."""
    return row.at_most(SPARSE_AIM if subject.sparse else ELSE_AIM)


def read_rows(
    subject: Subject, share: float, asked: Asked, experts: Written, neurons: Written, differ: int
) -> list[Row]:  # fmt: skip
    """`differ`: answers that are not those with everything in memory."""
    where = f"{subject.name}, {share:.0%}"
    ratio = Row(f"{where}: neurons, of whole experts", part(neurons, experts), OF)
    return [
        Row(f"{where}: whole experts read", experts.bytes_per_token / 1e3, "kB a token"),
        Row(f"{where}: neurons read", neurons.bytes_per_token / 1e3, "kB a token"),
        _exactly(subject, ratio) if neurons.holds_rows else ratio,
        Row(f"{where}: neurons, of what whole experts ask for", neurons.bytes_per_token / asked.experts_bytes, OF),
        Row(f"{where}: hits among blocks", 100 * neurons.block_hits / max(1, neurons.blocks), "%"),
        Row(f"{where}: answers that differ", differ, "of them").at_most(0),
    ]


def part(mine: Written, other: Written) -> float:
    """Bytes a token of one as a share of the other's; infinite where that reads nothing."""
    return mine.bytes_per_token / other.bytes_per_token if other.bytes_read else float("inf")


def in_order_rows(
    subject: Subject, alone: tuple[Written, Written], both: Mapping[float, tuple[Written, Written]]
) -> Iterator[Row]:
    """Neurons that lie by how often they fire, beside the same in the checkpoint's order: what a token asks for with
    everything in memory, and what is read for it in each room."""
    ordered, trained = alone
    beside = "of those in the checkpoint's order"
    yield Row(f"{subject.name}: columns asked for, {beside}", ordered.blocks / trained.blocks, OF)
    for share, (ordered, trained) in both.items():
        where = f"{subject.name}, {share:.0%}"
        yield Row(f"{where}: neurons read in the checkpoint's order", trained.bytes_per_token / 1e3, "kB a token")
        yield Row(f"{where}: neurons read, {beside}", part(ordered, trained), OF)


def predictor_rows(subject: Subject, predictor: NeuronPredictor, pack_bytes: int) -> Iterator[Row]:
    """What it names on held-out text, the mean over all layers, and what the model loses by it. `pack_bytes`: of the
    pack that it lies in."""
    where = f"{subject.name}: predictor"
    yield Row(f"{where}: size", 100 * len(predictor.to_bytes()) / pack_bytes, "% of the pack")
    shares = zip(*(layer.kept for layer in predictor.layers.values()), strict=True)
    for what, layers in zip(("firing neurons that it names", "neurons that it names", "blocks"), shares, strict=True):
        yield Row(f"{where}: {what}", 100 * sum(layers) / len(layers), "%")
    if (loss := predictor.loss) is not None:
        row = Row(f"{subject.name}: loss by the predictor", 100 * loss.loss, "%")
        yield row.within(100 * loss.low, 100 * loss.high).at_most(LOSS_AIM)


def predicted_rows(subject: Subject, share: float, asked: Asked, experts: Written, named: Written) -> Iterator[Row]:
    where = f"{subject.name}, {share:.0%}"
    yield Row(f"{where}: predicted read", named.bytes_per_token / 1e3, "kB a token")
    yield Row(f"{where}: predicted, of whole experts", part(named, experts), OF)
    of_asked = named.bytes_per_token / asked.experts_bytes
    row = Row(f"{where}: predicted, of what whole experts ask for", of_asked, OF)
    aim = SPARSE_AIM if subject.sparse else asked.activity + BESIDE_ACTIVITY
    yield row.at_most(aim) if share == HALF else row


# Races ----------------------------------------------------------------------------------------------------------------


def raced_rows(where: str, outcomes: Mapping[str, Outcome], limit_bytes: int) -> Iterator[Row]:
    """Of each entry: tokens a second, what it read for a token, where its time went, and what its process held."""
    for name, outcome in outcomes.items():
        what, tokens = f"{where}: {name}", sum(segment.tokens for segment in outcome.segments)
        yield row_of_runs(f"{what}: decode", outcome.speeds, "tokens/s")
        read = sum(segment.bytes_read for segment in outcome.segments)
        yield Row(f"{what}: read for a token", read / tokens / 1e3, "kB")
        if outcome.spent is not None:
            yield from spent_rows(what, outcome.spent)
        peak = outcome.facts["peak_bytes"] / 1e6
        yield Row(f"{what}: peak memory of the process", peak, "MB").at_most(limit_bytes / 1e6)


def spent_rows(what: str, spent: Spent) -> list[Row]:
    """Reading, managing memory, computing: the parts of a token's time. What whole experts decide has no aim here."""
    deciding = Row(f"{what}: deciding", 100 * spent.deciding / spent.whole, "% of a token")
    return [
        Row(f"{what}: reading", 100 * spent.waiting / spent.whole, "% of a token"),
        deciding if is_whole(what) else deciding.at_most(DECIDING_AIM),
        Row(f"{what}: computing", 100 * spent.kernels / spent.whole, "% of a token"),
    ]


def is_whole(what: str) -> bool:
    """Whether an entry reads whole experts."""
    return any(f": {name}" in what for name in (NAIVE, TODAY))


def steps_rows(where: str, device: str, outcomes: Mapping[str, Outcome], last: str | None) -> Iterator[Row]:
    """Each step beside loading all that a token needs; the aim, if there is one, is that of the `last`."""
    naive = outcomes.get(NAIVE)
    for name, outcome in outcomes.items():
        if naive is not None and outcome is not naive:
            row = row_of_runs(f"{where}: {name} to naive", ratios(outcome, naive), "× its speed")
            yield row.at_least(STEPS_AIMS[device]) if name == last and device in STEPS_AIMS else row


def of_naive_rows(where: str, outcomes: Mapping[str, Outcome], sparse: bool) -> Iterator[Row]:
    """Bytes for a token beside all that it needs; the aim is that of what is predicted, where few neurons fire."""

    def read(outcome: Outcome) -> float:
        return sum(each.bytes_read for each in outcome.segments) / sum(each.tokens for each in outcome.segments)

    naive = outcomes.get(NAIVE)
    for name, outcome in outcomes.items():
        if naive is not None and outcome is not naive:
            row = Row(f"{where}: {name}: read, of naive", read(outcome) / read(naive), OF)
            yield row.at_most(SPARSE_AIM) if sparse and name == NAMED else row


def today_rows(where: str, outcomes: Mapping[str, Outcome], names: Sequence[str], aim: float | None) -> Iterator[Row]:
    """Neurons beside whole experts; `names` are what all are followed by."""
    for name, what in product(names, (NEURONS, NAMED)):
        mine, other = outcomes.get(f"{what}{name}"), outcomes.get(f"{TODAY}{name}")
        if mine is not None and other is not None:
            row = row_of_runs(f"{where}: {what}{name} to {TODAY}", ratios(mine, other), "× their speed")
            yield row if aim is None else row.at_least(aim)
