"""Mixers whose memory is not keys and values of each token: recurrent states, and attention to pools of tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from moert.pack.documents import MAX_COUNT, Within
from moert.pack.parts import MOST, MOST_FEATURES, Factor, Limit, Norm, Role, Shapes, Tensor, matrix

HELD = "numbers of its state"


@dataclass(frozen=True)
class ShortConv:
    """A gated short convolution: out · (c ∗ conv(b ∗ u)), where `in` · x is b, c and u one after the other, of d_model
    features each (LFM2). The convolution is causal, of each feature alone, over the last `taps` tokens. `bias`: both
    matrices and the convolution have one."""

    KIND: ClassVar[str] = "conv"
    taps: Annotated[int, Within(1, MOST)]
    bias: bool = False

    def tensors(self, at: str, d_model: int) -> Iterator[Tensor]:
        yield from matrix(f"{at}.in", (3 * d_model, d_model), "mixer", self.bias)
        yield from _conv(at, d_model, self.taps, self.bias)
        yield from matrix(f"{at}.out", (d_model, d_model), "mixer", self.bias)

    def state_shapes(self, d_model: int) -> Shapes:
        return ((self.taps - 1, d_model),)

    def contradictions(self) -> Iterator[str]:
        return iter(())


@dataclass(frozen=True)
class GatedDelta:
    """The gated delta rule (Yang et al. 2024): `n` heads of values of `v` features, and `keys` heads of queries and
    keys of `dim`, each of which serves n / keys heads of values that follow one another.

    q, k and v pass a causal convolution over the last `taps` tokens and silu; q and k get the length 1, and q is
    divided by √dim. A head's state decays by e^(-e^a_log · softplus(a · x + dt_bias)), and moves to v for k by
    sigmoid(b · x). Its output for q is normed by head, multiplied with silu(z · x), and by `out`.

    With `by_feature` a and dt_bias have a row for each feature of each head's key, which decays by itself (Kimi Delta
    Attention, arXiv 2510.26692). With a `rank`, a and z get a_narrow · x and z_narrow · x of as many features in place
    of x. `gate`: the function of z. With a `bound` decays are e^(-bound · sigmoid(e^a_log · (a · x + dt_bias))).
    """

    KIND: ClassVar[str] = "delta"
    LEFT_OUT: ClassVar = ("by_feature", "rank", "gate", "bound")
    n: Annotated[int, Within(1, MOST)]
    keys: Annotated[int, Within(1, MOST)]
    dim: Annotated[int, Within(1, MOST)]
    v: Annotated[int, Within(1, MOST)]
    taps: Annotated[int, Within(1, MOST)]
    norm: Norm
    by_feature: bool = False
    rank: Annotated[int | None, Within(1, MOST)] = None
    gate: Literal["silu", "sigmoid"] = "silu"
    bound: Limit = None

    @property
    def key_features(self) -> int:
        return self.keys * self.dim

    @property
    def value_features(self) -> int:
        return self.n * self.v

    @property
    def channels(self) -> int:
        """Returns the channels of its convolution: q, k and v one after the other."""
        return 2 * self.key_features + self.value_features

    @property
    def decays(self) -> int:
        """Returns the number of decays of a token."""
        return self.n * self.dim if self.by_feature else self.n

    def tensors(self, at: str, d_model: int) -> Iterator[Tensor]:
        for name, features in (("q", self.key_features), ("k", self.key_features), ("v", self.value_features)):
            yield Tensor(f"{at}.{name}.weight", (features, d_model), "mixer")
        role: Role | None = "mixer" if self.by_feature else None
        for name, features, kind in (("z", self.value_features, "mixer"), ("a", self.decays, role)):
            if self.rank is not None:
                yield Tensor(f"{at}.{name}_narrow.weight", (self.rank, d_model), kind)
            yield Tensor(f"{at}.{name}.weight", (features, self.rank or d_model), kind)
        yield Tensor(f"{at}.b.weight", (self.n, d_model))
        yield from _conv(at, self.channels, self.taps, False)
        yield Tensor(f"{at}.a_log", (self.n,))
        yield Tensor(f"{at}.dt_bias", (self.decays,))
        yield from self.norm.tensors(f"{at}.norm", self.v)
        yield Tensor(f"{at}.out.weight", (d_model, self.value_features), "mixer")

    def state_shapes(self, d_model: int) -> Shapes:
        return (self.taps - 1, self.channels), (self.n, self.dim, self.v)

    def contradictions(self) -> Iterator[str]:
        if self.n % self.keys:
            yield f"{self.n} heads share {self.keys} heads of keys, which does not divide them"
        yield from too_many("features of its convolution", self.channels)
        yield from too_many(HELD, self.n * self.dim * self.v)
        yield from has_no_bias(self.norm)


@dataclass(frozen=True)
class Mamba2:
    """Mamba-2 (arXiv 2405.21060): `n` heads of `dim` features, each with a state of dim · `state` numbers. `in` · x is
    z, u, b and c one after the other, of n · dim features twice and `groups` · state twice; n / groups heads that
    follow one another share a group's b and c.

    u, b and c pass a causal convolution over the last `taps` tokens and silu. With t = softplus(dt · x + dt_bias) a
    head's state decays by e^(-e^a_log · t) and gains t · u bᵀ; its output is state · c + d · u. The output times
    silu(z) is normed, each group's features by themselves, and multiplied by `out`. `bias`: in, dt and out have one;
    `conv_bias`: the convolution has one.
    """

    KIND: ClassVar[str] = "mamba2"
    n: Annotated[int, Within(1, MOST)]
    dim: Annotated[int, Within(1, MOST)]
    groups: Annotated[int, Within(1, MOST)]
    state: Annotated[int, Within(1, MOST)]
    taps: Annotated[int, Within(1, MOST)]
    norm: Norm
    conv_bias: bool = True
    bias: bool = False

    @property
    def features(self) -> int:
        return self.n * self.dim

    @property
    def channels(self) -> int:
        """Returns the channels of its convolution: u, b and c one after the other."""
        return self.features + 2 * self.groups * self.state

    def tensors(self, at: str, d_model: int) -> Iterator[Tensor]:
        yield from matrix(f"{at}.in", (self.features + self.channels, d_model), "mixer", self.bias)
        yield Tensor(f"{at}.dt.weight", (self.n, d_model))
        if self.bias:
            yield Tensor(f"{at}.dt.bias", (self.n,))
        yield from _conv(at, self.channels, self.taps, self.conv_bias)
        for name in ("a_log", "dt_bias", "d"):
            yield Tensor(f"{at}.{name}", (self.n,))
        yield from self.norm.tensors(f"{at}.norm", self.features)
        yield from matrix(f"{at}.out", (d_model, self.features), "mixer", self.bias)

    def state_shapes(self, d_model: int) -> Shapes:
        return (self.taps - 1, self.channels), (self.n, self.dim, self.state)

    def contradictions(self) -> Iterator[str]:
        if self.n % self.groups:
            yield f"{self.n} heads are in {self.groups} groups, which does not divide them"
        yield from too_many("features of its convolution", self.features + self.channels)
        yield from too_many(HELD, self.features * self.state)
        yield from has_no_bias(self.norm)


@dataclass(frozen=True)
class Mamba:
    """Mamba (arXiv 2312.00752): `features` channels, each with a state of `state` numbers. `in` · x is u and z one
    after the other, and u passes a causal convolution over the last `taps` tokens and silu.

    `inner` · u is r, b and c one after the other, of `rank`, state and state features; with a `norm` each is normed.
    With t = softplus(steps · r + dt_bias) a channel's state decays by e^(-e^a_log · t) and gains t · u · b; its output
    is state · c + d · u. The output times silu(z) is multiplied by `out`. `bias`: in and out have one; `conv_bias`: the
    convolution has one.
    """

    KIND: ClassVar[str] = "mamba"
    features: Annotated[int, Within(1, MOST_FEATURES)]
    state: Annotated[int, Within(1, MOST)]
    rank: Annotated[int, Within(1, MOST)]
    taps: Annotated[int, Within(1, MOST)]
    norm: Norm | None
    conv_bias: bool = True
    bias: bool = False

    def tensors(self, at: str, d_model: int) -> Iterator[Tensor]:
        yield from matrix(f"{at}.in", (2 * self.features, d_model), "mixer", self.bias)
        yield from _conv(at, self.features, self.taps, self.conv_bias)
        yield Tensor(f"{at}.inner.weight", (self.rank + 2 * self.state, self.features), "mixer")
        if self.norm is not None:
            for name, size in (("dt", self.rank), ("b", self.state), ("c", self.state)):
                yield from self.norm.tensors(f"{at}.{name}_norm", size)
        yield Tensor(f"{at}.steps.weight", (self.features, self.rank), "mixer")
        yield Tensor(f"{at}.dt_bias", (self.features,))
        yield Tensor(f"{at}.a_log", (self.features, self.state))
        yield Tensor(f"{at}.d", (self.features,))
        yield from matrix(f"{at}.out", (d_model, self.features), "mixer", self.bias)

    def state_shapes(self, d_model: int) -> Shapes:
        return (self.taps - 1, self.features), (self.features, 1, self.state)

    def contradictions(self) -> Iterator[str]:
        yield from too_many(HELD, self.features * self.state)


FixedState = ShortConv | GatedDelta | Mamba2 | Mamba
"""A mixer with a recurrent state, which takes as many bytes for a text of any length."""


def _conv(at: str, channels: int, taps: int, bias: bool) -> Iterator[Tensor]:
    """Yields a convolution's factors, one for each channel and tap (the last tap is the token itself), and its bias."""
    yield Tensor(f"{at}.conv.weight", (channels, taps))
    if bias:
        yield Tensor(f"{at}.conv.bias", (channels,))


