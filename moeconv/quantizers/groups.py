"""Matrices cut into groups of inputs, and put together again as a pack stores them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from moeconv.quantizers.fit import Fitted, fit
from moert.pack.codec import QuantizedMatrix, n_groups, pack_codes

_FLOOR = 0.01  # of the mean importance: an input that was silent in the calibration text may speak in another


def importance_of(squares: Tensor) -> Tensor:
    """Mean squares of the inputs [n, in] → weights of the errors there, with mean 1; all 1 where nothing was seen."""
    mean = squares.mean(1, keepdim=True)
    return torch.where(mean > 0, squares / torch.where(mean > 0, mean, 1.0) + _FLOOR, 1.0)


def fit_groups(weights: Tensor, importance: Tensor, bits: int, size: int, roughly: bool = False) -> Fitted:
    """weights [n, out, in], importance [n, in] → codes [n, out, in], scale and minimum [n, out, groups]. `roughly`: see
    moeconv.quantizers.fit.fit."""
    n, rows, in_features = weights.shape
    groups = n_groups(in_features, size)
    padding = groups * size - in_features
    if padding:
        last = weights[:, :, -1:].expand(n, rows, padding)
        weights = torch.cat([weights, last], dim=2)
        importance = torch.cat([importance, importance.new_zeros(n, padding)], dim=1)
    codes, scale, minimum = fit(weights.view(n, rows, groups, size), importance.view(n, groups, size), bits, roughly)
    return Fitted(codes.view(n, rows, -1)[:, :, :in_features], scale, minimum)


def to_matrices(fitted: Fitted, bits: int, size: int) -> list[QuantizedMatrix]:
    """codes [n, out, in], scale and minimum [n, out, groups] → n matrices."""
    codes = fitted.codes.to(torch.uint8).numpy()
    scale, minimum = (values.numpy().astype(np.float16) for values in (fitted.scale, fitted.minimum))
    in_features = codes.shape[2]
    return [
        QuantizedMatrix(bits, in_features, size, pack_codes(codes[i], bits), scale[i], minimum[i])
        for i in range(len(codes))
    ]
