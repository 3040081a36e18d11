"""Tiny models on trial, and the samples that they are scored on."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moeconv.calibration import Sample
from moeconv.dense import dense_of
from moeconv.measure.metrics import METRICS
from moeconv.measure.scoring import Extent, GeneratedScorer, TextScorer, build_scorers, load_tokenizer
from moeconv.measure.trial import LoadedModel, Trial
from moeconv.quantizers import QUANTIZERS
from moeconv.quantizers.coder import DenseCoder, ExpertCoder
from moeconv.source.checkpoint import Checkpoint


def trial_of(model: Path, dense_bits: int | Mapping[str, int] | None = None) -> Trial:
    checkpoint = Checkpoint.open(model)
    coder = ExpertCoder(checkpoint, QUANTIZERS["channel"](None), None)
    return Trial(LoadedModel(checkpoint, DenseCoder(checkpoint, dense_of(checkpoint.spec, dense_bits))), coder)


def write_rows(path: Path, rows: Iterable[object]) -> str:
    """Writes JSONL; returns its path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def words(rng: random.Random, count: int) -> str:
    return " ".join("".join(rng.choices("abcdefgh", k=rng.randint(1, 4))) for _ in range(count))


def running(count: int, seed: int = 0) -> list[Sample]:
    """Rows of running text."""
    rng = random.Random(seed)
    return [Sample(words(rng, 12)) for _ in range(count)]


def pairs(count: int, seed: int = 0) -> list[Sample]:
    """Inputs of many lengths, and targets."""
    rng = random.Random(seed)
    return [Sample(words(rng, rng.randint(1, 5)), words(rng, rng.randint(1, 2))) for _ in range(count)]


def questions(count: int, seed: int = 0) -> list[Sample]:
    """Inputs with two or three choices."""
    rng, found = random.Random(seed), []
    for at in range(count):
        choices = tuple(words(rng, rng.randint(1, 2)) + "xyz"[place] for place in range(2 + at % 2))
        found.append(Sample(words(rng, rng.randint(1, 4)), choices[at % 2], choices, at % 2))
    return found


def scorers(
    trial: Trial, samples: Sequence[Sample], metric: str, *, blocks: int = 1, **options: Any
) -> list[TextScorer] | list[GeneratedScorer]:
    tokenizer = load_tokenizer(trial.checkpoint.path / "tokenizer.json")
    options = {"limit": None, "context": 16, "max_new_tokens": 8, **options}
    return build_scorers(trial, tokenizer, samples, METRICS[metric], Extent(**options), blocks=blocks)
