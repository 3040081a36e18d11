"""One training run from start to end: calibration text through the pack, a hash function into it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from moeconv.conversion.fidelity import loss_of, unquantised_of
from moeconv.conversion.lessons import check_memory, held_samples, lesson_bytes, lesson_of, usual_width
from moeconv.conversion.room import check_room
from moeconv.conversion.settings import check_counts
from moeconv.conversion.training import Asked, TrainingText, add_learnt, folder_of
from moeconv.errors import SettingsError
from moeconv.foresight.following import Following, refusal
from moeconv.foresight.training import EPOCHS, Course, trained
from moeconv.measure.workdir import WorkDir
from moeconv.packing.packed import PackedModel, described
from moeconv.progress import Progress
from moeconv.source.archs.errors import transformers_model
from moeconv.source.checkpoint import Checkpoint
from moert.pack.hash import HASH, MOST_WIDTH, RoutedLoss
from moert.pack.model_spec import LayerKey, ModelSpec
from moert.pack.reader import Pack


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


def train_hash(pack: Pack, asked: HashAsked, say: Callable[[str], None], show: Progress) -> HashFigures:
    """Adds hash.safetensors to the pack. What was begun goes on where it was. Raises ConversionError or PackError."""
    spec, others = pack.manifest.model, pack.manifest.nbytes(without=(HASH,))
    if not spec.moe.chooses:
        raise SettingsError(f"{pack.root} has nothing to foresee: every token passes all experts of a layer")
    folder = folder_of(pack, asked.work, "hash", HASH)
    text = TrainingText.of(pack, asked, lambda _, heldout: (None, held_samples(heldout)), say)
    check_memory(spec, "a hash function", 1 if asked.against is None else 2)
    unquantised = None if asked.against is None else source_of(spec, asked.against)
    course = asked.course(spec, others)
    check_room(folder, lesson_bytes(spec, text.volumes, course), "--work", folder)
    with WorkDir(folder) as work:
        packed, description = PackedModel.open(pack), described(pack)[1]
        scorers = text.scorers(packed)
        with transformers_model(pack.root):
            lesson = lesson_of(packed, description, scorers, course, work.path, text.about(pack), show)
        function = trained(lesson, course, say, show)
        if unquantised is not None:
            say("what routing by the function loses")
            with Following(packed, description, function).routing():
                after = text.judged().scores(packed)
            routed = RoutedLoss(spec.moe.router.top_k, *loss_of(after, unquantised, text.judged(), course.seed))
            function = replace(function, routed=routed)
    body = function.to_bytes()
    add_learnt(pack, HASH, body)
    shutil.rmtree(folder, ignore_errors=True)
    return HashFigures(
        lesson.train.tokens, lesson.heldout.tokens, spec.moe.router.top_k, course.width, len(body),
        len(body) / (others + len(body)), function.layer_hits(spec), function.routed,
    )  # fmt: skip


def source_of(spec: ModelSpec, against: str) -> Checkpoint:
    """The unquantised model. Raises SettingsError for routers that no function can stand for, and as
    moeconv.conversion.fidelity.unquantised_of."""
    if (why := refusal(spec.moe)) is not None:
        raise SettingsError(f"--against: a hash function {why}: leave it out")
    return unquantised_of(spec, against)
