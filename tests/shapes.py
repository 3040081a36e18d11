"""Models in few numbers: a flat description that tests change a field of, and the tree of parts that it stands for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from moert.pack.mixers import FixedState
from moert.pack.model_spec import Head, Layer, ModelSpec, Stack, Tokens, stack_of
from moert.pack.parts import Act, Attention, Buckets, Experts, Ffn, Narrow, Norm, Rope, Router

THETA = 10000.0
Has = tuple[bool, ...]


def every(n_layers: int) -> Has:
    """All of so many layers have experts."""
    return (True,) * n_layers


@dataclass(frozen=True)
class Shape:
    """`encoder` and `decoder` say of each layer whether it has experts; others have `d_ff_dense`. With an encoder
    positions are biases by distance, without one they are rotary. `mixers`: (layer of the decoder, what it has in place
    of attention); `bare`: layers of the decoder without a feed-forward."""

    vocab_size: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    decoder: Has
    encoder: Has | None = None
    num_experts: int = 4
    top_k: int = 2
    d_ff: int = 16
    activation: Literal["relu", "silu", "gelu", "gelu_new", "relu2"] = "silu"
    activation_limit: float | None = None
    gated: bool = True
    narrow: Narrow | None = None
    renormalise: bool = False
    capacity: int | None = None
    d_ff_dense: int = 16
    eps: float = 1e-5
    scale: float = 0.5
    qk_norm: bool = False
    clip: float | None = None
    tied: bool = False
    head_scale: float = 1.0
    max_positions: int | None = None
    eos: tuple[int, ...] = ()
    pad: int | None = None
    start: int | None = None
    mixers: tuple[tuple[int, FixedState | None], ...] = ()
    bare: tuple[int, ...] = ()
    family: str = "test"

    @property
    def spec(self) -> ModelSpec:
        attention = Attention(
            self.n_heads, self.n_kv_heads, self.head_dim, self.scale, "whole" if self.qk_norm else None, self.clip,
            rope=0 if self.encoder is None else None, buckets=None if self.encoder is None else Buckets(8, 16),
        )  # fmt: skip
        cross = None if self.encoder is None else replace(attention, buckets=None)
        norm, act = Norm(self.eps), Act(self.activation, self.activation_limit)
        experts = Experts(
            self.num_experts, Ffn(self.d_ff, act, self.gated), Router(self.top_k, self.renormalise, self.capacity),
            narrow=self.narrow,
        )  # fmt: skip

        def stack(has: Has, crossing: Attention | None) -> Stack:
            dense = Ffn(self.d_ff_dense, act, self.gated)
            return stack_of([Layer(norm, attention, crossing, experts if some else dense) for some in has], norm)

        decoder = stack(self.decoder, cross)
        layers = [decoder[at] for at in range(len(decoder))]
        for at, mixer in self.mixers:
            layers[at] = replace(layers[at], mixer=mixer)
        for at in self.bare:
            layers[at] = replace(layers[at], ffn=None)
        return ModelSpec(
            family=self.family, vocab_size=self.vocab_size, d_model=self.d_model,
            encoder=None if self.encoder is None else stack(self.encoder, None), decoder=stack_of(layers, norm),
            ropes=(Rope(self.head_dim),) if self.encoder is None else (), head=Head(self.tied, self.head_scale),
            tokens=Tokens(None, self.eos, self.pad, self.start), max_positions=self.max_positions,
        )  # fmt: skip

    def but(self, **changes: Any) -> Shape:
        """This shape with some fields changed."""
        return replace(self, **changes)


def frequencies(dims: int) -> npt.NDArray[np.float32]:
    """[dims / 2] of plain rotary positions."""
    return (1 / THETA ** (np.arange(0, dims, 2, dtype=np.float32) / dims)).astype(np.float32)


def shapes_of(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Canonical name → shape of everything outside the experts."""
    return {name: tensor.shape for name, tensor in spec.tensors.items()}
