"""The original model in memory, its matrices outside the experts as the checkpoint has them or as the pack will."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

from moeconv.quantizers.dense import DenseCoder
from moeconv.source.archs.errors import transformers_model
from moeconv.source.archs.weights import fill_backbone
from moeconv.source.checkpoint import Checkpoint
from moeconv.source.experts import ExpertCalls
from moert.pack.model_spec import ModelSpec


class LoadedModel:
    """A Subject of moeconv.measure.scorers."""

    layers = None

    def __init__(self, checkpoint: Checkpoint, dense: DenseCoder | None = None) -> None:
        self.checkpoint, self.family = checkpoint, checkpoint.family
        self.dense = dense or DenseCoder(checkpoint, None)
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        with transformers_model(checkpoint.path):
            self.model: Any = checkpoint.model(torch.float32).requires_grad_(False)
        self.calls = ExpertCalls(self.model, self.family, self.spec)
        self._dense_is_stored = False

    @property
    def spec(self) -> ModelSpec:
        return self.checkpoint.spec

    @property
    def stored_head(self) -> Tensor | None:
        """The head as the pack will give it back [vocab_size, d_model]; None where that is the original."""
        name = "embed.weight" if self.spec.head.tied else "head.weight"
        return self.dense.stored_weight(name) if name in self.dense.names else None

    def set_dense(self, *, stored: bool) -> None:
        """Matrices outside the experts as the pack will store them, or as they were."""
        if stored != self._dense_is_stored and self.dense.names:
            weights = self.dense.stored() if stored else self.dense.originals()
            fill_backbone(self.model, self.checkpoint.description, weights)
        self._dense_is_stored = stored
