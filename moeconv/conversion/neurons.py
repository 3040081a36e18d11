"""One training run from start to end: calibration text through the pack, a predictor of its neurons into it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from moeconv.conversion.fidelity import loss_of, unquantised_of
from moeconv.conversion.lessons import check_memory
from moeconv.conversion.neuron_lessons import (
    check_neurons,
    neuron_lesson_bytes,
    neuron_lesson_of,
    samples_wanted,
    usual_rank,
)
from moeconv.conversion.room import check_room
from moeconv.conversion.settings import check_counts
from moeconv.conversion.training import Asked, TrainingText, add_learnt, folder_of
from moeconv.errors import SettingsError
from moeconv.foresight.naming import NamedNeurons
from moeconv.foresight.neurons import EPOCHS, MISSED, NeuronCourse, trained_neurons
from moeconv.measure.workdir import WorkDir
from moeconv.packing.packed import PackedModel
from moeconv.progress import Progress
from moeconv.source.archs.errors import transformers_model
from moert.pack.model_spec import ExpertKey, LayerKey, ModelSpec
from moert.pack.neurons import MOST_RANK, PREDICTOR, Kept, PredictedLoss
from moert.pack.reader import Pack


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
        """Raises SettingsError."""
        rank = self.rank or usual_rank(spec)
        if rank > spec.expert_width:
            raise SettingsError(f"--rank {rank}: expected at most the {spec.expert_width} features of an expert")
        missed = MISSED if self.missed is None else self.missed
        return NeuronCourse(rank, self.epochs or EPOCHS, missed, seed=self.seed or 0)


@dataclass(frozen=True)
class NeuronFigures:
    """`kept`: of each layer what the predictor names of `heldout_tokens`, in blocks of `per_block` neurons. `share`:
    what its `nbytes` are of the pack's. `loss`: None where that was not asked for."""

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
    """Adds predictor.safetensors to the pack. What was begun goes on where it was. Raises ConversionError or
    PackError."""
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
    unquantised = None if asked.against is None else unquantised_of(spec, asked.against)
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
        if unquantised is not None:
            say("what computing only named neurons loses")
            with packed.calls.naming(NamedNeurons(predictor, block)):
                after = text.judged().scores(packed)
            predictor = replace(predictor, loss=PredictedLoss(*loss_of(after, unquantised, text.judged(), course.seed)))
    body = predictor.to_bytes()
    add_learnt(pack, PREDICTOR, body)
    shutil.rmtree(folder, ignore_errors=True)
    return NeuronFigures(
        lesson.tokens, lesson.heldout_tokens, course.rank, course.missed, predictor.per_block, len(body),
        len(body) / (others + len(body)), {at: layer.kept for at, layer in predictor.layers.items()}, predictor.loss,
    )  # fmt: skip
