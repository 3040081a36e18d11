"""Products and feed-forwards with matrices in a pack's bytes, in torch: of no matrix is there ever more in floats than
a tile."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from moert.devices.torch_matrices import TorchMatrix, weights
from moert.pack.parts import Act, Ffn

TILE = 1 << 22
"""Weights that are made floats at once: 16 MiB of them."""
FEW = 16
"""Tokens up to which a product goes to the Triton kernel, on devices that have it: with more, the weights of a tile are
made once and met by all of them."""

Product = Callable[[Tensor, TorchMatrix], Tensor]


def product(x: Tensor, matrix: TorchMatrix) -> Tensor:
    """x [tokens, cols] in float32 → [tokens, rows], its bias added."""
    fused = fused_product() if x.is_cuda and len(x) <= FEW else None
    made = tiled(x, matrix) if fused is None else fused(x, matrix)
    if fused is not None and matrix.power:
        made.mul_(2.0**matrix.power)
    return made if matrix.bias is None else made.add_(matrix.bias)


def tiled(x: Tensor, matrix: TorchMatrix) -> Tensor:
    """The same by torch alone, without the bias."""
    if matrix.kind == "F32":
        return x @ matrix.data.T
    made = torch.empty((len(x), matrix.rows), dtype=torch.float32, device=x.device)
    step = rows_of_tile(matrix.cols)
    for first in range(0, matrix.rows, step):
        stop = min(first + step, matrix.rows)
        made[:, first:stop] = x @ weights(matrix, first, stop).T
    return made


def rows_of_tile(cols: int) -> int:
    return max(1, TILE // cols)


def by_head(x: Tensor, matrix: TorchMatrix) -> Tensor:
    """x [tokens, heads, in], each head of which meets a matrix of its own, [heads · out, in] one after the other →
    [tokens, heads, out]. Without a bias."""
    tokens, heads, inputs = x.shape
    out = matrix.rows // heads
    made = torch.empty((tokens, heads, out), dtype=torch.float32, device=x.device)
    step = max(1, TILE // (out * inputs))
    for first in range(0, heads, step):
        stop = min(first + step, heads)
        each = weights(matrix, first * out, stop * out).view(stop - first, out, inputs)
        made[:, first:stop] = (x[:, first:stop].transpose(0, 1) @ each.transpose(1, 2)).transpose(0, 1)
    return made


@cache
def fused_product() -> Product | None:
    """That of the Triton kernel, which comes with torch for CUDA; None where there is no Triton."""
    try:
        from moert.devices import triton_kernel
    except ImportError:
        return None
    return triton_kernel.product


def ffn(matrices: Mapping[str, TorchMatrix], x: Tensor, spec: Ffn) -> Tensor:
    """x [rows, d_model] → [rows, d_model]; see moert.pack.parts.Ffn and Act."""
    return product(_bent(matrices, x, spec), matrices["down"])


def _bent(matrices: Mapping[str, TorchMatrix], x: Tensor, spec: Ffn) -> Tensor:
    """The same before `down`: [rows, d_ff]"""
    act, limit = spec.act, math.inf if spec.act.limit is None else spec.act.limit
    up = product(x, matrices["up"])
    if "gate" not in matrices:
        return activated(act, up.clamp_(max=limit))
    gate = activated(act, product(x, matrices["gate"]).clamp_(max=limit))
    return gate.mul_(up.clamp_(-limit, limit).add_(act.plus))


def activated(act: Act, x: Tensor) -> Tensor:
    if act.name == "silu":
        return x * torch.sigmoid(act.slope * x)
    return _ACTIVATIONS[act.name](x)


_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x).square(),
    "gelu": functional.gelu,
    "gelu_new": lambda x: functional.gelu(x, approximate="tanh"),
}


class TorchNorm(NamedTuple):
    """See moert.kernels.backend.NormWeights."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float


def normed(x: Tensor, norm: TorchNorm) -> Tensor:
    """x [..., n]"""
    if norm.weight is None:
        return x
    if norm.bias is not None:
        x = x - x.mean(dim=-1, keepdim=True)
    made = x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + norm.eps) * norm.weight
    return made if norm.bias is None else made + norm.bias


def softmax(scores: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Over the last axis, in place. With `sinks`, of as many axes, that is one score more whose share is left out."""
    most = scores.amax(dim=-1, keepdim=True)
    most = most if sinks is None else torch.maximum(most, sinks)
    powers = scores.sub_(most).exp_()
    total = powers.sum(dim=-1, keepdim=True)
    if sinks is not None:
        total += torch.exp(sinks - most)
    return powers.div_(total)
