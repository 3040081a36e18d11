"""Which tensors a checkpoint of a published shape has: names, shapes and types as they were published."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch

from moeconv.source.archs import Description
from moeconv.source.archs.description import FP8_SCALES, Source
from moeconv.source.outline import CONFIG, Outline
from recipes.bench.sized import SMOKE
from tests.published import PUBLISHED

MODELS = {
    "olmoe": "OLMoE-1B-7B",
    "mixtral": "Mixtral-8x7B",
    "qwen3": "Qwen3-30B-A3B",
    "gpt-oss": "gpt-oss-20b",
    "deepseek-v3": "DeepSeek-V3",
    "opt": "OPT-1.3B",
}
"""As the command calls them → in tests/published.py."""

Kind = Literal[
    "embed", "position", "head", "router", "choice bias", "norm", "last norm", "inner norm", "bias", "written", "into",
    "attended", "out of", "expert", "threshold", "fired",
]  # fmt: skip
"""What a tensor does. "into": matrices that read the residual stream or something inside a layer; "attended", "out of"
and "expert": those that write into it, behind attention, in networks for all tokens and in experts; "written": biases
of these; "inner norm": of queries, keys and latents; "bias": all other biases, and sinks; "threshold": that before a
relu without a gate, below which a neuron stays silent; "fired" takes the place of "expert" behind it."""
_MATRICES = ("into", "attended", "out of", "expert")
_SILENT: Mapping[str, Kind] = {"expert.up.bias": "threshold", "expert.down.weight": "fired"}
Form = Literal["fp8", "fp8 scales", "fp4", "fp4 scales"]

_NARROW = {
    "num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256,
    "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip
"""Sizes in the place of published ones, where only shown is that a bench runs."""
_BLOCK, _GROUP = 128, 32
_DTYPES = {"fp8": torch.float8_e4m3fn, "fp8 scales": torch.float32, "fp4": torch.uint8, "fp4 scales": torch.uint8}


@dataclass(frozen=True)
class Stored:
    """One tensor. `form`: how its numbers are coded, None for bfloat16; `inputs`: of a matrix, how many numbers a row
    of it has once they are decoded, otherwise 1."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    form: Form | None = None
    inputs: int = 1

    @property
    def dtype(self) -> torch.dtype:
        """The choice biases of DeepSeek are float32, as published."""
        if self.form is None:
            return torch.float32 if self.kind == "choice bias" else torch.bfloat16
        return _DTYPES[self.form]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def config_of(model: str, layers: int | None = None) -> dict[str, Any]:
    """A key of MODELS, cut after so many layers; None for all. Raises ValueError for more than it has."""
    config = dict(PUBLISHED[MODELS[model]])
    if SMOKE:
        config |= {name: value for name, value in _NARROW.items() if name in config}
    has = config["num_hidden_layers"]
    least = config.get("first_k_dense_replace", 0) + 1
    if layers is not None and not least <= layers <= has:
        raise ValueError(f"{model} is made with {least} to {has} layers, not {layers}")
    config["num_hidden_layers"] = layers or has
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][: config["num_hidden_layers"]]
    return config


def described(config: Mapping[str, Any]) -> Description:
    """What moeconv makes of a config.json. Raises CheckpointError for what can't be converted."""
    return Outline.of(config, {}, Path(CONFIG)).description


def stored(config: Mapping[str, Any]) -> dict[str, Stored]:
    """All tensors of a checkpoint with this config.json, in the order of the layers; those that no pack takes (what
    predicts several tokens at once) are left out. Raises CheckpointError for what can't be converted."""
    description = described(config)
    fp8 = (config.get("quantization_config") or {}).get("quant_method") == "fp8"
    found: dict[str, Stored] = {}
    ffn = description.spec.moe.ffn
    silent = _SILENT if ffn.act.name == "relu" and ffn.bias and not ffn.gated else {}
    for canonical, source, shape in _sources(description):
        kind = silent.get(canonical) or _kind(canonical)
        for each in _parts(source, source.shape or shape, kind, description, fp8):
            found[each.name] = each
    return dict(sorted(found.items(), key=lambda item: _place(item[0])))


def _sources(description: Description) -> Iterator[tuple[str, Source, tuple[int, ...]]]:
    """Canonical names, where they come from, and the pack's shape."""
    spec = description.spec
    for name, tensor in spec.tensors.items():
        if name in description.backbone:
            yield name, description.backbone[name], tensor.shape
    for key in spec.expert_keys():
        for projection in spec.moe.ffn.projections:
            shape = spec.projection_shape(projection)
            yield f"expert.{projection}.weight", description.experts(key, projection), shape
            if description.biases is not None:
                yield f"expert.{projection}.bias", description.biases(key, projection), shape[:1]


def _parts(source: Source, shape: tuple[int, ...], kind: Kind, description: Description, fp8: bool) -> Iterator[Stored]:
    """The tensors that one source is made of; one index of the first dimension becomes all experts of a layer."""
    stack = () if source.index is None else (description.spec.moe.n,)
    inputs = shape[-1] if len(shape) > 1 else 1
    if source.form == "mxfp4":
        groups = (*stack, shape[0], shape[1] // _GROUP)
        blocks, scales = source.names
        yield Stored(blocks, (*groups, _GROUP // 2), kind, "fp4", inputs)
        yield Stored(scales, groups, kind, "fp4 scales", inputs)
    elif fp8 and kind in _MATRICES:
        yield Stored(source.name, shape, kind, "fp8", inputs)
        blocks_each_way = (-(-shape[0] // _BLOCK), -(-shape[1] // _BLOCK))
        yield Stored(source.name + FP8_SCALES, blocks_each_way, kind, "fp8 scales", inputs)
    else:
        yield Stored(source.name, (*stack, *shape), kind, None, inputs)


def _kind(canonical: str) -> Kind:
    first = canonical.partition(".")[0]
    part = canonical.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
    if first in ("embed", "head"):
        return "embed" if first == "embed" else "head"
    if part == "positions":
        return "position"
    if canonical.endswith(".bias"):
        return "written" if part in ("o", "down") else "bias"
    if canonical == "decoder.norm.weight":
        return "last norm"
    if part in ("mixer_norm", "ffn_norm"):
        return "norm"
    if part.endswith("norm"):
        return "inner norm"
    if part == "choice_bias":
        return "choice bias"
    if part == "sinks":
        return "bias"
    if part == "router":
        return "router"
    if part == "down":
        return "expert" if first == "expert" else "out of"
    return "attended" if part == "o" else "into"


def _place(name: str) -> tuple[int, int, int, str]:
    """The embedding, then the layers with what all tokens need and then the experts by number, then the rest."""
    layer = re.search(r"\.layers\.(\d+)\.", name)
    expert = re.search(r"\.experts\.(\d+)\.", name)
    if layer is None:
        return (-1 if "embed" in name else 1 << 20), 0, 0, name
    return int(layer[1]), int(".experts" in name), int(expert[1]) if expert else 0, name
