"""The C's structs, filled in with the addresses of numpy's arrays; a caller that fills one keeps the arrays alive."""

from __future__ import annotations

import math
from collections.abc import Sequence
from ctypes import Structure, addressof, c_char, c_void_p
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy.typing as npt

from moert.kernels import structs
from moert.kernels.backend import AttentionWeights, KeptKeys, NormWeights, Positions, RouterWeights, Stored
from moert.kernels.structs import KINDS, SCORES, Keys, Matrix
from moert.pack.codec import F32
from moert.pack.layout import MatrixPlace, NeuronLayout, group_of
from moert.pack.parts import Attention

_S = TypeVar("_S", bound=Structure)


@dataclass(frozen=True)
class NativeMatrix:
    """A dense matrix; `struct` points to `stored` and `bias`."""

    stored: Stored
    bias: F32 | None
    struct: Matrix

    @property
    def rows(self) -> int:
        return int(self.struct.rows)

    @property
    def cols(self) -> int:
        return int(self.struct.cols)


def keys_of(kept: KeptKeys) -> Keys:
    """Returns the struct with the pages' addresses, valid until the pages change; the pages have to outlive it."""
    if kept.place is None:
        _, *others, head = kept.layout.places
        table = (c_void_p * len(kept.pages))(*[page.address for page in kept.pages])
        kept.place = Keys(addressof(table), head, *others, kept.layout.bits == 8), table
    place: Keys = kept.place[0]
    return place


def address(array: npt.NDArray[Any]) -> int:
    """Returns the address of an array's first number: `array.ctypes` takes three times as long, and every token needs
    many."""
    try:
        return addressof(c_char.from_buffer(array))  # type: ignore[arg-type]
    except (TypeError, ValueError):  # an array that is empty, or not to be written
        return int(array.ctypes.data)


def address_in_place(state: F32) -> int:
    """Returns the address of an array that is changed in place, which no copy can stand for."""
    assert state.flags.c_contiguous
    return address(state)


def neurons(layout: NeuronLayout) -> structs.Neurons:
    places = {name: _place(each, layout.d_model) for name, each in layout.rows.items()}
    return structs.Neurons(
        down=_place(layout.columns, layout.d_model), d_model=layout.d_model, d_ff=layout.d_ff,
        block_rows=layout.per_block, **places,
    )  # fmt: skip


def _place(matrix: MatrixPlace, cols: int) -> structs.Place:
    assert matrix.form16 != "MXFP4" or matrix.bits < 16
    data, scale, minimum = matrix.places if matrix.bits < 16 else (matrix.places[0], 0, 0)
    kind = KINDS[matrix.form16] if matrix.bits == 16 else matrix.bits
    group, bias = cols if matrix.bits == 16 else group_of(cols, matrix.group_size), matrix.bias_place
    return structs.Place(data, scale, minimum, -1 if bias is None else bias, kind, group, matrix.power)


def norm(of: NormWeights) -> structs.Norm:
    weight, bias = (None if each is None else address(each) for each in (of.weight, of.bias))
    return structs.Norm(weight, bias, of.eps)


def _heads(weights: AttentionWeights[NativeMatrix]) -> structs.Heads:
    part, sinks = weights.part, weights.sinks
    made = structs.Heads(
        None if sinks is None else address(sinks), part.n, part.kv, part.dim, part.value_dim, causal=weights.causal,
        window=part.window or 0, scale=part.scale,
    )  # fmt: skip
    if isinstance(part, Attention):
        made.chunk, made.softcap = part.chunk or 0, part.softcap or 0.0
    return made


def _fill(struct: _S, weights: AttentionWeights[NativeMatrix], norms: Sequence[str], matrices: Sequence[str]) -> _S:
    """Fills in the norms and matrices of these names that the weights have; returns the struct."""
    for name in norms:
        if name in weights.norms:
            setattr(struct, name if name == "after" else f"{name}_norm", norm(weights.norms[name]))
    for name in matrices:
        if name in weights.matrices:
            setattr(struct, name, weights.matrices[name].struct)
    return struct


def attention(weights: AttentionWeights[NativeMatrix], with_keys: bool | None = None) -> structs.Attention:
    """Returns the struct of an attention, without the matrices of keys and values where these are there already."""
    part = weights.part
    assert isinstance(part, Attention)
    block = structs.Attention(
        heads=_heads(weights), norm=norm(weights.norms["before"]), rope_dims=weights.rope_dims,
        norm_each=part.qk_norm == "head", norm_turned=part.norm_turned,
        clip=math.inf if part.clip is None else part.clip, add=weights.add,
    )  # fmt: skip
    own = weights.own if with_keys is None else with_keys
    return _fill(block, weights, ("q", "k", "v", "after"), ("q", "k", "v", "o", "gate") if own else ("q", "o", "gate"))


def with_keys(weights: AttentionWeights[NativeMatrix]) -> structs.Attention:
    return attention(weights, with_keys=True)


def latent(weights: AttentionWeights[NativeMatrix]) -> structs.Latent:
    block = structs.Latent(
        heads=_heads(weights), norm=norm(weights.norms["before"]), rope_dims=weights.part.turning, add=weights.add
    )
    return _fill(block, weights, ("q", "kv", "after"), ("q_a", "q", "q_turn", "kv_a", "k_turn", "keys", "values", "o"))


def router(weights: RouterWeights[NativeMatrix]) -> structs.Router:
    part, groups = weights.part, weights.part.groups
    optional = {"choice_bias": weights.choice_bias, "expert_scale": weights.expert_scale}
    made = structs.Router(
        norm=norm(weights.norm), matrix=weights.matrix.struct, score=SCORES[part.score], top_k=part.top_k,
        renormalise=part.renormalise, factor=part.factor * weights.factor, jitter=part.jitter,
        **{name: address(values) for name, values in optional.items() if values is not None},
    )  # fmt: skip
    if weights.own is not None:
        made.own = norm(weights.own)
    if groups is not None:
        made.groups, made.best_groups, made.group_top = groups.n, groups.best, groups.top
    return made


def positions(of: Positions) -> structs.Positions:
    turns, bias, scale = of.turns, of.bias, of.query_scale
    return structs.Positions(
        None if turns is None else address(turns),
        None if bias is None else address(bias) + bias.itemsize * of.zero,
        0 if bias is None else bias.shape[1],
        None if scale is None else address(scale),
    )
