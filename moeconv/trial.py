"""A model on trial: the original in memory, with weights replaced by what a pack would give back for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor

from moeconv.archs import Arch
from moeconv.archs.errors import transformers_model
from moeconv.archs.weights import fill_backbone
from moeconv.artifacts import Assignment, Bits, uniform
from moeconv.checkpoint import Checkpoint
from moeconv.coder import ORIGINAL, ExpertCoder, batches
from moeconv.dense import DenseCoder
from moeconv.scorers.experts import ExpertCalls, Weights
from moert.pack.model_spec import ExpertKey


class Trial:
    """`assign` quantises experts in the loaded model, `restore` brings back the original weights; only experts whose
    widths change are written. `coder()` returns the ExpertCoder that quantises them: it is called when the first expert
    is quantised, since making one may take a run over the calibration text. `dense` quantises the matrices outside the
    experts: `assign` puts them in as a pack stores them, `restore` takes them out."""

    def __init__(
        self, checkpoint: Checkpoint, coder: Callable[[], ExpertCoder], dense: DenseCoder | None = None
    ) -> None:
        self.checkpoint = checkpoint
        self.spec = checkpoint.spec
        self.arch: Arch = checkpoint.arch
        self.coder = coder
        self.dense = dense or DenseCoder(checkpoint, None)
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        with transformers_model(checkpoint.path):
            self.model: Any = self.arch.load(checkpoint.path, torch.float32)
        self.calls = ExpertCalls(self.model, self.arch, self.spec)
        self._widths: dict[ExpertKey, Bits] = uniform(self.spec, ORIGINAL)
        self._dense_is_stored = False

    def assign(self, widths: Assignment) -> None:
        """Every expert in `widths` gets them (float32 weights, as the pack will give them back)."""
        self._set_dense(stored=True)
        self._set_experts(widths)

    def restore(self) -> None:
        """The unquantised model."""
        self._set_dense(stored=False)
        self._set_experts(uniform(self.spec, ORIGINAL))

    @property
    def stored_head(self) -> Tensor | None:
        """The head as the pack will give it back [vocab_size, d_model]; None where that is the original."""
        name = "embed.weight" if self.spec.tied_head else "head.weight"
        return self.dense.stored_weight(name) if name in self.dense.names else None

    def _set_dense(self, *, stored: bool) -> None:
        if stored != self._dense_is_stored and self.dense.names:
            weights = self.dense.stored() if stored else self.dense.originals()
            fill_backbone(self.model, self.arch, self.spec, weights)
        self._dense_is_stored = stored

    def _set_experts(self, widths: Assignment) -> None:
        changed = {key: bits for key, bits in widths.items() if self._widths[key] != bits}
        for batch in batches(self.spec, changed.items()):
            if any(width < 16 for _, bits in batch for width in bits):
                self.coder().prepare(batch)
            for key, bits in batch:
                with torch.no_grad():
                    for mine, weight in zip(self.calls.weights(key), self.weights(key, bits), strict=True):
                        mine.copy_(weight)
                self._widths[key] = bits

    def weights(self, key: ExpertKey, bits: Bits) -> Weights:
        """What an expert becomes at these widths: float32 [out, in] for each projection."""
        if set(bits) == {ORIGINAL}:
            found = self.checkpoint.expert(key)
        else:
            found = self.coder().weights(key, bits)
        return tuple(torch.from_numpy(found[name]) for name in self.spec.moe.projections)
