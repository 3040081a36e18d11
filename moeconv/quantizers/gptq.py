"""GPTQ: codes for one input after the other, where later inputs make up for the errors of earlier ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from moeconv.quantizers.coding import CodeInputs, Grid, code_inputs
from moeconv.quantizers.group import Fitted, fit, fit_groups, importance_of, to_float16, to_matrices
from moeconv.quantizers.quantizer import Inputs, Wants, check_range
from moert.pack.codec import F32, Codes, QuantizedMatrix, Width, n_groups
from moert.pack.layout import group_of

# GPTQ's steps, one input after the other, and its statistics of the inputs: for a matrix and for its transpose.
# Matrices are turned here, [n, in, out], so that a step for one input of all rows works on one piece of memory.

_DAMPING = 0.01  # of the mean diagonal
_DOUBT = 0.5  # tokens for each input by which correlations are drawn to none
BLOCK, _SPAN = 32, 256  # inputs whose changes are passed on together: to the rest of a span, and to the rest


class Hessian:
    """The statistics of n matrices' inputs. `products` [n, in, in]: the damped mean of x xᵀ, its correlations the
    weaker the fewer tokens it rests on."""

    def __init__(self, inputs: Inputs) -> None:
        moment = torch.from_numpy(inputs.moment)
        size = moment.shape[1]
        squares = moment.diagonal(dim1=1, dim2=2)
        trust = torch.from_numpy(inputs.counted / (inputs.counted + _DOUBT * size)).view(-1, 1, 1)
        mean = squares.mean(1)[:, None]
        mean = torch.where(mean > 0, mean, 1.0)
        self.products = moment * trust
        self.products.diagonal(dim1=1, dim2=2).copy_(squares + _DAMPING * mean)

    @cached_property
    def order(self) -> Tensor:
        """Inputs by falling square [n, in]."""
        return self.products.diagonal(dim1=1, dim2=2).argsort(dim=1, descending=True, stable=True)

    @cached_property
    def factor(self) -> Tensor:
        """U [n, in, in], upper triangular, with H⁻¹ = Uᵀ U and inputs in `order`."""
        pairs = zip(self.products, self.order, strict=True)
        return torch.stack([factor_of(products[order][:, order]) for products, order in pairs])


def factor_of(hessian: Tensor) -> Tensor:
    """Returns U [in, in], the inverse of R in H = R Rᵀ: R is upper triangular, the Cholesky factor of H from
    behind."""
    size = len(hessian)
    root = torch.linalg.cholesky(hessian.flip(0, 1).double()).flip(0, 1)
    found: Tensor = torch.linalg.solve_triangular(root, torch.eye(size, dtype=root.dtype), upper=True)
    return found.float()


_HESSIANS: WeakKeyDictionary[Inputs, Hessian] = WeakKeyDictionary()


def hessian_of(inputs: Inputs) -> Hessian:
    """Returns the Hessian of some inputs, remembered as long as the inputs exist."""
    if inputs not in _HESSIANS:
        _HESSIANS[inputs] = Hessian(inputs)
    return _HESSIANS[inputs]


def one_by_one(values: Tensor, factor: Tensor, decide: Callable[[int, Tensor, Tensor], None]) -> None:
    """Calls `decide(j, values[:, j], moved)` for one input after the other, which fills in `moved` [n, out]; `moved`
    times factor[:, j, k] is then taken from the values of every later k. values [n, in, out], factor [n, in, in]."""

    def settle(block: slice, moved: Tensor) -> None:
        for at, j in enumerate(range(block.start, block.stop)):
            later = slice(j + 1, block.stop)
            decide(j, values[:, j], moved[:, at])
            values[:, later].addcmul_(factor[:, j, later, None], moved[:, at : at + 1], value=-1)

    by_blocks(values, factor, settle)


def by_blocks(values: Tensor, factor: Tensor, settle: Callable[[slice, Tensor], None]) -> None:
    """Calls `settle(block, moved)` for one block of inputs after the other, which fills in `moved` [n, block, out] and
    changes the block's own later values; values behind the block are changed here. See one_by_one."""
    size, moved = values.shape[1], torch.empty_like(values)
    for first in range(0, size, _SPAN):
        last = min(first + _SPAN, size)
        for begin in range(first, last, BLOCK):
            end = min(begin + BLOCK, last)
            settle(slice(begin, end), moved[:, begin:end])
            values[:, end:last] -= product(factor[:, begin:end, end:last].mT, moved[:, begin:end])
        values[:, last:] -= product(factor[:, first:last, last:].mT, moved[:, first:last])


