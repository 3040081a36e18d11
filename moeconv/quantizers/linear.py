"""Linear quantisation between the smallest and the largest weight of a channel or of a group of inputs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moeconv.errors import WeightsUnusable
from moert.pack.codec import F32, QuantizedMatrix, n_groups, pack_codes
from moert.pack.layout import group_of


@dataclass(frozen=True)
class LinearQuantizer:
    """w ≈ scale * code + minimum, with minimum = min(w) and scale = (max(w) - min(w)) / (2**bits - 1).

    `channel` (group_size 0) has one scale per output channel, as EdgeMoE §3.2 uses; `group` one for each `group_size`
    inputs of a channel. Codes are rounded against the float16 values of scale and minimum, which are what is stored.
    """

    name: str
    group_size: int

    def quantize(self, weight: F32, bits: int) -> QuantizedMatrix:
        """weight [out, in] float32 → QuantizedMatrix. Raises WeightsUnusable for weights that float16 can't bracket."""
        out_features, in_features = weight.shape
        size = group_of(in_features, self.group_size)
        groups = n_groups(in_features, size)
        padded = np.pad(weight, ((0, 0), (0, groups * size - in_features)), mode="edge")
        grouped = padded.reshape(out_features, groups, size)
        low, high = grouped.min(axis=2), grouped.max(axis=2)
        if not (np.isfinite(low).all() and np.isfinite(high).all() and max(-low.min(), high.max()) < 65504):
            raise WeightsUnusable("weights that are not finite, or larger than float16 can hold, can't be quantised")
        minimum = low.astype(np.float16)
        scale = ((high - minimum.astype(np.float32)) / (2**bits - 1)).astype(np.float16)
        step = np.where(scale > 0, scale, 1).astype(np.float32)[:, :, None]
        codes = np.rint((grouped - minimum.astype(np.float32)[:, :, None]) / step)
        codes = np.clip(codes, 0, 2**bits - 1).astype(np.uint8).reshape(out_features, -1)[:, :in_features]
        return QuantizedMatrix(bits, in_features, size, pack_codes(codes, bits), scale, minimum)
