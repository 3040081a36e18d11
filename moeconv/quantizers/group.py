"""A scale and a minimum for each group of inputs of a channel, fitted by alternating least squares."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from moeconv.quantizers.groups import fit_groups, importance_of, to_matrices
from moeconv.quantizers.quantizer import Inputs, Wants, check_range
from moert.pack.codec import F32, QuantizedMatrix
from moert.pack.layout import group_of


@dataclass(frozen=True)
class GroupQuantizer:
    """Errors are weighted with the mean square of each input where inputs are known, else all alike.

    Few tokens make the weighting coarse, not wrong, so there is no lower bound but one token.
    """

    group_size: int
    name: str = "group"
    wants: Wants = "squares"

    def too_few(self, rows: int, in_features: int) -> bool:
        return rows == 0

    def quantize(self, weights: F32, bits: int, inputs: Inputs | None) -> list[QuantizedMatrix]:
        check_range(weights)
        n, _, in_features = weights.shape
        squares = np.zeros((n, in_features), np.float32) if inputs is None else inputs.moment
        size = group_of(in_features, self.group_size)
        importance = importance_of(torch.from_numpy(squares))
        return to_matrices(fit_groups(torch.from_numpy(weights), importance, bits, size), bits, size)

    def columns(self, weights: F32, bits: int, inputs: Inputs | None) -> list[QuantizedMatrix]:
        """Errors inside a column have one weight, so that the plain fit of each group is the best one."""
        return self.quantize(np.ascontiguousarray(weights.transpose(0, 2, 1)), bits, None)
