"""Additions to a finished pack: paths, a hash function, a predictor of neurons."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

from moeconv.calibration import Sample, Splits
from moeconv.conversion.material import context_note, module_note, samples_note, text_of
from moeconv.conversion.room import check_least, check_room, room_in, whole_bytes, within
from moeconv.conversion.settings import check_counts
from moeconv.conversion.taught import (
    check_memory,
    check_neurons,
    held_samples,
    lesson_bytes,
    lesson_of,
    neuron_lesson_bytes,
    neuron_lesson_of,
    samples_wanted,
    usual_rank,
    usual_width,
)
from moeconv.errors import ConversionError, SettingsError
from moeconv.eviction import with_eviction
from moeconv.foresight.network import Following, refusal
from moeconv.foresight.neurons import MISSED, NEURON_EPOCHS, NamedNeurons, NeuronCourse, trained_neurons
from moeconv.foresight.training import EPOCHS, Course, trained
from moeconv.measure.metrics import F64, Metric, default_metric, find_metric, is_module
from moeconv.measure.passes import PASSAGES
from moeconv.measure.scorers import Routed, Subject, Tokenizer
from moeconv.measure.scoring import (
    Extent,
    GeneratedScorer,
    TextScorer,
    Volume,
    build_scorer,
    check_fit,
    load_tokenizer,
    volume,
)
from moeconv.measure.trial import LoadedModel
from moeconv.measure.workdir import LOCK, WorkDir
from moeconv.packing.packed import PackedLayers, PackedModel, described
from moeconv.packing.paths import LEAST_BYTES, MOST_SHARE, PathFigures, bounded, figures, routes_of, trace_of
from moeconv.progress import Progress, unseen
from moeconv.promise.bound import interval
from moeconv.report.page import size
from moeconv.routes import build
from moeconv.source.archs.config import transformers_model
from moeconv.source.checkpoint import Checkpoint
from moeconv.source.skeleton import by_layers
from moeconv.writer import add_files, check_addable
from moert.pack.files import beside
from moert.pack.learnt import HASH, MOST_RANK, MOST_WIDTH, PREDICTOR, Kept, PredictedLoss, RoutedLoss
from moert.pack.manifest import BACKBONE, Manifest
from moert.pack.model_spec import ExpertKey, LayerKey, ModelSpec
from moert.pack.paths import PATHS, TRACE
from moert.pack.reader import Pack
from moert.pack.tensors import TOKENIZER

# The loss of a finished pack as it is to be run, against the model that it was made from.


def unquantized_of(spec: ModelSpec, against: str) -> Checkpoint:
    """Returns the checkpoint that a pack was made from. Raises SettingsError for another model's; CheckpointError."""
    found = Checkpoint.open(against)
    if found.spec != spec:
        raise SettingsError(f"--against {against}: the pack was made from another model")
    return found


@dataclass(frozen=True)
class Text:
    """Held-out samples, and how they are scored."""

    tokenizer: Tokenizer
    samples: tuple[Sample, ...]
    metric: Metric
    extent: Extent

    def scores(self, subject: Subject) -> F64:
        scorer = build_scorer(subject, self.tokenizer, self.samples, self.metric, self.extent)
        return scorer.score(as_reference=True).scores


def loss_of(after: F64, source: Checkpoint, text: Text, seed: int) -> tuple[float, float, float]:
    """Returns the loss of a pack's model against the unquantized model, and its 95% interval; `after`: the scores on
    `text` of the pack's model as it is to be run."""
    loaded: Any = LoadedModel(source)
    with transformers_model(source.path):
        before = text.scores(loaded)
    del loaded
    gc.collect()  # a model is full of circles
    documents = volume(source.spec, text.tokenizer, text.samples, text.extent).documents
    loss = text.metric.loss(text.metric.value(before), text.metric.value(after))
    return loss, *interval(text.metric, before, after, seed=seed, groups=documents)


# Begin and end of every training on a finished pack: its text, and a file into the pack.

_LEFT = (LOCK, "to-learn", "to-judge-by", "*.pt", "*.pt.*.tmp")
"""Names of files that a training that was stopped may leave in its folder."""


