"""The place of each byte in an expert file: whole matrices, or blocks of neurons."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Annotated, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from moert.pack.codec import (
    MX_GROUP,
    Form16,
    Width,
    n_groups,
    row_bytes,
    stream_bytes,
)
from moert.pack.documents import Within
from moert.pack.model_spec import ExpertKey, ModelSpec
from moert.pack.tensors import DTYPE_BITS

NEURONS = "neurons.safetensors"
"""The file of a pack with a checksum of each piece."""
SECTOR = 512  # bytes: a piece that is read alone has a whole number of sectors, as any drive can read
MOST_PIECE_BYTES = 1 << 20
_ALIGNMENT = 8  # bytes, of each array in a piece
_BIAS_BYTES = 4
DOWN = "down"


class Part(NamedTuple):
    """One of the tensors that stand for a matrix: its name behind the matrix's, and its type and columns."""

    name: str
    dtype: str
    columns: int

    @property
    def nbytes(self) -> int:
        """Returns the bytes of a row."""
        return DTYPE_BITS[self.dtype] // 8 * self.columns


class Coding(NamedTuple):
    """The coding of matrices: the inputs that share a scale (`group_size` as in `group_of`), the form of 16 bits, and
    whether widths below 8 are trellis codes."""

    group_size: int
    form16: Form16
    trellis: bool = False

    def is_trellis(self, bits: Width) -> bool:
        """Returns whether a matrix of this width has trellis codes."""
        return self.trellis and bits < 8


@lru_cache(maxsize=1024)
def parts_of(bits: Width, in_features: int, coding: Coding) -> tuple[Part, ...]:
    """Returns the tensors that stand for a matrix of this width, which has no trellis codes, in their order."""
    if bits == 16 and coding.form16 == "MXFP4":
        exponents = Part("exponent", "U8", n_groups(in_features, MX_GROUP))
        return Part("qweight", "U8", row_bytes(in_features, 4)), exponents
    if bits == 16:
        return (Part("weight", coding.form16, in_features),)
    groups = n_groups(in_features, group_of(in_features, coding.group_size))
    codes = Part("qweight", "U8", row_bytes(in_features, int(bits)))
    return codes, Part("scale", "F16", groups), Part("min", "F16", groups)


Tensor = tuple[str, str, tuple[int, ...]]
"""The name, type and shape of a stored tensor."""


def tensors_of(bits: Width, shape: tuple[int, int], coding: Coding) -> list[Tensor]:
    """Returns the tensors that stand for a matrix [out, in] of this width, in their order; names are those behind the
    matrix's."""
    out, in_features = shape
    if coding.is_trellis(bits):
        return [("trellis", "U8", (stream_bytes(bits, out, in_features),)), ("scale", "F16", (out,))]
    return [(part.name, part.dtype, (out, part.columns)) for part in parts_of(bits, in_features, coding)]


def group_of(in_features: int, group_size: int) -> int:
    """Returns the inputs per group; the manifest's group_size 0 stands for the whole row."""
    return in_features if group_size == 0 else min(group_size, in_features)


@dataclass(frozen=True)
class Neurons:
    """A pack's settings for blocks of neurons: see `NeuronLayout`. `piece_bytes`: the most that a block's columns take.
    `bundled`: the columns of a block lie behind its rows; else all columns of an expert lie behind all its rows.
    `together`: rows, not bundled, are read all at once, so that their pieces are no whole sectors."""

    LEFT_OUT: ClassVar = ("together",)
    piece_bytes: Annotated[int, Within(SECTOR, MOST_PIECE_BYTES)]
    bundled: bool
    together: bool = False


class MatrixPlace(NamedTuple):
    """The place of a matrix within a piece: `places` count bytes from the piece's beginning, to its codes, scales and
    minima or to its weights of 16 bits, `bias_place` to its biases. `group_size` counts features of d_model, and is
    never 0. Weights are multiplied with two to the `power`."""

    bits: int
    group_size: int
    form16: Form16
    places: tuple[int, ...]
    bias_place: int | None
    power: int = 0

    def neuron_bytes(self, d_model: int) -> tuple[int, ...]:
        """Returns the bytes that one neuron takes at each of `places`."""
        return tuple(part.nbytes for part in parts_of(self.bits, d_model, Coding(self.group_size, self.form16)))


