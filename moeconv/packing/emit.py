"""Writing a pack from a checkpoint and widths."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moeconv.artifacts import Assignment
from moeconv.order import NeuronOrder
from moeconv.progress import Bar
from moeconv.quantizers.coder import DenseCoder, ExpertCoder, Wanted, batches
from moeconv.source.checkpoint import Checkpoint
from moeconv.source.outline import CheckpointError, json_object, line
from moeconv.source.tensors import Part, read_ahead, write_tensors
from moeconv.tokenizers import chat_tokenizer
from moeconv.writer import Files, PackWriter
from moert.pack.codec import QuantizedMatrix, TrellisMatrix, Width, times_two
from moert.pack.errors import ChatInvalid, WriteFailed
from moert.pack.learnt import ORDER
from moert.pack.manifest import (
    BACKBONE,
    NGRAMS,
    WIDTHS_OF,
    Manifest,
    Preference,
    Quality,
    Quantization,
    stored_tensors,
)
from moert.pack.model_spec import ExpertKey
from moert.pack.tensors import TOKENIZER
from moert.pack.text import CHAT, ChatFormat, dump_chat

# The backbone, written tensor by tensor, so that it is never in memory as a whole.


def write_backbone(dense: DenseCoder, writer: PackWriter) -> None:
    """Writes the backbone's file, and that of tables that stay on the drive. Raises CheckpointError for values that are
    not finite, WriteFailed."""
    spec, stored_as = dense.checkpoint.spec, writer.quantization
    names = {name: list(parts) for name, parts in stored_tensors(spec, stored_as).items()}
    _write(writer, BACKBONE, [part for name in names for part in _parts(dense, name, names[name], stored_as)])
    if tables := dense.checkpoint.spec.tables:
        _write(writer, NGRAMS, [_table(dense.checkpoint, name, shape) for name, shape, _ in tables.values()])


def _write(writer: PackWriter, name: str, parts: list[Part]) -> None:
    path = writer.add_file(name)
    try:
        with path.open("wb") as file:
            write_tensors(file, parts)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise WriteFailed(f"can't write {path}: {error.strerror}; free some space or choose another place") from None
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    writer.seal_file(name)


def _table(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> Part:
    """Returns a table that stays on the drive: in the type of its first rows, or in 16 bits if they are coded."""
    first, tensors = checkpoint.description.tables[name][0].name, checkpoint.tensors
    dtype = tensors.dtype16(first) if tensors.is_coded(first) else tensors.fetch(first, 0).dtype
    return Part(name, dtype, shape, lambda: (_finite(name, piece.to(dtype)) for piece in checkpoint.table(name)))


def _parts(dense: DenseCoder, name: str, names: list[str], stored_as: Quantization) -> list[Part]:
    """Returns the tensors of the file, which have these names, that stand for one of the checkpoint's."""
    if dense.width(name) is None:
        stored = _stored(dense, name)
        return [Part(name, stored.dtype, tuple(stored.shape), lambda: _finite(name, _stored(dense, name)))]

    def coded() -> dict[str, Tensor]:
        projection = dense.code(name)
        assert stored_as.dense is not None
        if isinstance(projection, QuantizedMatrix):
            values = [*map(torch.from_numpy, (projection.qweight, projection.scale, projection.minimum))]
        elif isinstance(projection, TrellisMatrix):
            values = [torch.from_numpy(projection.stream), torch.from_numpy(projection.scale[:, 0])]
        else:
            whole = torch.from_numpy(times_two(projection, -stored_as.dense.power(name)))
            values = [whole.to(torch.bfloat16 if stored_as.dtype16 == "BF16" else torch.float16)]
        return dict(zip(names, values, strict=True))

    found = {part: (tensor.dtype, tuple(tensor.shape)) for part, tensor in coded().items()}
    return [Part(part, *about, lambda part=part: coded()[part]) for part, about in found.items()]  # type: ignore[misc]


def _stored(dense: DenseCoder, name: str) -> Tensor:
    stored = dense.checkpoint.stored_tensor(name, dense.checkpoint.spec.tensors[name].shape)
    return dense.trained.norms.get(name, stored).to(stored.dtype)


def _finite(name: str, tensor: Tensor) -> Tensor:
    if not torch.isfinite(tensor).all():
        raise CheckpointError(f"{name} holds values that are not finite: the checkpoint is damaged")
    return tensor


# The chat format of the source model: its chat templates and special tokens, as transformers knows them.

