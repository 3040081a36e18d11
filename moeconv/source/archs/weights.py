"""Writing weights of the backbone, by their canonical names, into a loaded model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from moeconv.source.archs.description import Description


def fill_backbone(model: Any, description: Description, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Writes each tensor to its place in the model, and to every copy that the model keeps."""
    places = description.parameters
    with torch.no_grad():
        for canonical, weight in weights:
            if canonical in places:  # the others the model computes by itself
                place = places[canonical]
                place.write(tensor_of(model, place.name), weight)
        for stored, copy in description.repeated:
            model.get_parameter(copy).copy_(model.get_parameter(stored))


def tensor_of(model: Any, name: str) -> Tensor:
    """Returns a parameter or buffer of the model."""
    module, _, last = name.rpartition(".")
    found: Tensor = getattr(model.get_submodule(module), last)
    return found.detach()


def parameter(model: Any, description: Description, name: str) -> Tensor:
    """Returns the model's present tensor of this canonical name."""

    def fetch(name: str, index: int | None) -> Tensor:
        found = tensor_of(model, name)
        return found if index is None else found[index]

    return description.parameters[name].read(fetch, description.spec.tensors[name].shape)