@dataclass(frozen=True)
class Asked:
    """The settings of any training; None for the usual choice."""

    calib: str | None = None
    heldout: str | None = None
    seed: int | None = None
    samples: int | None = None
    context: int | None = None
    epochs: int | None = None
    work: Path | None = None
    against: str | None = None
    metric: str | None = None

    def __post_init__(self) -> None:
        check_counts(samples=self.samples, context=self.context, seed=self.seed, epochs=self.epochs)


@dataclass(frozen=True)
class TrainingText:
    """The text that is trained on and the held-out text that judges, with their extents and volumes."""

    splits: Splits
    tokenizer: Tokenizer
    metric: Metric
    learning: Extent
    heldout: Extent
    volumes: tuple[Volume, Volume]

    @classmethod
    def of(
        cls, pack: Pack, asked: Asked, usual: Callable[[Volume, Volume], tuple[int | None, int]],
        say: Callable[[str], None],
    ) -> TrainingText:  # fmt: skip
        """Returns the text of a training. `usual` gives the numbers of samples (None: all) of both texts where the user
        does not. Raises ConversionError or PackError."""
        spec = pack.manifest.model
        source = text_of(pack, asked.calib, asked.heldout, None if asked.calib is None else asked.seed)
        splits = source.splits
        if note := module_note(asked.metric):
            say(note)
        metric = find_metric(_metric_of(pack, asked, splits))
        check_fit(spec, splits, metric)
        tokenizer = load_tokenizer(pack.file(TOKENIZER))
        if note := context_note(asked.context, spec):
            say(note)
        whole = Extent(asked.samples, asked.context or source.context, None)

        def size(split: str, extent: Extent) -> Volume:
            return volume(spec, tokenizer, getattr(splits, split), extent)

        found = size("calibration", whole), size("heldout", whole)
        if note := samples_note("--samples", asked.samples, found[0].samples, "samples of the calibration text"):
            say(note)
        if asked.samples:
            return cls(splits, tokenizer, metric, whole, whole, found)
        learning, heldout = (replace(whole, limit=limit) for limit in usual(*found))
        used = size("calibration", learning), size("heldout", heldout)
        return cls(splits, tokenizer, metric, learning, heldout, used)

    def scorers(self, subject: Subject) -> tuple[TextScorer | GeneratedScorer, TextScorer | GeneratedScorer]:
        """Returns the scorers of the text to learn and of the text to judge by."""
        return (
            build_scorer(subject, self.tokenizer, self.splits.calibration, self.metric, self.learning),
            build_scorer(subject, self.tokenizer, self.splits.heldout, self.metric, self.heldout),
        )

    def about(self, pack: Pack) -> Mapping[str, Any]:
        """Returns, as JSON values, all that decides the outputs of the pack's model on this text."""
        return {
            "weights": _weights_of(pack.manifest), "context": self.learning.context, "samples": self.learning.limit,
            "text": [self.splits.digest("calibration"), self.splits.digest("heldout")],
        }  # fmt: skip

    def judged(self) -> Text:
        """Returns the text that a loss is measured on."""
        return Text(self.tokenizer, self.splits.heldout, self.metric, self.heldout)


def add_learnt(pack: Pack, name: str, body: bytes) -> None:
    """Adds a file to the pack as it is now, which may have got other files since it was opened. Raises ConversionError
    if its weights have changed."""
    now = Pack.open(pack.root).manifest
    if _weights_of(now) != _weights_of(pack.manifest):
        raise ConversionError(f"{pack.root} was replaced in the meantime: run the same command again")
    add_files(pack.root, now, {name: body})


def folder_of(pack: Pack, work: Path | None, ending: str, learnt: str) -> Path:
    """Returns the folder of a training's files, which are removed when it is done. Raises SettingsError for a folder
    with files that no training has left, and WriteFailed for a pack that can't take the file `learnt`."""
    check_addable(pack.root, learnt)
    folder = work or beside(pack.root, ending)
    there = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    others = [name for name in there if not any(fnmatch(name, ours) for ours in _LEFT)]
    if there and (others or LOCK not in there):
        raise SettingsError(
            f"{folder} holds {(others or there)[0]}, which is not of a training and would be lost: give another --work"
        )
    return folder


