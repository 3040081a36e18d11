"""GPTQ for a matrix that is stored as its transpose: scales run along the outputs, errors still along the inputs.

Column i of W [out, in] is what input i adds to the outputs. Its weights share scales in groups of outputs, so that
inside a group all errors count alike, H[i, i] times (H the mean of x xᵀ). What is lost is trace((W - Q) H (W - Q)ᵀ) all
the same. The start is GPTQ (Frantar et al. 2022): columns in the order of falling H[i, i], scales fitted to what each
block of them has become by then, the rounding error of each made up for by those after it. Then every column in turn
gets the scales and codes that are best for it with all others as they are, which never makes anything worse.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moeconv.quantizers.feedback import BLOCK, Hessian, one_by_one, picked, product
from moeconv.quantizers.fit import Fitted, fit, to_float16
from moert.pack.codec import n_groups


class ColumnProblem:
    """weights [n, in, out], outputs in a group."""

    def __init__(self, weights: Tensor, hessian: Hessian, bits: int, size: int) -> None:
        self.hessian, self.bits, self.top, self.size = hessian, bits, 2**bits - 1, size
        n, rows, self.out = weights.shape
        self.groups = n_groups(self.out, size)
        padding = self.groups * size - self.out
        if padding:
            weights = torch.cat([weights, weights[:, :, -1:].expand(n, rows, padding)], 2)
        self.weights = weights  # [n, in, groups * size]
        counts = torch.ones(self.groups * size)
        counts[self.out :] = 0
        self.counts = counts.view(self.groups, size)

    def solved(self, sweeps: int) -> Fitted:
        """codes [n, in, out], scale and minimum [n, in, groups]."""
        found = self.compensated()
        for _ in range(sweeps):
            found = self.swept(found)
        n, rows, _ = self.weights.shape
        return Fitted(found.codes.view(n, rows, -1)[:, :, : self.out], found.scale, found.minimum)

    def compensated(self) -> Fitted:
        """By GPTQ; codes [n, in, groups, size]."""
        order, factor = self.hessian.order, self.hessian.factor
        rest = picked(self.weights, order)
        found = self._blank()
        root = factor.diagonal(dim1=1, dim2=2)[..., None]

        def decide(j: int, wanted: Tensor, error: Tensor) -> None:
            if j % BLOCK == 0:
                block = slice(j, j + BLOCK)
                fitted = fit(self._grouped(rest[:, block]), self.counts.expand(len(rest), -1, -1), self.bits)
                found.scale[:, block], found.minimum[:, block] = fitted.scale, fitted.minimum
            scale, minimum, target = found.scale[:, j], found.minimum[:, j], self._grouped(wanted)
            found.codes[:, j] = code = self._nearest(target, scale, minimum)
            error.copy_((target - _values(code, scale, minimum)).flatten(1) / root[:, j])

        one_by_one(rest, factor, decide)
        back = order.argsort(dim=1)
        codes = picked(found.codes.flatten(2), back).view_as(found.codes)
        return Fitted(codes, picked(found.scale, back), picked(found.minimum, back))

    def swept(self, of: Fitted) -> Fitted:
        """Every column once, in order."""
        codes, scale, minimum = (part.clone() for part in of)
        values = _values(codes, scale, minimum)
        pull = product(self.hessian.products, self.weights - values.flatten(2))
        curvature = self.hessian.products.diagonal(dim1=1, dim2=2)[..., None]

        def decide(j: int, pulled: Tensor, change: Tensor) -> None:
            target = values[:, j] + self._grouped(pulled / curvature[:, j])
            best = self._column(target, Fitted(codes[:, j], scale[:, j], minimum[:, j]))
            codes[:, j], scale[:, j], minimum[:, j] = best
            change.copy_((_values(*best) - values[:, j]).flatten(1))

        one_by_one(pull, self.hessian.products, decide)
        return Fitted(codes, scale, minimum)

    def _column(self, target: Tensor, before: Fitted) -> Fitted:
        """Nearest codes for target [n, groups, size] by the scales that it had, or by those that suit such codes."""
        codes = self._nearest(target, before.scale, before.minimum)
        scale, minimum = self._regressed(target, codes, before)
        refitted = Fitted(self._nearest(target, scale, minimum), scale, minimum)
        kept = Fitted(codes, before.scale, before.minimum)
        better = self._missed(target, refitted) < self._missed(target, kept)
        return Fitted(
            torch.where(better[..., None], refitted.codes, kept.codes),
            torch.where(better, refitted.scale, kept.scale),
            torch.where(better, refitted.minimum, kept.minimum),
        )

    def _regressed(self, target: Tensor, codes: Tensor, before: Fitted) -> tuple[Tensor, Tensor]:
        """Scale and minimum by least squares for these codes, as float16 holds them."""
        number = self.counts.sum(-1)
        mean, aim = ((each * self.counts).sum(-1) / number for each in (codes, target))
        apart = (codes - mean[..., None]) * self.counts
        spread, crossed = (apart * codes).sum(-1), (apart * target).sum(-1)
        slope = crossed / spread
        sound = (spread > 1e-3) & (slope > 0)
        scale = to_float16(torch.where(sound, slope, before.scale))
        return scale, to_float16(torch.where(sound, aim - scale * mean, before.minimum))

    def _missed(self, target: Tensor, fitted: Fitted) -> Tensor:
        """[n, groups]"""
        return ((target - _values(*fitted)).square() * self.counts).sum(-1)

    def _nearest(self, target: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
        step = torch.where(scale > 0, scale, 1.0)[..., None]
        return ((target - minimum[..., None]) / step).round_().clamp_(0, self.top)

    def _grouped(self, values: Tensor) -> Tensor:
        """[..., groups * size] → [..., groups, size]"""
        return values.view(*values.shape[:-1], self.groups, self.size)

    def _blank(self) -> Fitted:
        n, rows, _ = self.weights.shape
        return Fitted(
            torch.empty(n, rows, self.groups, self.size), *(torch.empty(n, rows, self.groups) for _ in range(2))
        )


def _values(codes: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    """codes [..., size], scale and minimum [...]"""
    return codes * scale[..., None] + minimum[..., None]
