"""Attention, and the positions that it knows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from moert.pack.parts.base import MOST, MOST_FEATURES, Factor, Limit, Norm, Tensor, matrix
from moert.pack.reading import MAX_COUNT, Between, Within

MOST_TURN = 1000.0
"""The largest frequency that a rope may have, in magnitude; models have at most 1."""


@dataclass(frozen=True)
class Rope:
    """Rotary positions: the first `dims` features of each head turn in pairs (i, i + dims / 2), pair i at position p by
    the angle p · frequencies[i]; cosine and sine are multiplied by `factor`."""

    dims: Annotated[int, Within(2, MOST)]
    factor: Factor = 1.0

    def tensors(self, at: str) -> Iterator[Tensor]:
        yield Tensor(f"{at}.frequencies", (self.dims // 2,))

    def contradictions(self) -> Iterator[str]:
        if self.dims % 2:
            yield f"{self.dims} features turn, which has no halves"


@dataclass(frozen=True)
class Buckets:
    """A bias on the scores by distance between query and key, in `n` buckets as in T5, for each head of a stack."""

    n: Annotated[int, Within(4, MOST)]
    max_distance: Annotated[int, Within(1, MAX_COUNT)]

    def contradictions(self) -> Iterator[str]:
        if self.n % 2:
            yield f"{self.n} buckets of distances, it should be even"
        if self.max_distance <= self.n // 2:
            yield f"the largest distance is {self.max_distance}, it should be above {self.n // 2}, half of the buckets"


@dataclass(frozen=True)
class Stretch:
    """Queries at position p are multiplied with 1 + by · ln(1 + ⌊(p + 1) / every⌋): far ones look more sharply."""

    every: Annotated[int, Within(1, MAX_COUNT)]
    by: Annotated[float, Between(0, 1e3)]


@dataclass(frozen=True)
class Attention:
    """`n` heads of queries and `kv` of keys and values, of `dim` features each: softmax(scale · q kᵀ + bias) v.

    `qk_norm` normalises queries and keys, all heads as one vector or each by itself, before they turn or, if
    `norm_turned`, after; `v_norm` each head of the values. `clip` bounds queries, keys and values to ± itself. `rope`
    is the place of the model's rope that turns them. `buckets` are those of the stack. A query sees at most the last
    `window` keys, its own among them, and none before the last multiple of `chunk`. Scores become
    softcap · tanh(score / softcap). With `sinks` each head has a score that takes part in the softmax and has no value.
    What the heads give is multiplied with sigmoid(gate · x) if there is a `gate`. `biases`: matrices that have one, of
    which g is the gate.
    """

    KIND: ClassVar[str] = "heads"
    n: Annotated[int, Within(1, MOST)]
    kv: Annotated[int, Within(1, MOST)]
    dim: Annotated[int, Within(1, MOST)]
    scale: Factor
    qk_norm: Literal["whole", "head"] | None
    clip: Limit
    rope: Annotated[int | None, Within(0, MOST)]
    buckets: Buckets | None
    window: Annotated[int | None, Within(1, MAX_COUNT)] = None
    softcap: Limit = None
    sinks: bool = False
    biases: Literal["qkv", "qkvo", "qkvog"] | None = None
    norm_turned: bool = False
    v_norm: bool = False
    chunk: Annotated[int | None, Within(1, MAX_COUNT)] = None
    gate: bool = False
    stretch: Stretch | None = None

    @property
    def value_dim(self) -> int:
        return self.dim

    @property
    def turning(self) -> int:
        """Features of a head that a rope may turn, at most."""
        return self.dim

    @property
    def q_features(self) -> int:
        return self.n * self.dim

    @property
    def kv_features(self) -> int:
        return self.kv * self.dim

    def tensors(self, at: str, d_model: int) -> Iterator[Tensor]:
        shapes = {
            "q": (self.q_features, d_model), "k": (self.kv_features, d_model), "v": (self.kv_features, d_model),
            "o": (d_model, self.q_features),
        }  # fmt: skip
        if self.gate:
            shapes["gate"] = (self.q_features, d_model)
        for name, shape in shapes.items():
            yield from matrix(f"{at}.{name}", shape, "attention", name[0] in (self.biases or ""))
        if self.qk_norm is not None:
            whole = self.qk_norm == "whole"
            yield Tensor(f"{at}.q_norm.weight", (self.q_features if whole else self.dim,))
            yield Tensor(f"{at}.k_norm.weight", (self.kv_features if whole else self.dim,))
        if self.v_norm:
            yield Tensor(f"{at}.v_norm.weight", (self.dim,))
        if self.sinks:
            yield Tensor(f"{at}.sinks", (self.n,))

    def contradictions(self) -> Iterator[str]:
        if self.n % self.kv:
            yield f"{self.n} heads share {self.kv} heads of keys, which does not divide them"
        if self.q_features > MOST_FEATURES:
            yield f"n times dim is {self.q_features}, it should be at most {MOST_FEATURES}"
        if "g" in (self.biases or "") and not self.gate:
            yield "its gate has a bias, and there is no gate"
        if self.buckets is not None:
            yield from self.buckets.contradictions()


@dataclass(frozen=True)
class Latent:
    """Attention to a few features of each token in place of keys and values (DeepSeek-V2, arXiv 2405.04434, 2.1).

    A token leaves c = norm(kv_a · x) of `kv_rank` features and k = k_turn · x of `turning` features, which turn. A
    head's query has `nope` features, which meet those that `keys` makes of c, and `turning` ones, which meet k; what it
    reads of c becomes `v` features by `values`. With a `q_rank` queries are made of norm(q_a · x), else of x. `bias`:
    q_a, kv_a, k_turn and o have one.
    """

    KIND: ClassVar[str] = "latent"
    n: Annotated[int, Within(1, MOST)]
    q_rank: Annotated[int | None, Within(1, MOST)]
    kv_rank: Annotated[int, Within(1, MOST)]
    nope: Annotated[int, Within(1, MOST)]
    turning: Annotated[int, Within(2, MOST)]
    v: Annotated[int, Within(1, MOST)]
    scale: Factor
    norm: Norm
    rope: Annotated[int | None, Within(0, MOST)]
    bias: bool = False
    buckets: ClassVar[None] = None
    window: ClassVar[None] = None
    kv: ClassVar[int] = 1

    @property
    def dim(self) -> int:
        """Features of what stands for a key."""
        return self.kv_rank + self.turning

    @property
    def value_dim(self) -> int:
        return self.kv_rank

    @property
    def q_features(self) -> int:
        return self.n * self.dim

    @property
    def kv_features(self) -> int:
        return self.dim

    def tensors(self, at: str, d_model: int) -> Iterator[Tensor]:
        asked = d_model
        if self.q_rank is not None:
            yield from matrix(f"{at}.q_a", (self.q_rank, d_model), "attention", self.bias)
            yield from self.norm.tensors(f"{at}.q_norm", self.q_rank)
            asked = self.q_rank
        yield from matrix(f"{at}.q", (self.n * self.nope, asked), "attention")
        yield from matrix(f"{at}.q_turn", (self.n * self.turning, asked), "attention")
        yield from matrix(f"{at}.kv_a", (self.kv_rank, d_model), "attention", self.bias)
        yield from matrix(f"{at}.k_turn", (self.turning, d_model), "attention", self.bias)
        yield from self.norm.tensors(f"{at}.kv_norm", self.kv_rank)
        yield from matrix(f"{at}.keys", (self.n * self.kv_rank, self.nope), "attention")
        yield from matrix(f"{at}.values", (self.n * self.v, self.kv_rank), "attention")
        yield from matrix(f"{at}.o", (d_model, self.n * self.v), "attention", self.bias)

    def contradictions(self) -> Iterator[str]:
        most = self.n * max(self.dim, self.nope, self.v)
        if most > MOST_FEATURES:
            yield f"its heads have {most} features together, it should be at most {MOST_FEATURES}"
