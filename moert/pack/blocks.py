"""An expert's matrices to blocks of neurons and back, and a checksum of each piece: see moert.pack.neurons."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from moert.pack.codec import F32, U8, QuantizedMatrix, from_bfloat16, times_two
from moert.pack.neurons import DOWN, NeuronLayout

Array = npt.NDArray[Any]
U32 = npt.NDArray[np.uint32]


def rows_of(layout: NeuronLayout, buffer: U8) -> U8:
    """The rows pieces of an expert that lies in `buffer`, [blocks, rows_bytes], not copied."""
    return _pieces(layout, buffer, layout.rows_at, layout.rows_step, layout.rows_bytes)


def columns_of(layout: NeuronLayout, buffer: U8) -> U8:
    """The columns pieces, [blocks, columns_bytes], not copied."""
    return _pieces(layout, buffer, layout.columns_at, layout.columns_step, layout.columns_bytes)


def place(
    layout: NeuronLayout, buffer: U8, tensors: Mapping[str, tuple[Array, ...]], biases: Mapping[str, F32]
) -> None:
    """Puts matrices [d_ff, d_model] where they belong, each as its codes, scales and minima or its weights; and biases.
    Raises ValueError where one is missing or has another size."""
    for name, matrix in layout.matrices:
        pieces = columns_of(layout, buffer) if name == DOWN else rows_of(layout, buffer)
        given = tensors.get(name, ())
        if len(given) != len(matrix.places):
            raise ValueError(f"{name} is not given, or of another width")
        for at, nbytes, array in zip(matrix.places, matrix.neuron_bytes(layout.d_model), given, strict=True):
            _put(layout, pieces, at, nbytes, array, name)
        if matrix.bias_place is not None:
            _put(layout, pieces, matrix.bias_place, 4, _given(biases, name)[:, None], f"{name}.bias")
    if layout.bias_at is not None:
        bias = _given(biases, DOWN)
        if bias.shape != (layout.d_model,):
            raise ValueError(f"{DOWN}.bias: {bias.shape} given, the layout has {layout.d_model}")
        buffer[layout.bias_at :][: bias.nbytes] = bias.view(np.uint8)


def matrix_of(layout: NeuronLayout, buffer: U8, name: str) -> QuantizedMatrix | F32:
    """A matrix [d_ff, d_model] of an expert that lies in `buffer`, copied; `down` as its transpose. 16 bits become
    float32."""
    matrix = layout.columns if name == DOWN else layout.rows[name]
    pieces = columns_of(layout, buffer) if name == DOWN else rows_of(layout, buffer)
    sizes = matrix.neuron_bytes(layout.d_model)
    parts = [_taken(layout, pieces, at, nbytes) for at, nbytes in zip(matrix.places, sizes, strict=True)]
    if matrix.bits == 16:
        return (
            from_bfloat16(parts[0].view(np.uint16))
            if matrix.form16 == "BF16"
            else times_two(_widened(parts[0]), matrix.power)
        )
    scale, minimum = (part.view(np.float16) for part in parts[1:])
    return QuantizedMatrix(matrix.bits, layout.d_model, matrix.group_size, parts[0], scale, minimum, matrix.power)


def bias_of(layout: NeuronLayout, buffer: U8, name: str) -> F32:
    """The biases [out] of a projection that has them."""
    if name == DOWN:
        assert layout.bias_at is not None
        return buffer[layout.bias_at :][: 4 * layout.d_model].view(np.float32)
    at = layout.rows[name].bias_place
    assert at is not None
    bias: F32 = _taken(layout, rows_of(layout, buffer), at, 4).view(np.float32)[:, 0]
    return bias


def checksums(layout: NeuronLayout, buffer: U8, crc32: Callable[[memoryview], int] = zlib.crc32) -> U32:
    """CRC-32 of each rows piece, each columns piece, the biases of down (0 without), and rows that lie together:
    [n_checksums]."""
    pieces = [*rows_of(layout, buffer), *columns_of(layout, buffer)]
    found = [crc32(piece.data) for piece in pieces]
    found.append(0 if layout.bias_at is None else crc32(buffer[layout.bias_at :][: 4 * layout.d_model].data))
    if layout.together_bytes:
        found.append(crc32(buffer[layout.rows_at :][: layout.together_bytes].data))
    return np.array(found, np.uint32)


def _pieces(layout: NeuronLayout, buffer: U8, at: int, step: int, nbytes: int) -> U8:
    pieces: U8 = np.ndarray((layout.n_blocks, nbytes), np.uint8, buffer.data, at, (step, 1))
    return pieces


def _put(layout: NeuronLayout, pieces: U8, at: int, nbytes: int, array: Array, what: str) -> None:
    """Rows of neurons [d_ff, ...], of `nbytes` each."""
    if len(array) != layout.d_ff or array.nbytes != layout.d_ff * nbytes:
        raise ValueError(f"{what}: {array.nbytes} bytes in {len(array)} rows, the layout has {layout.d_ff} of {nbytes}")
    rows = np.zeros((layout.n_blocks * layout.per_block, nbytes), np.uint8)
    rows[: layout.d_ff] = np.ascontiguousarray(array).view(np.uint8).reshape(layout.d_ff, nbytes)
    pieces[:, at : at + layout.per_block * nbytes] = rows.reshape(layout.n_blocks, -1)


def _taken(layout: NeuronLayout, pieces: U8, at: int, nbytes: int) -> U8:
    """The reverse: uint8 [d_ff, nbytes]."""
    rows = np.ascontiguousarray(pieces[:, at : at + layout.per_block * nbytes]).reshape(-1, nbytes)
    found: U8 = rows[: layout.d_ff]
    return found


def _given(biases: Mapping[str, F32], name: str) -> F32:
    if name not in biases:
        raise ValueError(f"{name}.bias is not given")
    return np.ascontiguousarray(biases[name], np.float32)


def _widened(halves: U8) -> F32:
    wide: F32 = halves.view(np.float16).astype(np.float32)
    return wide