def _metric_of(pack: Pack, asked: Asked, splits: Splits) -> str:
    """Returns the name of the user's metric, else the conversion's where its text is used, else the text's own. Raises
    SettingsError."""
    quality = pack.manifest.quality
    if asked.metric is not None:
        return asked.metric
    if asked.calib is None and quality is not None:
        if is_module(quality.metric):  # a program, which only a user may name: the pack may have brought its own
            raise SettingsError(f"the pack was judged by {quality.metric}, a module: say where it is with --metric")
        return quality.metric
    return splits.metric or default_metric(splits.seq2seq, splits.choices)


def _weights_of(manifest: Manifest) -> list[str]:
    """Returns the digests of the files that decide the outputs of the pack's model."""
    files = [manifest.files[name].sha256 for name in (BACKBONE, "config.json", TOKENIZER)]
    return [*files, *(entry.sha256 for entry in manifest.experts)]


# Profiling paths: calibration text goes through the pack, transition tables and a trace into it.


def profile_paths(
    pack: Pack,
    *,
    calib: str | None,
    heldout: str | None,
    seed: int | None,
    samples: int | None,
    context: int | None,
    say: Callable[[str], None],
    show: Progress = unseen,
    memory_bytes: int | None = None,
) -> tuple[PathFigures, int]:
    """Adds paths.safetensors and trace.safetensors to the pack; returns the figures and the bytes of both.

    Without `calib` it takes the text that the pack was converted with. A model that does not fit `memory_bytes`, or
    the free memory, is run layer by layer. Raises ConversionError or PackError.
    """
    check_counts(samples=samples, context=context, seed=seed)
    check_addable(pack.root, PATHS, TRACE)
    source = text_of(pack, calib, heldout, seed)
    splits = source.splits
    metric = find_metric(default_metric(splits.seq2seq, splits.choices))
    check_fit(pack.manifest.model, splits, metric)
    tokenizer = load_tokenizer(pack.file(TOKENIZER))
    packed = _subject(pack, show, memory_bytes)
    extent = Extent(samples, context or source.context, None)
    if note := context_note(context, packed.spec):
        say(note)

    named = {"calibration": "calibration", "heldout": "held-out"}

    def routed(split: str) -> list[Routed]:
        texts = getattr(splits, split)
        there = volume(packed.spec, tokenizer, texts, extent).samples
        if note := samples_note("--samples", samples, there, f"samples of the {named[split]} text"):
            say(note)
        scorer = build_scorer(packed, tokenizer, texts, metric, extent)
        say(f"routing of {scorer.n_samples} samples of the {named[split]} text")
        with transformers_model(pack.root):
            return list(scorer.routes())

    num_experts = packed.spec.moe.n
    parts = routed("calibration")
    seen = routes_of(parts)
    kept = bounded(build(num_experts, seen), pack.manifest.nbytes(without=(PATHS, TRACE)))
    if kept.least > 1:
        say(
            f"tables take at most {MOST_SHARE:.0%} of a pack, or {size(LEAST_BYTES)}: what followed after an expert or "
            f"two less than {kept.least} times is left out, {kept.left_out:.1%} of what was counted"
        )
    table = kept.table
    found = figures(table, seen, routes_of(routed("heldout")))
    nbytes = {entry.key: entry.file_bytes for entry in pack.manifest.experts}
    trace = with_eviction(trace_of(parts, num_experts), pack.manifest.model, nbytes)
    chosen = ", ".join(f"{name} at {percent}%" for percent, name in trace.eviction.items())
    say(f"eviction that finds most experts in memory, by the room for them: {chosen}")
    bodies = {PATHS: table.to_bytes(), TRACE: trace.to_bytes()}
    add_files(pack.root, pack.manifest, bodies)
    if not _others(_passes(pack)):
        shutil.rmtree(_passes(pack), ignore_errors=True)
    return found, sum(map(len, bodies.values()))


