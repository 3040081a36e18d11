"""One training run from start to end: calibration text through the pack, a hash function into it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from moeconv.calibration import Splits
from moeconv.conversion.fidelity import Text, routed_loss, source_of
from moeconv.conversion.lessons import check_memory, held_samples, lesson_bytes, lesson_of, usual_width
from moeconv.conversion.limits import context_note, samples_note
from moeconv.conversion.pack_text import text_of
from moeconv.conversion.room import check_room
from moeconv.conversion.settings import check_counts
from moeconv.errors import ConversionError, SettingsError
from moeconv.foresight.training import EPOCHS, Course, trained
from moeconv.measure.metrics import default_metric, find_metric
from moeconv.measure.scorers.build import Extent, build_scorer, check_fit, load_tokenizer, volume
from moeconv.measure.workdir import WorkDir
from moeconv.packing.packed import PackedModel, described
from moeconv.progress import Progress
from moeconv.source.archs.errors import transformers_model
from moeconv.source.checkpoint import TOKENIZER
from moert.pack.hash import HASH, MOST_WIDTH, HashFunction, RoutedLoss
from moert.pack.manifest import BACKBONE, Manifest
from moert.pack.model_spec import LayerKey, ModelSpec
from moert.pack.reader import Pack
from moert.pack.writer import add_files


@dataclass(frozen=True)
class Asked:
    """What a user asks of a training run; None for what is usual."""

    calib: str | None = None
    heldout: str | None = None
    seed: int | None = None
    samples: int | None = None
    context: int | None = None
    width: int | None = None
    epochs: int | None = None
    work: Path | None = None
    against: str | None = None
    metric: str | None = None

    def __post_init__(self) -> None:
        check_counts(samples=self.samples, context=self.context, seed=self.seed, width=self.width, epochs=self.epochs)
        if self.width is not None and (self.width % 2 or self.width > MOST_WIDTH):
            raise SettingsError(f"--width {self.width}: expected an even number, at most {MOST_WIDTH}")

    def course(self, spec: ModelSpec, pack_bytes: int) -> Course:
        width = self.width or usual_width(spec, pack_bytes)
        return Course(width, self.epochs or EPOCHS, seed=self.seed or 0)


@dataclass(frozen=True)
class HashFigures:
    """`hits`: of each layer the share of held-out choices among the top_k, and among the 3 · top_k, experts that the
    function names first, of `heldout_tokens`. `share`: what its `nbytes` are of the pack's. `routed`: None where that
    was not asked for."""

    tokens: int
    heldout_tokens: int
    top_k: int
    width: int
    nbytes: int
    share: float
    hits: Mapping[LayerKey, tuple[float, float]]
    routed: RoutedLoss | None = None


def train_hash(pack: Pack, asked: Asked, say: Callable[[str], None], show: Progress) -> HashFigures:
    """Adds hash.safetensors to the pack. What was begun goes on where it was. Raises ConversionError or PackError."""
    spec, others = pack.manifest.model, pack.manifest.nbytes(without=(HASH,))
    if not spec.moe.chooses:
        raise SettingsError(f"{pack.root} has nothing to foresee: every token passes all experts of a layer")
    source = text_of(pack, asked.calib, asked.heldout, None if asked.calib is None else asked.seed)
    splits = source.splits
    metric = find_metric(_metric_of(pack, asked, splits))
    check_fit(spec, splits, metric)
    check_memory(spec, 1 if asked.against is None else 2)
    unquantised = None if asked.against is None else source_of(spec, asked.against)
    tokenizer = load_tokenizer(pack.file(TOKENIZER))
    if note := context_note(asked.context, spec):
        say(note)
    course = asked.course(spec, others)
    whole = Extent(asked.samples, asked.context or source.context, None)
    sizes = [volume(spec, tokenizer, text, whole) for text in (splits.calibration, splits.heldout)]
    if note := samples_note("--samples", asked.samples, sizes[0].samples, "samples of the calibration text"):
        say(note)
    held = whole if asked.samples else replace(whole, limit=held_samples(sizes[1]))
    folder = asked.work or pack.root.with_name(f"{pack.root.name}.hash")
    check_room(folder, lesson_bytes(spec, sizes, course), "--work", folder)
    with WorkDir(folder) as work:
        packed = PackedModel.open(pack)
        scorers = (
            build_scorer(packed, tokenizer, splits.calibration, metric, whole),
            build_scorer(packed, tokenizer, splits.heldout, metric, held),
        )
        about = {
            "weights": _weights_of(pack.manifest), "context": whole.context, "samples": asked.samples,
            "text": [splits.digest("calibration"), splits.digest("heldout")],
        }  # fmt: skip
        description = described(pack)[1]
        with transformers_model(pack.root):
            lesson = lesson_of(packed, description, scorers, course, work.path, about, show)
        function = trained(lesson, course, say, show)
        if unquantised is not None:
            say("what routing by the function loses")
            text = Text(tokenizer, splits.heldout, metric, held)
            routed = routed_loss(packed, description, function, unquantised, text, course.seed)
            function = replace(function, routed=routed)
    nbytes = _add(pack, function)
    shutil.rmtree(folder, ignore_errors=True)
    return HashFigures(
        lesson.train.tokens, lesson.heldout.tokens, spec.moe.router.top_k, course.width, nbytes,
        nbytes / (others + nbytes), function.layer_hits(spec),
        function.routed,
    )  # fmt: skip


def _add(pack: Pack, function: HashFunction) -> int:
    """To the pack as it is now, which may have got other files since. Returns the bytes. Raises ConversionError."""
    now = Pack.open(pack.root).manifest
    if _weights_of(now) != _weights_of(pack.manifest):
        raise ConversionError(f"{pack.root} was replaced in the meantime: run the same command again")
    body = function.to_bytes()
    add_files(pack.root, now, {HASH: body})
    return len(body)


def _metric_of(pack: Pack, asked: Asked, splits: Splits) -> str:
    """That of the conversion, where its text is used and no other is asked for. Raises SettingsError."""
    quality = pack.manifest.quality
    if asked.metric is not None:
        return asked.metric
    if asked.calib is None and quality is not None:
        if ".py" in quality.metric and not Path(quality.metric).is_file():
            raise SettingsError(f"the pack was judged by {quality.metric}, a module: say where it is with --metric")
        return quality.metric
    return splits.metric or default_metric(splits.seq2seq, splits.choices)


def _weights_of(manifest: Manifest) -> list[str]:
    """What decides what the pack's model says."""
    files = [manifest.files[name].sha256 for name in (BACKBONE, "config.json", TOKENIZER)]
    return [*files, *(entry.sha256 for entry in manifest.experts)]
