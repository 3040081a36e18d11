"""Writing weights of the backbone, by their canonical names, into a loaded model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moeconv.source.archs.description import Description

Rows = Callable[[str, Tensor], Tensor]
"""Canonical name of a table, numbers of rows [n] → these rows [n, dim]."""


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


def put_tables(model: Any, description: Description, rows: Rows) -> None:
    """Lets the model read the rows of tables that stay on the drive, in its own type of numbers."""

    def read(name: str, numbers: Tensor) -> Tensor:
        return rows(name, numbers).to(next(model.parameters()).dtype)

    for name, place in description.table_places.items():
        model.get_submodule(place).read = partial(read, name)


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


def linears_of(model: Any, description: Description, names: Iterable[str]) -> dict[str, nn.Linear]:
    """Returns those of the named matrices that a linear module of the model has, by canonical name: its inputs are the
    matrix's, in the same order."""
    found = {}
    for name in names:
        place, shape = description.parameters.get(name), description.spec.tensors[name].shape
        module = None if place is None else model.get_submodule(place.name.rpartition(".")[0])
        if place is None or type(module) is not nn.Linear or module.in_features != shape[-1]:
            continue
        numbered = torch.arange(shape[-1]).expand(module.weight.shape)
        columns = replace(place, factor=1.0, plus=0.0).read(lambda *_, numbered=numbered: numbered, shape)
        if torch.equal(columns, numbered[:1].expand(shape)):
            found[name] = module
    return found