def too_many(what: str, count: int) -> Iterator[str]:
    if count > MOST_FEATURES:
        yield f"{what} are {count}, they should be at most {MOST_FEATURES}"


def has_no_bias(norm: Norm) -> Iterator[str]:
    if norm.kind != "rms":
        yield f"what it gives is normed by one of the kind {norm.kind}, it should be rms"


MOST_GROUPS = 64


@dataclass(frozen=True)
class Indexer:
    """The choice of the `top` pools that a query attends to, by `n` heads of queries that meet `dim` features of each
    pool, made as the pool itself is: those with the largest sum over heads of weight · relu(q k)."""

    n: Annotated[int, Within(1, MOST)]
    dim: Annotated[int, Within(1, MOST)]
    top: Annotated[int, Within(1, MAX_COUNT)]


@dataclass(frozen=True)
class Pools:
    """Keys that stand for `every` tokens each: a weighted mean of features that the tokens leave, with weights of their
    own for each feature. With `overlap` a pool also takes in the tokens of the pool before, which leave other features
    for that. A query attends to all pools before it, or to those that an `indexer` chooses."""

    every: Annotated[int, Within(1, MOST)]
    overlap: bool
    indexer: Indexer | None

    def width(self, dim: int) -> int:
        """Returns the features that a token leaves for pools of `dim` features."""
        return dim * (1 + self.overlap)

    @property
    def span(self) -> int:
        """Returns the number of tokens that make a pool."""
        return self.every * (1 + self.overlap)


