"""A model on trial: the original in memory, with any of its experts replaced by their quantised selves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

from moeconv.archs import Arch
from moeconv.artifacts import Assignment, Bits, uniform
from moeconv.checkpoint import Checkpoint
from moeconv.coder import ORIGINAL, ExpertCoder, batches
from moeconv.scorers.experts import ExpertCalls, Weights
from moert.pack.model_spec import ExpertKey


class Trial:
    """`assign` gives each expert its widths; only experts whose widths change are touched. `coder` is asked for what
    says what an expert becomes at some widths, when the first is to be quantised."""

    def __init__(self, checkpoint: Checkpoint, coder: Callable[[], ExpertCoder]) -> None:
        self.checkpoint = checkpoint
        self.spec = checkpoint.spec
        self.arch: Arch = checkpoint.arch
        self.coder = coder
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self.model: Any = self.arch.load(checkpoint.path, torch.float32)
        self.calls = ExpertCalls(self.model, self.arch, self.spec)
        self._widths: dict[ExpertKey, Bits] = uniform(self.spec, ORIGINAL)

    def assign(self, widths: Assignment) -> None:
        """Every expert in `widths` gets them (float32 weights, as the pack will give them back)."""
        changed = {key: bits for key, bits in widths.items() if self._widths[key] != bits}
        for batch in batches(self.spec, changed.items()):
            if any(width < 16 for _, bits in batch for width in bits):
                self.coder().prepare(batch)
            for key, bits in batch:
                with torch.no_grad():
                    for mine, weight in zip(self.calls.weights(key), self.weights(key, bits), strict=True):
                        mine.copy_(weight)
                self._widths[key] = bits

    def restore(self) -> None:
        """The unquantised model."""
        self.assign(uniform(self.spec, ORIGINAL))

    def weights(self, key: ExpertKey, bits: Bits) -> Weights:
        """What an expert becomes at these widths: float32 [out, in] for each projection."""
        if set(bits) == {ORIGINAL}:
            found = self.checkpoint.expert(key)
        else:
            found = self.coder().weights(key, bits)
        return tuple(torch.from_numpy(found[name]) for name in self.spec.moe.projections)
