"""Feed-forwards by their neurons, which lie in blocks."""

from __future__ import annotations

import numpy as np

from moert.kernels.backend import I64, ProjectionView
from moert.kernels.reference.arithmetic import Plain, bent
from moert.kernels.reference.codes import weights
from moert.pack.codec import F32, U8
from moert.pack.layout import group_of
from moert.pack.neurons import MatrixPlace, NeuronLayout
from moert.pack.parts import Ffn


def fire(layout: NeuronLayout, base: U8, offsets: I64, x: F32, spec: Ffn) -> F32:
    """See `moert.kernels.backend.Backend.fire`."""
    return bent({name: _matrix(layout, place, base, offsets) for name, place in layout.rows.items()}, x, spec)


def project(layout: NeuronLayout, base: U8, offsets: I64, hidden: F32, bias: F32 | None) -> F32:
    """See `moert.kernels.backend.Backend.project`."""
    made = np.zeros((len(hidden), layout.d_model), np.float32)
    fired = np.flatnonzero((hidden != 0).any(axis=0))
    blocks = np.unique(fired // layout.per_block)
    if (offsets[blocks] < 0).any():
        raise ValueError("a neuron that fired is not there")
    columns = {block: _block(layout, layout.columns, base, int(offsets[block])).weight for block in blocks}
    for neuron in fired:
        block, place = divmod(int(neuron), layout.per_block)
        made += hidden[:, neuron, None] * columns[block][place]
    return made if bias is None else made + bias


def _matrix(layout: NeuronLayout, place: MatrixPlace, base: U8, offsets: I64) -> Plain:
    """[d_ff, d_model], with zeros for what is not there."""
    shape = layout.n_blocks * layout.per_block, layout.d_model
    weight, bias = np.zeros(shape, np.float32), np.zeros(shape[0], np.float32)
    for block in np.flatnonzero(offsets >= 0):
        rows = slice(block * layout.per_block, (block + 1) * layout.per_block)
        weight[rows], found = _block(layout, place, base, int(offsets[block]))
        if found is not None:
            bias[rows] = found
    return Plain(weight[: layout.d_ff], None if place.bias_place is None else bias[: layout.d_ff])


def _block(layout: NeuronLayout, place: MatrixPlace, base: U8, offset: int) -> Plain:
    """The matrix of one piece, [per_block, d_model]."""
    shape, group = (layout.per_block, layout.d_model), group_of(layout.d_model, place.group_size)
    view = ProjectionView(shape, place.bits, group, place.form16, place.places, place.bias_place, place.power)
    piece = base[offset:]
    return Plain(weights(view.stored(piece)), view.bias(piece))
