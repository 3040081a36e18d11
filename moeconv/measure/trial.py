"""A model on trial: the original in memory, with weights replaced by what a pack would give back for them."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from moeconv.artifacts import Assignment, Bits, uniform
from moeconv.measure.loaded import LoadedModel
from moeconv.quantizers.coder import ORIGINAL, ExpertCoder, batches
from moeconv.quantizers.dense import DenseCoder
from moeconv.source.archs import Family
from moeconv.source.checkpoint import Checkpoint
from moeconv.source.experts import ExpertCalls, Weights
from moeconv.source.preferring import Preferring
from moert.pack.model_spec import ExpertKey, ModelSpec


class Trial:
    """`assign` quantises experts in the loaded model, and puts in the matrices outside the experts as a pack stores
    them; `restore` brings back the original weights. Only experts whose widths change are written."""

    layers = None

    def __init__(self, loaded: LoadedModel, coder: ExpertCoder) -> None:
        self.loaded, self.coder = loaded, coder
        self._widths: dict[ExpertKey, Bits] = uniform(self.spec, ORIGINAL)

    @property
    def checkpoint(self) -> Checkpoint:
        return self.loaded.checkpoint

    @property
    def family(self) -> Family:
        return self.loaded.family

    @property
    def spec(self) -> ModelSpec:
        return self.loaded.spec

    @property
    def model(self) -> Any:
        return self.loaded.model

    @property
    def calls(self) -> ExpertCalls:
        return self.loaded.calls

    @property
    def dense(self) -> DenseCoder:
        return self.loaded.dense

    @property
    def stored_head(self) -> Tensor | None:
        return self.loaded.stored_head

    @cached_property
    def preferring(self) -> Preferring:
        """Routes the model's decoder otherwise, where it takes the routers' place and is on."""
        return Preferring(self.model, self.checkpoint.description)

    def widths(self, key: ExpertKey) -> Bits:
        """Those that an expert has now."""
        return self._widths[key]

    def assign(self, widths: Assignment) -> None:
        """Every expert in `widths` gets them (float32 weights, as the pack will give them back)."""
        self.loaded.set_dense(stored=True)
        self._set_experts(widths)

    def restore(self) -> None:
        """The unquantised model."""
        self.loaded.set_dense(stored=False)
        self._set_experts(uniform(self.spec, ORIGINAL))

    def original_experts(self) -> None:
        """Unquantised experts among what a pack stores of everything else."""
        self.assign(uniform(self.spec, ORIGINAL))

    def _set_experts(self, widths: Assignment) -> None:
        changed = {key: bits for key, bits in widths.items() if self._widths[key] != bits}
        for batch in batches(self.spec, changed.items()):
            self.coder.prepare(batch)
            for key, bits in batch:
                with torch.no_grad():
                    for mine, weight in zip(self.calls.weights(key), self.weights(key, bits), strict=True):
                        mine.copy_(weight)
                self._widths[key] = bits

    def weights(self, key: ExpertKey, bits: Bits) -> Weights:
        """What an expert becomes at these widths: float32 [out, in] for each projection."""
        found = self.checkpoint.expert(key) if set(bits) == {ORIGINAL} else self.coder.weights(key, bits)
        return tuple(torch.from_numpy(found[name]) for name in self.spec.moe.ffn.projections)
