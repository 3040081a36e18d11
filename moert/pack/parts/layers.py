"""Layers, and stacks of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from moert.pack.parts.attention import Attention, Buckets, Latent
from moert.pack.parts.base import MOST, Factor, Norm, Tensor
from moert.pack.parts.feed_forward import Experts, Ffn
from moert.pack.parts.mixers import FixedState
from moert.pack.parts.positions import PositionTable
from moert.pack.reading import Within

MOST_LAYERS = 4096


@dataclass(frozen=True)
class Join:
    """How what a part gives joins the stream: x += add · after(made)."""

    after: Norm | None = None
    add: Factor = 1.0

    def tensors(self, at: str, d_model: int) -> Iterator[Tensor]:
        if self.after is not None:
            yield from self.after.tensors(at, d_model)


@dataclass(frozen=True)
class Layer:
    """x joins mixer(norm(x)), if it has one; in a decoder that reads an encoder's output x += cross(norm(x), output);
    x joins ffn(norm(x)), if it has one; and if it is `scaled`, at the end x *= a number of its own. Without a norm all
    get x as it is. `positions` are added to x before."""

    norm: Norm | None
    mixer: Attention | Latent | FixedState | None
    cross: Attention | None
    ffn: Ffn | Experts | None
    mixer_join: Join = Join()
    ffn_join: Join = Join()
    scaled: bool = False
    positions: PositionTable | None = None

    @property
    def attention(self) -> Attention | Latent | None:
        """Its mixer, if that keeps keys and values."""
        return self.mixer if isinstance(self.mixer, (Attention, Latent)) else None

    @property
    def buckets(self) -> Buckets | None:
        return None if self.attention is None else self.attention.buckets

    @property
    def adds_experts(self) -> bool:
        """Whether what the experts give is added to the stream as it is, but for a factor."""
        experts = self.ffn
        if not isinstance(experts, Experts) or experts.beside is not None or experts.narrow is not None:
            return False
        if experts.bypass or experts.router.overflow == "itself":
            return False
        return self.ffn_join.after is None and not self.scaled

    def tensors(self, at: str, d_model: int) -> Iterator[Tensor]:
        if self.positions is not None:
            yield from self.positions.tensors(at, d_model)
        if self.mixer is not None:
            yield from self._norm(f"{at}.mixer_norm", d_model)
            yield from self.mixer.tensors(f"{at}.{'mixer' if self.attention is None else 'attn'}", d_model)
            yield from self.mixer_join.tensors(f"{at}.mixer_after", d_model)
        if self.cross is not None:
            yield from self._norm(f"{at}.cross_norm", d_model)
            yield from self.cross.tensors(f"{at}.cross", d_model)
        if self.ffn is not None:
            yield from self._norm(f"{at}.ffn_norm", d_model)
            yield from self.ffn.tensors(f"{at}.ffn" if isinstance(self.ffn, Ffn) else at, d_model)
            yield from self.ffn_join.tensors(f"{at}.ffn_after", d_model)
        if self.scaled:
            yield Tensor(f"{at}.scale", (1,))

    def _norm(self, at: str, d_model: int) -> Iterator[Tensor]:
        if self.norm is not None:
            yield from self.norm.tensors(at, d_model)

    def contradictions(self) -> Iterator[str]:
        if self.mixer is None and self.ffn is None:
            yield "a layer has neither a mixer nor a feed-forward, so that it would do nothing"
        for part, join in ((self.mixer, self.mixer_join), (self.ffn, self.ffn_join)):
            if part is not None:
                yield from part.contradictions()
            elif join != Join():
                yield "a layer says how something joins that it has not"
        if self.cross is not None:
            yield from self.cross.contradictions()
            if (self.cross.rope, self.cross.buckets, self.cross.stretch) != (None, None, None):
                yield "attention to the encoder's output has positions, which that output has not"
            if self.cross.window is not None or self.cross.chunk is not None:
                yield "attention to the encoder's output has a window, and all of it is before every token"
        if self.norm is None and self._borrows:
            yield "a part of a layer has norms with the eps of the layer's, which it has not"
        if self.positions is not None and self.positions.skips_pad:
            yield "the positions of a layer skip the pad token, which only those of a stack do"

    @property
    def _borrows(self) -> bool:
        """Whether a part has norms that take their eps from the layer's."""
        heads = [each for each in (self.mixer, self.cross) if isinstance(each, Attention)]
        own = isinstance(self.ffn, Experts) and self.ffn.router.own_norm
        return own or any(each.qk_norm is not None or each.v_norm for each in heads)


@dataclass(frozen=True)
class Stack:
    """A tower: `layers` says for each layer which of `kinds` it is; a norm ends it, if it has one. `positions` are
    added to what it reads."""

    kinds: tuple[Layer, ...]
    layers: Annotated[tuple[int, ...], Within(0, MOST)]
    norm: Norm | None
    positions: PositionTable | None = None

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, layer: int) -> Layer:
        return self.kinds[self.layers[layer]]

    @property
    def buckets(self) -> Buckets | None:
        """Those of its layers' own attention, which share one table."""
        return next((kind.buckets for kind in self.kinds if kind.buckets is not None), None)

    def n_tensors(self, d_model: int) -> int:
        """How many its layers have, without naming each."""
        each = [sum(1 for _ in kind.tensors("", d_model)) for kind in self.kinds]
        return sum(each[kind] for kind in self.layers)

    def tensors(self, at: str, d_model: int) -> Iterator[Tensor]:
        if self.norm is not None:
            yield from self.norm.tensors(f"{at}.norm", d_model)
        if self.positions is not None:
            yield from self.positions.tensors(at, d_model)
        if (buckets := self.buckets) is not None:
            heads = next(kind.attention.n for kind in self.kinds if kind.buckets is not None and kind.attention)
            yield Tensor(f"{at}.relative_bias.weight", (buckets.n, heads))
        for layer in range(len(self)):
            yield from self[layer].tensors(f"{at}.{layer}", d_model)

    def contradictions(self) -> Iterator[str]:
        if not self.layers or not self.kinds or max(len(self.layers), len(self.kinds)) > MOST_LAYERS:
            yield f"there are {len(self.layers)} layers of {len(self.kinds)} kinds, it should be 1 to {MOST_LAYERS}"
            return
        if max(self.layers) >= len(self.kinds):
            yield f"a layer is of kind {max(self.layers)}, there are {len(self.kinds)} kinds"
            return
        for kind in self.kinds:
            yield from kind.contradictions()
        biased = {(kind.buckets, kind.attention.n) for kind in self.kinds if kind.buckets and kind.attention}
        if len(biased) > 1:
            yield "its layers have distance biases of several sizes, but share one table"


def stack_of(layers: Sequence[Layer], norm: Norm | None) -> Stack:
    """A tower of these layers, each kind of which is said once."""
    kinds = list(dict.fromkeys(layers))
    return Stack(tuple(kinds), tuple(kinds.index(layer) for layer in layers), norm)
