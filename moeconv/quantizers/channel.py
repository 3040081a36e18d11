"""Linear quantisation between the smallest and the largest weight of an output channel (EdgeMoE §3.2)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moeconv.quantizers.quantizer import Inputs, Wants, check_range
from moert.pack.codec import F32, QuantizedMatrix, pack_codes


@dataclass(frozen=True)
class ChannelQuantizer:
    """w ≈ scale * code + minimum, with minimum = min(w) and scale = (max(w) - min(w)) / (2**bits - 1) of a channel.

    Codes are rounded against the float16 values of scale and minimum, which are what is stored.
    """

    name: str = "channel"
    group_size: int = 0
    wants: Wants = "nothing"

    def too_few(self, rows: int, in_features: int) -> bool:
        return False

    def quantize(self, weights: F32, bits: int, inputs: Inputs | None) -> list[QuantizedMatrix]:
        return [self._matrix(weight, bits) for weight in weights]

    def columns(self, weights: F32, bits: int, inputs: Inputs | None) -> list[QuantizedMatrix]:
        return self.quantize(weights.transpose(0, 2, 1), bits, None)

    def _matrix(self, weight: F32, bits: int) -> QuantizedMatrix:
        check_range(weight)
        low, high = weight.min(axis=1, keepdims=True), weight.max(axis=1, keepdims=True)
        minimum = low.astype(np.float16)
        scale = ((high - minimum.astype(np.float32)) / (2**bits - 1)).astype(np.float16)
        step = np.where(scale > 0, scale, 1).astype(np.float32)
        codes = np.clip(np.rint((weight - minimum.astype(np.float32)) / step), 0, 2**bits - 1).astype(np.uint8)
        in_features = weight.shape[1]
        return QuantizedMatrix(bits, in_features, in_features, pack_codes(codes, bits), scale, minimum)
