"""Codes for the inputs of matrices one after the other, each making up for the errors of those before it.

In C where there is the library of moert's kernels, in torch where there is none. Matrices are turned here,
[n, in, out].
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from moeconv.quantizers.feedback import by_blocks, one_by_one, picked
from moert.kernels.coding import CodeInputs, Grid, code_inputs


class Rounding:
    """Codes from 0 to `top` on a grid: scale and minimum [n, groups, out], and which of the groups an input has
    [n, in]."""

    def __init__(self, scale: Tensor, minimum: Tensor, group: Tensor, top: int) -> None:
        self.scale, self.minimum, self.group, self.top = scale.contiguous(), minimum.contiguous(), group, top

    def made(self, wanted: Tensor, factor: Tensor) -> Tensor:
        """By GPTQ, for weights `wanted` [n, in, out], which change, and U [n, in, in] (Hessian.factor)."""
        codes = torch.empty_like(wanted)
        self._code(wanted, factor, codes, improves=False)
        return codes

    def improved(self, pull: Tensor, products: Tensor, codes: Tensor) -> Tensor:
        """Every code once, in order, set to what is best with all others as they are; `pull` [n, in, out], minus half
        the gradient of the loss, changes. products [n, in, in]."""
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
