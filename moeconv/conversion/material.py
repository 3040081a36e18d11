"""What a conversion measures on: text in its parts, tokenizer and metric, checked before anything is measured."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moeconv.calibration import RANKING_SHARE, Sample, Splits, divide, load_splits, samples_digest
from moeconv.conversion.settings import Settings
from moeconv.errors import SettingsError
from moeconv.measure.metrics import Metric, default_metric, find_metric, is_module
from moeconv.measure.scorers import Scorer, Subject
from moeconv.measure.scorers.build import Extent, Volume, build_scorer, check_fit, load_tokenizer, volume
from moeconv.measure.tokenizer import Tokenizer
from moeconv.source.checkpoint import Checkpoint
from moert.pack.tensors import TOKENIZER

LEARNING_SHARE = 0.5
"""Of the calibration text trains a hash function, or a predictor of neurons, where there is one."""
NOTHING = Volume(0, 0, 0, np.zeros(0, np.int64), 0.0)


@dataclass(frozen=True)
class Material:
    """`ranking` and `acceptance` are the two parts of the calibration text; with --route hash or --neurons predicted
    there is a third, `learning`, which these are trained on and nothing else sees. `judged` and `heldout` say how many
    samples plans are judged on, and how many the result is measured on."""

    settings: Settings
    splits: Splits
    metric: Metric
    metric_name: str
    tokenizer: Tokenizer
    ranking: tuple[Sample, ...]
    acceptance: tuple[Sample, ...]
    learning: tuple[Sample, ...]
    learned: Volume
    ranked: Volume
    judged: Volume
    heldout: Volume

    @classmethod
    def read(cls, settings: Settings, checkpoint: Checkpoint) -> Material:
        """Raises CalibrationError or SettingsError."""
        assert settings.calib is not None
        splits = load_splits(
            settings.calib, settings.heldout, seed=settings.seed, fields=settings.fields, tokenizer=checkpoint.path
        )
        if settings.metric is None and splits.metric is not None and is_module(splits.metric):
            raise SettingsError(f"{splits.name} asks for the metric {splits.metric}, a module: name it with --metric")
        named = _absolute(settings.metric or splits.metric or default_metric(splits.seq2seq, splits.choices))
        metric = find_metric(named)
        check_fit(checkpoint.spec, splits, metric, settings.max_new_tokens)
        tokenizer = load_tokenizer(checkpoint.path / TOKENIZER, checkpoint.spelled)
        learning: tuple[Sample, ...] = ()
        rest = splits.calibration
        if settings.learns:
            learning, rest = divide(rest, splits.seq2seq, LEARNING_SHARE, settings.seed)
        ranking, acceptance = divide(rest, splits.seq2seq, RANKING_SHARE, settings.seed)

        def size(samples: Sequence[Sample], limit: int | None) -> Volume:
            return volume(checkpoint.spec, tokenizer, samples, _extent(settings, limit))

        return cls(
            settings, splits, metric, named, tokenizer, ranking, acceptance, learning,
            size(learning, None) if learning else NOTHING,
            size(ranking, settings.sweep_samples), size(acceptance, settings.samples),
            size(splits.heldout, settings.heldout_samples),
        )  # fmt: skip

    @property
    def judged_share(self) -> float:
        """Of the calibration text, what plans are judged on."""
        return (1 - RANKING_SHARE) * (1 - LEARNING_SHARE if self.learning else 1)

    @property
    def metric_file(self) -> list[Path]:
        """The module that a metric of the user's own lies in."""
        file, module, _ = self.metric_name.partition(".py")
        return [Path(file + module)] if module else []

    @property
    def metric_sha256(self) -> str | None:
        return next((hashlib.sha256(path.read_bytes()).hexdigest() for path in self.metric_file), None)

    @property
    def documents_sha256(self) -> str:
        """Of what each sample is a part of, which decides how text is divided and cut into windows."""
        names = [[sample.document for sample in part] for part in (self.splits.calibration, self.splits.heldout)]
        return hashlib.sha256(json.dumps(names).encode()).hexdigest()

    @property
    def judged_texts(self) -> tuple[str, ...]:
        """Digests of what is judged on: the acceptance text, the held-out text, and both with what ranks, in any
        order, which another seed may divide in another way."""
        splits = self.splits
        every = sorted((*splits.calibration, *splits.heldout), key=lambda sample: (*sample.key, sample.choices))
        return tuple(map(samples_digest, (self.acceptance, splits.heldout, every)))

    def extent(self, limit: int | None) -> Extent:
        """At most `limit` samples of a text."""
        return _extent(self.settings, limit)

    def scorer(self, subject: Subject, samples: Sequence[Sample], limit: int | None) -> Scorer:
        return build_scorer(subject, self.tokenizer, samples, self.metric, self.extent(limit))


def _extent(settings: Settings, limit: int | None) -> Extent:
    return Extent(limit, settings.context, settings.max_new_tokens)


def _absolute(metric: str) -> str:
    """A metric that is the path of a module, wherever a sweep's worker may be started; others as they are."""
    return str(Path(metric).absolute()) if ".py" in metric else metric
