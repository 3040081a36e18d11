"""What a hash function is trained on and how: routing of text as examples on disk, a width, and what both take."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moeconv.conversion.room import whole_bytes, within
from moeconv.conversion.settings import Settings
from moeconv.errors import SettingsError
from moeconv.foresight.examples import Examples, Routing, collected, stacks_of, token_bytes
from moeconv.foresight.network import Shape
from moeconv.foresight.training import Course, Lesson
from moeconv.measure.scorers import Subject
from moeconv.measure.scorers.build import Volume
from moeconv.plan.question import uniform_bytes
from moeconv.progress import Progress
from moeconv.report.units import size
from moeconv.source.archs.description import Description
from moeconv.source.archs.weights import parameter
from moert.pack.model_spec import ModelSpec

HELD_TOKENS = 32768
"""Of held-out text, which each epoch is judged on, where nothing else is asked for."""
MOST_SHARE = 0.02
"""Of a pack, which a function takes where that leaves it LEAST_WIDTH."""
USUAL_WIDTH, LEAST_WIDTH = 256, 128
_STEP = 32
_GUESSED_BITS = 4  # for the size of a pack before there is one
_COPIES = 4  # of all numbers, in a checkpoint: those, two of the optimizer's, and what was best


def usual_width(spec: ModelSpec, pack_bytes: int) -> int:
    """Of the functions of a model in a pack of so many bytes without it."""
    widest = max(2, min(USUAL_WIDTH, spec.d_model) // 2 * 2)
    fitting = (
        width
        for width in range(widest, LEAST_WIDTH - 1, -_STEP)
        if 2 * _numbers(spec, width) <= MOST_SHARE * pack_bytes
    )
    return next(fitting, min(widest, LEAST_WIDTH))


def _numbers(spec: ModelSpec, width: int) -> int:
    return sum(Shape.of(spec, stack, width).numbers for stack in stacks_of(spec))


def held_samples(there: Volume) -> int:
    """How many held-out samples have about HELD_TOKENS."""
    return samples_of(there, HELD_TOKENS)


def samples_of(there: Volume, tokens: int) -> int:
    """How many samples of a text have about so many tokens."""
    whole = max(there.encoder_tokens, there.decoder_tokens)
    return max(1, min(there.samples, tokens * there.samples // whole))


def lesson_bytes(spec: ModelSpec, texts: Sequence[Volume], course: Course) -> int:
    """What examples and checkpoints take on the disk, at most."""
    tokens = sum(text.encoder_tokens + text.decoder_tokens for text in texts)
    return tokens * token_bytes(spec) + _COPIES * 4 * _numbers(spec, course.width)


def check_memory(spec: ModelSpec, what: str, models: int) -> None:
    """Raises SettingsError where so many models of this shape do not fit what is free; `what` is trained on one."""
    limit, whole = within(None), models * whole_bytes(spec)
    if limit is not None and whole > limit:
        raise SettingsError(
            f"{what} is trained on a model in memory, which takes {size(whole)}, and {size(limit)} are free: "
            "train it on a larger machine"
        )


def lesson_of(
    subject: Subject, description: Description, scorers: tuple[Routing, Routing], course: Course, folder: Path,
    about: Mapping[str, Any], show: Progress,
) -> Lesson:  # fmt: skip
    """Examples of the routing of `subject` on the text of both scorers, to train on and held out, in a folder; `about`
    is all that decides what they are. Those that are there are taken. Raises ConversionError."""
    told = digest_of(about)

    def examples(name: str, scorer: Routing) -> Examples:
        with show(f"routing {name}", scorer.n_samples, "sample") as bar:
            return collected(folder / name.replace(" ", "-"), told, subject, description, scorer, bar)

    train, heldout = examples("to learn", scorers[0]), examples("to judge by", scorers[1])
    embedding = parameter(subject.model, description, "embed.weight").float()
    return Lesson(description.spec, embedding, train, heldout, decided_by(about, course), folder / "checkpoint.pt")


def course_of(settings: Settings, spec: ModelSpec) -> Course:
    """Of a conversion whose pack is routed by a function."""
    return Course(usual_width(spec, uniform_bytes(spec, _GUESSED_BITS)), seed=settings.seed)


def course_values(settings: Settings, spec: ModelSpec) -> dict[str, Any]:
    """All that decides how it is trained, as JSON values."""
    return asdict(course_of(settings, spec))


def decided_by(about: Mapping[str, Any], course: Course) -> str:
    """Digest of all that decides a function; see lesson_of."""
    return digest_of({"examples": digest_of(about), **asdict(course)})


def digest_of(about: Mapping[str, Any]) -> str:
    """sha256 of JSON values."""
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