_CONFIG, _TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
_DEFAULT, _TOOLS = "default", "tool_use"


def chat_of(folder: Path) -> bytes | None:
    """Returns the contents of chat.json for a pack of the model in `folder`; None where that has no chat template.

    Raises CheckpointError for a template or tokenizer that can't be used.
    """
    if not (folder / _TEMPLATE).is_file() and not (json_object(folder / _CONFIG) or {}).get("chat_template"):
        return None
    tokenizer = _tokenizer(folder)
    templates = tokenizer.chat_template
    if isinstance(templates, str):
        templates = {_DEFAULT: templates}
    if not isinstance(templates, dict) or not templates.get(_DEFAULT):
        named = f" (there are {', '.join(sorted(map(str, templates)))[:100]})" if isinstance(templates, dict) else ""
        raise CheckpointError(
            f"{folder} has chat templates, and none of them is called {_DEFAULT}{named}: name the usual one so in "
            f"{_CONFIG}, or take them out"
        )
    chat = ChatFormat(templates[_DEFAULT], dict(tokenizer.special_tokens_map), templates.get(_TOOLS))
    try:
        return dump_chat(chat)
    except ChatInvalid as error:
        raise CheckpointError(f"{folder}: {error}: mend {_CONFIG}, or take the template out") from None


def _tokenizer(folder: Path) -> Any:
    try:
        return chat_tokenizer(folder)
    except Exception as error:  # the library raises nothing more precise
        raise CheckpointError(
            f"{folder} has a chat template, and its tokenizer can't be loaded ({line(error)}): mend it, or take the "
            f"template out of {_CONFIG} to convert without"
        ) from None


# Writing the pack: a few experts of a layer at a time; a run that was killed goes on where it stopped.


@dataclass(frozen=True)
class Profile:
    """Files that were added to a finished pack with this manifest: their contents, by their paths in the pack."""

    manifest: Manifest
    files: Mapping[str, bytes]


@dataclass(frozen=True)
class Label:
    """The contents of a pack beside its weights. `files` (relative path → contents) go in as they are, and so do those
    of `profile` if the pack has the same weights as the one that was profiled: routing depends only on these."""

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
    """Writes the pack at `out`: every expert at its widths, all other tensors at those of `dense`, or as in the source.
    `bar` counts experts. `files`: whether each expert or each layer has a file of its own. `order`: the order of
    neurons in blocks (None: as in the source).

    Raises CheckpointError (unreadable source, values that 16 bits can't hold), WriteFailed, or ValueError for widths
    that don't cover the model's experts.
    """
    checkpoint = coder.checkpoint
    assert order is None or coder.neurons is not None, "there is an order of neurons only where experts lie by them"
    _check_widths(checkpoint, widths, WIDTHS_OF[coder.quantizer.codes])
    dense, chat = dense or DenseCoder(checkpoint, None), chat_of(checkpoint.path)
    name, group_size = coder.quantizer.name, coder.quantizer.group_size
    quantization = Quantization(
        name, group_size, coder.dtype16, seed, dense.recorded(), coder.mxfp4, coder.neurons, coder.quantizer.codes
    )
    writer = PackWriter(out, checkpoint.spec, quantization, _fingerprint(coder, widths, quantization, order), files)
    try:
        _write_experts(coder, widths, label.importance, writer, bar, order)
        write_backbone(dense, writer)
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


def _check_widths(checkpoint: Checkpoint, widths: Assignment, known: Collection[Width]) -> None:
    count = len(checkpoint.spec.moe.ffn.projections)
    for key in checkpoint.spec.expert_keys():
        if len(widths.get(key, ())) != count or not set(widths[key]) <= set(known):
            projections = checkpoint.spec.moe.ffn.projections
            raise ValueError(f"expert {key} needs a width among {known} for each of {projections}")


def _fingerprint(
    coder: ExpertCoder, widths: Assignment, quantization: Quantization, order: NeuronOrder | None
) -> str:  # fmt: skip
    """Returns the sha256 of all that the experts' bytes depend on."""
    plan = [[*key, widths[key]] for key in coder.checkpoint.spec.expert_keys()]
    moments = coder.inputs_digest
    neurons = quantization.neurons
    what = [coder.checkpoint.sha256, plan, quantization.quantizer, quantization.group_size, quantization.seed, moments]
    what += [] if neurons is None else [asdict(neurons)]
    what += [] if order is None else [order.digest]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()