class NeuronLayout(NamedTuple):
    """The places of the neurons in one expert's file. Block k has the neurons from k · per_block on; its *rows* piece
    (gate, if the expert has one, and up) begins at rows_at + k · rows_step, its *columns* piece (down, transposed) at
    columns_at + k · columns_step: bytes from the expert's beginning. Pieces are filled up with zeros. `bias_at`: the
    place of the biases of down, F32 [d_model]."""

    d_model: int
    d_ff: int
    per_block: int
    n_blocks: int
    rows: Mapping[str, MatrixPlace]
    columns: MatrixPlace
    rows_bytes: int
    columns_bytes: int
    rows_at: int
    rows_step: int
    columns_at: int
    columns_step: int
    bias_at: int | None
    together_bytes: int = 0
    """The bytes of all rows, to be read at once, in whole sectors; 0: each piece is whole sectors itself."""

    @property
    def n_checksums(self) -> int:
        """Returns the number of checksums: of each piece, of the biases of down, and of rows that lie together."""
        return 2 * self.n_blocks + (2 if self.together_bytes else 1)

    @property
    def matrices(self) -> Iterator[tuple[str, MatrixPlace]]:
        """Yields the matrices by name, in the order of the format."""
        yield from self.rows.items()
        yield DOWN, self.columns

    @property
    def tensor_bytes(self) -> int:
        """Returns the bytes of weights, scales, minima and biases of all neurons, without padding."""
        return sum(self.matrix_bytes(name) for name, _ in self.matrices)

    def matrix_bytes(self, name: str) -> int:
        """Returns the same bytes for one projection."""
        if name == DOWN:
            biases = 0 if self.bias_at is None else _BIAS_BYTES * self.d_model
            return biases + self.d_ff * sum(self.columns.neuron_bytes(self.d_model))
        biased = 0 if self.rows[name].bias_place is None else _BIAS_BYTES
        return self.d_ff * (sum(self.rows[name].neuron_bytes(self.d_model)) + biased)

    def block(self, k: int) -> range:
        """Returns the neurons of block k."""
        return range(k * self.per_block, min(self.d_ff, (k + 1) * self.per_block))

    def scaled(self, powers: Mapping[str, int]) -> NeuronLayout:
        """Returns the same layout for projections that are multiplied with powers of two."""
        rows = {name: matrix._replace(power=powers.get(name, 0)) for name, matrix in self.rows.items()}
        return self._replace(rows=rows, columns=self.columns._replace(power=powers.get(DOWN, 0)))

    def moved(self, nbytes: int) -> NeuronLayout:
        """Returns the same layout `nbytes` further on."""
        bias_at = None if self.bias_at is None else self.bias_at + nbytes
        return self._replace(rows_at=self.rows_at + nbytes, columns_at=self.columns_at + nbytes, bias_at=bias_at)


def neuron_layout(
    spec: ModelSpec, bits: Mapping[str, Width], coding: Coding, page_bytes: int, neurons: Neurons
) -> NeuronLayout:
    """Returns the layout of an expert whose projections have the widths `bits`, counted from the beginning of its data.
    A `group_size` of 0 stands for a neuron's whole row of d_model features."""
    widths, ffn = tuple((name, bits[name]) for name in spec.moe.ffn.projections), spec.moe.ffn
    return _layout((spec.expert_width, ffn.d_ff), ffn.bias, widths, coding, page_bytes, neurons)


def columns_bytes(width: Width, d_model: int, coding: Coding) -> int:
    """Returns the bytes of one neuron's column where `down` has this width."""
    return sum(part.nbytes for part in parts_of(width, d_model, coding))


