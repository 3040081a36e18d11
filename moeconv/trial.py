"""A model on trial: the original in memory, with any of its experts replaced by their quantised selves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers

from moeconv.archs import Arch
from moeconv.checkpoint import Checkpoint
from moeconv.quantizers import Quantizer
from moert.pack.codec import dequantize
from moert.pack.model_spec import ExpertKey, Stack

Widths = Mapping[ExpertKey, int]
ORIGINAL = 32
"""The width of an expert as the checkpoint has it; 16 is what a pack stores, which may round a float32 source."""


class Trial:
    """`assign` gives each expert a width; only experts whose width changes are touched."""

    def __init__(self, checkpoint: Checkpoint, quantizer: Quantizer) -> None:
        self.checkpoint = checkpoint
        self.spec = checkpoint.spec
        self.arch: Arch = checkpoint.arch
        self.quantizer = quantizer
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self.model: Any = self.arch.load(checkpoint.path, torch.float32)
        self._widths: dict[ExpertKey, int] = dict.fromkeys(self.spec.expert_keys(), ORIGINAL)

    def assign(self, widths: Widths) -> None:
        """Every expert gets the width that `widths` says (float32 weights, as the pack will give them back)."""
        for key, bits in widths.items():
            if self._widths[key] != bits:
                self._write(key, bits)
                self._widths[key] = bits

    def layer_state(self, stack: Stack, layer: int) -> tuple[int, ...]:
        """The widths of one layer's experts: equal states mean equal weights."""
        if (stack, layer) not in self.spec.moe_layers():
            return ()
        return tuple(self._widths[ExpertKey(stack, layer, expert)] for expert in range(self.spec.moe.num_experts))

    def stack_state(self, stack: Stack) -> tuple[tuple[int, ...], ...]:
        tower = self.spec.stack(stack)
        return tuple(self.layer_state(stack, layer) for layer in range(tower.n_layers)) if tower else ()

    def _write(self, key: ExpertKey, bits: int) -> None:
        for projection, weight in self.checkpoint.expert(key).items():
            if bits < 16:
                weight = dequantize(self.quantizer.quantize(weight, bits))
            elif bits == 16 and self.checkpoint.source_dtype != "BF16":
                weight = weight.astype("float16").astype("float32")
            with torch.no_grad():
                self.arch.expert_weight(self.model, key, projection).copy_(torch.from_numpy(weight))
