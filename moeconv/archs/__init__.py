"""One small adapter per model family: its names and config on one side, canonical names and ModelSpec on the other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from moeconv.archs.errors import UnsupportedModel
from moeconv.archs.olmoe import Olmoe
from moeconv.archs.switch import SwitchTransformers
from moert.pack.model_spec import ExpertKey, ModelSpec, Stack

__all__ = ["ARCHS", "Arch", "UnsupportedModel"]


class Arch(Protocol):
    """What the converter must know of a family of Hugging Face models. `model_type` is that of config.json."""

    model_type: str
    layer_list: str

    def spec(self, config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> ModelSpec:
        """Both files as JSON objects → ModelSpec. Raises UnsupportedModel."""
        ...

    def backbone_names(self, spec: ModelSpec) -> dict[str, str]:
        """Canonical name (`moert.pack.model_spec.backbone_tensors`) → name in the checkpoint."""
        ...

    def equal_tensors(self, spec: ModelSpec) -> list[tuple[str, str]]:
        """Pairs of names in the checkpoint that a pack stores once: where both are there, they must be equal."""
        ...

    def expert_name(self, key: ExpertKey, projection: str) -> str:
        """Name in the checkpoint of one expert's "gate", "up" or "down" matrix."""
        ...

    def load(self, path: Path, dtype: torch.dtype) -> nn.Module:
        """The model as transformers runs it, in eval mode, with the one experts implementation we compare with."""
        ...

    def empty(self, config_dir: Path) -> nn.Module:
        """The same model from its config.json alone, in float32 and eval mode, with weights still to be filled in."""
        ...

    def stack_module(self, model: nn.Module, stack: Stack) -> nn.Module:
        """The module of one tower, whose list of layers is its attribute `layer_list`. Cut short to its last layers,
        it goes on from hidden states that are given to it as inputs_embeds."""
        ...

    def experts_module(self, model: nn.Module, stack: Stack, layer: int) -> nn.Module:
        """The module called as experts(x [tokens, d_model], selected, weights), see `routed`."""
        ...

    def routed(self, selected: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """What an experts module is called with → chosen int64 and weights, both [tokens, top_k]; -1 for none."""
        ...

    def expert_weight(self, model: nn.Module, key: ExpertKey, projection: str) -> Tensor:
        """A view [out, in] of the loaded parameter: writing to it changes the model."""
        ...


ARCHS: Mapping[str, Arch] = {arch.model_type: arch for arch in (SwitchTransformers(), Olmoe())}
