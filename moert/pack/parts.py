"""The parts that a model is made of, free of any family's own names.

What differs only in numbers is a tensor of the pack, what may be absent is None, and where a part may be one of several
they carry a kind. Each part says which tensors it has, and what about it contradicts itself. All matrices are stored
[out_features, in_features].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple

from moert.pack.reading import MAX_COUNT, Above, Within

_MOST = 65535
_MOST_FEATURES = 1 << 24
_MOST_LAYERS = 4096

Role = Literal["attention", "router", "ffn", "head", "embed"]
ROLES: tuple[Role, ...] = ("attention", "router", "ffn", "head", "embed")
"""What a dense matrix (one outside the experts) is for; a pack gives widths to roles."""


class Tensor(NamedTuple):
    """A tensor that stays in memory: its canonical name, its shape, and what it is for; None for what is never
    quantised."""

    name: str
    shape: tuple[int, ...]
    role: Role | None = None


@dataclass(frozen=True)
class Norm:
    """weight · x / √(mean(x²) + eps)"""

    eps: Annotated[float, Above(0)]

    def tensors(self, at: str, features: int) -> Iterator[Tensor]:
        yield Tensor(f"{at}.weight", (features,))


@dataclass(frozen=True)
class Rope:
    """Rotary positions: the first `dims` features of each head turn in pairs (i, i + dims / 2), pair i at position p by
    the angle p · frequencies[i]; cosine and sine are multiplied by `factor`."""

    dims: Annotated[int, Within(2, _MOST)]
    factor: float = 1.0

    def tensors(self, at: str) -> Iterator[Tensor]:
        yield Tensor(f"{at}.frequencies", (self.dims // 2,))

    def contradictions(self) -> Iterator[str]:
        if self.dims % 2:
            yield f"{self.dims} features turn, which has no halves"
        if self.factor == 0:
            yield "its factor is 0, so that nothing would turn"


@dataclass(frozen=True)
class Buckets:
    """A bias on the scores by distance between query and key, in `n` buckets as in T5, for each head of a stack."""

    n: Annotated[int, Within(4, _MOST)]
    max_distance: Annotated[int, Within(1, MAX_COUNT)]

    def contradictions(self) -> Iterator[str]:
        if self.n % 2:
            yield f"{self.n} buckets of distances, it should be even"
        if self.max_distance <= self.n // 2:
            yield f"the largest distance is {self.max_distance}, it should be above {self.n // 2}, half of the buckets"


@dataclass(frozen=True)
class Attention:
    """`n` heads of queries and `kv` of keys and values, of `dim` features each: softmax(scale · q kᵀ + bias) v.

    `qk_norm` normalises queries and keys, all heads as one vector or each by itself, before they turn. `clip` bounds
    queries, keys and values to ± itself. `rope` is the place of the model's rope that turns them. `buckets` are those
    of the stack. A query sees at most the last `window` keys, its own among them. Scores become
    softcap · tanh(score / softcap). With `sinks` each head has a score that takes part in the softmax and has no value.
    """

    n: Annotated[int, Within(1, _MOST)]
    kv: Annotated[int, Within(1, _MOST)]
    dim: Annotated[int, Within(1, _MOST)]
    scale: float
    qk_norm: Literal["whole", "head"] | None
    clip: Annotated[float | None, Above(0)]
    rope: Annotated[int | None, Within(0, _MOST)]
    buckets: Buckets | None
    window: Annotated[int | None, Within(1, MAX_COUNT)] = None
    softcap: Annotated[float | None, Above(0)] = None
    sinks: bool = False

    @property
    def q_features(self) -> int:
        return self.n * self.dim

    @property
    def kv_features(self) -> int:
        return self.kv * self.dim

    def tensors(self, at: str, d_model: int) -> Iterator[Tensor]:
        yield Tensor(f"{at}.q.weight", (self.q_features, d_model), "attention")
        yield Tensor(f"{at}.k.weight", (self.kv_features, d_model), "attention")
        yield Tensor(f"{at}.v.weight", (self.kv_features, d_model), "attention")
        yield Tensor(f"{at}.o.weight", (d_model, self.q_features), "attention")
        if self.qk_norm is not None:
            whole = self.qk_norm == "whole"
            yield Tensor(f"{at}.q_norm.weight", (self.q_features if whole else self.dim,))
            yield Tensor(f"{at}.k_norm.weight", (self.kv_features if whole else self.dim,))
        if self.sinks:
            yield Tensor(f"{at}.sinks", (self.n,))

    def contradictions(self) -> Iterator[str]:
        if self.n % self.kv:
            yield f"{self.n} heads share {self.kv} heads of keys, which does not divide them"
        if self.q_features > _MOST_FEATURES:
            yield f"n times dim is {self.q_features}, it should be at most {_MOST_FEATURES}"
        if self.scale == 0:
            yield "its scale is 0, so that nothing the model reads would matter"
        if self.buckets is not None:
            yield from self.buckets.contradictions()


@dataclass(frozen=True)
class Act:
    """The activation of a feed-forward. With a `limit` the gate is bounded to at most the limit and up to ± the limit
    before it; without a gate, up to at most the limit."""

    name: Literal["relu", "silu", "gelu", "gelu_new"]
    limit: Annotated[float | None, Above(0)] = None


@dataclass(frozen=True)
class Ffn:
    """down(act(gate(x)) · up(x)), or without a gate down(act(up(x))); gate and up have `d_ff` outputs."""

    KIND: ClassVar[str] = "ffn"
    d_ff: Annotated[int, Within(1, MAX_COUNT)]
    act: Act
    gated: bool

    @property
    def projections(self) -> tuple[str, ...]:
        return ("gate", "up", "down") if self.gated else ("up", "down")

    def shape(self, projection: str, d_model: int) -> tuple[int, int]:
        """(out_features, in_features)"""
        return (d_model, self.d_ff) if projection == "down" else (self.d_ff, d_model)

    def tensors(self, at: str, d_model: int) -> Iterator[Tensor]:
        for projection in self.projections:
            yield Tensor(f"{at}.ffn.{projection}.weight", self.shape(projection, d_model), "ffn")

    def contradictions(self) -> Iterator[str]:
        yield from ()


@dataclass(frozen=True)
class Router:
    """Sends a token to the `top_k` experts with the largest softmax(weight · x), which are their weights too;
    `renormalise` makes these sum to 1. `capacity` is the most tokens of one sequence that one expert takes in one pass
    (later ones skip it); None: no limit."""

    top_k: Annotated[int, Within(1, _MOST)]
    renormalise: bool
    capacity: Annotated[int | None, Within(0, MAX_COUNT)]


@dataclass(frozen=True)
class Experts:
    """`n` networks of one shape, of which a router chooses some for each token."""

    KIND: ClassVar[str] = "experts"
    n: Annotated[int, Within(1, _MOST)]
    ffn: Ffn
    router: Router

    def tensors(self, at: str, d_model: int) -> Iterator[Tensor]:
        yield Tensor(f"{at}.router.weight", (self.n, d_model), "router")

    def contradictions(self) -> Iterator[str]:
        if self.router.top_k > self.n:
            yield f"a token goes to {self.router.top_k} of {self.n} experts"
        yield from self.ffn.contradictions()


@dataclass(frozen=True)
class Layer:
    """x += attention(norm(x)); in a decoder that reads an encoder's output x += cross(norm(x), output);
    x += ffn(norm(x))."""

    norm: Norm
    attention: Attention
    cross: Attention | None
    ffn: Ffn | Experts

    def tensors(self, at: str, d_model: int) -> Iterator[Tensor]:
        yield from self.norm.tensors(f"{at}.attn_norm", d_model)
        yield from self.attention.tensors(f"{at}.attn", d_model)
        if self.cross is not None:
            yield from self.norm.tensors(f"{at}.cross_norm", d_model)
            yield from self.cross.tensors(f"{at}.cross", d_model)
        yield from self.norm.tensors(f"{at}.ffn_norm", d_model)
        yield from self.ffn.tensors(at, d_model)

    def contradictions(self) -> Iterator[str]:
        yield from self.attention.contradictions()
        if self.cross is not None:
            yield from self.cross.contradictions()
            if self.cross.rope is not None or self.cross.buckets is not None:
                yield "attention to the encoder's output has positions, which that output has not"
            if self.cross.window is not None:
                yield "attention to the encoder's output has a window, and all of it is before every token"
        yield from self.ffn.contradictions()


@dataclass(frozen=True)
class Stack:
    """A tower: `layers` says for each layer which of `kinds` it is; a norm ends it."""

    kinds: tuple[Layer, ...]
    layers: Annotated[tuple[int, ...], Within(0, _MOST)]
    norm: Norm

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, layer: int) -> Layer:
        return self.kinds[self.layers[layer]]

    @property
    def buckets(self) -> Buckets | None:
        """Those of its layers' own attention, which share one table."""
        return next((kind.attention.buckets for kind in self.kinds if kind.attention.buckets is not None), None)

    def tensors(self, at: str, d_model: int) -> Iterator[Tensor]:
        yield from self.norm.tensors(f"{at}.norm", d_model)
        if (buckets := self.buckets) is not None:
            yield Tensor(f"{at}.relative_bias.weight", (buckets.n, self.kinds[0].attention.n))
        for layer in range(len(self)):
            yield from self[layer].tensors(f"{at}.{layer}", d_model)

    def contradictions(self) -> Iterator[str]:
        if not self.layers or not self.kinds or len(self.layers) > _MOST_LAYERS:
            yield f"there are {len(self.layers)} layers of {len(self.kinds)} kinds, it should be 1 to {_MOST_LAYERS}"
            return
        if max(self.layers) >= len(self.kinds):
            yield f"a layer is of kind {max(self.layers)}, there are {len(self.kinds)} kinds"
            return
        for kind in self.kinds:
            yield from kind.contradictions()
        biased = [kind.attention for kind in self.kinds if kind.attention.buckets is not None]
        if len({(attention.buckets, attention.n) for attention in biased}) > 1:
            yield "its layers have distance biases of several sizes, but share one table"


def stack_of(layers: Sequence[Layer], norm: Norm) -> Stack:
    """A tower of these layers, each kind of which is said once."""
    kinds = list(dict.fromkeys(layers))
    return Stack(tuple(kinds), tuple(kinds.index(layer) for layer in layers), norm)
