"""What mixes tokens through a state of fixed size, in place of attention: such a layer keeps no keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

from moert.pack.parts.base import MOST, MOST_FEATURES, Norm, Tensor, matrix
from moert.pack.reading import Within

Shapes = tuple[tuple[int, ...], ...]
"""Of the arrays of float32 that a sequence keeps of such a layer; the first holds the last inputs of its
convolution."""

_HELD = "numbers of its state"


@dataclass(frozen=True)
class ShortConv:
    """out · (c ∗ conv(b ∗ u)), where `in` · x is b, c and u one after the other, of d_model features each (LFM2). The
    convolution is causal, of each feature alone, over the last `taps` tokens. `bias`: both matrices and the convolution
    have one."""

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
    keys of `dim`, each of which serves as many heads of values that follow one another.

    q, k and v pass a causal convolution over the last `taps` tokens and silu; q and k get the length 1, and q is
    divided by √dim. A head's state decays by e^(-e^a_log · softplus(a · x + dt_bias)), and moves to v for k by
    sigmoid(b · x). What it gives for q is normed by head, multiplied with silu(z · x), and by `out`.
    """

    KIND: ClassVar[str] = "delta"
    n: Annotated[int, Within(1, MOST)]
    keys: Annotated[int, Within(1, MOST)]
    dim: Annotated[int, Within(1, MOST)]
    v: Annotated[int, Within(1, MOST)]
    taps: Annotated[int, Within(1, MOST)]
    norm: Norm

    @property
    def key_features(self) -> int:
        return self.keys * self.dim

    @property
    def value_features(self) -> int:
        return self.n * self.v

    @property
    def channels(self) -> int:
        """Of its convolution: q, k and v one after the other."""
        return 2 * self.key_features + self.value_features

    def tensors(self, at: str, d_model: int) -> Iterator[Tensor]:
        wide = {"q": self.key_features, "k": self.key_features, "v": self.value_features, "z": self.value_features}
        for name, features in wide.items():
            yield Tensor(f"{at}.{name}.weight", (features, d_model), "mixer")
        for name in ("a", "b"):
            yield Tensor(f"{at}.{name}.weight", (self.n, d_model))
        yield from _conv(at, self.channels, self.taps, False)
        yield Tensor(f"{at}.a_log", (self.n,))
        yield Tensor(f"{at}.dt_bias", (self.n,))
        yield from self.norm.tensors(f"{at}.norm", self.v)
        yield Tensor(f"{at}.out.weight", (d_model, self.value_features), "mixer")

    def state_shapes(self, d_model: int) -> Shapes:
        return (self.taps - 1, self.channels), (self.n, self.dim, self.v)

    def contradictions(self) -> Iterator[str]:
        if self.n % self.keys:
            yield f"{self.n} heads share {self.keys} heads of keys, which does not divide them"
        yield from _too_many("features of its convolution", self.channels)
        yield from _too_many(_HELD, self.n * self.dim * self.v)
        yield from _has_no_bias(self.norm)


@dataclass(frozen=True)
class Mamba2:
    """Mamba-2 (arXiv 2405.21060): `n` heads of `dim` features, each with a state of dim · `state`. `in` · x is z, u, b
    and c one after the other, of n · dim features twice and `groups` · state twice; as many heads that follow one
    another share a group's b and c.

    u, b and c pass a causal convolution over the last `taps` tokens and silu. With t = softplus(dt · x + dt_bias) a
    head's state decays by e^(-e^a_log · t) and gains t · u bᵀ; it gives state · c + d · u. That times silu(z) is
    normed, each group's features by themselves, and multiplied by `out`. `bias`: in, dt and out have one; `conv_bias`:
    the convolution has one.
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
        """Of its convolution: u, b and c one after the other."""
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
        yield from _too_many("features of its convolution", self.features + self.channels)
        yield from _too_many(_HELD, self.features * self.state)
        yield from _has_no_bias(self.norm)


@dataclass(frozen=True)
class Mamba:
    """Mamba (arXiv 2312.00752): `features` channels, each with a state of `state` numbers. `in` · x is u and z one
    after the other, and u passes a causal convolution over the last `taps` tokens and silu.

    `inner` · u is r, b and c one after the other, of `rank`, state and state features; with a `norm` each is normed.
    With t = softplus(steps · r + dt_bias) a channel's state decays by e^(-e^a_log · t) and gains t · u · b; it gives
    state · c + d · u. That times silu(z) is multiplied by `out`. `bias`: in and out have one; `conv_bias`: the
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
        yield from _too_many(_HELD, self.features * self.state)


FixedState = ShortConv | GatedDelta | Mamba2 | Mamba
"""Keeps as much of a text of any length."""


def _conv(at: str, channels: int, taps: int, bias: bool) -> Iterator[Tensor]:
    """A factor for each channel and tap, the last of which is that of the token itself."""
    yield Tensor(f"{at}.conv.weight", (channels, taps))
    if bias:
        yield Tensor(f"{at}.conv.bias", (channels,))


def _too_many(what: str, count: int) -> Iterator[str]:
    if count > MOST_FEATURES:
        yield f"{what} are {count}, they should be at most {MOST_FEATURES}"


def _has_no_bias(norm: Norm) -> Iterator[str]:
    if norm.kind != "rms":
        yield f"what it gives is normed by one of the kind {norm.kind}, it should be rms"
