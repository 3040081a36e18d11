"""Expert layers computed group by group, for training on a CPU.

Tokens are sorted by expert, each expert multiplies its contiguous slice, and the gradient is written by hand so that
no per-expert autograd graph is built. The mathematics are those of the Hugging Face layers.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from recipes.train.precision import COMPUTE_DTYPE
from recipes.train.restraint import Moments

ROUND_ROWS = 64  # groups are padded to a multiple of this, so that the matrix kernels meet few distinct shapes


def layout(flat: Tensor, experts: int) -> tuple[Tensor, list[int]]:
    """Where each choice goes in the padded, expert-sorted buffer, and where each expert's slice begins and ends.

    flat [choices] holds expert numbers; returns places [choices] and experts + 1 bounds in rows.
    """
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=experts)
    padded = (counts + ROUND_ROWS - 1) // ROUND_ROWS * ROUND_ROWS
    shift = (padded.cumsum(0) - padded) - (counts.cumsum(0) - counts)  # padding rows before each expert
    places = torch.empty_like(order)
    places[order] = torch.arange(order.numel()) + shift[flat[order]]
    return places, [0, *padded.cumsum(0).tolist()]


def _scatter(rows: Tensor, places: Tensor, size: int) -> Tensor:
    """Put rows [choices, d] at their places in a zeroed buffer [size, d]."""
    return rows.new_zeros(size, rows.shape[1]).index_copy_(0, places, rows)


def _forward_slices(x: Tensor, weight: Tensor, bounds: list[int]) -> Tensor:
    """``x[slice e] @ weight[e].T`` for every expert; x [rows, in], weight [experts, out, in] → [rows, out]."""
    out = x.new_empty(x.shape[0], weight.shape[1])
    for expert, (start, stop) in enumerate(pairwise(bounds)):
        if stop > start:
            torch.mm(x[start:stop], weight[expert].t(), out=out[start:stop])
    return out


def _input_gradient(grad: Tensor, weight: Tensor, bounds: list[int]) -> Tensor:
    """``grad[slice e] @ weight[e]``; grad [rows, out], weight [experts, out, in] → [rows, in]."""
    out = grad.new_empty(grad.shape[0], weight.shape[2])
    for expert, (start, stop) in enumerate(pairwise(bounds)):
        if stop > start:
            torch.mm(grad[start:stop], weight[expert], out=out[start:stop])
    return out


def _weight_gradient(grad: Tensor, x: Tensor, bounds: list[int]) -> Tensor:
    """``grad[slice e].T @ x[slice e]`` → [experts, out, in]; zero for experts without rows."""
    out = grad.new_zeros(len(bounds) - 1, grad.shape[1], x.shape[1])
    for expert, (start, stop) in enumerate(pairwise(bounds)):
        if stop > start:
            torch.mm(grad[start:stop].t(), x[start:stop], out=out[expert])
    return out


def _activate(up: Tensor, gated: bool) -> Tensor:
    """ReLU, or SiLU(gate) · up when the projection holds gate and up side by side."""
    if not gated:
        return F.relu(up)
    gate, value = up.chunk(2, dim=-1)
    return F.silu(gate) * value


def _activate_gradient(grad: Tensor, up: Tensor, gated: bool) -> Tensor:
    """Gradient of ``_activate`` with respect to ``up``."""
    if not gated:
        return grad * (up > 0)
    gate, value = up.chunk(2, dim=-1)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    return torch.cat([grad * value * (sigmoid + silu * (1 - sigmoid)), grad * silu], dim=-1)


def _forward(
    ctx: Any, x: Tensor, scores: Tensor, index: Tensor, up: Tensor, down: Tensor, gated: bool
) -> tuple[Tensor, Tensor]:
    """What the experts give, see GroupedExperts, and what enters down [padded rows, h]: zero in rows between."""
    tokens, k = index.shape
    places, bounds = layout(index.reshape(-1), up.shape[0])
    up_low, down_low = up.to(COMPUTE_DTYPE), down.to(COMPUTE_DTYPE)
    low = x.to(COMPUTE_DTYPE)
    rows = _scatter(low.repeat_interleave(k, 0) if k > 1 else low, places, bounds[-1])
    wide = _forward_slices(rows, up_low, bounds)
    hidden = _activate(wide, gated)
    result = _forward_slices(hidden, down_low, bounds).index_select(0, places).view(tokens, k, -1)
    ctx.save_for_backward(rows, wide, hidden, result, scores, places, up_low, down_low)
    ctx.bounds, ctx.gated, ctx.k, ctx.dtype = bounds, gated, k, x.dtype
    return (result * scores.unsqueeze(-1).to(COMPUTE_DTYPE)).sum(1, dtype=torch.float32).to(x.dtype), hidden


def _backward(ctx: Any, given: Tensor, beside: Callable[[Tensor], Tensor] | None) -> tuple[Tensor | None, ...]:
    """Gradients of what ``_forward`` got but ``gated``; ``beside`` gives more of the gradient of what enters down."""
    rows, wide, hidden, result, scores, places, up_low, down_low = ctx.saved_tensors
    grad = given.unsqueeze(1)  # [tokens, 1, d]
    grad_scores = (result * grad).sum(-1).to(scores.dtype)
    spread = _scatter((grad * scores.unsqueeze(-1)).to(COMPUTE_DTYPE).flatten(0, 1), places, ctx.bounds[-1])
    grad_down = _weight_gradient(spread, hidden, ctx.bounds)
    grad_hidden = _input_gradient(spread, down_low, ctx.bounds)
    if beside is not None:
        grad_hidden += beside(hidden)
    grad_wide = _activate_gradient(grad_hidden, wide, ctx.gated)
    grad_up = _weight_gradient(grad_wide, rows, ctx.bounds)
    grad_rows = _input_gradient(grad_wide, up_low, ctx.bounds).index_select(0, places)
    grad_x = grad_rows.view(-1, ctx.k, grad_rows.shape[-1]).sum(1, dtype=torch.float32).to(ctx.dtype)
    return grad_x, grad_scores, None, grad_up.float(), grad_down.float()


class GroupedExperts(torch.autograd.Function):
    """Weighted sum over the chosen experts' outputs.

    x [tokens, d], scores [tokens, k], index [tokens, k], up [experts, u, d], down [experts, d, h] → [tokens, d];
    u = h for ReLU experts, u = 2·h for gated ones.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, scores: Tensor, index: Tensor, up: Tensor, down: Tensor, gated: bool) -> Tensor:
        return _forward(ctx, x, scores, index, up, down, gated)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *_backward(ctx, grads[0], None), None


class RestrainedExperts(torch.autograd.Function):
    """ReLU experts: the same, the spread of their activations (see restraint.Moments) and the share not zero."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scores: Tensor, index: Tensor, up: Tensor, down: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        out, hidden = _forward(ctx, x, scores, index, up, down, False)
        ctx.moments = Moments.of(hidden, index.numel() * hidden.shape[1])
        firing = (hidden > 0).sum() / ctx.moments.count
        ctx.mark_non_differentiable(firing)
        return out, torch.tensor(ctx.moments.spread), firing

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _backward(ctx, grads[0], lambda hidden: ctx.moments.slope(hidden).mul_(float(grads[1])))


def balance_loss(probabilities: Tensor, index: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Load-balancing loss of one layer and each expert's share of the choices.

    probabilities [tokens, experts], index [tokens, k], mask [tokens] (true where a token counts). The loss is
    experts · Σ share · mean probability: 1 when even. Switch Transformers, formula 4, with k choices a token.
    """
    experts = probabilities.shape[-1]
    if mask is not None:
        probabilities, index = probabilities[mask], index[mask]
    share = torch.bincount(index.reshape(-1), minlength=experts).float() / max(index.numel(), 1)
    return experts * (share * probabilities.mean(0)).sum(), share
