"""The network of a predictor of neurons in torch, layer by layer: scores of low rank, to be trained and to name by."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from moeconv.foresight.firings import LayerFirings
from moeconv.foresight.halves import half
from moeconv.source.experts import Biases, Weights
from moert.pack.neurons import F16, LayerPredictor

_CHUNK = 4096  # tokens
_RIDGE = 1e-4
"""Of the mean variance of the inputs, added to all: some may never vary."""
_SURE = 0.05
"""Of a neuron's own spread: what scores of low rank leave out of it is taken to be no less."""
_LOGIT = 1.7
"""sigmoid(1.7 z) is about the normal distribution's share below z."""


class LayerNetwork(nn.Module):
    """Of one layer: score of neuron i of expert e = heads[e, i] · (compress · x) + bias[e, i]; compress [r, features],
    heads [experts, d_ff, r], bias [experts, d_ff]."""

    def __init__(self, compress: Tensor, heads: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.compress, self.heads, self.bias = map(nn.Parameter, (compress, heads, bias))

    def compressed(self, x: Tensor) -> Tensor:
        """x [rows, features] → [rows, r]"""
        return x @ self.compress.T

    def scores(self, expert: int, compressed: Tensor) -> Tensor:
        """compressed [rows, r] → [rows, d_ff]"""
        return compressed @ self.heads[expert].T + self.bias[expert]

    @classmethod
    def of(cls, layer: LayerPredictor) -> LayerNetwork:
        """Of what is stored."""
        found = cls(_single(layer.compress), _single(layer.heads), torch.tensor(layer.bias))
        return found.requires_grad_(False)

    def stored(self) -> tuple[F16, F16, npt.NDArray[np.float32]]:
        """compress, heads and bias as a LayerPredictor has them."""
        return half(self.compress), half(self.heads), self.bias.detach().numpy().copy()


def _single(values: F16) -> Tensor:
    return torch.from_numpy(values.astype(np.float32))


def begun(rank: int, first: list[tuple[Weights, Biases]], firings: LayerFirings) -> LayerNetwork:
    """A network before it is trained: of all of rank `rank`, the one that says best, on the whole of a layer's experts,
    what their first matrices give, whose sign says what fires. `first`: the matrices and biases of each expert.

    With x of mean m and covariance L·Lᵀ that is by the singular vectors of the stacked W·L; scores are in units of what
    is left out, so that they are logits.
    """
    mean, covariance = _moments(firings)
    lower = torch.linalg.cholesky(covariance)
    stacked = [weights[0].double() @ lower for weights, _ in first]
    gram = torch.stack([matrix.T @ matrix for matrix in stacked]).sum(0)
    chosen = torch.linalg.eigh(gram).eigenvectors[:, -rank:].flip(1)  # [features, r]
    compress = torch.linalg.solve_triangular(lower.T, chosen, upper=True).T
    heads, bias = [], []
    for matrix, (weights, biases) in zip(stacked, first, strict=True):
        head = matrix @ chosen
        whole, kept = matrix.square().sum(1), head.square().sum(1)
        left_out = (whole - kept).clamp(min=0).maximum(whole * _SURE**2).sqrt().clamp(min=1e-9)
        unit = _LOGIT / left_out
        constant = weights[0].double() @ mean - head @ (compress @ mean)
        bias.append((constant + (biases[0].double() if biases else 0)) * unit)
        heads.append(head * unit[:, None])
    return LayerNetwork(compress.float().contiguous(), torch.stack(heads).float(), torch.stack(bias).float())


def _moments(firings: LayerFirings) -> tuple[Tensor, Tensor]:
    """Mean and covariance of what enters a layer's experts."""
    features = firings.x.shape[1]
    total, products = torch.zeros(features, dtype=torch.double), torch.zeros((features, features), dtype=torch.double)
    for start in range(0, len(firings), _CHUNK):
        x = torch.from_numpy(firings.x[start : start + _CHUNK].astype(np.float64))
        total += x.sum(0)
        products += x.T @ x
    mean = total / len(firings)
    covariance = products / len(firings) - torch.outer(mean, mean)
    ridge = _RIDGE * covariance.diagonal().mean().clamp(min=1e-9)
    return mean, covariance + ridge * torch.eye(features, dtype=torch.double)


def in_blocks(named: Tensor, per_block: int) -> Tensor:
    """named [rows, d_ff] → which blocks of so many neurons hold one that is named. [rows, blocks]"""
    padded = nn.functional.pad(named, (0, -named.shape[1] % per_block))
    return padded.view(len(named), -1, per_block).any(-1)
