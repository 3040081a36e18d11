"""What predictors of neurons are trained on and how: firings of text on disk, a rank, and what both take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moeconv.conversion.lessons import digest_of, samples_of
from moeconv.conversion.settings import Settings
from moeconv.errors import SettingsError
from moeconv.foresight.firings import Firings, firings, token_bytes
from moeconv.foresight.naming import per_block
from moeconv.foresight.neurons import NeuronCourse, NeuronLesson
from moeconv.measure.firing import Reads
from moeconv.measure.scorers import Subject
from moeconv.measure.scorers.build import Volume
from moeconv.progress import Progress
from moeconv.source.experts import Biases, Weights
from moert.pack.layout import Neurons
from moert.pack.model_spec import ExpertKey, LayerKey, ModelSpec
from moert.pack.neurons import NeuronOrder

HELD_TOKENS = 16384
"""Of held-out text, which each epoch is judged on, where nothing else is asked for."""
_ROWS, _MOST_TOKENS = 32768, 131072
"""Tokens that each expert is to see, of as many tokens of the text at most."""
_USUAL_SHARE, _LEAST_RANK, _MOST_RANK = 16, 8, 256
_GUESSED_BITS = 4  # for the blocks of a pack before there is one
_COPIES = 4  # of all numbers, in a checkpoint: those, two of the optimizer's, and what was best


def check_neurons(spec: ModelSpec, what: str) -> None:
    """Raises SettingsError for experts of which no neuron gives exactly zero; `what` is about them."""
    act = spec.moe.ffn.act
    if not act.exact_zeros:
        raise SettingsError(
            f"{what}: a predictor names neurons of experts in which most are exactly zero (relu, relu2), and this "
            f"model's activation is {act.name}"
        )


def usual_rank(spec: ModelSpec) -> int:
    """A sixteenth of what enters experts."""
    width = spec.expert_width
    return min(width, max(_LEAST_RANK, min(_MOST_RANK, width // _USUAL_SHARE)))


def tokens_wanted(spec: ModelSpec) -> int:
    """Of text to learn, where nothing else is asked for."""
    return min(_MOST_TOKENS, _ROWS * spec.moe.n // spec.moe.router.top_k)


def samples_wanted(spec: ModelSpec, learning: Volume, heldout: Volume) -> tuple[int, int]:
    """How many samples of both texts are taken where nothing else is asked for."""
    return samples_of(learning, tokens_wanted(spec)), samples_of(heldout, HELD_TOKENS)


def neuron_lesson_bytes(spec: ModelSpec, texts: Sequence[Volume], limits: Sequence[int], course: NeuronCourse) -> int:
    """What firings of so many samples of texts, and checkpoints, take on the disk, at most."""
    tokens = sum(
        (text.encoder_tokens + text.decoder_tokens) * limit // text.samples + 1
        for text, limit in zip(texts, limits, strict=True)
    )
    heads = spec.moe.n * spec.moe.ffn.d_ff * (course.rank + 1)
    numbers = len(spec.moe_layers()) * (heads + course.rank * spec.expert_width)
    return tokens * token_bytes(spec) + _COPIES * 4 * numbers


def neuron_lesson_of(
    subject: Subject, scorers: tuple[Reads, Reads], block: Callable[[ExpertKey], int], course: NeuronCourse,
    folder: Path, about: Mapping[str, Any], show: Progress, order: NeuronOrder | None = None,
) -> NeuronLesson:  # fmt: skip
    """What the experts of `subject` are asked and what fires, on the text of both scorers, to train on and held out, in
    a folder; `about` is all that decides what these are. Those that are there are taken. `block`: the neurons of an
    expert's block, `order`: that in which they will lie there (None: their own). Raises ConversionError."""
    spec, told = subject.spec, digest_of(about)

    def examples(name: str, scorer: Reads) -> Firings:
        with show(f"neurons {name}", scorer.n_samples, "sample") as bar:
            return firings(folder / name.replace(" ", "-"), told, subject, scorer, bar)

    def first(place: LayerKey) -> list[tuple[Weights, Biases]]:
        supply = subject.calls.supply
        return [(supply.weights(key), supply.biases(key)) for key in _experts(spec, place)]

    blocks = {place: [block(key) for key in _experts(spec, place)] for place in spec.moe_layers()}
    train, heldout = examples("to learn", scorers[0]), examples("to judge by", scorers[1])
    return NeuronLesson(train, heldout, first, blocks, neurons_decided_by(about, course), folder, order)


def _experts(spec: ModelSpec, place: LayerKey) -> list[ExpertKey]:
    return [place.expert(number) for number in range(spec.moe.n)]


def guessed_block(spec: ModelSpec, group_size: int, neurons: Neurons) -> int:
    """Neurons of a block where widths are not known yet."""
    return per_block(spec, (_GUESSED_BITS,) * len(spec.moe.ffn.projections), group_size, "F16", neurons)


def neuron_course_of(settings: Settings, spec: ModelSpec) -> NeuronCourse:
    """Of a conversion whose pack is to compute what a predictor names."""
    return NeuronCourse(usual_rank(spec), seed=settings.seed)


def neuron_course_values(settings: Settings, spec: ModelSpec) -> dict[str, Any]:
    """All that decides how it is trained, as JSON values."""
    return asdict(neuron_course_of(settings, spec))


def neurons_decided_by(about: Mapping[str, Any], course: NeuronCourse) -> str:
    """Digest of all that decides a predictor; see neuron_lesson_of."""
    return digest_of({"examples": digest_of(about), **asdict(course)})
