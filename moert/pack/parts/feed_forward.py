"""What a token passes by itself: a feed-forward network, or experts that a router chooses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from moert.pack.parts.base import MOST, Factor, Limit, Norm, Plus, Tensor, matrix
from moert.pack.reading import MAX_COUNT, Between, Within


@dataclass(frozen=True)
class Act:
    """The activation of a feed-forward; silu is x · sigmoid(slope · x), relu2 the square of relu. With a `limit` the
    gate is bounded to at most the limit and up to ± the limit before it; without a gate, up to at most the limit.
    `plus` is added to up then."""

    name: Literal["relu", "silu", "gelu", "gelu_new", "relu2"]
    limit: Limit = None
    slope: Factor = 1.0
    plus: Plus = 0.0

    @property
    def exact_zeros(self) -> bool:
        """Whether it is zero, and not merely small, for all that is below zero."""
        return self.name in ("relu", "relu2")


@dataclass(frozen=True)
class Ffn:
    """down(act(gate(x)) · (up(x) + plus)), or without a gate down(act(up(x))); gate and up have `d_ff` outputs. `bias`:
    all matrices have one."""

    KIND: ClassVar[str] = "ffn"
    d_ff: Annotated[int, Within(1, MAX_COUNT)]
    act: Act
    gated: bool
    bias: bool = False

    @property
    def projections(self) -> tuple[str, ...]:
        return ("gate", "up", "down") if self.gated else ("up", "down")

    def shape(self, projection: str, d_model: int) -> tuple[int, int]:
        """(out_features, in_features)"""
        return (d_model, self.d_ff) if projection == "down" else (self.d_ff, d_model)

    def tensors(self, at: str, d_model: int) -> Iterator[Tensor]:
        for projection in self.projections:
            yield from matrix(f"{at}.{projection}", self.shape(projection, d_model), "ffn", self.bias)

    def contradictions(self) -> Iterator[str]:
        if self.act.slope != 1 and self.act.name != "silu":
            yield f"its activation is {self.act.name} with a slope, which only silu has"
        if self.act.plus and not self.gated:
            yield "something is added to up, and there is no gate to multiply that with"


@dataclass(frozen=True)
class Groups:
    """Experts in `n` groups of one size after the other, of which only the `best` are chosen from: those whose `top`
    best experts have the largest sum."""

    n: Annotated[int, Within(1, MOST)]
    best: Annotated[int, Within(1, MOST)]
    top: Annotated[int, Within(1, MOST)]


@dataclass(frozen=True)
class Router:
    """Sends a token to the `top_k` experts with the largest scores, which are the softmax or sigmoid of weight · x, and
    their weights too (sigmoid_of_chosen takes the sigmoid after the choice: large ones are all 1). `renormalise` makes
    these sum to 1, `factor` multiplies them, and `expert_scale` has one more factor for each expert. `capacity` is the
    most tokens of one sequence that one expert takes in one pass; None: no limit. Of later ones `overflow` says what
    the expert gives: nothing, or what it would have got, itself.

    `choice_bias`: numbers that are added to scores for the choice alone. The sparsemixer (arXiv 2310.00811) chooses one
    expert after the other, each with its softmax among those no further than 2 · jitter below the best that is left.
    With `own_norm` the router sees another norm of the layer's input than the experts. `weigh`: whether weights
    multiply what experts give, or what they get.
    """

    top_k: Annotated[int, Within(1, MOST)]
    renormalise: bool
    capacity: Annotated[int | None, Within(0, MAX_COUNT)]
    score: Literal["softmax", "sigmoid", "sigmoid_of_chosen", "sparsemixer"] = "softmax"
    bias: bool = False
    choice_bias: bool = False
    groups: Groups | None = None
    factor: Factor = 1.0
    jitter: Annotated[float, Between(0, 1)] = 0.0
    own_norm: bool = False
    expert_scale: bool = False
    weigh: Literal["output", "input"] = "output"
    overflow: Literal["nothing", "itself"] = "nothing"

    def tensors(self, at: str, experts: int, d_model: int) -> Iterator[Tensor]:
        yield from matrix(f"{at}.router", (experts, d_model), "router", self.bias)
        if self.choice_bias:
            yield Tensor(f"{at}.router.choice_bias", (experts,))
        if self.expert_scale:
            yield Tensor(f"{at}.router.expert_scale", (experts,))
        if self.own_norm:
            yield Tensor(f"{at}.router_norm.weight", (d_model,))

    def contradictions(self, experts: int) -> Iterator[str]:
        if self.top_k > experts:
            yield f"a token goes to {self.top_k} of {experts} experts"
        if (groups := self.groups) is not None:
            if experts % groups.n:
                yield f"{experts} experts are in {groups.n} groups, which does not divide them"
            elif groups.best > groups.n or groups.best * (experts // groups.n) < self.top_k:
                yield f"a token goes to {self.top_k} experts of {groups.best} of {groups.n} groups of {experts} experts"
        if self.score == "sparsemixer" and (self.groups is not None or self.choice_bias):
            yield "its router is a sparsemixer with groups or a bias for the choice, which that has not"
        if self.weigh == "input" and self.top_k > 1:
            yield "its router weighs what experts get, and a token goes to more than one"
        if self.overflow == "itself" and self.capacity is None:
            yield "its router says what a token gets whose expert is full, and experts have no capacity"


@dataclass(frozen=True)
class Beside:
    """A network that every token passes beside the experts, of a norm of its own; what it gives and what they give is
    normed (`after`, `experts_after`), then added."""

    ffn: Ffn
    norm: Norm
    after: Norm
    experts_after: Norm

    def tensors(self, at: str, d_model: int) -> Iterator[Tensor]:
        yield from self.norm.tensors(f"{at}.beside_norm", d_model)
        yield from self.ffn.tensors(f"{at}.beside", d_model)
        yield from self.after.tensors(f"{at}.beside_after", d_model)
        yield from self.experts_after.tensors(f"{at}.experts_after", d_model)


@dataclass(frozen=True)
class Narrow:
    """Experts get narrow · x, of so many features, and what they give together is multiplied by `widen`. `bias`: both
    matrices have one."""

    features: Annotated[int, Within(1, MOST)]
    bias: bool = False

    def tensors(self, at: str, d_model: int) -> Iterator[Tensor]:
        yield from matrix(f"{at}.narrow", (self.features, d_model), "ffn", self.bias)
        yield from matrix(f"{at}.widen", (d_model, self.features), "ffn", self.bias)


@dataclass(frozen=True)
class Experts:
    """`n` networks of one shape, of which a router chooses some for each token. Every token passes the `shared` one
    too; with a `shared_gate`, what that gives is multiplied with sigmoid(shared_gate · x). `narrow` stands around the
    others alone, which it makes as wide as it says. With a `bypass`, tanh(bypass · x) is added to what all give."""

    KIND: ClassVar[str] = "experts"
    n: Annotated[int, Within(1, MOST)]
    ffn: Ffn
    router: Router
    shared: Ffn | None = None
    shared_gate: bool = False
    beside: Beside | None = None
    narrow: Narrow | None = None
    bypass: bool = False

    @property
    def chooses(self) -> bool:
        """Whether tokens go to different experts: there is more than one for those that a token takes."""
        return self.router.top_k < self.n

    def width(self, d_model: int) -> int:
        """Features that an expert gets and gives."""
        return d_model if self.narrow is None else self.narrow.features

    def tensors(self, at: str, d_model: int) -> Iterator[Tensor]:
        yield from self.router.tensors(at, self.n, d_model)
        if self.shared is not None:
            yield from self.shared.tensors(f"{at}.shared", d_model)
        if self.shared_gate:
            yield Tensor(f"{at}.shared_gate.weight", (1, d_model))
        if self.beside is not None:
            yield from self.beside.tensors(at, d_model)
        if self.narrow is not None:
            yield from self.narrow.tensors(at, d_model)
        if self.bypass:
            yield from matrix(f"{at}.bypass", (d_model, d_model), "ffn")

    def contradictions(self) -> Iterator[str]:
        yield from self.router.contradictions(self.n)
        for ffn in (self.ffn, self.shared, None if self.beside is None else self.beside.ffn):
            if ffn is not None:
                yield from ffn.contradictions()
        if self.shared_gate and self.shared is None:
            yield "there is a gate for a shared expert, and no such expert"
