"""What a finished pack loses as it is to be run, against the model it was made from."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

from moeconv.calibration import Sample
from moeconv.errors import SettingsError
from moeconv.measure.loaded import LoadedModel
from moeconv.measure.metrics import F64, Metric
from moeconv.measure.scorers import Subject
from moeconv.measure.scorers.build import Extent, build_scorer, volume
from moeconv.measure.tokenizer import Tokenizer
from moeconv.promise.bound import interval
from moeconv.source.archs.errors import transformers_model
from moeconv.source.checkpoint import Checkpoint
from moert.pack.model_spec import ModelSpec


def unquantised_of(spec: ModelSpec, against: str) -> Checkpoint:
    """The model that a pack was made from. Raises SettingsError for another one; CheckpointError."""
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
    """Of a pack's model, as it is to be run, with these scores on a text: the loss against the unquantised model, and
    its 95% interval."""
    loaded: Any = LoadedModel(source)
    with transformers_model(source.path):
        before = text.scores(loaded)
    del loaded
    gc.collect()  # a model is full of circles
    documents = volume(source.spec, text.tokenizer, text.samples, text.extent).documents
    loss = text.metric.loss(text.metric.value(before), text.metric.value(after))
    return loss, *interval(text.metric, before, after, seed=seed, groups=documents)
