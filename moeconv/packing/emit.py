"""Checkpoint and widths → pack: a few experts of a layer at a time, and a killed run goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from moeconv.artifacts import Assignment
from moeconv.packing.chat import chat_of
from moeconv.quantizers.coder import ExpertCoder, batches
from moeconv.quantizers.dense import DenseCoder
from moeconv.source.checkpoint import TOKENIZER, Checkpoint
from moeconv.source.outline import CheckpointError
from moert.pack.chat import CHAT
from moert.pack.codec import WIDTHS, QuantizedMatrix
from moert.pack.dense import part_names
from moert.pack.errors import WriteFailed
from moert.pack.manifest import BACKBONE, Manifest, Preference, Quality, Quantization
from moert.pack.model_spec import ExpertKey
from moert.pack.reader import Projection
from moert.pack.writer import PackWriter


@dataclass(frozen=True)
class Profile:
    """What profiling added to a pack with this manifest: contents of its `files`, by their paths in the pack."""

    manifest: Manifest
    files: Mapping[str, bytes]


@dataclass(frozen=True)
class Label:
    """What a pack says beside its weights. `files` (relative path → contents) go in as they are, and so do those of
    `profile` if the pack has the same weights as the one that was profiled: routing depends on nothing else."""

    creator: str
    importance: Mapping[ExpertKey, float] = field(default_factory=dict)
    quality: Quality | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    profile: Profile | None = None
    preferences: tuple[Preference, ...] = ()


def emit(
    coder: ExpertCoder,
    widths: Assignment,
    out: Path,
    *,
    seed: int,
    label: Label,
    dense: DenseCoder | None = None,
) -> Manifest:
    """Writes the pack at `out`: every expert at its widths, everything else as `dense` says, or as it was.

    Raises CheckpointError (unreadable source, values that 16 bits can't hold), WriteFailed, or ValueError for widths
    that don't cover the model's experts.
    """
    checkpoint = coder.checkpoint
    _check_widths(checkpoint, widths)
    dense, chat = dense or DenseCoder(checkpoint, None), chat_of(checkpoint.path)
    name, group_size = coder.quantizer.name, coder.quantizer.group_size
    quantization = Quantization(name, group_size, coder.dtype16, seed, dense.dense, coder.mxfp4)
    writer = PackWriter(out, checkpoint.spec, quantization, _fingerprint(coder, widths, quantization))
    try:
        _write_experts(coder, widths, label.importance, writer)
        _write_backbone(dense, coder.dtype16, writer)
        for name in ("config.json", "generation_config.json", *checkpoint.tokenizer_files):
            if (checkpoint.path / name).is_file():
                writer.write_file(name, (checkpoint.path / name).read_bytes())
        if checkpoint.spelled is not None:
            writer.write_file(TOKENIZER, checkpoint.spelled.encode())
        if chat is not None:
            writer.write_file(CHAT, chat)
        profile = label.profile
        kept = profile.files if profile is not None and writer.has_weights_of(profile.manifest) else {}
        for name, body in {**label.files, **kept}.items():
            writer.write_file(name, body)
        return writer.finish(label.creator, label.quality, label.preferences)
    except WriteFailed as error:
        raise WriteFailed(
            f"{error}; the experts in {writer.partial} are kept: the same command goes on with them"
        ) from None


def _write_experts(
    coder: ExpertCoder, widths: Assignment, importance: Mapping[ExpertKey, float], writer: PackWriter
) -> None:
    spec = coder.checkpoint.spec
    left = [(key, widths[key]) for key in spec.expert_keys() if not writer.has(key)]
    for batch in batches(spec, left):
        coder.prepare(batch)
        for key, bits in batch:
            biases = coder.checkpoint.biases(key)
            writer.write_expert(key, coder.code(key, bits), importance.get(key), biases)


def _check_widths(checkpoint: Checkpoint, widths: Assignment) -> None:
    count = len(checkpoint.spec.moe.ffn.projections)
    for key in checkpoint.spec.expert_keys():
        if len(widths.get(key, ())) != count or not set(widths[key]) <= set(WIDTHS):
            projections = checkpoint.spec.moe.ffn.projections
            raise ValueError(f"expert {key} needs a width among {WIDTHS} for each of {projections}")


def _fingerprint(coder: ExpertCoder, widths: Assignment, quantization: Quantization) -> str:
    """Of everything that the experts' bytes depend on."""
    plan = [[*key, widths[key]] for key in coder.checkpoint.spec.expert_keys()]
    moments = None if coder.moments is None else coder.moments.digest
    what = [coder.checkpoint.sha256, plan, quantization.quantizer, quantization.group_size, quantization.seed, moments]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()


def _write_backbone(dense: DenseCoder, dtype16: str, writer: PackWriter) -> None:
    tensors: dict[str, Tensor] = {}
    for name, (_, shape, _) in dense.checkpoint.spec.tensors.items():
        if dense.width(name) is not None:
            tensors |= _stored(name, dense.code(name), dtype16)
            continue
        stored = dense.checkpoint.stored_tensor(name, shape)
        tensors[name] = stored.contiguous().clone()  # two may be one in the checkpoint
        if not torch.isfinite(tensors[name]).all():
            raise CheckpointError(f"{name} holds values that are not finite: the checkpoint is damaged")
    path = writer.add_file(BACKBONE)
    try:
        save_file(tensors, path)
    except (SafetensorError, OSError) as error:
        path.unlink(missing_ok=True)
        reason = getattr(error, "strerror", None) or str(error).removeprefix("Error while serializing: ")
        raise WriteFailed(f"can't write {path}: {reason}; free some space or choose another place") from None
    writer.seal_file(BACKBONE)


def _stored(name: str, coded: Projection, dtype16: str) -> dict[str, Tensor]:
    """The tensors that stand for one matrix."""
    if isinstance(coded, QuantizedMatrix):
        parts = (coded.qweight, coded.scale, coded.minimum)
        return {part: torch.from_numpy(values) for part, values in zip(part_names(name), parts, strict=True)}
    return {name: torch.from_numpy(coded).to(torch.bfloat16 if dtype16 == "BF16" else torch.float16)}
