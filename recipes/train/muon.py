"""Muon: momentum whose matrices are orthogonalised before they are applied (Jordan et al., 2024).

The step is scaled by 0.2·√max(rows, columns), so that rates of AdamW carry over (Liu et al., 2025, arXiv 2502.16982).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recipes.train.precision import COMPUTE_DTYPE

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


def orthogonalise(matrices: Tensor) -> Tensor:
    """Nearly orthogonal matrices with the same singular vectors; [batch, rows, columns] → the same."""
    a, b, c = COEFFICIENTS
    wide = matrices.shape[-2] <= matrices.shape[-1]
    x = (matrices if wide else matrices.mT).to(COMPUTE_DTYPE)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)  # (a + b·gram + c·gram²)·x
    return (x if wide else x.mT).to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """Muon for parameters of shape [rows, columns] or [experts, rows, columns].

    A group's ``parts`` says of how many stacked matrices the rows consist (2 for gate and up in one parameter).
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, momentum: float = 0.95):
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": 0.0, "parts": 1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Nesterov momentum, orthogonalisation, decoupled weight decay."""
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        buffer = state["momentum"]
        buffer.lerp_(parameter.grad, 1 - group["momentum"])
        direction = parameter.grad.lerp(buffer, group["momentum"])
        rows, columns = parameter.shape[-2] // group["parts"], parameter.shape[-1]
        direction = orthogonalise(direction.reshape(-1, rows, columns)).view_as(parameter)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(direction, alpha=-group["lr"] * 0.2 * max(rows, columns) ** 0.5)