def product(left: Tensor, right: Tensor) -> Tensor:
    """Returns n products, computed one by one, so that a result does not depend on the rest of the batch."""
    return torch.stack([a.contiguous() @ b.contiguous() for a, b in zip(left, right, strict=True)])


def picked(values: Tensor, order: Tensor) -> Tensor:
    """Returns the values at the places `order` [n, m] of each of the n matrices in values [n, k, out]. [n, m, out]"""
    return values.gather(1, order[..., None].expand(-1, -1, values.shape[2]))


# Codes for the inputs of matrices one after the other, each making up for the errors of the earlier ones.
# In C if moert's library of kernels is there, else in torch. Matrices are turned here, [n, in, out].


class Rounding:
    """The rounding to codes from 0 to `top` on a grid: scale and minimum [n, groups, out], and the group of each input
    [n, in]."""

    def __init__(self, scale: Tensor, minimum: Tensor, group: Tensor, top: int) -> None:
        self.scale, self.minimum, self.group, self.top = scale.contiguous(), minimum.contiguous(), group, top

    def made(self, wanted: Tensor, factor: Tensor) -> Tensor:
        """Returns codes by GPTQ for weights `wanted` [n, in, out], which change, and U [n, in, in] (Hessian.factor)."""
        codes = torch.empty_like(wanted)
        self._code(wanted, factor, codes, improves=False)
        return codes

    def improved(self, pull: Tensor, products: Tensor, codes: Tensor) -> Tensor:
        """Returns codes, each set once, in order, to its best value with all others as they are. `pull` [n, in, out],
        minus half the gradient of the loss, changes. products [n, in, in]."""
        codes = codes.clone()
        self._code(pull, products, codes, improves=True)
        return codes

    def _code(self, values: Tensor, factor: Tensor, codes: Tensor, improves: bool) -> None:
        if native := code_inputs():
            self._in_c(native, values, factor, codes, improves)
        elif improves:
            self._improve(values, factor, codes)
        else:
            self._make(values, factor, codes)

    def _in_c(self, native: CodeInputs, values: Tensor, factor: Tensor, codes: Tensor, improves: bool) -> None:
        assert all(each.is_contiguous() for each in (values, factor, codes)), "columns lie side by side"
        group = self.group.numpy().astype(np.int32)
        arrays = [each.numpy() for each in (values, factor, codes, self.scale, self.minimum)]

        def settle(block: slice, moved: Tensor) -> None:
            for value, by, code, scale, minimum, of, move in zip(*arrays, group, moved.numpy(), strict=True):
                grid = Grid(scale, minimum, of[block], self.top)
                native(value[block], by[block, block], grid, code[block], move, improves)

        by_blocks(values, factor, settle)

    def _make(self, wanted: Tensor, factor: Tensor, codes: Tensor) -> None:
        scale, minimum = picked(self.scale, self.group), picked(self.minimum, self.group)
        step, root = _positive(scale), factor.diagonal(dim1=1, dim2=2)[..., None]

        def decide(j: int, value: Tensor, error: Tensor) -> None:
            code = torch.sub(value, minimum[:, j], out=codes[:, j]).div_(step[:, j]).round_().clamp_(0, self.top)
            torch.addcmul(minimum[:, j], code, scale[:, j], out=error).sub_(value).div_(-root[:, j])

        one_by_one(wanted, factor, decide)

    def _improve(self, pull: Tensor, products: Tensor, codes: Tensor) -> None:
        scale = picked(self.scale, self.group)
        step, curvature = _positive(scale), products.diagonal(dim1=1, dim2=2)[..., None]

        def decide(j: int, value: Tensor, change: Tensor) -> None:
            wanted = (value / step[:, j]).div_(curvature[:, j]).add_(codes[:, j]).round_().clamp_(0, self.top)
            torch.sub(wanted, codes[:, j], out=change).mul_(scale[:, j])
            codes[:, j] = wanted

        one_by_one(pull, products, decide)


def _positive(scale: Tensor) -> Tensor:
    return torch.where(scale > 0, scale, 1.0)


# GPTQ for a matrix that is stored as its transpose: scales run along the outputs, errors still along the inputs.
# Column i of W [out, in] holds the weights of input i. They share scales in groups of outputs, so that inside a group
# all errors count alike, H[i, i] times (H the mean of x xᵀ). The loss is trace((W - Q) H (W - Q)ᵀ) all the same. The
# start is GPTQ (Frantar et al. 2022): columns in the order of falling H[i, i], scales fitted to the values of each
# block of columns at its turn, the rounding error of each column made up for by the later ones. Then every column in
# turn gets the scales and codes that are best for it with all others as they are, which never raises the loss.


