"""How unevenly routers spread tokens over experts: of the reference models, and of models of published shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Choices = npt.NDArray[np.int64]  # [tokens, top_k], of one layer


@dataclass(frozen=True)
class Skew:
    """Of one layer. `busiest`: what the most used expert gets, in even shares; `quarter`: share of all choices that
    the most used quarter of the experts gets; `unused`: share of the experts that no token goes to."""

    busiest: float
    quarter: float
    unused: float


def skew(choices: Choices, num_experts: int) -> Skew:
    counts = np.sort(np.bincount(choices.ravel(), minlength=num_experts))[::-1]
    quarter = counts[: -(-num_experts // 4)].sum() / counts.sum()
    return Skew(counts[0] / counts.mean(), float(quarter), float((counts == 0).mean()))


@contextmanager
def heard(model: Any) -> Iterator[list[Choices]]:
    """What the routers of a model of transformers select, by layer, when it is run on one text within the block."""
    found: list[Choices] = []
    routers = [module for name, module in model.named_modules() if name.endswith((".mlp.gate", ".mlp.router"))]

    def hear(module: Any, inputs: Any, output: Any) -> None:
        found.append(output[-1].reshape(-1, output[-1].shape[-1]).numpy())

    handles = [router.register_forward_hook(hear) for router in routers]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def of_model(model: Any, windows: Sequence[Sequence[int]], num_experts: int) -> list[Skew]:
    """Of each layer, over all windows."""
    texts = []
    for ids in windows:
        with heard(model) as choices, torch.no_grad():
            model(torch.tensor([list(ids)]))
        texts.append(choices)
    return [skew(np.concatenate(of_layer), num_experts) for of_layer in zip(*texts, strict=True)]
