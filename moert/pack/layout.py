"""Where each byte of an expert file lies. Reader and writer both derive it from the manifest, so a header can't lie."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from moert.pack.codec import MX_GROUP, Form16, n_groups, row_bytes
from moert.pack.model_spec import ExpertKey, ModelSpec
from moert.pack.neurons import DOWN, NeuronLayout, Neurons, neuron_layout

TENSOR_ALIGNMENT = 64
SMALL_PAGE, LARGE_PAGE = 4096, 16384
_LARGE_EXPERT_BYTES = 1 << 20
_NAME = b"#"  # nothing else in a header is like it
PROJECTIONS = ("gate", "up", "down")
DTYPE_BYTES = {"U8": 1, "F16": 2, "BF16": 2, "F32": 4}


@dataclass(frozen=True)
class TensorSlot:
    """One tensor of an expert file. `start` and `stop` count bytes from the beginning of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class ExpertLayout:
    """A whole expert file: `header` (with its length prefix) fills `data_offset` bytes, the data follows.

    `tensor_bytes` counts weights, scales, minima and biases; `file_bytes` adds header and padding.
    """

    header: bytes
    data_offset: int
    slots: tuple[TensorSlot, ...]
    tensor_bytes: int
    file_bytes: int
    neurons: NeuronLayout | None = None
    """Where the neurons lie, if they do in blocks; then `slots` are of whole blocks."""

    def slot(self, name: str) -> TensorSlot:
        return next(slot for slot in self.slots if slot.name == name)


def with_powers(layout: ExpertLayout, powers: Mapping[str, int] | None, page_bytes: int) -> ExpertLayout:
    """The same of an expert of which some projections count powers of two. The header says so: readers that do not know
    of powers refuse it."""
    if not powers:
        return layout
    said = ",".join(f"{name}:{powers[name]}" for name in PROJECTIONS if name in powers)
    text = layout.header[8:].rstrip(b" ").replace(b'"}', f'","powers":"{said}"}}'.encode(), 1)
    text += b" " * (-(8 + len(text)) % page_bytes)
    further = 8 + len(text) - layout.data_offset
    neurons = None if layout.neurons is None else layout.neurons.moved(further).scaled(powers)
    return replace(
        layout, header=len(text).to_bytes(8, "little") + text, data_offset=layout.data_offset + further,
        file_bytes=layout.file_bytes + further, neurons=neurons,
    )  # fmt: skip


def choose_page_bytes(spec: ModelSpec) -> int:
    """16 KiB pages for experts of a MiB and more at 4 bits, 4 KiB below, where padding would outweigh the weights."""
    return LARGE_PAGE if spec.weights_per_expert() // 2 >= _LARGE_EXPERT_BYTES else SMALL_PAGE


def group_of(in_features: int, group_size: int) -> int:
    """Inputs per group; the manifest's group_size 0 stands for the whole row."""
    return in_features if group_size == 0 else min(group_size, in_features)


def expert_layout(
    spec: ModelSpec, key: ExpertKey, bits: Mapping[str, int], group_size: int, form16: Form16, page_bytes: int,
    neurons: Neurons | None = None,
) -> ExpertLayout:  # fmt: skip
    """The layout of the expert `key` whose projections have the widths `bits`; `form16` and `neurons`: see
    `Quantization`."""
    if neurons is not None:
        placed = neuron_layout(spec, bits, group_size, form16, page_bytes, neurons)
        data = _blocks(placed, neurons.bundled, page_bytes)
        found = _named(*data, placed.tensor_bytes, page_bytes, len(str(key))).of(key)
        return replace(found, neurons=placed.moved(found.data_offset))
    shapes = tuple((name, *spec.projection_shape(name), bits[name]) for name in spec.moe.ffn.projections)
    return _pattern(shapes, spec.moe.ffn.bias, group_size, form16, page_bytes, len(str(key))).of(key)


@dataclass(frozen=True)
class _Pattern:
    """What experts of the same widths have in common: all but their names, which have one length. `filled` spaces end
    the header, and are not kept."""

    before: bytes
    after: bytes
    filled: int
    slots: tuple[TensorSlot, ...]
    tensor_bytes: int
    data_bytes: int

    def of(self, key: ExpertKey) -> ExpertLayout:
        header = self.before + str(key).encode() + self.after + b" " * self.filled
        return ExpertLayout(header, len(header), self.slots, self.tensor_bytes, len(header) + self.data_bytes)


