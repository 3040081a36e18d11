"""Experts whose neurons lie in blocks, so that some of them can be read alone: where each byte is. SPEC.md, section 2.

A neuron is a row of gate and of up, and a column of down, which is stored as its transpose: all are matrices [d_ff,
d_model] here. Where the activation gives exact zeros, a neuron that gives one needs no column.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, NamedTuple

from moert.pack.codec import Form16, n_groups, row_bytes
from moert.pack.model_spec import ModelSpec
from moert.pack.reading import Within

NEURONS = "neurons.safetensors"
"""The file of a pack that has a checksum of each piece."""
SECTOR = 512  # bytes: what is read alone is a whole number of them, as any drive can
MOST_PIECE_BYTES = 1 << 20
_ALIGNMENT = 8  # bytes, of what lies in a piece
_BIAS_BYTES = 4
DOWN = "down"


@dataclass(frozen=True)
class Neurons:
    """What a pack says of its blocks: see `NeuronLayout`. `piece_bytes`: the most that a block's columns take.
    `bundled`: the columns of a block lie behind its rows; else all columns of an expert lie behind all its rows.
    `together`: rows, not bundled, are read all at once, so that their pieces are no whole sectors."""

    piece_bytes: Annotated[int, Within(SECTOR, MOST_PIECE_BYTES)]
    bundled: bool
    together: bool = False


class MatrixPlace(NamedTuple):
    """A matrix within a piece: `places` count bytes from the piece's beginning, of its codes, scales and minima or of
    its weights of 16 bits, `bias_place` of its biases. `group_size` counts features of d_model, and is never 0.
    Weights are multiplied with two to the `power`."""

    bits: int
    group_size: int
    form16: Form16
    places: tuple[int, ...]
    bias_place: int | None
    power: int = 0

    def neuron_bytes(self, d_model: int) -> tuple[int, ...]:
        """What a neuron takes at each of `places`."""
        return _neuron_bytes(self.bits, d_model, self.group_size)


class NeuronLayout(NamedTuple):
    """Of one expert's file. Block k has the neurons from k · per_block on; its *rows* piece (gate, if there is one, and
    up) begins at rows_at + k · rows_step, its *columns* piece (down, transposed) at columns_at + k · columns_step:
    bytes from the expert's beginning. Pieces are filled up with zeros. `bias_at`: where the biases of down, F32
    [d_model], are."""

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
    """Of all rows, to be read at once, in whole sectors; 0: each piece is whole sectors itself."""

    @property
    def n_checksums(self) -> int:
        """Of each piece, of the biases of down, and of rows that lie together."""
        return 2 * self.n_blocks + (2 if self.together_bytes else 1)

    @property
    def matrices(self) -> Iterator[tuple[str, MatrixPlace]]:
        """In the order of the format."""
        yield from self.rows.items()
        yield DOWN, self.columns

    @property
    def tensor_bytes(self) -> int:
        """Weights, scales, minima and biases of all neurons, without what fills up."""
        return sum(self.matrix_bytes(name) for name, _ in self.matrices)

    def matrix_bytes(self, name: str) -> int:
        """The same of one projection."""
        if name == DOWN:
            biases = 0 if self.bias_at is None else _BIAS_BYTES * self.d_model
            return biases + self.d_ff * sum(self.columns.neuron_bytes(self.d_model))
        biased = 0 if self.rows[name].bias_place is None else _BIAS_BYTES
        return self.d_ff * (sum(self.rows[name].neuron_bytes(self.d_model)) + biased)

    def block(self, k: int) -> range:
        """The neurons of block k."""
        return range(k * self.per_block, min(self.d_ff, (k + 1) * self.per_block))

    def scaled(self, powers: Mapping[str, int]) -> NeuronLayout:
        """The same of projections that count powers of two."""
        rows = {name: matrix._replace(power=powers.get(name, 0)) for name, matrix in self.rows.items()}
        return self._replace(rows=rows, columns=self.columns._replace(power=powers.get(DOWN, 0)))

    def moved(self, nbytes: int) -> NeuronLayout:
        """The same, so many bytes further on."""
        bias_at = None if self.bias_at is None else self.bias_at + nbytes
        return self._replace(rows_at=self.rows_at + nbytes, columns_at=self.columns_at + nbytes, bias_at=bias_at)


def neuron_layout(
    spec: ModelSpec, bits: Mapping[str, int], group_size: int, form16: Form16, page_bytes: int, neurons: Neurons
) -> NeuronLayout:
    """Of an expert whose projections have the widths `bits`, counted from the beginning of its data. `group_size` 0
    stands for a neuron's whole row of d_model features."""
    widths, ffn = tuple((name, bits[name]) for name in spec.moe.ffn.projections), spec.moe.ffn
    return _layout((spec.expert_width, ffn.d_ff), ffn.bias, widths, group_size, form16, page_bytes, neurons)


def columns_bytes(width: int, d_model: int, group_size: int) -> int:
    """What the column of one neuron takes where `down` has this width; `group_size` as above."""
    return sum(_neuron_bytes(width, d_model, _features(group_size, d_model)))


@lru_cache(maxsize=1024)
def _layout(
    sizes: tuple[int, int], bias: bool, widths: tuple[tuple[str, int], ...], group_size: int, form16: Form16,
    page_bytes: int, neurons: Neurons,
) -> NeuronLayout:  # fmt: skip
    (d_model, d_ff), group = sizes, _features(group_size, sizes[0])
    plain = {name: MatrixPlace(width, group, form16, (), None) for name, width in widths}
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
    """The most neurons whose columns take at most `piece_bytes`; at least one."""
    count = max(1, min(d_ff, piece_bytes // sum(down.neuron_bytes(d_model))))
    while count > 1 and _placed({DOWN: down}, d_model, count, bias=False)[1] > piece_bytes:
        count -= 1
    return count


def _placed(
    matrices: Mapping[str, MatrixPlace], d_model: int, per_block: int, bias: bool, unit: int = SECTOR
) -> tuple[dict[str, MatrixPlace], int]:
    """With their places in a piece, and the bytes of that piece, a multiple of `unit`."""
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


def _features(group_size: int, d_model: int) -> int:
    """Of a group: 0 stands for all."""
    return min(group_size, d_model) if group_size else d_model


def _neuron_bytes(bits: int, d_model: int, group_size: int) -> tuple[int, ...]:
    if bits == 16:
        return (2 * d_model,)
    groups = n_groups(d_model, group_size)
    return row_bytes(d_model, bits), 2 * groups, 2 * groups


def _filled(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit
