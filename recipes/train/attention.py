"""Attention in cache-sized pieces with a hand-written gradient, for training on a CPU.

Registered with transformers under the name ``sliced``; takes an additive mask and, for T5-like models, a learnt
position bias.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.modeling_utils import AttentionInterface

from recipes.train.precision import COMPUTE_DTYPE

NAME = "sliced"
PIECE = 800_000  # scores that exist at a time


def _pieces(q: Tensor, k: Tensor) -> list[slice]:
    """Slices of the batch so that each has about PIECE scores."""
    rows = max(1, PIECE // (q.shape[1] * q.shape[2] * k.shape[2]))
    return [slice(start, start + rows) for start in range(0, q.shape[0], rows)]


def _of(extra: Tensor | None, part: slice) -> Tensor | None:
    """The piece of an optional [batch or 1, heads or 1, queries, keys] tensor."""
    return extra if extra is None or extra.shape[0] == 1 else extra[part]


class SlicedAttention(torch.autograd.Function):
    """softmax(q·kᵀ·scale + bias + mask)·v.

    q, k [batch, heads, length, width], v [batch, heads, keys, its own width] → [batch, heads, queries, that width].
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None, scale: float
    ) -> Tensor:
        dtype = q.dtype
        q, k, v = ((t * scale if i == 0 else t).to(COMPUTE_DTYPE).contiguous() for i, t in enumerate((q, k, v)))
        low_bias = None if bias is None else bias.to(COMPUTE_DTYPE)
        low_mask = None if mask is None else mask.to(COMPUTE_DTYPE)
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        weights = []
        for part in _pieces(q, k):
            scores = q[part] @ k[part].mT
            for extra in (_of(low_bias, part), _of(low_mask, part)):
                if extra is not None:
                    scores += extra
            weights.append(scores.softmax(-1))
            out[part] = weights[-1] @ v[part]
        ctx.save_for_backward(q, k, v, out, *weights)
        ctx.scale, ctx.bias, ctx.dtype = scale, bias is not None and bias.requires_grad, dtype
        return out.to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        q, k, v, out, *weights = ctx.saved_tensors
        grad = grads[0].to(COMPUTE_DTYPE).contiguous()
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        grad_bias: Tensor | None = None
        inner = (grad * out).sum(-1, keepdim=True)  # [batch, heads, queries, 1]
        for part, weight in zip(_pieces(q, k), weights, strict=True):
            grad_v[part] = weight.mT @ grad[part]
            scores = (grad[part] @ v[part].mT).sub_(inner[part]).mul_(weight)
            grad_q[part] = scores @ k[part]
            grad_k[part] = scores.mT @ q[part]
            if ctx.bias:
                summed = scores.sum(0, keepdim=True, dtype=torch.float32)
                grad_bias = summed if grad_bias is None else grad_bias + summed
        return (
            (grad_q * ctx.scale).to(ctx.dtype),
            grad_k.to(ctx.dtype),
            grad_v.to(ctx.dtype),
            grad_bias,
            None,
            None,
        )


def sliced_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention function in the form that transformers calls; the result is [batch, queries, heads, width]."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = SlicedAttention.apply(query, key, value, position_bias, attention_mask, scale)
    return out.transpose(1, 2), None


def register() -> str:
    """Make ``sliced`` known to transformers; returns the name."""
    AttentionInterface.register(NAME, sliced_attention)
    AttentionMaskInterface.register(NAME, eager_mask)
    return NAME
