"""A pack loaded into the transformers model, so that other code than the runtime runs its weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from moeconv.errors import ConversionError
from moeconv.source.archs import FAMILIES, Description, Family
from moeconv.source.archs.errors import transformers_model
from moeconv.source.archs.weights import fill_backbone
from moeconv.source.experts import ExpertCalls
from moeconv.source.outline import CONFIG, GENERATION_CONFIG, MAX_JSON_BYTES, Outline, line
from moeconv.strict_json import NotJson, parse
from moert.pack.codec import times_two
from moert.pack.documents import brief
from moert.pack.manifest import BACKBONE, dense_width, quantized, stem_of, stored_tensors
from moert.pack.model_spec import ModelSpec
from moert.pack.reader import Pack, Projection, projection_weights


@dataclass(frozen=True)
class PackedModel:
    """A pack's weights, dequantised to float32, inside the transformers model of its config.json."""

    pack: Pack
    family: Family
    spec: ModelSpec
    model: Any
    calls: ExpertCalls

    @classmethod
    def open(cls, pack: Pack) -> PackedModel:
        """Raises ConversionError for a pack whose family this program does not know, or a PackError."""
        family, description = described(pack)
        with transformers_model(pack.root):
            model: Any = family.empty(pack.root)
        spec = pack.manifest.model
        backbone = backbone_weights(pack)
        fill_backbone(model, description, ((name, backbone(name)) for name in spec.tensors))
        for key in spec.expert_keys():
            body = pack.read_expert(key)
            for name, projection in pack.projections(key, body).items():
                weight = torch.from_numpy(projection_weights(projection))
                family.expert_weight(model, key, name).copy_(weight)
            for name, bias in pack.biases(key, body).items():
                family.expert_bias(model, key, name).copy_(torch.from_numpy(bias))
        return cls(pack, family, spec, model, ExpertCalls(model, family, spec))

    @property
    def layers(self) -> None:
        """None: it is in memory."""
        return None

    @property
    def stored_head(self) -> None:
        """None: a pack's head never changes."""
        return None


def described(pack: Pack) -> tuple[Family, Description]:
    """What a pack's config.json is about. Raises ConversionError for a family that this program does not know, or a
    PackError."""
    config = _object(pack, CONFIG)
    if str(config.get("model_type", "")) not in FAMILIES:
        raise ConversionError(
            f"{CONFIG} in the pack has model_type {brief(config.get('model_type'))}: not supported: convert again"
        )
    generation = _object(pack, GENERATION_CONFIG) if GENERATION_CONFIG in pack.manifest.files else {}
    outline, spec = Outline.of(config, generation, pack.root / CONFIG), pack.manifest.model
    if _shapes(outline.spec) != _shapes(spec):
        raise ConversionError(f"{CONFIG} in {pack.root} is of another model than its manifest: convert again")
    return outline.family, outline.description


def _object(pack: Pack, name: str) -> dict[str, Any]:
    """A JSON file of the pack. Raises ConversionError or a PackError."""
    entry = pack.manifest.files.get(name)
    if entry is not None and entry.nbytes > MAX_JSON_BYTES:
        raise ConversionError(f"{name} in the pack has {entry.nbytes} bytes: convert again")
    try:
        found = parse(pack.read_file(name), finite=False)
    except NotJson as error:
        raise ConversionError(f"{name} in the pack is not JSON ({error}): convert again") from None
    if not isinstance(found, dict):
        raise ConversionError(f"{name} in the pack should be a JSON object, found {brief(found)}: convert again")
    return found


def _shapes(spec: ModelSpec) -> Any:
    """What a model of it has in memory."""
    moe = spec.moe
    each = {name: spec.projection_shape(name) for name in moe.ffn.projections}
    return {name: tensor.shape for name, tensor in spec.tensors.items()}, [*spec.experts], moe.n, each, moe.ffn.bias


def backbone_of(pack: Pack) -> dict[str, Tensor]:
    """Every tensor of the pack that is not an expert's, as stored. Raises ConversionError or a PackError."""
    try:
        found = load(pack.read_file(BACKBONE))
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise ConversionError(f"{BACKBONE} in the pack can't be read ({line(error)}): convert again") from None
    manifest = pack.manifest
    for parts in stored_tensors(manifest.model, manifest.quantization).values():
        for name, (_, shape) in parts.items():
            if name not in found or tuple(found[name].shape) != tuple(shape):
                raise ConversionError(f"{BACKBONE} in the pack lacks {name} of the shape {tuple(shape)}: convert again")
    return found


def dense_projection(pack: Pack, tensors: Mapping[str, Tensor], name: str) -> Projection:
    """A matrix of the backbone that has a width, out of `backbone_of`: at 16 bits as float32. Raises PackError."""
    model, dense = pack.manifest.model, pack.manifest.quantization.dense
    assert dense is not None
    if (whole := f"{stem_of(name, dense)}.weight") in tensors:
        return times_two(tensors[whole].float().numpy(), dense.power(name))
    return quantized(model, dense, name, model.tensors[name].shape[1], lambda part: tensors[part].numpy())


def backbone_weights(pack: Pack) -> Callable[[str], Tensor]:
    """Canonical name → float32 weights of that tensor of the backbone, which is read at once and kept as it is stored.
    Raises ConversionError or a PackError."""
    tensors, manifest = backbone_of(pack), pack.manifest

    def weight(name: str) -> Tensor:
        if dense_width(manifest.model, manifest.quantization.dense, name) is None:
            return tensors[name].float()
        return torch.from_numpy(projection_weights(dense_projection(pack, tensors, name)))

    return weight
