"""Checkpoint and widths → pack: a few experts of a layer at a time, and a killed run goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from moeconv.artifacts import Assignment
from moeconv.packing.backbone import write_backbone
from moeconv.packing.chat import chat_of
from moeconv.progress import Bar
from moeconv.quantizers.coder import ExpertCoder, Wanted, batches
from moeconv.quantizers.dense import DenseCoder
from moeconv.source.ahead import read_ahead
from moeconv.source.checkpoint import Checkpoint
from moert.pack.codec import WIDTHS
from moert.pack.errors import WriteFailed
from moert.pack.manifest import Files, Manifest, Preference, Quality, Quantization
from moert.pack.model_spec import ExpertKey
from moert.pack.neurons import ORDER, NeuronOrder
from moert.pack.tensors import TOKENIZER
from moert.pack.text import CHAT
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
    bar: Bar | None = None,
    files: Files = "expert",
    order: NeuronOrder | None = None,
) -> Manifest:
    """Writes the pack at `out`: every expert at its widths, everything else as `dense` says, or as it was. `bar` hears
    of each expert. `files`: what has one of its own. `order`: that of the neurons of experts in blocks (None: as in the
    source).

    Raises CheckpointError (unreadable source, values that 16 bits can't hold), WriteFailed, or ValueError for widths
    that don't cover the model's experts.
    """
    checkpoint = coder.checkpoint
    assert order is None or coder.neurons is not None, "there is an order of neurons only where experts lie by them"
    _check_widths(checkpoint, widths)
    dense, chat = dense or DenseCoder(checkpoint, None), chat_of(checkpoint.path)
    name, group_size = coder.quantizer.name, coder.quantizer.group_size
    quantization = Quantization(name, group_size, coder.dtype16, seed, dense.recorded(), coder.mxfp4, coder.neurons)
    writer = PackWriter(out, checkpoint.spec, quantization, _fingerprint(coder, widths, quantization, order), files)
    try:
        _write_experts(coder, widths, label.importance, writer, bar, order)
        write_backbone(dense, coder.dtype16, writer)
        for name in ("config.json", "generation_config.json", *checkpoint.tokenizer_files):
            if (checkpoint.path / name).is_file():
                writer.write_file(name, (checkpoint.path / name).read_bytes())
        if checkpoint.spelled is not None:
            writer.write_file(TOKENIZER, checkpoint.spelled.encode())
        if chat is not None:
            writer.write_file(CHAT, chat)
        if order is not None:
            writer.write_file(ORDER, order.to_bytes())
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
    coder: ExpertCoder,
    widths: Assignment,
    importance: Mapping[ExpertKey, float],
    writer: PackWriter,
    bar: Bar | None,
    order: NeuronOrder | None,
) -> None:
    checkpoint = coder.checkpoint
    left = [(key, widths[key]) for key in checkpoint.spec.expert_keys() if not writer.has(key)]
    if bar is not None:
        bar.update(len(widths) - len(left))

    def touch(batch: list[Wanted]) -> None:
        for key, _ in batch:
            checkpoint.touch(key)

    for batch in read_ahead(batches(checkpoint.spec, left), touch):
        coder.prepare(batch)
        for key, bits in batch:
            projections, biases = coder.code(key, bits), checkpoint.biases(key)
            if order is not None:
                projections, biases = order.placed(key, projections, biases)
            writer.write_expert(key, projections, importance.get(key), biases)
        if bar is not None:
            bar.update(len(batch))


def _check_widths(checkpoint: Checkpoint, widths: Assignment) -> None:
    count = len(checkpoint.spec.moe.ffn.projections)
    for key in checkpoint.spec.expert_keys():
        if len(widths.get(key, ())) != count or not set(widths[key]) <= set(WIDTHS):
            projections = checkpoint.spec.moe.ffn.projections
            raise ValueError(f"expert {key} needs a width among {WIDTHS} for each of {projections}")


def _fingerprint(
    coder: ExpertCoder, widths: Assignment, quantization: Quantization, order: NeuronOrder | None
) -> str:  # fmt: skip
    """Of everything that the experts' bytes depend on."""
    plan = [[*key, widths[key]] for key in coder.checkpoint.spec.expert_keys()]
    moments = coder.inputs_digest
    neurons = quantization.neurons
    what = [coder.checkpoint.sha256, plan, quantization.quantizer, quantization.group_size, quantization.seed, moments]
    what += [] if neurons is None else [asdict(neurons)]
    what += [] if order is None else [order.digest]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()
