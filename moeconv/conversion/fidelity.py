"""What a finished pack loses where a hash function takes the routers' place, against the model it was made from."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from moeconv.calibration import Sample
from moeconv.errors import SettingsError
from moeconv.foresight.following import Following, refusal
from moeconv.measure.loaded import LoadedModel
from moeconv.measure.metrics import F64, Metric
from moeconv.measure.scorers import Subject
from moeconv.measure.scorers.build import Extent, build_scorer, volume
from moeconv.promise.bound import interval
from moeconv.source.archs.description import Description
from moeconv.source.archs.errors import transformers_model
from moeconv.source.checkpoint import Checkpoint
from moert.pack.hash import HashFunction, RoutedLoss
from moert.pack.model_spec import ModelSpec


def source_of(spec: ModelSpec, against: str) -> Checkpoint:
    """The unquantised model. Raises SettingsError for another one than the pack's, and for routers that no function can
    stand for; CheckpointError."""
    if (why := refusal(spec.moe)) is not None:
        raise SettingsError(f"--against: a hash function {why}: leave it out")
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


def routed_loss(
    packed: Subject, description: Description, function: HashFunction, source: Checkpoint, text: Text, seed: int
) -> RoutedLoss:
    """Of a pack's model with the function in its routers' place."""
    with Following(packed, description, function).routing():
        after = text.scores(packed)
    loaded: Any = LoadedModel(source)
    with transformers_model(source.path):
        before = text.scores(loaded)
    del loaded
    gc.collect()  # a model is full of circles
    documents = volume(packed.spec, text.tokenizer, text.samples, text.extent).documents
    loss = text.metric.loss(text.metric.value(before), text.metric.value(after))
    low, high = interval(text.metric, before, after, seed=seed, groups=documents)
    return RoutedLoss(packed.spec.moe.router.top_k, loss, low, high)
