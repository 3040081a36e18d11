"""Codes that keep the outputs, E |(W - Q) x|² = trace((W - Q) H (W - Q)ᵀ) with H the mean of x xᵀ.

The start is GPTQ (Frantar et al. 2022): columns in the order of falling H[j, j], the rounding error of each made up for
by those after it. Then scales and codes are improved in turn: scale and minimum of all groups of a row by least squares
under H, and each code to the nearest of what would be best with all others as they are (coordinate descent, as
in QuantEase, Behdin et al. 2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moeconv.quantizers.fit import Fitted, to_float16
from moeconv.quantizers.groups import fit_groups, importance_of, to_matrices
from moeconv.quantizers.quantizer import Inputs, Wants, check_range
from moert.pack.codec import F32, QuantizedMatrix
from moert.pack.layout import group_of

_DAMPING = 0.01  # of the mean diagonal
_SWEEPS = 4
_GRID_BYTES = 256 << 20  # that the normal equations of as many rows as are solved at once may take
_GRID_COPIES = 32  # bytes for each entry of them: in float32, in float64 as they are, damped and factored
_BLOCK = 32  # columns whose changes are passed on together


@dataclass(frozen=True)
class GptqQuantizer:
    """One scale for each output channel unless a group size is given.

    An expert that saw fewer tokens than the matrix has inputs can't say how these correlate: its H is drawn towards
    its diagonal in proportion, and with no token at all it is the identity, so that all errors count alike.
    """

    group_size: int
    name: str = "gptq"
    wants: Wants = "products"

    def too_few(self, rows: int, in_features: int) -> bool:
        return rows < in_features

    def quantize(self, weights: F32, bits: int, inputs: Inputs | None) -> list[QuantizedMatrix]:
        check_range(weights)
        n, _, in_features = weights.shape
        if inputs is None:
            inputs = Inputs(np.zeros(n, np.int64), np.zeros((n, in_features, in_features), np.float32))
        size = group_of(in_features, self.group_size)
        hessian = _hessian(inputs)
        problem = _Problem(torch.from_numpy(weights), hessian, 2**bits - 1, size)
        importance = importance_of(torch.from_numpy(inputs.moment).diagonal(dim1=1, dim2=2))
        fitted = problem.compensated(fit_groups(problem.weights, importance, bits, size))
        for _ in range(_SWEEPS):
            fitted = problem.swept(problem.refitted(fitted))
        return to_matrices(problem.refitted(fitted), bits, size)


def _hessian(inputs: Inputs) -> Tensor:
    """The damped mean of x xᵀ [n, in, in], its correlations as weak as the tokens are few."""
    moment = torch.from_numpy(inputs.moment)
    size = moment.shape[1]
    squares = moment.diagonal(dim1=1, dim2=2)
    trust = torch.from_numpy(np.minimum(inputs.rows / size, 1).astype(np.float32)).view(-1, 1, 1)
    mean = squares.mean(1).view(-1, 1, 1)
    mean = torch.where(mean > 0, mean, 1.0)
    return moment * trust + torch.diag_embed(squares) * (1 - trust) + _DAMPING * mean * torch.eye(size)


@dataclass(frozen=True)
class _Problem:
    """weights [n, out, in], hessian [n, in, in], the largest code, inputs in a group."""

    weights: Tensor
    hessian: Tensor
    top: int
    size: int

    def compensated(self, start: Fitted) -> Fitted:
        """The codes of `start` chosen anew by GPTQ, with its scales."""
        order = self.hessian.diagonal(dim1=1, dim2=2).argsort(dim=1, descending=True, stable=True)
        hessian = _columns(_columns(self.hessian, order).mT, order)
        inverse = torch.linalg.inv(hessian.double())
        factor = torch.linalg.cholesky(inverse, upper=True).float()
        scale, minimum = (_columns(self._wide(values), order) for values in (start.scale, start.minimum))
        rest, codes = _columns(self.weights, order), torch.empty_like(self.weights)
        in_features = rest.shape[2]
        for begin in range(0, in_features, _BLOCK):
            end = min(begin + _BLOCK, in_features)
            errors = torch.empty_like(rest[:, :, begin:end])
            for j in range(begin, end):
                code = self._nearest(rest[:, :, j], scale[:, :, j], minimum[:, :, j])
                error = (rest[:, :, j] - (code * scale[:, :, j] + minimum[:, :, j])) / factor[:, j, j, None]
                rest[:, :, j + 1 : end] -= error[:, :, None] * factor[:, j, None, j + 1 : end]
                codes[:, :, j], errors[:, :, j - begin] = code, error
            rest[:, :, end:] -= _matmul(errors, factor[:, begin:end, end:])
        return start._replace(codes=_columns(codes, order.argsort(dim=1)))

    def swept(self, fitted: Fitted) -> Fitted:
        """Every code once, in order, set to what is best with all others as they are."""
        scale, minimum, codes = self._wide(fitted.scale), self._wide(fitted.minimum), fitted.codes.clone()
        pull = _matmul(self.weights - (codes * scale + minimum), self.hessian)  # minus half the gradient
        curvature = self.hessian.diagonal(dim1=1, dim2=2)[:, None]
        in_features = codes.shape[2]
        for begin in range(0, in_features, _BLOCK):
            end = min(begin + _BLOCK, in_features)
            near, moved = pull[:, :, begin:end], torch.empty_like(codes[:, :, begin:end])
            for j in range(begin, end):
                old, step = codes[:, :, j], scale[:, :, j]
                code = self._nearest(old * step + near[:, :, j - begin] / curvature[:, :, j], step, torch.zeros(()))
                change = (code - old) * step
                near = near - change[:, :, None] * self.hessian[:, j, None, begin:end]
                codes[:, :, j], moved[:, :, j - begin] = code, change
            pull[:, :, end:] -= _matmul(moved, self.hessian[:, begin:end, end:])
        return fitted._replace(codes=codes)

    def refitted(self, fitted: Fitted) -> Fitted:
        """Scale and minimum of each row by least squares under the hessian, where that is better in float16."""
        groups = fitted.scale.shape[2]
        found = to_float16(torch.stack([self._solved(i, codes, groups) for i, codes in enumerate(fitted.codes)]))
        new = Fitted(fitted.codes, found[:, :, :groups].contiguous(), found[:, :, groups:].contiguous())
        sound = (new.scale > 0).all(2) & (self._loss(new) < self._loss(fitted))
        scale = torch.where(sound[..., None], new.scale, fitted.scale)
        return Fitted(fitted.codes, scale, torch.where(sound[..., None], new.minimum, fitted.minimum))

    def _solved(self, i: int, codes: Tensor, groups: int) -> Tensor:
        """codes [out, in] of matrix i → the best scales, then minima, of each row [out, 2 * groups]."""
        of_input = torch.arange(codes.shape[1])
        member = torch.zeros(codes.shape[1], groups)  # of which group an input is
        member[of_input, of_input // self.size] = 1
        hessian = self.hessian[i]
        minima = member.T.contiguous() @ (hessian @ member)
        pulled = self.weights[i] @ hessian
        at_once = max(1, _GRID_BYTES // (_GRID_COPIES * (2 * groups) ** 2))
        return torch.cat([
            _least_squares(part, aim, hessian, member, minima)
            for part, aim in zip(torch.split(codes, at_once), torch.split(pulled, at_once), strict=True)
        ])  # fmt: skip

    def _loss(self, fitted: Fitted) -> Tensor:
        """[n, out]"""
        miss = self.weights - (fitted.codes * self._wide(fitted.scale) + self._wide(fitted.minimum))
        return (_matmul(miss, self.hessian) * miss).sum(2)

    def _nearest(self, values: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
        return ((values - minimum) / torch.where(scale > 0, scale, 1.0)).round_().clamp_(0, self.top)

    def _wide(self, per_group: Tensor) -> Tensor:
        """[n, out, groups] → [n, out, in]"""
        return per_group.repeat_interleave(self.size, dim=2)[:, :, : self.weights.shape[2]]


def _least_squares(codes: Tensor, pulled: Tensor, hessian: Tensor, member: Tensor, minima: Tensor) -> Tensor:
    """Solves the normal equations of rows. codes and pulled (weights times hessian) [rows, in], member [in, groups],
    minima [groups, groups]: their part that is the same for all rows → [rows, 2 * groups], scales before minima."""
    rows, groups = len(codes), member.shape[1]
    size = int(member[:, 0].sum())
    grid = torch.empty(rows, 2 * groups, 2 * groups)
    for g in range(groups):
        part = slice(g * size, (g + 1) * size)
        by_code = codes[:, part].contiguous() @ hessian[part]  # [rows, in]
        grid[:, g, :groups] = (by_code * codes) @ member
        grid[:, g, groups:] = by_code @ member
    grid[:, groups:, :groups] = grid[:, :groups, groups:].mT
    grid[:, groups:, groups:] = minima
    aim = torch.cat([(pulled * codes) @ member, pulled @ member], dim=1).double()
    ridge = 1e-9 * grid.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] * torch.eye(2 * groups)
    found: Tensor = torch.linalg.solve(grid.double() + ridge, aim)
    return found.float()


def _columns(values: Tensor, order: Tensor) -> Tensor:
    """values [n, rows, in] with the columns of each of the n in its own order [n, in]."""
    return values.gather(2, order[:, None].expand(-1, values.shape[1], -1))


def _matmul(left: Tensor, right: Tensor) -> Tensor:
    """n products one by one, so that a result does not depend on what else is in the batch."""
    return torch.stack([a.contiguous() @ b.contiguous() for a, b in zip(left, right, strict=True)])
