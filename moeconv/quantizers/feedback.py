"""What GPTQ does one input after the other, and what it knows of the inputs: used for a matrix and for its transpose.

Matrices are turned here, [n, in, out], so that what is done to one input of all rows is done to memory in one piece.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from moeconv.quantizers.quantizer import Inputs

_DAMPING = 0.01  # of the mean diagonal
_DOUBT = 0.5  # tokens for each input by which correlations are drawn to none
BLOCK, _SPAN = 32, 256  # inputs whose changes are passed on together: to the rest of a span, and to the rest


class Hessian:
    """`products` [n, in, in]: the damped mean of x xᵀ, its correlations as weak as the tokens are few."""

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
        return torch.stack([_factor(products[order][:, order]) for products, order in pairs])


def _factor(hessian: Tensor) -> Tensor:
    """H = R Rᵀ with R upper triangular, the Cholesky factor of H from behind; then U is its inverse."""
    size = len(hessian)
    root = torch.linalg.cholesky(hessian.flip(0, 1).double()).flip(0, 1)
    found: Tensor = torch.linalg.solve_triangular(root, torch.eye(size, dtype=root.dtype), upper=True)
    return found.float()


_HESSIANS: WeakKeyDictionary[Inputs, Hessian] = WeakKeyDictionary()


def hessian_of(inputs: Inputs) -> Hessian:
    """Remembered as long as the inputs are."""
    if inputs not in _HESSIANS:
        _HESSIANS[inputs] = Hessian(inputs)
    return _HESSIANS[inputs]


def one_by_one(values: Tensor, factor: Tensor, decide: Callable[[int, Tensor, Tensor], None]) -> None:
    """`decide(j, values[:, j], moved)` for one input after the other, which fills in `moved` [n, out]: that times
    factor[:, j, k] is taken from the values of every later k. values [n, in, out], factor [n, in, in]."""

    def settle(block: slice, moved: Tensor) -> None:
        for at, j in enumerate(range(block.start, block.stop)):
            later = slice(j + 1, block.stop)
            decide(j, values[:, j], moved[:, at])
            values[:, later].addcmul_(factor[:, j, later, None], moved[:, at : at + 1], value=-1)

    by_blocks(values, factor, settle)


def by_blocks(values: Tensor, factor: Tensor, settle: Callable[[slice, Tensor], None]) -> None:
    """`settle(block, moved)` for one block of inputs after the other, which fills in `moved` [n, block, out] and sees
    to it that inputs of the block feel those before them; see one_by_one."""
    size, moved = values.shape[1], torch.empty_like(values)
    for first in range(0, size, _SPAN):
        last = min(first + _SPAN, size)
        for begin in range(first, last, BLOCK):
            end = min(begin + BLOCK, last)
            settle(slice(begin, end), moved[:, begin:end])
            values[:, end:last] -= product(factor[:, begin:end, end:last].mT, moved[:, begin:end])
        values[:, last:] -= product(factor[:, first:last, last:].mT, moved[:, first:last])


def product(left: Tensor, right: Tensor) -> Tensor:
    """n products one by one, so that a result does not depend on what else is in the batch."""
    return torch.stack([a.contiguous() @ b.contiguous() for a, b in zip(left, right, strict=True)])


def picked(values: Tensor, order: Tensor) -> Tensor:
    """values [n, k, out], of each of the n those at `order` [n, m] → [n, m, out]."""
    return values.gather(1, order[..., None].expand(-1, -1, values.shape[2]))