def _subject(pack: Pack, show: Progress, memory_bytes: int | None) -> PackedModel | PackedLayers:
    spec, limit = pack.manifest.model, within(memory_bytes)
    if limit is None or whole_bytes(spec) <= limit or not by_layers(described(pack)[0], spec):
        return PackedModel.open(pack)
    check_least(limit, spec)
    if others := _others(_passes(pack)):
        raise SettingsError(f"{_passes(pack)} holds {others[0]}, which no run has left: move it away")
    return PackedLayers(pack, room_in(limit, spec, _passes(pack)), show)


def _others(folder: Path) -> list[str]:
    """Returns the files and folders in the folder of passes that no run of them has left."""
    return sorted({path.name for path in folder.iterdir()} - {*PASSAGES}) if folder.is_dir() else []


def _passes(pack: Pack) -> Path:
    """Returns the folder that keeps states between layers until a run has ended well: a run that was killed goes on
    from them."""
    return beside(pack.root, "passes")


# Training a hash function: calibration text goes through the pack, a hash function into it.


@dataclass(frozen=True)
class HashAsked(Asked):
    width: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(width=self.width)
        if self.width is not None and (self.width % 2 or self.width > MOST_WIDTH):
            raise SettingsError(f"--width {self.width}: expected an even number, at most {MOST_WIDTH}")

    def course(self, spec: ModelSpec, pack_bytes: int) -> Course:
        width = self.width or usual_width(spec, pack_bytes)
        return Course(width, self.epochs or EPOCHS, seed=self.seed or 0)


@dataclass(frozen=True)
class HashFigures:
    """Figures of a trained hash function. `hits`: for each layer, the share of the choices of `heldout_tokens` that are
    among the top_k, and among the 3 · top_k, experts that the function names first. `share`: its `nbytes` as a share of
    the pack's. `routed`: the loss of routing by it; None without --against."""

    tokens: int
    heldout_tokens: int
    top_k: int
    width: int
    nbytes: int
    share: float
    hits: Mapping[LayerKey, tuple[float, float]]
    routed: RoutedLoss | None = None


def train_hash(pack: Pack, asked: HashAsked, say: Callable[[str], None], show: Progress) -> HashFigures:
    """Adds hash.safetensors to the pack; returns the figures of the hash function. A training that was stopped goes on
    where it was. Raises ConversionError or PackError."""
    spec, others = pack.manifest.model, pack.manifest.nbytes(without=(HASH,))
    if not spec.moe.chooses:
        raise SettingsError(f"{pack.root} has nothing to foresee: every token passes all experts of a layer")
    folder = folder_of(pack, asked.work, "hash", HASH)
    text = TrainingText.of(pack, asked, lambda _, heldout: (None, held_samples(heldout)), say)
    check_memory(spec, "a hash function", 1 if asked.against is None else 2)
    unquantized = None if asked.against is None else source_of(spec, asked.against)
    course = asked.course(spec, others)
    check_room(folder, lesson_bytes(spec, text.volumes, course), "--work", folder)
    with WorkDir(folder) as work:
        packed, description = PackedModel.open(pack), described(pack)[1]
        scorers = text.scorers(packed)
        with transformers_model(pack.root):
            lesson = lesson_of(packed, description, scorers, course, work.path, text.about(pack), show)
        function = trained(lesson, course, say, show)
        if unquantized is not None:
            say("what routing by the function loses")
            with Following(packed, description, function).routing():
                after = text.judged().scores(packed)
            routed = RoutedLoss(spec.moe.router.top_k, *loss_of(after, unquantized, text.judged(), course.seed))
            function = replace(function, routed=routed)
    body = function.to_bytes()
    add_learnt(pack, HASH, body)
    shutil.rmtree(folder, ignore_errors=True)
    return HashFigures(
        lesson.train.tokens, lesson.heldout.tokens, spec.moe.router.top_k, course.width, len(body),
        len(body) / (others + len(body)), function.layer_hits(spec), function.routed,
    )  # fmt: skip


