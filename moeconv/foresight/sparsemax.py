"""SparseMax: the nearest point of the simplex, most of whose numbers are 0 (Martins and Astudillo 2016)."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor


class _Sparsemax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        ordered = scores.sort(dim=-1, descending=True).values
        sums, counts = ordered.cumsum(-1), torch.arange(1, scores.shape[-1] + 1, dtype=scores.dtype)
        inside = 1 + counts * ordered > sums
        size = inside.sum(-1, keepdim=True)
        threshold = (sums.gather(-1, size - 1) - 1) / size
        shares = (scores - threshold).clamp(min=0)
        ctx.save_for_backward(shares)
        return shares

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (shares,) = ctx.saved_tensors
        support = shares > 0
        kept = gradients[0] * support
        mean = kept.sum(-1, keepdim=True) / support.sum(-1, keepdim=True)
        return cast("Tensor", (kept - mean) * support)


def sparsemax(scores: Tensor) -> Tensor:
    """scores [..., n], -infinity for what may have no share but not for all → shares [..., n] that sum to 1."""
    return cast("Tensor", _Sparsemax.apply(scores))  # type: ignore[no-untyped-call]