@lru_cache(maxsize=1024)
def _layout(
    sizes: tuple[int, int], bias: bool, widths: tuple[tuple[str, Width], ...], coding: Coding, page_bytes: int,
    neurons: Neurons,
) -> NeuronLayout:  # fmt: skip
    (d_model, d_ff), group = sizes, group_of(sizes[0], coding.group_size)
    plain = {name: MatrixPlace(int(width), group, coding.form16, (), None) for name, width in widths}
    per_block = _per_block(plain[DOWN], d_model, d_ff, neurons.piece_bytes)
    n_blocks = -(-d_ff // per_block)
    unit = _ALIGNMENT if neurons.together else SECTOR
    rows, rows_bytes = _placed(
        {name: one for name, one in plain.items() if name != DOWN}, d_model, per_block, bias, unit
    )
    columns, columns_bytes = _placed({DOWN: plain[DOWN]}, d_model, per_block, bias=False)
    rows_at = _filled(_BIAS_BYTES * d_model, page_bytes) if bias else 0
    if neurons.bundled:
        columns_at, rows_step = rows_at + rows_bytes, rows_bytes + columns_bytes
    else:
        columns_at, rows_step = rows_at + _filled(n_blocks * rows_bytes, page_bytes), rows_bytes
    return NeuronLayout(
        d_model, d_ff, per_block, n_blocks, rows, columns[DOWN], rows_bytes, columns_bytes, rows_at, rows_step,
        columns_at, rows_step if neurons.bundled else columns_bytes, 0 if bias else None,
        _filled(n_blocks * rows_bytes, SECTOR) if neurons.together else 0,
    )  # fmt: skip


def _per_block(down: MatrixPlace, d_model: int, d_ff: int, piece_bytes: int) -> int:
    """Returns the largest number of neurons whose columns take at most `piece_bytes`; at least one."""
    count = max(1, min(d_ff, piece_bytes // sum(down.neuron_bytes(d_model))))
    while count > 1 and _placed({DOWN: down}, d_model, count, bias=False)[1] > piece_bytes:
        count -= 1
    return count


def _placed(
    matrices: Mapping[str, MatrixPlace], d_model: int, per_block: int, bias: bool, unit: int = SECTOR
) -> tuple[dict[str, MatrixPlace], int]:
    """Returns the matrices with their places in a piece, and the bytes of that piece, a multiple of `unit`."""
    end, found = 0, {}
    for name, matrix in matrices.items():
        places = []
        for nbytes in matrix.neuron_bytes(d_model):
            places.append(_filled(end, _ALIGNMENT))
            end = places[-1] + per_block * nbytes
        found[name] = matrix._replace(places=tuple(places))
    for name in found if bias else ():
        place = _filled(end, _ALIGNMENT)
        found[name] = found[name]._replace(bias_place=place)
        end = place + per_block * _BIAS_BYTES
    return found, _filled(end, unit)


def _filled(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


TENSOR_ALIGNMENT = 64
_NAME = b"#"  # no other text in a header has this letter
PROJECTIONS = ("gate", "up", "down")


Said = tuple[int, str]
"""The variable parts of a header: the number of letters of the expert's name, and the powers that its projections are
multiplied with, as text."""


@dataclass(frozen=True)
class TensorSlot:
    """The place of one tensor in an expert file. `start` and `stop` count bytes from the beginning of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class ExpertLayout:
    """The layout of a whole expert file: `header` (with its length prefix) fills `data_offset` bytes, the data follows.

    `tensor_bytes` counts weights, scales, minima and biases; `file_bytes` adds header and padding.
    """

    header: bytes
    data_offset: int
    slots: tuple[TensorSlot, ...]
    tensor_bytes: int
    file_bytes: int
    neurons: NeuronLayout | None = None
    """The places of the neurons, where they lie in blocks; then `slots` are of whole blocks."""

    def slot(self, name: str) -> TensorSlot:
        return next(slot for slot in self.slots if slot.name == name)


def expert_layout(
    spec: ModelSpec, key: ExpertKey, bits: Mapping[str, Width], coding: Coding, page_bytes: int,
    neurons: Neurons | None = None, powers: Mapping[str, int] | None = None,
) -> ExpertLayout:  # fmt: skip
    """Returns the layout of the expert `key` whose projections have the widths `bits`, and are multiplied with two to
    the `powers`; `neurons`: see `Quantization`."""
    powers = powers or {}
    said = len(str(key)), ",".join(f"{name}:{powers[name]}" for name in PROJECTIONS if name in powers)
    if neurons is not None:
        placed = neuron_layout(spec, bits, coding, page_bytes, neurons)
        data = _blocks(placed, neurons.bundled, page_bytes)
        found = _named(*data, placed.tensor_bytes, page_bytes, said).of(key)
        placed = placed.moved(found.data_offset)
        return replace(found, neurons=placed.scaled(powers) if powers else placed)
    shapes = tuple((name, *spec.projection_shape(name), bits[name]) for name in spec.moe.ffn.projections)
    return _pattern(shapes, spec.moe.ffn.bias, coding, page_bytes, said).of(key)


@dataclass(frozen=True)
class _Pattern:
    """The common part of the layouts of experts of the same widths: all but their names, which have one length.
    `filled` spaces end the header, and are not kept."""

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
    shapes: tuple[tuple[str, int, int, Width], ...], bias: bool, coding: Coding, page_bytes: int, said: Said
) -> _Pattern:
    """Returns the pattern of experts without blocks of neurons. `shapes`: (projection, outputs, inputs, width) of each
    projection."""
    tensors: list[Tensor] = []
    for projection, out_features, in_features, width in shapes:
        for name, dtype, shape in tensors_of(width, (out_features, in_features), coding):
            tensors.append((f"{projection}.{name}", dtype, shape))
    if bias:
        tensors += [(f"{projection}.bias", "F32", (out_features,)) for projection, out_features, _, _ in shapes]
    slots, data_bytes = _place(tensors, TENSOR_ALIGNMENT, page_bytes)
    tensor_bytes = sum(slot.stop - slot.start for slot in slots if not slot.name.startswith("pad."))
    return _named(tuple(slots), data_bytes, tensor_bytes, page_bytes, said)


def _blocks(placed: NeuronLayout, bundled: bool, page_bytes: int) -> tuple[tuple[TensorSlot, ...], int]:
    """Returns the tensors of an expert whose neurons lie in blocks, each from a page on, and its bytes with padding."""
    tensors: list[Tensor] = []
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
def _named(slots: tuple[TensorSlot, ...], data_bytes: int, tensor_bytes: int, page_bytes: int, said: Said) -> _Pattern:
    before, after = _header(slots, said, page_bytes).split(_NAME * said[0])
    kept = after.rstrip(b" ")
    return _Pattern(before, kept, len(after) - len(kept), slots, tensor_bytes, data_bytes)


def _place(tensors: list[Tensor], alignment: int, page_bytes: int) -> tuple[list[TensorSlot], int]:
    """Returns the slots of the tensors, one behind the other, and their bytes with padding."""
    slots: list[TensorSlot] = []
    position = 0
    for index, (name, dtype, shape) in enumerate(tensors):
        size = DTYPE_BITS[dtype] // 8 * prod(shape)
        slots.append(TensorSlot(name, dtype, shape, position, position + size))
        position += size
        last = index == len(tensors) - 1
        padding = -position % (page_bytes if last else alignment)
        if padding:
            slots.append(TensorSlot(f"pad.{index}", "U8", (padding,), position, position + padding))
            position += padding
    return slots, position


def _header(slots: Iterable[TensorSlot], said: Said, page_bytes: int) -> bytes:
    """Returns a safetensors header, filled up with spaces so that the data begins on a page; _NAME stands in the place
    of each letter of the expert's name."""
    name_bytes, powers = said
    about = {"format": "model.pack expert", "expert": _NAME.decode() * name_bytes} | (
        {"powers": powers} if powers else {}  # readers that do not know of powers refuse it
    )
    table: dict[str, object] = {"__metadata__": about}
    for slot in slots:
        place = [slot.start, slot.stop]
        table[slot.name] = {"dtype": slot.dtype, "shape": list(slot.shape), "data_offsets": place}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % page_bytes)
    return len(text).to_bytes(8, "little") + text


U32 = npt.NDArray[np.uint32]