class ColumnProblem:
    """The problem of coding weights [n, in, out] by columns, with `size` outputs in a group."""

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
        """Returns codes [n, in, out], scale and minimum [n, in, groups]."""
        found = self.compensated()
        for _ in range(sweeps):
            found = self.swept(found)
        n, rows, _ = self.weights.shape
        return Fitted(found.codes.view(n, rows, -1)[:, :, : self.out], found.scale, found.minimum)

    def compensated(self) -> Fitted:
        """Returns codes [n, in, groups, size], scale and minimum by GPTQ."""
        order, factor = self.hessian.order, self.hessian.factor
        rest = picked(self.weights, order)
        n, rows, _ = rest.shape
        found = Fitted(torch.empty(n, rows, self.groups, self.size), *torch.empty(2, n, rows, self.groups))
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
        """Returns the solution with every column improved once, in order."""
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
        """Returns the nearest codes for target [n, groups, size] with their scales: the ones from before, or those
        refitted to these codes where they are better."""
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
        """Returns scale and minimum by least squares for these codes, rounded to float16."""
        number = self.counts.sum(-1)
        mean, aim = ((each * self.counts).sum(-1) / number for each in (codes, target))
        apart = (codes - mean[..., None]) * self.counts
        spread, crossed = (apart * codes).sum(-1), (apart * target).sum(-1)
        slope = crossed / spread
        sound = (spread > 1e-3) & (slope > 0)
        scale = to_float16(torch.where(sound, slope, before.scale))
        return scale, to_float16(torch.where(sound, aim - scale * mean, before.minimum))

    def _missed(self, target: Tensor, fitted: Fitted) -> Tensor:
        """Returns the squared error of each group. [n, groups]"""
        return ((target - _values(*fitted)).square() * self.counts).sum(-1)

    def _nearest(self, target: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
        step = torch.where(scale > 0, scale, 1.0)[..., None]
        return ((target - minimum[..., None]) / step).round_().clamp_(0, self.top)

    def _grouped(self, values: Tensor) -> Tensor:
        """Returns values [..., groups * size] by group. [..., groups, size]"""
        return values.view(*values.shape[:-1], self.groups, self.size)


def _values(codes: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    """Returns the values that codes [..., size] stand for, with scale and minimum [...]."""
    return codes * scale[..., None] + minimum[..., None]


# Codes that keep the outputs, E |(W - Q) x|² = trace((W - Q) H (W - Q)ᵀ) with H the mean of x xᵀ.
# The start is GPTQ (Frantar et al. 2022): columns in the order of falling H[j, j], the rounding error of each made up
# for by the later ones. Then scales and codes are improved in turn: scale and minimum of all groups of a row by least
# squares under H, and each code to the one nearest to its best value with all others as they are (coordinate descent,
# as in QuantEase, Behdin et al. 2023). Inside, matrices are turned, [n, in, out], so that a step for one input of all
# rows works on one piece of memory.

_SWEEPS, _SMALL = 4, 512  # sweeps for at most _SMALL inputs; with more, the second sweep wins 1 to 2% at most
_LARGE_SWEEPS = {2: 2, 3: 1, 4: 0, 8: 0}
_WORK_BYTES = 256 << 20  # for as many rows as are solved at once
_COPIES = 12  # of their weights
_GRID_COPIES = 32  # bytes for each entry of the normal equations: in float32, in float64 as they are, damped, factored


@dataclass(frozen=True)
class GptqQuantizer:
    """The quantizer "gptq": one scale for each output channel unless a group size is given.

    Few tokens can't show how inputs correlate, and codes that rely on them fit these tokens and no others: H is drawn
    towards its diagonal, the more the fewer tokens it rests on, half way if the tokens are half as many as the inputs.
    With no token at all it is the identity, so that all errors count alike. The factors of H are remembered as long as
    the `inputs` exist: pass the same object for other widths.
    """

    group_size: int
    name: str = "gptq"
    codes: Codes = "plain"
    wants: Wants = "products"

    def too_few(self, rows: int, in_features: int) -> bool:
        return rows < in_features

    def quantize(self, weights: F32, bits: Width, inputs: Inputs | None) -> list[QuantizedMatrix]:
        check_range(weights)
        bits, (n, _, in_features) = int(bits), weights.shape
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

    def columns(self, weights: F32, bits: Width, inputs: Inputs | None) -> list[QuantizedMatrix]:
        check_range(weights)
        bits, (n, out_features, in_features) = int(bits), weights.shape
        size = group_of(out_features, self.group_size)
        hessian, sweeps = hessian_of(_known(weights, inputs)), _sweeps(in_features, bits)
        groups = max(1, _WORK_BYTES // (_COPIES * 4 * n * in_features * size))
        parts = [
            ColumnProblem(_by_input(part), hessian, bits, size).solved(sweeps)
            for part in torch.split(torch.from_numpy(weights), groups * size, 1)
        ]
        return to_matrices(Fitted(*(torch.cat(each, 2) for each in zip(*parts, strict=True))), bits, size)


def _known(weights: F32, inputs: Inputs | None) -> Inputs:
    """Returns the inputs of n matrices; if they are None, inputs of no token."""
    if inputs is not None:
        return inputs
    n, _, in_features = weights.shape
    return Inputs.of(np.zeros(n, np.int64), np.zeros((n, in_features, in_features), np.float32))


def _sweeps(in_features: int, bits: int) -> int:
    return _SWEEPS if in_features <= _SMALL else _LARGE_SWEEPS[bits]


def _by_input(values: Tensor) -> Tensor:
    """Returns matrices [n, out, in] turned. [n, in, out]"""
    return values.mT.contiguous()


class _Codes(NamedTuple):
    """A solution: codes [n, in, out], scale and minimum [n, groups, out]; `pull` [n, in, out]: H (W - Q), minus half
    the gradient of the loss."""

    codes: Tensor
    scale: Tensor
    minimum: Tensor
    pull: Tensor


class _Problem:
    """The problem of coding weights [n, in, out], with codes up to `top` and `size` inputs in a group."""

    def __init__(self, weights: Tensor, hessian: Hessian, top: int, size: int) -> None:
        self.weights, self.hessian, self.top, self.size = weights, hessian, top, size
        self.products = hessian.products
        self.pulled = product(self.products, weights)

    def solved(self, scale: Tensor, minimum: Tensor, sweeps: int) -> Fitted:
        """Returns codes [n, out, in], scale and minimum [n, out, groups], from scales and minima to start with [n,
        groups, out]."""
        found = self.refitted(self.compensated(scale, minimum), scale, minimum)
        for _ in range(sweeps):
            found = self.refitted(self.swept(found), found.scale, found.minimum)
        return Fitted(*(values.mT for values in (found.codes, found.scale, found.minimum)))

    def compensated(self, scale: Tensor, minimum: Tensor) -> Tensor:
        """Returns codes by GPTQ. [n, in, out]"""
        order = self.hessian.order
        codes = Rounding(scale, minimum, order // self.size, self.top).made(
            picked(self.weights, order), self.hessian.factor
        )
        return picked(codes, order.argsort(dim=1))

    def swept(self, of: _Codes) -> Tensor:
        """Returns codes, each set once, in order, to its best value with all others as they are. [n, in, out]"""
        n, inputs, _ = self.weights.shape
        group = (torch.arange(inputs) // self.size).expand(n, -1)
        rounding = Rounding(of.scale, of.minimum, group, self.top)
        return rounding.improved(of.pull.clone(), self.products, of.codes)

    def refitted(self, codes: Tensor, scale: Tensor, minimum: Tensor) -> _Codes:
        """Returns the codes with scale and minimum of each row by least squares under the hessian, or with the given
        ones where these are better in float16."""
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
        """Returns W - Q. [n, in, out]"""
        return self.weights - (codes * self._wide(scale) + self._wide(minimum))

    def _by_group(self, values: Tensor) -> Tensor:
        """Returns values [n, in, ...] summed over the inputs of each group. [n, groups, ...]"""
        return torch.stack([part.sum(1) for part in torch.split(values, self.size, 1)], 1)

    def _wide(self, per_group: Tensor) -> Tensor:
        """Returns values per group [n, groups, out] for each input [n, in, out]; of one group as they are."""
        if per_group.shape[1] == 1:
            return per_group
        return per_group.repeat_interleave(self.size, dim=1)[:, : self.weights.shape[1]]


def _row_bytes(in_features: int, size: int) -> int:
    """Returns the bytes of memory that a row takes while its problem is solved."""
    return _COPIES * 4 * in_features + _GRID_COPIES * (2 * n_groups(in_features, size)) ** 2


def _least_squares(grid: Tensor, aim: Tensor) -> Tensor:
    """Returns the solutions [..., k] of the normal equations of rows: grid [..., k, k], aim [..., k]."""
    size = grid.shape[-1]
    ridge = 1e-9 * grid.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None] * torch.eye(size)
    found: Tensor = torch.linalg.solve(grid.double() + ridge, aim.double())
    return found.float()