@lru_cache(maxsize=1024)
def _pattern(
    shapes: tuple[tuple[str, int, int, int], ...], bias: bool, group_size: int, form16: str, page_bytes: int,
    name_bytes: int,
) -> _Pattern:  # fmt: skip
    """`shapes`: (projection, outputs, inputs, width) of each. `name_bytes`: of the expert's name."""
    tensors: list[tuple[str, str, tuple[int, ...]]] = []
    for projection, out_features, in_features, width in shapes:
        if width == 16 and form16 == "MXFP4":
            tensors.append((f"{projection}.qweight", "U8", (out_features, row_bytes(in_features, 4))))
            tensors.append((f"{projection}.exponent", "U8", (out_features, n_groups(in_features, MX_GROUP))))
            continue
        if width == 16:
            tensors.append((f"{projection}.weight", form16, (out_features, in_features)))
            continue
        groups = n_groups(in_features, group_of(in_features, group_size))
        tensors.append((f"{projection}.qweight", "U8", (out_features, row_bytes(in_features, width))))
        tensors.append((f"{projection}.scale", "F16", (out_features, groups)))
        tensors.append((f"{projection}.min", "F16", (out_features, groups)))
    if bias:
        tensors += [(f"{projection}.bias", "F32", (out_features,)) for projection, out_features, _, _ in shapes]
    slots, data_bytes = _place(tensors, TENSOR_ALIGNMENT, page_bytes)
    tensor_bytes = sum(slot.stop - slot.start for slot in slots if not slot.name.startswith("pad."))
    return _named(tuple(slots), data_bytes, tensor_bytes, page_bytes, name_bytes)


def _blocks(placed: NeuronLayout, bundled: bool, page_bytes: int) -> tuple[tuple[TensorSlot, ...], int]:
    """Tensors of an expert whose neurons lie in blocks, each from a page on, and bytes with padding."""
    tensors: list[tuple[str, str, tuple[int, ...]]] = []
    if placed.bias_at is not None:
        tensors.append((f"{DOWN}.bias", "F32", (placed.d_model,)))
    if bundled:
        tensors.append(("blocks", "U8", (placed.n_blocks, placed.rows_bytes + placed.columns_bytes)))
    else:
        tensors.append(("rows", "U8", (placed.n_blocks, placed.rows_bytes)))
        tensors.append(("columns", "U8", (placed.n_blocks, placed.columns_bytes)))
    slots, data_bytes = _place(tensors, page_bytes, page_bytes)
    return tuple(slots), data_bytes


@lru_cache(maxsize=1024)
def _named(
    slots: tuple[TensorSlot, ...], data_bytes: int, tensor_bytes: int, page_bytes: int, name_bytes: int
) -> _Pattern:
    before, after = _header(slots, name_bytes, page_bytes).split(_NAME * name_bytes)
    kept = after.rstrip(b" ")
    return _Pattern(before, kept, len(after) - len(kept), slots, tensor_bytes, data_bytes)


def _place(
    tensors: list[tuple[str, str, tuple[int, ...]]], alignment: int, page_bytes: int
) -> tuple[list[TensorSlot], int]:
    """Slots, and bytes with padding."""
    slots: list[TensorSlot] = []
    position = 0
    for index, (name, dtype, shape) in enumerate(tensors):
        size = DTYPE_BYTES[dtype]
        for extent in shape:
            size *= extent
        slots.append(TensorSlot(name, dtype, shape, position, position + size))
        position += size
        last = index == len(tensors) - 1
        padding = -position % (page_bytes if last else alignment)
        if padding:
            slots.append(TensorSlot(f"pad.{index}", "U8", (padding,), position, position + padding))
            position += padding
    return slots, position


def _header(slots: Iterable[TensorSlot], name_bytes: int, page_bytes: int) -> bytes:
    """A safetensors header, filled up with spaces so that the data begins on a page; _NAME in the place of each letter
    of the expert's name."""
    name = _NAME.decode() * name_bytes
    table: dict[str, object] = {"__metadata__": {"format": "model.pack expert", "expert": name}}
    for slot in slots:
        table[slot.name] = {
            "dtype": slot.dtype,
            "shape": list(slot.shape),
            "data_offsets": [slot.start, slot.stop],
        }
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % page_bytes)
    return len(text).to_bytes(8, "little") + text
