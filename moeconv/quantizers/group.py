"""Groups of weights with a scale and a minimum, fitted by alternating least squares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moeconv.quantizers.quantizer import MAX_F16, Inputs, Wants, check_range
from moert.pack.codec import F32, Codes, QuantizedMatrix, Width, n_groups, pack_codes
from moert.pack.layout import group_of

# Scale and minimum of a group by alternating least squares: round to codes, refit both to the codes, repeat.
# The objective is the weighted squared error Σ h (w - scale * code - minimum)², h the mean square of each input, which
# is the error of the output when inputs don't correlate. It has many local minima, so that few bits are worth several
# starts: around the step that suits normally distributed weights, and the range between smallest and largest weight.

# the step of the best evenly spaced quantizer of normally distributed values (Max 1960), in standard deviations
_NORMAL_STEP = {2: 0.9957, 3: 0.5860, 4: 0.3352, 8: 0.0308}
_STARTS = {2: (0.85, 1.0, 1.15), 3: (0.85, 1.0, 1.15), 4: (1.0,), 8: (1.0,)}  # times that step
_ROUNDS = {2: 6, 3: 4, 4: 2, 8: 1}
_BLOCK = 1 << 18  # weights at a time: enough for two cores to share, few enough for their caches


class Fitted(NamedTuple):
    """Fitted groups: codes [..., size] (whole numbers), scale and minimum [...] (exact in float16); all float32."""

    codes: Tensor
    scale: Tensor
    minimum: Tensor


def fit(weights: Tensor, importance: Tensor, bits: int, roughly: bool = False) -> Fitted:
    """Returns the best fit found for each group of weights [n, rows, groups, size] with importance [n, groups, size],
    float32.

    It is never worse than rounding between the smallest and the largest weight. Padding has importance 0 and repeats a
    weight. `roughly`: from one start and in at most two rounds, for a caller that improves the fit afterwards.
    """
    n, rows, groups, size = weights.shape
    many = max(1, _BLOCK // (rows * groups * size))
    few = max(1, min(rows, _BLOCK // (groups * size)))
    found = Fitted(torch.empty_like(weights), *torch.empty((2, n, rows, groups)))
    for i in range(0, n, many):
        for j in range(0, rows, few):
            block = _fit_block(weights[i : i + many, j : j + few], importance[i : i + many, None], bits, roughly)
            for whole, part in zip(found, block, strict=True):
                whole[i : i + many, j : j + few] = part
    return found


def _fit_block(weights: Tensor, h: Tensor, bits: int, roughly: bool) -> Fitted:
    top = 2**bits - 1
    total = h.sum(-1)
    mean = (weights * h).sum(-1) / total
    centred = weights - mean[..., None]
    smallest, largest = weights.amin(-1), weights.amax(-1)
    minimum = to_float16(smallest)
    best, least = _finish(weights, h, ((largest - minimum) / top).clamp(min=0), minimum, top)
    low, span = smallest - mean, largest - smallest
    regress = _Regression(centred, h, total)
    for factor in (1.0,) if roughly else _STARTS[bits]:
        scale = torch.minimum(regress.deviation * (factor * _NORMAL_STEP[bits]), span / top)
        minimum = torch.maximum(scale * (-top / 2), low)
        for _ in range(min(2, _ROUNDS[bits]) if roughly else _ROUNDS[bits]):
            scale, minimum = regress.refit(scale, minimum, top)
        found, error = _finish(weights, h, scale, minimum + mean, top)
        better = error < least
        least = torch.where(better, error, least)
        best = Fitted(
            torch.where(better[..., None], found.codes, best.codes),
            torch.where(better, found.scale, best.scale),
            torch.where(better, found.minimum, best.minimum),
        )
    return best


class _Regression:
    """A weighted linear regression of weights, centred on their weighted mean, on their codes."""

    def __init__(self, centred: Tensor, h: Tensor, total: Tensor) -> None:
        self.centred, self.h, self.total = centred, h, total
        self.weighted = centred * h
        self.deviation = ((self.weighted * centred).sum(-1) / total).sqrt()
        self.codes, self.product = torch.empty_like(centred), torch.empty_like(centred)

    def refit(self, scale: Tensor, minimum: Tensor, top: int) -> tuple[Tensor, Tensor]:
        """Returns scale and minimum, refitted to the codes that the given ones lead to; unchanged for a group whose
        codes are all equal."""
        codes, product = self.codes, self.product
        _round(self.centred, scale, minimum, top, codes)
        by_h = torch.mul(codes, self.h, out=product).sum(-1)
        squared = product.mul_(codes).sum(-1)
        crossed = torch.mul(codes, self.weighted, out=product).sum(-1)
        mean = by_h / self.total
        spread = squared - by_h * mean
        slope = crossed / spread
        sound = (spread > 1e-5 * squared) & (slope > 0)
        slope = torch.where(sound, slope, scale)
        return slope, torch.where(sound, -slope * mean, minimum)


def _round(weights: Tensor, scale: Tensor, minimum: Tensor, top: int, out: Tensor) -> None:
    """Writes the nearest code for each weight [..., size] into `out`; 0 where scale is 0."""
    inverse = torch.where(scale > 0, 1 / scale, 0.0)[..., None]
    torch.sub(weights, minimum[..., None], out=out).mul_(inverse).round_().clamp_(0, top)


def to_float16(values: Tensor) -> Tensor:
    """Returns values rounded to float16, as float32."""
    return values.clamp(-MAX_F16, MAX_F16).half().float()


def _finish(weights: Tensor, h: Tensor, scale: Tensor, minimum: Tensor, top: int) -> tuple[Fitted, Tensor]:
    """Returns codes with scale and minimum rounded to float16, and the weighted squared error of each group."""
    scale, minimum = to_float16(scale), to_float16(minimum)
    codes = torch.empty_like(weights)
    _round(weights, scale, minimum, top, codes)
    miss = (codes * scale[..., None]).add_(minimum[..., None]).sub_(weights)
    return Fitted(codes, scale, minimum), miss.square_().mul_(h).sum(-1)


# Matrices cut into groups of inputs, and put together again as a pack stores them.

_FLOOR = 0.01  # of the mean importance: an input that was silent in the calibration text may speak in another


def importance_of(squares: Tensor) -> Tensor:
    """Returns the weights of errors at each input [n, in], with mean 1 before `_FLOOR` is added, from the mean squares
    of the inputs [n, in]; all 1 for a matrix that saw no token."""
    mean = squares.mean(1, keepdim=True)
    return torch.where(mean > 0, squares / torch.where(mean > 0, mean, 1.0) + _FLOOR, 1.0)


def fit_groups(weights: Tensor, importance: Tensor, bits: int, size: int, roughly: bool = False) -> Fitted:
    """Returns codes [n, out, in], scale and minimum [n, out, groups] for weights [n, out, in] with importance [n, in].
    `roughly`: see `fit`."""
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
    """Returns n matrices of codes [n, out, in], scale and minimum [n, out, groups]."""
    codes = fitted.codes.to(torch.uint8).numpy()
    scale, minimum = (values.numpy().astype(np.float16) for values in (fitted.scale, fitted.minimum))
    in_features = codes.shape[2]
    return [
        QuantizedMatrix(bits, in_features, size, pack_codes(codes[i], bits), scale[i], minimum[i])
        for i in range(len(codes))
    ]


# The quantizer with a scale and a minimum for each group of inputs of a channel, fitted by alternating least squares.


@dataclass(frozen=True)
class GroupQuantizer:
    """The quantizer "group": errors are weighted with the mean square of each input if inputs are known, else all
    alike.

    Few tokens make the weighting coarse, not wrong, so that one token is enough.
    """

    group_size: int
    name: str = "group"
    codes: Codes = "plain"
    wants: Wants = "squares"

    def too_few(self, rows: int, in_features: int) -> bool:
        return rows == 0

    def quantize(self, weights: F32, bits: Width, inputs: Inputs | None) -> list[QuantizedMatrix]:
        check_range(weights)
        n, _, in_features = weights.shape
        squares = np.zeros((n, in_features), np.float32) if inputs is None else inputs.moment
        size = group_of(in_features, self.group_size)
        importance, bits = importance_of(torch.from_numpy(squares)), int(bits)
        return to_matrices(fit_groups(torch.from_numpy(weights), importance, bits, size), bits, size)

    def columns(self, weights: F32, bits: Width, inputs: Inputs | None) -> list[QuantizedMatrix]:
        """Returns the codes of the transposes. Errors inside a column have one weight, so that the plain fit of each
        group is the best one."""
        return self.quantize(np.ascontiguousarray(weights.transpose(0, 2, 1)), bits, None)
