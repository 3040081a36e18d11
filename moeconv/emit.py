"""Checkpoint and widths → pack: one expert in memory at a time, and a killed run goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from moeconv.checkpoint import F32, Checkpoint, CheckpointError
from moeconv.quantizers import Quantizer
from moert.pack.codec import WIDTHS, QuantizedMatrix
from moert.pack.manifest import BACKBONE, Manifest, Quality, Quantization
from moert.pack.model_spec import ExpertKey, backbone_tensors
from moert.pack.reader import Projection
from moert.pack.writer import PackWriter

_MAX_F16 = 65504.0

Progress = Callable[[int, int], None]
"""progress(done, total): experts written so far, of all."""


def emit(
    checkpoint: Checkpoint,
    widths: Mapping[ExpertKey, Mapping[str, int]],
    quantizer: Quantizer,
    out: Path,
    *,
    seed: int,
    creator: str,
    importance: Mapping[ExpertKey, float] | None = None,
    quality: Quality | None = None,
    extra_files: Mapping[str, bytes] | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """Writes the pack at `out`: expert → projection → bits as `widths` says, everything else as it was.

    `extra_files` (relative path → contents) go in as they are. Raises CheckpointError (unreadable source, values
    that 16 bits can't hold), WriteFailed, or ValueError for widths that don't cover the model's experts.
    """
    _check_widths(checkpoint, widths)
    quantization = Quantization(quantizer.name, quantizer.group_size, _dtype16(checkpoint), seed)
    writer = PackWriter(out, checkpoint.spec, quantization, _fingerprint(checkpoint, widths, quantization))
    keys = checkpoint.spec.expert_keys()
    for done, key in enumerate(keys, start=1):
        if not writer.has(key):
            projections = _projections(checkpoint, key, widths[key], quantizer, quantization.dtype16)
            writer.write_expert(key, projections, None if importance is None else importance.get(key))
        if progress is not None:
            progress(done, len(keys))
    _write_backbone(checkpoint, writer)
    for name in ("config.json", "generation_config.json", *checkpoint.tokenizer_files):
        if (checkpoint.path / name).is_file():
            writer.write_file(name, (checkpoint.path / name).read_bytes())
    for name, body in (extra_files or {}).items():
        writer.write_file(name, body)
    return writer.finish(creator, quality)


def _check_widths(checkpoint: Checkpoint, widths: Mapping[ExpertKey, Mapping[str, int]]) -> None:
    projections = set(checkpoint.spec.moe.projections)
    for key in checkpoint.spec.expert_keys():
        if key not in widths or set(widths[key]) != projections or not set(widths[key].values()) <= set(WIDTHS):
            raise ValueError(f"expert {key} needs a width among {WIDTHS} for each of {sorted(projections)}")


def _dtype16(checkpoint: Checkpoint) -> str:
    return "BF16" if checkpoint.source_dtype == "BF16" else "F16"


def _fingerprint(
    checkpoint: Checkpoint, widths: Mapping[ExpertKey, Mapping[str, int]], quantization: Quantization
) -> str:
    plan = [[*key, sorted(widths[key].items())] for key in checkpoint.spec.expert_keys()]
    what = [checkpoint.sha256(), plan, quantization.quantizer, quantization.group_size, quantization.seed]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()


def _projections(
    checkpoint: Checkpoint, key: ExpertKey, widths: Mapping[str, int], quantizer: Quantizer, dtype16: str
) -> dict[str, Projection]:
    parts: dict[str, Projection] = {}
    for projection, weight in checkpoint.expert(key).items():
        if widths[projection] == 16:
            _check_range(key, projection, weight, dtype16)
            parts[projection] = weight
        else:
            parts[projection] = _checked(key, projection, quantizer.quantize(weight, widths[projection]))
    return parts


def _check_range(key: ExpertKey, projection: str, weight: F32, dtype16: str) -> None:
    largest = float(np.abs(weight).max(initial=0.0))
    if not np.isfinite(largest):
        raise CheckpointError(f"expert {key} {projection} holds values that are not finite: the checkpoint is damaged")
    if dtype16 == "F16" and largest > _MAX_F16:
        raise CheckpointError(
            f"expert {key} {projection} holds {largest:.6g}, more than float16 can hold ({_MAX_F16:.0f}): "
            "save the checkpoint as bfloat16 or give this expert fewer bits"
        )


def _checked(key: ExpertKey, projection: str, matrix: QuantizedMatrix) -> QuantizedMatrix:
    if not (np.isfinite(matrix.scale).all() and np.isfinite(matrix.minimum).all()):
        raise CheckpointError(
            f"expert {key} {projection}: its scales at {matrix.bits} bits are not finite in float16: the weights are "
            "too large or damaged"
        )
    return matrix


def _write_backbone(checkpoint: Checkpoint, writer: PackWriter) -> None:
    tensors = {
        name: checkpoint.backbone_tensor(name, shape).contiguous()
        for name, shape in backbone_tensors(checkpoint.spec).items()
    }
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise CheckpointError(f"{name} holds values that are not finite: the checkpoint is damaged")
    save_file(tensors, writer.add_file(BACKBONE))
    writer.seal_file(BACKBONE)
