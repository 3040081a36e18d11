"""What a hash function is trained on and how: routing of text as examples on disk, a width, and what both take."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moeconv.conversion.room import whole_bytes, within
from moeconv.errors import SettingsError
from moeconv.foresight.examples import Examples, Routing, collected, stacks_of, token_bytes
from moeconv.foresight.network import Shape
from moeconv.foresight.training import Course, Lesson
from moeconv.measure.scorers import Subject
from moeconv.measure.scorers.build import Volume
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
    tokens = max(there.encoder_tokens, there.decoder_tokens)
    return max(1, min(there.samples, HELD_TOKENS * there.samples // tokens))


def lesson_bytes(spec: ModelSpec, texts: Sequence[Volume], course: Course) -> int:
    """What examples and checkpoints take on the disk, at most."""
    tokens = sum(text.encoder_tokens + text.decoder_tokens for text in texts)
    return tokens * token_bytes(spec) + _COPIES * 4 * _numbers(spec, course.width)


def check_memory(spec: ModelSpec) -> None:
    """Raises SettingsError where the model does not fit what is free."""
    limit, whole = within(None), whole_bytes(spec)
    if limit is not None and whole > limit:
        raise SettingsError(
            f"a hash function is trained on a model in memory, which takes {size(whole)}, and {size(limit)} are free: "
            "train it on a larger machine"
        )


def lesson_of(
    subject: Subject, description: Description, scorers: tuple[Routing, Routing], course: Course, folder: Path,
    about: Mapping[str, Any], show: Progress,
) -> Lesson:  # fmt: skip
    """Examples of the routing of `subject` on the text of both scorers, to train on and held out, in a folder; `about`
    is all that decides what they are. Those that are there are taken. Raises ConversionError."""
    told = _digest(about)

    def examples(name: str, scorer: Routing) -> Examples:
        with show(f"routing of {name} text", scorer.n_samples, "sample") as bar:
            return collected(folder / name, told, subject, description, scorer, bar)

    train, heldout = examples("calibration", scorers[0]), examples("held-out", scorers[1])
    decided = _digest({"examples": told, **asdict(course)})
    embedding = parameter(subject.model, description, "embed.weight").float()
    return Lesson(description.spec, embedding, train, heldout, decided, folder / "checkpoint.pt")


def _digest(about: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
