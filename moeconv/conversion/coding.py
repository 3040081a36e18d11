"""How the weights of one checkpoint become codes: its quantizer, and the widths of what lies outside its experts."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from moeconv.conversion.layouts import neurons_of
from moeconv.conversion.settings import DEFAULT_MEMORY, Settings
from moeconv.errors import SettingsError
from moeconv.packing.chat import chat_of
from moeconv.plan.problem import Storage
from moeconv.plan.question import check_budget
from moeconv.quantizers import QUANTIZERS, Quantizer
from moeconv.quantizers.coder import ExpertCoder
from moeconv.quantizers.dense import DenseCoder
from moeconv.quantizers.dense_bits import dense_of
from moeconv.quantizers.moments import Moments, moments_bytes
from moeconv.source.checkpoint import Checkpoint
from moert.pack.layout import Neurons
from moert.pack.manifest import Dense
from moert.pack.model_spec import ModelSpec


@dataclass(frozen=True)
class Coding:
    checkpoint: Checkpoint
    quantizer: Quantizer
    dense: DenseCoder
    neurons: Neurons | None = None
    """How experts lie in blocks of neurons."""

    @classmethod
    def open(cls, settings: Settings) -> Coding:
        """Raises CheckpointError, UnsupportedModel or SettingsError."""
        checkpoint = Checkpoint.open(settings.model)
        chat_of(checkpoint.path)  # so that a template that can't be used is not found after hours
        quantizer = QUANTIZERS[settings.coded_by](settings.group_size)
        neurons = neurons_of(settings.laid_out, checkpoint.spec, checkpoint.description.mxfp4, settings.piece_bytes)
        if neurons is not None and settings.predicts:
            neurons = replace(neurons, together=False)  # of rows, too, only some are read
        dense = DenseCoder(checkpoint, dense_of(checkpoint.spec, settings.dense_bits))
        return cls(checkpoint, quantizer, dense, neurons)

    @property
    def spec(self) -> ModelSpec:
        return self.checkpoint.spec

    @property
    def storage(self) -> Storage:
        return Storage(self.quantizer.group_size, self.checkpoint.description.mxfp4, self.neurons)

    @property
    def dense_widths(self) -> Dense | None:
        """None where nothing outside the experts is quantised."""
        return self.dense.dense

    def check(self, settings: Settings, layered: bool = False) -> None:
        """Raises TargetMissed for a size that no plan has, SettingsError where the moments that the quantizer needs do
        not fit in --memory."""
        check_budget(settings.target, self.spec, min(settings.bits), self.storage)
        wants = self.quantizer.wants
        needed = 0 if wants == "nothing" or layered else moments_bytes(self.spec, wants)
        if needed > (settings.memory_bytes or DEFAULT_MEMORY):
            raise SettingsError(
                f"--quantizer {self.quantizer.name} collects {needed / 1e6:,.0f} MB about the inputs of this model's "
                f"experts: give --memory {math.ceil(needed / 1e6):,}MB or more, or take --quantizer group"
            )

    def moments_in(self, folder: Path) -> Path | None:
        """File with what the quantizer knows of the experts' inputs; None where it needs nothing."""
        wants = self.quantizer.wants
        return None if wants == "nothing" else folder / f"moments-{wants}.safetensors"

    def experts(self, moments: Path | None) -> ExpertCoder:
        known = None if moments is None else Moments.load(moments)
        return ExpertCoder(self.checkpoint, self.quantizer, known, neurons=self.neurons)
