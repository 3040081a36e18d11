"""The experts of a pack as matrices, for checks and measurements: the runtime computes with their bytes as they lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moert.pack.codec import (
    F32,
    U8,
    Mxfp4Matrix,
    QuantizedMatrix,
    TrellisMatrix,
    Width,
    dequantize,
    dequantize_trellis,
    from_bfloat16,
    times_two,
)
from moert.pack.files import OpenedFile
from moert.pack.layout import DOWN, Coding, NeuronLayout, group_of, tensors_of
from moert.pack.model_spec import ExpertKey
from moert.pack.reader import Pack

Projection = QuantizedMatrix | TrellisMatrix | npt.NDArray[np.float32]


def read_expert(pack: Pack, key: ExpertKey, into: U8 | None = None) -> U8:
    """Returns all bytes of one expert, uint8 [file_bytes], in one read, checked against its layout and fast
    checksum.

    Raises FileMissing, FileTruncated, HeaderInvalid, HashMismatch.
    """
    entry = pack.entry(key)
    buffer = np.empty(entry.file_bytes, dtype=np.uint8) if into is None else into[: entry.file_bytes]
    with OpenedFile(pack.root, entry.path, pack.file(entry.path)) as file:
        file.read_into(buffer.data, entry.offset)
    pack.check_expert(key, buffer)
    return buffer


def matrices_of(pack: Pack, key: ExpertKey, buffer: U8) -> dict[str, Projection]:
    """Returns each projection [out, in] of the bytes of read_expert: views, but 16-bit ones become float32, and so
    does `down` where experts lie in blocks of neurons."""
    found = stored_matrices(pack, key, buffer)
    if pack.has_neurons:
        found[DOWN] = np.ascontiguousarray(projection_weights(found[DOWN]).T)
    return found


def stored_matrices(pack: Pack, key: ExpertKey, buffer: U8) -> dict[str, Projection]:
    """Returns each projection as it is stored: in blocks of neurons `down` is its transpose [d_ff, d_model]."""
    layout, entry = pack.layout(key), pack.entry(key)
    if pack.has_neurons:
        placed = pack.neurons(key)
        return {name: matrix_of(placed, buffer, name) for name in entry.bits}
    data, coding, powers = buffer[layout.data_offset :], pack.manifest.quantization.coding, entry.powers or {}
    found = {}
    for name, width in entry.bits.items():
        rows, columns = pack.manifest.model.projection_shape(name)
        form = _Form(width, columns, coding, powers.get(name, 0))
        slots = [layout.slot(f"{name}.{part}") for part, *_ in tensors_of(width, (rows, columns), coding)]
        found[name] = form.matrix(rows, [data[slot.start : slot.stop] for slot in slots])
    return found


def biases_of(pack: Pack, key: ExpertKey, buffer: U8) -> dict[str, npt.NDArray[np.float32]]:
    """Returns the bias [out] of each projection of the bytes of read_expert; none where experts have none."""
    ffn, layout = pack.manifest.model.moe.ffn, pack.layout(key)
    if pack.has_neurons and ffn.bias:
        placed = pack.neurons(key)
        return {name: bias_of(placed, buffer, name) for name in ffn.projections}
    slots = {name: layout.slot(f"{name}.bias") for name in ffn.projections} if ffn.bias else {}
    data = buffer[layout.data_offset :]
    return {name: data[slot.start : slot.stop].view(np.float32) for name, slot in slots.items()}


def rows_of(layout: NeuronLayout, buffer: U8) -> U8:
    """Returns the rows pieces of an expert that lies in `buffer`, [blocks, rows_bytes], not copied."""
    return _pieces(layout, buffer, layout.rows_at, layout.rows_step, layout.rows_bytes)


def columns_of(layout: NeuronLayout, buffer: U8) -> U8:
    """Returns the columns pieces of an expert, [blocks, columns_bytes], not copied."""
    return _pieces(layout, buffer, layout.columns_at, layout.columns_step, layout.columns_bytes)


def _pieces(layout: NeuronLayout, buffer: U8, at: int, step: int, nbytes: int) -> U8:
    pieces: U8 = np.ndarray((layout.n_blocks, nbytes), np.uint8, buffer.data, at, (step, 1))
    return pieces


class _Form(NamedTuple):
    """The form of a stored matrix: its width, its inputs, its coding, and the power of two that it is multiplied
    with."""

    bits: Width
    in_features: int
    coding: Coding
    power: int = 0

    def matrix(self, rows: int, stored: Sequence[U8]) -> QuantizedMatrix | TrellisMatrix | F32:
        """Returns the matrix [rows, in_features] that the bytes of its tensors stand for; weights of 16 bits become
        float32."""
        if self.coding.is_trellis(self.bits):
            stream, scales = stored
            return TrellisMatrix(self.bits, self.in_features, stream, scales.view(np.float16)[:, None], self.power)
        group_size, form16, _ = self.coding
        parts = [each.reshape(rows, -1) for each in stored]
        if self.bits != 16:
            scale, minimum = (part.view(np.float16) for part in parts[1:])
            group = group_of(self.in_features, group_size)
            return QuantizedMatrix(int(self.bits), self.in_features, group, parts[0], scale, minimum, self.power)
        if form16 == "MXFP4":
            return Mxfp4Matrix(self.in_features, *parts).widened()
        if form16 == "BF16":
            return from_bfloat16(parts[0].view(np.uint16))
        return times_two(parts[0].view(np.float16).astype(np.float32), self.power)


def matrix_of(layout: NeuronLayout, buffer: U8, name: str) -> QuantizedMatrix | F32:
    """Returns a matrix [d_ff, d_model] of an expert that lies in `buffer`, copied; `down` as its transpose. Weights of
    16 bits become float32."""
    matrix = layout.columns if name == DOWN else layout.rows[name]
    pieces = columns_of(layout, buffer) if name == DOWN else rows_of(layout, buffer)
    sizes = matrix.neuron_bytes(layout.d_model)
    form = _Form(matrix.bits, layout.d_model, Coding(matrix.group_size, matrix.form16), matrix.power)
    taken = [_taken(layout, pieces, *place) for place in zip(matrix.places, sizes, strict=True)]
    found = form.matrix(layout.d_ff, taken)
    assert not isinstance(found, TrellisMatrix), "blocks of neurons have plain codes"
    return found


def bias_of(layout: NeuronLayout, buffer: U8, name: str) -> F32:
    """Returns the biases [out] of a projection that has some."""
    if name == DOWN:
        assert layout.bias_at is not None
        return buffer[layout.bias_at :][: 4 * layout.d_model].view(np.float32)
    at = layout.rows[name].bias_place
    assert at is not None
    bias: F32 = _taken(layout, rows_of(layout, buffer), at, 4).view(np.float32)[:, 0]
    return bias


def _taken(layout: NeuronLayout, pieces: U8, at: int, nbytes: int) -> U8:
    """Returns the array of all neurons that begins at byte `at` of each piece: uint8 [d_ff, nbytes]."""
    rows = np.ascontiguousarray(pieces[:, at : at + layout.per_block * nbytes]).reshape(-1, nbytes)
    found: U8 = rows[: layout.d_ff]
    return found


def projection_weights(projection: Projection) -> npt.NDArray[np.float32]:
    """Returns the weights of one projection as float32 [out, in], whatever its width."""
    if isinstance(projection, TrellisMatrix):
        return dequantize_trellis(projection)
    return dequantize(projection) if isinstance(projection, QuantizedMatrix) else projection