def source_of(spec: ModelSpec, against: str) -> Checkpoint:
    """Returns the checkpoint that a pack was made from. Raises SettingsError for routers that no hash function can
    replace, and the errors of `unquantized_of`."""
    if (why := refusal(spec.moe)) is not None:
        raise SettingsError(f"--against: a hash function {why}: leave it out")
    return unquantized_of(spec, against)


# Training a predictor of neurons: calibration text goes through the pack, a predictor into it.


@dataclass(frozen=True)
class NeuronsAsked(Asked):
    rank: int | None = None
    missed: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(rank=self.rank)
        if self.rank is not None and self.rank > MOST_RANK:
            raise SettingsError(f"--rank {self.rank}: expected at most {MOST_RANK}")

    def course(self, spec: ModelSpec) -> NeuronCourse:
        """Returns the course of the training. Raises SettingsError for a rank above the features of an expert."""
        rank = self.rank or usual_rank(spec)
        if rank > spec.expert_width:
            raise SettingsError(f"--rank {rank}: expected at most the {spec.expert_width} features of an expert")
        missed = MISSED if self.missed is None else self.missed
        return NeuronCourse(rank, self.epochs or NEURON_EPOCHS, missed, seed=self.seed or 0)


@dataclass(frozen=True)
class NeuronFigures:
    """Figures of a trained predictor of neurons. `kept`: for each layer, the shares that the predictor names on
    `heldout_tokens`, in blocks of `per_block` neurons. `share`: its `nbytes` as a share of the pack's. `loss`: the loss
    of computing only named neurons; None without --against."""

    tokens: int
    heldout_tokens: int
    rank: int
    missed: float
    per_block: int
    nbytes: int
    share: float
    kept: Mapping[LayerKey, Kept]
    loss: PredictedLoss | None = None


def train_neurons(pack: Pack, asked: NeuronsAsked, say: Callable[[str], None], show: Progress) -> NeuronFigures:
    """Adds predictor.safetensors to the pack; returns the figures of the predictor. A training that was stopped goes on
    where it was. Raises ConversionError or PackError."""
    spec, others = pack.manifest.model, pack.manifest.nbytes(without=(PREDICTOR,))
    check_neurons(spec, str(pack.root))
    if not pack.has_neurons:
        raise SettingsError(
            f"experts of {pack.root} do not lie by neurons, so that all of an expert is read whatever fires: convert "
            "the model with --layout neuron"
        )
    course, folder = asked.course(spec), folder_of(pack, asked.work, "neurons", PREDICTOR)
    text = TrainingText.of(pack, asked, partial(samples_wanted, spec), say)
    check_memory(spec, "a predictor of neurons", 1 if asked.against is None else 2)
    unquantized = None if asked.against is None else unquantized_of(spec, asked.against)
    whole = [part.samples for part in text.volumes]
    check_room(folder, neuron_lesson_bytes(spec, text.volumes, whole, course), "--work", folder)

    def block(key: ExpertKey) -> int:
        return pack.neurons(key).per_block

    with WorkDir(folder) as work:
        packed = PackedModel.open(pack)
        scorers = text.scorers(packed)
        with transformers_model(pack.root):
            lesson = neuron_lesson_of(packed, scorers, block, course, work.path, text.about(pack), show)
        predictor = trained_neurons(lesson, course, say, show)
        if unquantized is not None:
            say("what computing only named neurons loses")
            with packed.calls.during(naming=NamedNeurons(predictor, block)):
                after = text.judged().scores(packed)
            predictor = replace(predictor, loss=PredictedLoss(*loss_of(after, unquantized, text.judged(), course.seed)))
    body = predictor.to_bytes()
    add_learnt(pack, PREDICTOR, body)
    shutil.rmtree(folder, ignore_errors=True)
    return NeuronFigures(
        lesson.tokens, lesson.heldout_tokens, course.rank, course.missed, predictor.per_block, len(body),
        len(body) / (others + len(body)), {at: layer.kept for at, layer in predictor.layers.items()}, predictor.loss,
    )  # fmt: skip
