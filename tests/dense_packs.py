"""Small packs whose dense matrices have widths: random codes, scales and weights, and what they stand for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from random_packs import random_biases, random_expert, write_tables
from safetensors.torch import save
from torch import Tensor

from moeconv.writer import PackWriter
from moert.kernels.backend import Stored
from moert.kernels.reference import weights
from moert.pack.codec import F32, pack_codes
from moert.pack.manifest import BACKBONE, Dense, Quantization, dense_width, stored_tensors
from moert.pack.model_spec import ModelSpec
from tests.shapes import shapes_of

Tensors = dict[str, Tensor]
"""What is written: torch has all types that a file may hold."""
GROUP = 4


def dense_quantization(bits: Mapping[str, int], dtype16: str = "BF16") -> Quantization:
    return Quantization("group", GROUP, dtype16, 0, Dense("group", GROUP, dict(bits)))


def write_dense_pack(
    out: Path, spec: ModelSpec, quantization: Quantization, change: Callable[[Tensors], object] = lambda tensors: None
) -> Tensors:
    """Returns what was put into the backbone; `change` may alter it first."""
    tensors = random_backbone(spec, quantization)
    change(tensors)
    writer = PackWriter(out, spec, quantization, "dense")
    for key in spec.expert_keys():
        experts = random_expert(spec, key, quantization.group_size)
        writer.write_expert(key, experts, biases=random_biases(spec, key))
    writer.write_file(BACKBONE, save(tensors))
    write_tables(writer, spec)
    writer.finish("tests", None)
    return tensors


def random_backbone(spec: ModelSpec, quantization: Quantization, seed: int = 0) -> Tensors:
    """By name in the file. What has no width is float32."""
    rng, found = np.random.default_rng(seed), {}
    types = {"F16": torch.float16, "BF16": torch.bfloat16, None: torch.float32}
    for name, parts in stored_tensors(spec, quantization).items():
        out_features, *rest = shapes_of(spec)[name]
        width = dense_width(spec, quantization.dense, name)
        for part, (dtype, shape) in parts.items():
            if part.endswith(".qweight"):
                codes = rng.integers(0, 1 << (width or 0), (out_features, *rest)).astype(np.uint8)
                found[part] = torch.from_numpy(pack_codes(codes, width or 0))
            elif part.endswith(".trellis"):
                found[part] = torch.from_numpy(rng.integers(0, 256, shape).astype(np.uint8))
            elif part.endswith(".table"):
                rows = [rng.permutation(spec.moe.n)[: rest[0]] for _ in range(out_features)]
                found[part] = torch.from_numpy(np.stack(rows).astype(np.float32))
            else:
                found[part] = torch.from_numpy(rng.normal(size=shape)).to(types[dtype])
    return found


def widened(backbone: Mapping[str, Stored]) -> dict[str, F32]:
    """What the reference computes with: all in float32."""
    return {name: weights(stored) for name, stored in backbone.items()}
