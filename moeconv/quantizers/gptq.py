"""Codes that keep the outputs, E |(W - Q) x|² = trace((W - Q) H (W - Q)ᵀ) with H the mean of x xᵀ.

The start is GPTQ (Frantar et al. 2022): columns in the order of falling H[j, j], the rounding error of each made up for
by those after it. Then scales and codes are improved in turn: scale and minimum of all groups of a row by least squares
under H, and each code to the nearest of what would be best with all others as they are (coordinate descent, as
in QuantEase, Behdin et al. 2023).

Inside, matrices are turned, [n, in, out], so that what is done to one input of all rows is done to memory in one piece.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moeconv.quantizers.columns import ColumnProblem
from moeconv.quantizers.feedback import Hessian, hessian_of, picked, product
from moeconv.quantizers.fit import Fitted, to_float16
from moeconv.quantizers.groups import fit_groups, importance_of, to_matrices
from moeconv.quantizers.quantizer import Inputs, Wants, check_range
from moeconv.quantizers.rounding import Rounding
from moert.pack.codec import F32, QuantizedMatrix, n_groups
from moert.pack.layout import group_of

_SWEEPS, _SMALL = 4, 512  # for matrices of at most so many inputs; in larger ones the second wins 1 to 2% at most
_LARGE_SWEEPS = {2: 2, 3: 1, 4: 0, 8: 0}
_WORK_BYTES = 256 << 20  # for as many rows as are solved at once
_COPIES = 12  # of their weights
_GRID_COPIES = 32  # bytes for each entry of the normal equations: in float32, in float64 as they are, damped, factored


@dataclass(frozen=True)
class GptqQuantizer:
    """One scale for each output channel unless a group size is given.

    Few tokens can't say how inputs correlate, and codes that believe them fit these tokens and no others: H is drawn
    towards its diagonal, the more the fewer tokens it rests on, half way where these are half as many as inputs. With
    no token at all it is the identity, so that all errors count alike. What H is turned into is remembered as long as
    the `inputs` are: give the same for other widths.
    """

    group_size: int
    name: str = "gptq"
    wants: Wants = "products"

    def too_few(self, rows: int, in_features: int) -> bool:
        return rows < in_features

    def quantize(self, weights: F32, bits: int, inputs: Inputs | None) -> list[QuantizedMatrix]:
        check_range(weights)
        n, _, in_features = weights.shape
        inputs = _known(weights, inputs)
        size = group_of(in_features, self.group_size)
        rows = torch.from_numpy(weights)
        importance = importance_of(torch.from_numpy(inputs.moment).diagonal(dim1=1, dim2=2))
        small = in_features <= _SMALL
        start = fit_groups(rows, importance, bits, size, roughly=not small)
        hessian = hessian_of(inputs)
        at_once = max(1, _WORK_BYTES // (n * _row_bytes(in_features, size)))
        sweeps = _sweeps(in_features, bits)
        parts = [
            _Problem(_by_input(part), hessian, 2**bits - 1, size).solved(_by_input(scale), _by_input(minimum), sweeps)
            for part, scale, minimum in zip(
                *(torch.split(each, at_once, 1) for each in (rows, start.scale, start.minimum)), strict=True
            )
        ]
        return to_matrices(Fitted(*(torch.cat(each, 1) for each in zip(*parts, strict=True))), bits, size)

    def columns(self, weights: F32, bits: int, inputs: Inputs | None) -> list[QuantizedMatrix]:
        check_range(weights)
        n, out_features, in_features = weights.shape
        size = group_of(out_features, self.group_size)
        hessian, sweeps = hessian_of(_known(weights, inputs)), _sweeps(in_features, bits)
        groups = max(1, _WORK_BYTES // (_COPIES * 4 * n * in_features * size))
        parts = [
            ColumnProblem(_by_input(part), hessian, bits, size).solved(sweeps)
            for part in torch.split(torch.from_numpy(weights), groups * size, 1)
        ]
        return to_matrices(Fitted(*(torch.cat(each, 2) for each in zip(*parts, strict=True))), bits, size)


def _known(weights: F32, inputs: Inputs | None) -> Inputs:
    """Of n matrices; those of no token where nothing is known."""
    if inputs is not None:
        return inputs
    n, _, in_features = weights.shape
    return Inputs.of(np.zeros(n, np.int64), np.zeros((n, in_features, in_features), np.float32))


def _sweeps(in_features: int, bits: int) -> int:
    return _SWEEPS if in_features <= _SMALL else _LARGE_SWEEPS[bits]


def _by_input(values: Tensor) -> Tensor:
    """[n, out, in] → [n, in, out]"""
    return values.mT.contiguous()


class _Codes(NamedTuple):
    """codes [n, in, out], scale and minimum [n, groups, out]; `pull` [n, in, out]: H (W - Q), minus half the gradient
    of the loss."""

    codes: Tensor
    scale: Tensor
    minimum: Tensor
    pull: Tensor


class _Problem:
    """weights [n, in, out], the largest code, inputs in a group."""

    def __init__(self, weights: Tensor, hessian: Hessian, top: int, size: int) -> None:
        self.weights, self.hessian, self.top, self.size = weights, hessian, top, size
        self.products = hessian.products
        self.pulled = product(self.products, weights)

    def solved(self, scale: Tensor, minimum: Tensor, sweeps: int) -> Fitted:
        """From scales and minima to start with [n, groups, out]."""
        found = self.refitted(self.compensated(scale, minimum), scale, minimum)
        for _ in range(sweeps):
            found = self.refitted(self.swept(found), found.scale, found.minimum)
        return Fitted(*(values.mT for values in (found.codes, found.scale, found.minimum)))

    def compensated(self, scale: Tensor, minimum: Tensor) -> Tensor:
        """Codes by GPTQ."""
        order = self.hessian.order
        codes = Rounding(scale, minimum, order // self.size, self.top).made(
            picked(self.weights, order), self.hessian.factor
        )
        return picked(codes, order.argsort(dim=1))

    def swept(self, of: _Codes) -> Tensor:
        """Every code once, in order, set to what is best with all others as they are."""
        n, inputs, _ = self.weights.shape
        group = (torch.arange(inputs) // self.size).expand(n, -1)
        rounding = Rounding(of.scale, of.minimum, group, self.top)
        return rounding.improved(of.pull.clone(), self.products, of.codes)

    def refitted(self, codes: Tensor, scale: Tensor, minimum: Tensor) -> _Codes:
        """Scale and minimum of each row by least squares under the hessian, where that is better in float16."""
        groups, (n, _, out) = scale.shape[1], codes.shape
        of_ones = torch.stack([part.sum(2) for part in torch.split(self.products, self.size, 2)], 2)  # [n, in, groups]
        grid = torch.empty(n, out, 2 * groups, 2 * groups)
        pull = self.pulled.clone()
        for g in range(groups):
            part = slice(g * self.size, (g + 1) * self.size)
            of_codes, ones = product(self.products[:, :, part], codes[:, part]), of_ones[:, :, g, None]
            pull.addcmul_(of_codes, scale[:, None, g], value=-1).addcmul_(ones, minimum[:, None, g], value=-1)
            grid[:, :, g, :groups] = self._by_group(of_codes * codes).mT
            grid[:, :, g, groups:] = self._by_group(of_codes).mT
        grid[:, :, groups:, :groups] = grid[:, :, :groups, groups:].mT
        grid[:, :, groups:, groups:] = self._by_group(of_ones)[:, None]
        aim = torch.cat([self._by_group(self.pulled * codes), self._by_group(self.pulled)], 1).mT
        best = to_float16(_least_squares(grid, aim)).mT.contiguous()
        best_scale, best_minimum = best[:, :groups], best[:, groups:]
        best_missed = self._missed(codes, best_scale, best_minimum)
        best_pull = (
            torch.addcmul(self.pulled, of_codes, best_scale, value=-1).addcmul_(of_ones, best_minimum, value=-1)
            if groups == 1
            else product(self.products, best_missed)
        )
        before, after = (self._missed(codes, scale, minimum) * pull).sum(1), (best_missed * best_pull).sum(1)
        sound = ((best_scale > 0).all(1) & (after < before))[:, None]
        return _Codes(
            codes,
            torch.where(sound, best_scale, scale),
            torch.where(sound, best_minimum, minimum),
            torch.where(sound, best_pull, pull),
        )

    def _missed(self, codes: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
        """W - Q"""
        return self.weights - (codes * self._wide(scale) + self._wide(minimum))

    def _by_group(self, values: Tensor) -> Tensor:
        """[n, in, ...] summed over the inputs of each group → [n, groups, ...]"""
        return torch.stack([part.sum(1) for part in torch.split(values, self.size, 1)], 1)

    def _wide(self, per_group: Tensor) -> Tensor:
        """[n, groups, out] → [n, in, out], or what is as good as that."""
        if per_group.shape[1] == 1:
            return per_group
        return per_group.repeat_interleave(self.size, dim=1)[:, : self.weights.shape[1]]


def _row_bytes(in_features: int, size: int) -> int:
    """Memory that a row takes while its problem is solved."""
    return _COPIES * 4 * in_features + _GRID_COPIES * (2 * n_groups(in_features, size)) ** 2


def _least_squares(grid: Tensor, aim: Tensor) -> Tensor:
    """Solves the normal equations of rows: grid [..., k, k], aim [..., k] → [..., k]."""
    size = grid.shape[-1]
    ridge = 1e-9 * grid.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None] * torch.eye(size)
    found: Tensor = torch.linalg.solve(grid.double() + ridge, aim.double())
    return found.float()
