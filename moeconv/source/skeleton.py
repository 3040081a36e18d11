"""A decoder whose weights are not in memory: tensors outside its layers stay, a layer is filled in while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from moeconv.source.archs import Description, Family
from moeconv.source.archs.description import Source
from moeconv.source.archs.weights import Rows, put_tables, tensor_of
from moeconv.source.outline import CheckpointError
from moert.pack.model_spec import ModelSpec

Weight = Callable[[str], Tensor]
"""Canonical name → this tensor of the backbone, in any type of numbers."""


def by_layers(family: Family, spec: ModelSpec) -> bool:
    """Returns whether a model can be run layer by layer."""
    return spec.encoder is None and family.by_layers


class Skeleton:
    """A model of transformers, `model`, whose layers are filled in while they run, in float32. Experts are never
    filled: ExpertCalls gets their weights from its supply. `weight` is called each time that a layer is filled."""

    def __init__(
        self, family: Family, config_dir: Path, description: Description, weight: Weight, rows: Rows
    ) -> None:  # fmt: skip
        """`rows`: of tables that stay on the drive. Raises CheckpointError for a model that can't be run by its
        layers."""
        if not by_layers(family, description.spec):
            raise CheckpointError(
                f"{config_dir}: a {family.model_type} model can't be run layer by layer: it must fit the memory whole"
            )
        self.family, self.description, self.weight = family, description, weight
        with _without_weights():
            self.model = cast("Any", family.empty(config_dir))
        put_tables(self.model, description, rows)
        tower: Any = family.tower(self.model, "decoder")
        self.layers: list[nn.Module] = list(getattr(tower, family.layer_list))
        self._experts = {
            part for at in description.spec.moe_layers() for part in family.experts_module(self.model, at).modules()
        }
        inside = {self._name(layer) for layer in self.layers}
        ends = {self._name(self.model.get_input_embeddings()), self._name(self.model.get_output_embeddings())}
        self._fill(
            (name, module)
            for name, module in self.model.named_modules()
            if not any(name == part or name.startswith(f"{part}.") for part in inside | ends)
        )

    @contextmanager
    def layer(self, at: int) -> Iterator[None]:
        """Fills in a layer's weights, but for its experts, for the length of a with block."""
        with self._filled(self.layers[at]):
            yield

    @contextmanager
    def embedding(self) -> Iterator[None]:
        with self._filled(self.model.get_input_embeddings()):
            yield

    @contextmanager
    def head(self) -> Iterator[None]:
        with self._filled(self.model.get_output_embeddings()):
            yield

    @contextmanager
    def _filled(self, part: nn.Module) -> Iterator[None]:
        name = self._name(part)
        modules = [(f"{name}.{own}" if own else name, module) for own, module in part.named_modules()]
        self._fill(modules)
        try:
            yield
        finally:
            for _, module in modules:
                for own, parameter in module.named_parameters(recurse=False):
                    module._parameters[own] = _promise(parameter)

    def _fill(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        """Fills in the own parameters and stored buffers of these modules, given with their names in the model."""
        parents = set()
        for name, module in modules:
            if module in self._experts:
                continue
            parents.add(name)
            for own, parameter in module.named_parameters(recurse=False):
                if parameter.is_meta:
                    filled = torch.empty(parameter.shape, dtype=torch.float32)
                    module._parameters[own] = nn.Parameter(filled, requires_grad=False)
        with torch.no_grad():
            for canonical, place in self._places():
                if place.name.rpartition(".")[0] in parents:
                    place.write(tensor_of(self.model, place.name), self.weight(canonical).float())

    def _places(self) -> Iterator[tuple[str, Source]]:
        """Yields each tensor's canonical name and its place in the model, for copies of other tensors too."""
        copies = dict(self.description.repeated)
        for canonical, place in self.description.parameters.items():
            yield canonical, place
            if place.name in copies:
                yield canonical, replace(place, name=copies[place.name])

    def _name(self, module: nn.Module) -> str:
        found: str = next(name for name, one in self.model.named_modules() if one is module)
        return found


@contextmanager
def _without_weights() -> Iterator[None]:
    """Makes modules that are built inside a with block have parameters without memory; buffers are made as always."""
    register = nn.Module.register_parameter

    def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, None if parameter is None else _promise(parameter))

    nn.Module.register_parameter = registered  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _promise(parameter: nn.Parameter) -> nn.Parameter:
    """Returns a parameter of the same shape, without numbers."""
    return nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
