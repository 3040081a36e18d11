"""Cross-entropy of a large output layer, a few rows of logits at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recipes.train.precision import COMPUTE_DTYPE

CHUNK_LOGITS = 1 << 21  # logits that exist at a time


class ChunkedCross(torch.autograd.Function):
    """Mean cross-entropy of ``hidden @ weight.T``; all logits never exist at once, gradients are made on the way.

    hidden [rows, d], weight [vocab, d], labels [rows] → scalar, nats a token. The value is the plain cross-entropy (in
    COMPUTE_DTYPE); the gradient is that of the label-smoothed one.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, smoothing: float) -> Tensor:
        low, rows, vocab = weight.to(COMPUTE_DTYPE), hidden.shape[0], weight.shape[0]
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        plain, chunk = 0.0, max(1, CHUNK_LOGITS // vocab)
        for start in range(0, rows, chunk):
            part, label = hidden[start : start + chunk].to(COMPUTE_DTYPE), labels[start : start + chunk]
            place = torch.arange(len(label))
            grad = (part @ low.t()).softmax(-1)
            plain -= float(grad[place, label].float().clamp_min(1e-30).log().sum())
            grad[place, label] -= 1 - smoothing
            if smoothing:
                grad -= smoothing / vocab
            grad_hidden[start : start + chunk] = grad @ low
            if grad_weight is not None:
                grad_weight += grad.t() @ part
        ctx.save_for_backward(grad_hidden.div_(rows), None if grad_weight is None else grad_weight.div_(rows))
        return hidden.new_tensor(plain / rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grads[0], None if grad_weight is None else grad_weight * grads[0], None, None
