"""What the stages measure with: the model, its text, its journal."""

from __future__ import annotations

import math
from functools import cached_property
from pathlib import Path

from moeconv.calibration import Sample
from moeconv.conversion.coding import Coding
from moeconv.conversion.material import Material
from moeconv.conversion.settings import Settings
from moeconv.measure.assignments import Measure
from moeconv.measure.journal import Journal
from moeconv.measure.loaded import LoadedModel
from moeconv.measure.trial import Trial
from moeconv.quantizers.coder import ExpertCoder
from moeconv.quantizers.moments import collect
from moeconv.source.archs.errors import transformers_model
from moert.pack.model_spec import ModelSpec

ROWS_AN_INPUT = 10  # tokens that an expert should see for each of its inputs, on average, before they are weighed


class Bench:
    """The model and its coder are made when they are first needed: a run that only reads its journal needs little of
    it. `moments` is the file that the coder reads then, None where the quantizer needs none."""

    def __init__(self, coding: Coding, material: Material, journal: Journal, moments: Path | None) -> None:
        self.coding, self.material, self.journal, self.moments = coding, material, journal, moments

    @property
    def settings(self) -> Settings:
        return self.material.settings

    @property
    def spec(self) -> ModelSpec:
        return self.coding.spec

    @cached_property
    def loaded(self) -> LoadedModel:
        """The model in memory."""
        return LoadedModel(self.coding.checkpoint, self.coding.dense)

    @cached_property
    def coder(self) -> ExpertCoder:
        return self.coding.experts(self.moments)

    @cached_property
    def trial(self) -> Trial:
        return Trial(self.loaded, self.coder)

    def measure(self, what: str, samples: tuple[Sample, ...], limit: int | None) -> Measure:
        return Measure(
            lambda: self.trial, lambda: self.material.scorer(self.trial, samples, limit), self.material.metric,
            self.journal, f"{what}/{limit or 'all'}",
        )  # fmt: skip

    def collect_moments(self, path: Path) -> None:
        """Moments of the experts' inputs on the ranking text, into a file."""
        scorer = self.material.scorer(self.loaded, self.material.ranking, self._moment_samples())
        self.loaded.set_dense(stored=True)
        with transformers_model(self.coding.checkpoint.path):
            moments = collect(self.loaded.calls, scorer.score, self.coding.quantizer.wants)
        moments.save(path)

    def _moment_samples(self) -> int:
        spec, ranked = self.spec, self.material.ranked
        wanted = ROWS_AN_INPUT * max(spec.expert_width, spec.moe.ffn.d_ff) * spec.moe.n / spec.moe.router.top_k
        scarcer = min(tokens for tokens in (ranked.encoder_tokens, ranked.decoder_tokens) if tokens)
        return math.ceil(wanted * ranked.samples / scarcer)
