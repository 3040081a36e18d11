"""What the stages measure with: the model, its text, its journal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import cast

from moeconv.artifacts import FISHER
from moeconv.calibration import Sample
from moeconv.conversion.coding import Coding
from moeconv.conversion.material import Material
from moeconv.conversion.room import Memory
from moeconv.conversion.settings import Settings
from moeconv.measure.assignments import Instead, Measure
from moeconv.measure.codes import LayerCoding, Shared
from moeconv.measure.coding import CodingJob, CodingWorker
from moeconv.measure.firing import Counts, firing_counts
from moeconv.measure.journal import Journal
from moeconv.measure.layered import LayeredModel
from moeconv.measure.loaded import LoadedModel
from moeconv.measure.scorers import Scorer
from moeconv.measure.scorers.build import build_scorer
from moeconv.measure.scorers.text import TextScorer
from moeconv.measure.trial import Trial
from moeconv.progress import Progress, unseen
from moeconv.quantizers.coder import ExpertCoder
from moeconv.quantizers.kept import KeptCodes
from moeconv.quantizers.moments import collect, widest
from moeconv.source.archs.errors import transformers_model
from moeconv.sweep.fisher import have_gradients
from moeconv.sweep.runners import runner_for
from moeconv.sweep.sensitivity import BASE_BITS
from moert.pack.model_spec import ModelSpec

EXACT_PROBES = 4096
"""More of them are not measured one by one, if nothing else is asked for."""
ROWS_AN_INPUT = 10  # tokens that an expert should see for each of its inputs, on average, before they are weighed


class Bench:
    """The model and its coder are made when they are first needed: a run that only reads its journal needs little of
    it. `moments` is the file that the coder reads then, None where the quantizer needs none. `instead`: what
    takes the routers' place, or leaves out neurons, where plans are judged."""

    def __init__(self, coding: Coding, material: Material, journal: Journal, moments: Path | None) -> None:
        self.coding, self.material, self.journal, self.moments = coding, material, journal, moments
        self.memory, self.show = Memory(), unseen
        self.instead: Instead | None = None

    def within(self, memory: Memory, show: Progress) -> Bench:
        """The same in this memory; `show` says how far a pass through a model's layers is."""
        self.memory, self.show = memory, show
        return self

    def by_gradients(self, widths: Sequence[int]) -> bool:
        """Whether the sweep is by gradients: asked for, or the model is too large for another."""
        settings, spec = self.settings, self.spec
        if self.memory.layered or settings.signal == FISHER:
            return True
        exact_was_asked = settings.signal != "kl" or settings.cluster is not None or settings.racing is not None
        many = len(spec.expert_keys()) * len(set(widths)) > EXACT_PROBES
        return many and not exact_was_asked and have_gradients(self.coding.checkpoint.family, spec)

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
        if not self.memory.layered:
            return self.coding.experts(self.moments)
        kept = KeptCodes(self.journal.path.parent / "codes", self.journal.subject, self.journal)
        return ExpertCoder(self.coding.checkpoint, self.coding.quantizer, None, kept, self.coding.neurons)

    @cached_property
    def layered(self) -> LayeredModel:
        """The model layer by layer, with the same codes."""
        folder = self.journal.path.parent / "passes"
        model = LayeredModel(self.coder, self.coding.dense, self.memory.room(self.spec, folder), self.show)
        if self.coder.kept is not None:
            seen = self.material.scorer(model, self.material.ranking, self.moment_samples)
            assert isinstance(seen, TextScorer)
            likely = {bits for bits in self.settings.bits if bits <= BASE_BITS}  # of which the sweep wants most
            model.coded = LayerCoding(model, self.coder.kept, seen.texts, likely, self._shared(folder)).ensure
        return model

    def _shared(self, folder: Path) -> Shared | None:
        """Who codes beside this process, which has put its passes into `folder`."""
        address, kept = self.settings.cluster, self.coder.kept
        if address is None or kept is None:
            return None
        model = self.coding.checkpoint.path.absolute()
        job = CodingJob(
            model, self.settings.coded_by, self.settings.group_size, kept.folder.absolute(), kept.about,
            self.coding.neurons,
        )  # fmt: skip
        return Shared(job, lambda: runner_for(address, CodingWorker, [model, folder.absolute()]))

    @cached_property
    def trial(self) -> Trial:
        """What plans are tried on."""
        if self.memory.layered:
            return cast("Trial", self.layered)  # all of it that Measure asks for
        return Trial(self.loaded, self.coder)

    def measure(
        self, what: str, samples: tuple[Sample, ...], limit: int | None, instead: Instead | None = None
    ) -> Measure:
        return Measure(
            lambda: self.trial, lambda: self.material.scorer(self.trial, samples, limit), self.material.metric,
            self.journal, f"{what}/{limit or 'all'}", instead,
        )  # fmt: skip

    def measured_by(self, scorer: Scorer, what: str) -> Measure:
        """The same over samples that there is a scorer of the layered model for."""
        layered = cast("Trial", self.layered)
        return Measure(lambda: layered, lambda: scorer, self.material.metric, self.journal, what)

    def firing_counts(self) -> Counts:
        """How often neurons fire on the same text that moments are of, unquantised experts among what a pack stores of
        everything else."""
        self.trial.original_experts()
        material, extent = self.material, self.material.extent(self.moment_samples)
        scorer = build_scorer(self.trial, material.tokenizer, material.ranking, material.metric, extent)
        with transformers_model(self.coding.checkpoint.path):
            return firing_counts(self.trial, scorer, self.show)

    def collect_moments(self, path: Path) -> None:
        """Moments of the experts' inputs on the ranking text, into a file."""
        scorer = self.material.scorer(self.loaded, self.material.ranking, self.moment_samples)
        self.loaded.set_dense(stored=True)
        with transformers_model(self.coding.checkpoint.path):
            moments = collect(self.loaded.calls, scorer.score, self.coding.quantizer.wants)
        moments.save(path)

    @property
    def moment_samples(self) -> int:
        """Samples of the ranking text that experts are looked at with."""
        spec, ranked = self.spec, self.material.ranked
        wanted = ROWS_AN_INPUT * widest(spec) * spec.moe.n / spec.moe.router.top_k
        scarcer = min(tokens for tokens in (ranked.encoder_tokens, ranked.decoder_tokens) if tokens)
        return math.ceil(wanted * ranked.samples / scarcer)
