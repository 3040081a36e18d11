"""A pack as the model that transformers runs: what the pack says, judged by code that did not write it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from moeconv.archs import ARCHS, Arch
from moeconv.errors import ConversionError
from moeconv.scorers.experts import ExpertCalls
from moert.pack.manifest import BACKBONE
from moert.pack.model_spec import ModelSpec
from moert.pack.reader import Pack, projection_weights


@dataclass(frozen=True)
class PackedModel:
    """A pack's weights, dequantised to float32, inside the transformers model of its config.json."""

    pack: Pack
    arch: Arch
    spec: ModelSpec
    model: Any
    calls: ExpertCalls

    @classmethod
    def open(cls, pack: Pack) -> PackedModel:
        """Raises ConversionError for a pack whose family this program does not know, or a PackError."""
        config = json.loads(pack.read_file("config.json"))
        arch = ARCHS.get(config.get("model_type", ""))
        if arch is None:
            raise ConversionError(f"config.json in the pack has model_type {config.get('model_type')!r}: not supported")
        model: Any = arch.empty(pack.root)
        spec = pack.manifest.model
        _load_backbone(model, arch, spec, pack)
        for key in spec.expert_keys():
            projections = pack.projections(key, pack.read_expert(key))
            for name, projection in projections.items():
                weight = torch.from_numpy(projection_weights(projection))
                arch.expert_weight(model, key, name).copy_(weight)
        return cls(pack, arch, spec, model, ExpertCalls(model, arch, spec))


def _load_backbone(model: Any, arch: Arch, spec: ModelSpec, pack: Pack) -> None:
    tensors = backbone_of(pack)
    for canonical, name in arch.backbone_names(spec).items():
        model.get_parameter(name).copy_(tensors[canonical].float())
    for stored, copy in arch.equal_tensors(spec):
        model.get_parameter(copy).copy_(model.get_parameter(stored))


def backbone_of(pack: Pack) -> dict[str, Tensor]:
    """Every tensor of the pack that is not an expert's, as stored. Raises ConversionError or a PackError."""
    try:
        return load(pack.read_file(BACKBONE))
    except SafetensorError as error:
        raise ConversionError(f"{BACKBONE} in the pack can't be read ({error}): convert again") from None
