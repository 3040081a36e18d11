"""Weights of the backbone, by their canonical names, into a loaded model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from moeconv.archs import Arch
    from moert.pack.model_spec import ModelSpec


def fill_backbone(model: Any, arch: Arch, spec: ModelSpec, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Writes each tensor where the model has it, and wherever else the model keeps a copy."""
    names = arch.backbone_names(spec)
    with torch.no_grad():
        for canonical, weight in weights:
            model.get_parameter(names[canonical]).copy_(weight)
        for stored, copy in arch.equal_tensors(spec):
            model.get_parameter(copy).copy_(model.get_parameter(stored))