@dataclass(frozen=True)
class Pooled:
    """Attention to the last `window` tokens and to pools of the tokens before (compressed attention of DeepSeek-V4),
    with one head of keys, which are the values too. `n` heads of `dim` features, the last `turning` of which turn in
    pairs (2i, 2i + 1), and back once they are summed. Queries are made of norm(q_a · x) of `q_rank` features, and each
    is normed without weights. Each head has a score that takes part in the softmax and has no value. The output of each
    of `groups` groups of heads becomes `o_rank` features, and `out` makes x of all of them."""

    KIND: ClassVar[str] = "pooled"
    n: Annotated[int, Within(1, MOST)]
    dim: Annotated[int, Within(2, MOST)]
    turning: Annotated[int, Within(2, MOST)]
    q_rank: Annotated[int, Within(1, MOST)]
    window: Annotated[int, Within(1, MAX_COUNT)]
    scale: Factor
    norm: Norm
    rope: Annotated[int, Within(0, MOST)]
    groups: Annotated[int, Within(1, MOST_GROUPS)]
    o_rank: Annotated[int, Within(1, MOST)]
    pools: Pools | None

    @property
    def kept(self) -> dict[str, int]:
        """Returns the features of each pool that are kept, by the names that their tensors begin with."""
        if self.pools is None:
            return {}
        indexer = self.pools.indexer
        return {"pool": self.dim, **({} if indexer is None else {"index": indexer.dim})}

    def tensors(self, at: str, d_model: int) -> Iterator[Tensor]:
        yield from matrix(f"{at}.q_a", (self.q_rank, d_model), "mixer")
        yield from self.norm.tensors(f"{at}.q_norm", self.q_rank)
        yield from matrix(f"{at}.q", (self.n * self.dim, self.q_rank), "mixer")
        yield from matrix(f"{at}.kv", (self.dim, d_model), "mixer")
        yield from self.norm.tensors(f"{at}.kv_norm", self.dim)
        yield Tensor(f"{at}.sinks", (self.n,))
        for group in range(self.groups):
            yield from matrix(f"{at}.narrow.{group}", (self.o_rank, self.n * self.dim // self.groups), "mixer")
        yield from matrix(f"{at}.out", (d_model, self.groups * self.o_rank), "mixer")
        if self.pools is None:
            return
        for name, dim in self.kept.items():
            width = self.pools.width(dim)
            yield from matrix(f"{at}.{name}.values", (width, d_model), "mixer")
            yield from matrix(f"{at}.{name}.gates", (width, d_model), "mixer")
            yield Tensor(f"{at}.{name}.places", (self.pools.every, width))
            yield from self.norm.tensors(f"{at}.{name}.norm", dim)
        if (indexer := self.pools.indexer) is not None:
            yield from matrix(f"{at}.index.q", (indexer.n * indexer.dim, self.q_rank), "mixer")
            yield from matrix(f"{at}.index.weights", (indexer.n, d_model), "mixer")

    def state_shapes(self, d_model: int) -> Shapes:
        """Returns the shapes of the last keys and, for each of `kept`, of the features that the last tokens leave."""
        window = self.window - 1, self.dim
        if self.pools is None:
            return (window,)
        return window, *((self.pools.span, 2, self.pools.width(dim)) for dim in self.kept.values())

    def contradictions(self) -> Iterator[str]:
        if self.n % self.groups:
            yield f"{self.n} heads are in {self.groups} groups, which does not divide them"
        if self.turning > min(self.dim, *self.kept.values(), MOST):
            yield f"{self.turning} features of a head turn, and a head has fewer"
        yield from too_many("features of its heads", max(self.n * self.dim, self.groups * self.o_rank))
        yield from too_many(HELD, sum(math.prod(shape) for shape in self.state_shapes(1)))
        if self.pools is not None and (indexer := self.pools.indexer) is not None:
            yield from too_many("features of its indexer's heads", indexer.n * indexer.dim)
        yield from has_no_bias(self.norm)


Stateful = FixedState | Pooled
"""A mixer whose memory is not keys and values of each token."""
