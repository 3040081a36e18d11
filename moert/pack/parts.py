"""The parts that models are made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple

from moert.pack.documents import MAX_COUNT, Within

MOST = 65535
"""The most heads, features of a head, experts, and other things that a part counts."""
MOST_FEATURES = 1 << 24
MOST_STREAMS = 64
MOST_ROUNDS = 1000
MOST_ROWS = 1 << 40
_MOST_TOKENS = 16
MOST_WORD = (1 << 63) - 1
"""The largest number of a token times a multiplier."""
MOST_IDS = 1 << 24
"""The most tokens of a vocabulary whose numbers float32 has, and so a recurrent state."""
DIGITS = 3
"""The digits of such a number to the base 256, each of which any type of floats has."""

# Bounds of numbers that are not whole, so that float32 has them, and products of them, in every kernel alike. All known
# models are well inside: the least and the largest number in use stand beside each.
Eps = Annotated[float, Within(1e-30, 1.0)]
"""1e-12 to 1e-5"""
Factor = Annotated[float, Within(1e-6, 1e6)]
"""A factor: 0.0078 (scores of Granite) to 72 (embeddings of 5,120 features)"""
Limit = Annotated[float | None, Within(1e-3, 1e9)]
"""A bound on a number, hard or soft: 6 to 50"""
Plus = Annotated[float, Within(-1e3, 1e3)]
"""A summand: 0 or 1"""

Role = Literal["attention", "mixer", "router", "ffn", "head", "embed"]
ROLES: tuple[Role, ...] = ("attention", "mixer", "router", "ffn", "head", "embed")
"""The uses of dense matrices (those outside the experts); a pack gives widths to roles."""
TRELLIS_ROLES: tuple[Role, ...] = ("attention", "mixer", "ffn", "head", "embed")
"""The roles whose matrices may have trellis codes: all but routers, which are small."""


class Tensor(NamedTuple):
    """A tensor that stays in memory: its canonical name, its shape, and its role; None for a tensor that is never
    quantized."""

    name: str
    shape: tuple[int, ...]
    role: Role | None = None


@dataclass(frozen=True)
class Norm:
    """A norm: weight · x / √(mean(x²) + eps); in the kind layer, of x less its mean, plus a bias."""

    eps: Eps
    kind: Literal["rms", "layer"] = "rms"

    def tensors(self, at: str, features: int) -> Iterator[Tensor]:
        yield Tensor(f"{at}.weight", (features,))
        if self.kind == "layer":
            yield Tensor(f"{at}.bias", (features,))


def matrix(at: str, shape: tuple[int, int], role: Role, bias: bool = False) -> Iterator[Tensor]:
    """Yields a matrix [out, in], and its bias [out] if it has one."""
    yield Tensor(f"{at}.weight", shape, role)
    if bias:
        yield Tensor(f"{at}.bias", shape[:1])


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
    """A factor on queries, 1 + by · ln(1 + ⌊(p + 1) / every⌋) at position p: far ones look more sharply."""

    every: Annotated[int, Within(1, MAX_COUNT)]
    by: Annotated[float, Within(0, 1e3)]


@dataclass(frozen=True)
class Attention:
    """`n` heads of queries and `kv` of keys and values, of `dim` features each: softmax(scale · q kᵀ + bias) v.

    `qk_norm` normalises queries and keys, all heads as one vector or each by itself, before they turn or, if
    `norm_turned`, after; `v_norm` each head of the values. `clip` bounds queries, keys and values to ± itself. `rope`
    is the place of the model's rope that turns them. `buckets` are the stack's. A query sees at most the last `window`
    keys, its own among them, and none before the last multiple of `chunk`. Scores become softcap · tanh(score /
    softcap). With `sinks` each head has a score that takes part in the softmax and has no value. The heads' output is
    multiplied with sigmoid(gate · x) if there is a `gate`, which has one output a head if it is `gate_by_head`.
    `biases` names the matrices that have one; g is the gate.
    """

    KIND: ClassVar[str] = "heads"
    LEFT_OUT: ClassVar = ("gate_by_head",)
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
    gate_by_head: bool = False

    @property
    def value_dim(self) -> int:
        return self.dim

    @property
    def turning(self) -> int:
        """Returns the most features of a head that a rope may turn."""
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
            shapes["gate"] = (self.n if self.gate_by_head else self.q_features, d_model)
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
        if self.gate_by_head and not self.gate:
            yield "its gate has an output a head, and there is no gate"
        if self.buckets is not None:
            yield from self.buckets.contradictions()


@dataclass(frozen=True)
class Latent:
    """Attention to a few features of each token in place of keys and values (DeepSeek-V2, arXiv 2405.04434, 2.1).

    A token leaves c = norm(kv_a · x) of `kv_rank` features and k = k_turn · x of `turning` features, which turn. A
    head's query has `nope` features, which meet the features that `keys` makes of c, and `turning` features, which meet
    k; the c that the head reads becomes `v` features by `values`. With a `q_rank` queries are made of norm(q_a · x),
    else of x. `bias`: q_a, kv_a, k_turn and o have one. With a `gate` each head's output is multiplied with its number
    of sigmoid(gate · x).
    """

    KIND: ClassVar[str] = "latent"
    LEFT_OUT: ClassVar = ("gate",)
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
    gate: bool = False
    buckets: ClassVar[None] = None
    window: ClassVar[None] = None
    kv: ClassVar[int] = 1

    @property
    def dim(self) -> int:
        """Returns the number of features that stand for a key."""
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
        if self.gate:
            yield from matrix(f"{at}.gate", (self.n, d_model), "attention")

    def contradictions(self) -> Iterator[str]:
        most = self.n * max(self.dim, self.nope, self.v)
        if most > MOST_FEATURES:
            yield f"its heads have {most} features together, it should be at most {MOST_FEATURES}"


@dataclass(frozen=True)
class Streams:
    """`n` streams in place of one, which the two halves of a layer mix (manifold-constrained hyper-connections, arXiv
    2512.24880). Each half gets a weighted sum of the streams, and its output joins each stream by a weight of its own,
    beside a weighted sum of the streams before. The weights follow from the token's streams: `n` to enter, `n` to join,
    and a matrix [n, n] of which rows and columns are divided by their sums in turn, `rounds` times. `floor` is added to
    weights and sums that divide. At the end of the stack stands their mean or, if they are `weighed`, a sum whose
    weights follow from them too."""

    KIND: ClassVar[str] = "sinkhorn"
    LEFT_OUT: ClassVar = ("weighed",)
    n: Annotated[int, Within(2, MOST_STREAMS)]
    rounds: Annotated[int, Within(1, MOST_ROUNDS)]
    floor: Eps
    weighed: bool = False

    @property
    def weights(self) -> int:
        """Returns the number of weights of a token."""
        return (2 + self.n) * self.n

    def tensors(self, at: str, d_model: int) -> Iterator[Tensor]:
        yield Tensor(f"{at}.weight", (self.weights, self.n * d_model))
        yield Tensor(f"{at}.bias", (self.weights,))
        yield Tensor(f"{at}.scale", (3,))

    def end_tensors(self, at: str, d_model: int) -> Iterator[Tensor]:
        """Yields the tensors of the end of a stack."""
        if self.weighed:
            yield Tensor(f"{at}.weight", (self.n, self.n * d_model))
            yield Tensor(f"{at}.bias", (self.n,))
            yield Tensor(f"{at}.scale", (1,))


@dataclass(frozen=True)
class GatedStreams:
    """`n` streams in place of one, which the halves of a layer mix by gates of `rank` numbers (Qwen4-Exp). Each stream
    is normed by itself. A half gets the mean of the normed streams, each of whose features is multiplied with a gate;
    its output joins each stream by a weight of the token's own. Behind the last layer, gates make one vector of the
    streams."""

    KIND: ClassVar[str] = "gated"
    n: Annotated[int, Within(2, MOST_STREAMS)]
    rank: Annotated[int, Within(1, MOST)]
    norm: Norm

    def tensors(self, at: str, d_model: int) -> Iterator[Tensor]:
        yield from self.end_tensors(at, d_model)
        yield Tensor(f"{at}.join.weight", (self.n, self.n * d_model))

    def end_tensors(self, at: str, d_model: int) -> Iterator[Tensor]:
        """Yields the tensors behind the last layer, whose streams get nothing more."""
        width = self.n * d_model
        yield Tensor(f"{at}.norm.weight", (width,))
        yield Tensor(f"{at}.narrow.weight", (self.rank, width))
        yield Tensor(f"{at}.wide.weight", (width, self.rank))

    def contradictions(self) -> Iterator[str]:
        if self.norm.kind != "rms":
            yield f"its streams are normed by one of the kind {self.norm.kind}, it should be rms"


@dataclass(frozen=True)
class Ngrams:
    """An embedding of the last 2 to `n` tokens together, which joins a token's streams (Qwen4-Exp). For each length
    there are as many heads as `sizes` has numbers for each. A head's row is the exclusive or of each token's number
    times the multiplier for its place, modulo the head's size; rows of all heads lie in one table of `rows` rows of
    `dim` features, which stays on the drive. Tokens before the last `end` count as `end`, and so do tokens before the
    first.

    The heads' rows together make keys for all streams and a value. The value, times a gate that follows from key and
    stream, joins the stream, and so does silu of a convolution of it, normed, over `taps` tokens that lie `n` apart."""

    n: Annotated[int, Within(2, _MOST_TOKENS)]
    dim: Annotated[int, Within(1, MOST)]
    rows: Annotated[int, Within(1, MOST_ROWS)]
    taps: Annotated[int, Within(1, MOST)]
    end: Annotated[int, Within(0, MOST_IDS)]
    multipliers: Annotated[tuple[int, ...], Within(1, MOST_WORD)]
    sizes: Annotated[tuple[int, ...], Within(1, MOST_ROWS)]
    norm: Norm

    @property
    def features(self) -> int:
        """Returns the features of all heads' rows together."""
        return len(self.sizes) * self.dim

    @property
    def reach(self) -> int:
        """Returns how many tokens before a token its convolution reaches."""
        return (self.taps - 1) * self.n

    def tensors(self, at: str, d_model: int, streams: int) -> Iterator[Tensor]:
        width = streams * d_model
        yield Tensor(f"{at}.key.weight", (width, self.features))
        yield Tensor(f"{at}.value.weight", (d_model, self.features))
        for name in ("key", "stream", "conv"):
            yield Tensor(f"{at}.{name}_norm.weight", (width,))
        yield Tensor(f"{at}.conv.weight", (width, self.taps))

    def table(self, at: str) -> Tensor:
        """Returns the table, which is no tensor that stays in memory."""
        return Tensor(f"{at}.table", (self.rows, self.dim))

    def state_shapes(self, width: int) -> Shapes:
        """Returns the shapes of the last tokens' numbers, each plus 1, and of the convolution's last inputs; `width`:
        features of all streams."""
        return (self.n - 1,), (self.reach, width)

    def contradictions(self) -> Iterator[str]:
        if len(self.multipliers) != self.n or len(self.sizes) % (self.n - 1) or not self.sizes:
            counts = f"{len(self.multipliers)} multipliers and {len(self.sizes)} heads"
            yield f"{counts} are for up to {self.n} tokens together"
        elif sum(self.sizes) > self.rows:
            yield f"the heads of its tokens together have {sum(self.sizes)} rows, their table has {self.rows}"
        elif self.norm.kind != "rms":
            yield f"its tokens together are normed by one of the kind {self.norm.kind}, it should be rms"
        elif max(self.features, self.taps * self.n) > MOST_FEATURES:
            yield f"its tokens together have {self.features} features, it should be at most {MOST_FEATURES}"


@dataclass(frozen=True)
class PositionTable:
    """A vector for each of the first `n` positions, added to the token there, learnt or computed alike. With
    `skips_pad` the pad token gets none, and an encoder counts the tokens after it as if it were not there."""

    n: Annotated[int, Within(1, MOST)]
    skips_pad: bool = False

    def tensors(self, at: str, d_model: int) -> Iterator[Tensor]:
        yield Tensor(f"{at}.positions.weight", (self.n, d_model))


Shapes = tuple[tuple[int, ...], ...]
"""The shapes of the float32 arrays of a layer's recurrent state; the first array holds the last inputs of the layer's
convolution."""


@dataclass(frozen=True)
class Act:
    """The activation of a feed-forward network; silu is x · sigmoid(slope · x), relu2 the square of relu. With a
    `limit` the gate is bounded to at most the limit and up to ± the limit before it; without a gate, up to at most the
    limit. With a `bound` the activation's output is bounded to at most the bound, and up, beside a gate, to ± the
    bound. `plus` is added to up then."""

    LEFT_OUT: ClassVar = ("bound",)
    name: Literal["relu", "silu", "gelu", "gelu_new", "relu2"]
    limit: Limit = None
    slope: Factor = 1.0
    plus: Plus = 0.0
    bound: Limit = None

    @property
    def exact_zeros(self) -> bool:
        """Returns whether the activation is zero, and not merely small, for all numbers below zero."""
        return self.name in ("relu", "relu2")


@dataclass(frozen=True)
class Ffn:
    """A feed-forward network: down(act(gate(x)) · (up(x) + plus)), or without a gate down(act(up(x))); gate and up have
    `d_ff` outputs. `bias`: all matrices have one."""

    KIND: ClassVar[str] = "ffn"
    d_ff: Annotated[int, Within(1, MAX_COUNT)]
    act: Act
    gated: bool
    bias: bool = False

    @property
    def projections(self) -> tuple[str, ...]:
        return ("gate", "up", "down") if self.gated else ("up", "down")

    def shape(self, projection: str, d_model: int) -> tuple[int, int]:
        """Returns (out_features, in_features) of a projection."""
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
    """Experts in `n` groups of one size, one group after the other, of which a token's experts come from the `best`
    alone: the groups whose `top` best experts have the largest sum."""

    n: Annotated[int, Within(1, MOST)]
    best: Annotated[int, Within(1, MOST)]
    top: Annotated[int, Within(1, MOST)]


@dataclass(frozen=True)
class Router:
    """A router, which sends a token to the `top_k` experts with the largest scores: the softmax or sigmoid of weight ·
    x, which are the experts' weights too (sigmoid_of_chosen takes the sigmoid after the choice: large ones are all 1;
    sqrt_softplus is √ln(1 + e^z) of a number z). `renormalise` makes the weights sum to 1, `factor` multiplies them,
    and `expert_scale` has one more factor for each expert. `capacity` is the most tokens of one sequence that one
    expert takes in one pass; None: no limit. `overflow`: the expert's output for later tokens, nothing or its input
    itself.

    `choice_bias`: numbers that are added to scores for the choice alone. The sparsemixer (arXiv 2310.00811) chooses one
    expert after the other, each with its softmax among those no further than 2 · jitter below the best that is left.
    With `own_norm` the router gets another norm of the layer's input than the experts. `weigh`: whether weights
    multiply the experts' output or their input. Of the choices among `identities` more numbers, behind those of the
    experts, each adds its weight times the experts' input, as if an expert returned that. With `by_token`, a count of
    tokens, a table names the experts of each token by its number, and scores are their weights alone.
    """

    LEFT_OUT: ClassVar = ("identities", "by_token")
    top_k: Annotated[int, Within(1, MOST)]
    renormalise: bool
    capacity: Annotated[int | None, Within(0, MAX_COUNT)]
    score: Literal["softmax", "sigmoid", "sigmoid_of_chosen", "sparsemixer", "sqrt_softplus"] = "softmax"
    bias: bool = False
    choice_bias: bool = False
    groups: Groups | None = None
    factor: Factor = 1.0
    jitter: Annotated[float, Within(0, 1)] = 0.0
    own_norm: bool = False
    expert_scale: bool = False
    weigh: Literal["output", "input"] = "output"
    overflow: Literal["nothing", "itself"] = "nothing"
    identities: Annotated[int, Within(0, MOST)] = 0
    by_token: Annotated[int | None, Within(1, MAX_COUNT)] = None

    @property
    def keeps(self) -> bool:
        """Returns whether a choice that is no expert, -1, adds its weight times the experts' input."""
        return self.overflow == "itself" or self.identities > 0

    def tensors(self, at: str, experts: int, d_model: int) -> Iterator[Tensor]:
        choices = experts + self.identities
        yield from matrix(f"{at}.router", (choices, d_model), "router", self.bias)
        if self.choice_bias:
            yield Tensor(f"{at}.router.choice_bias", (choices,))
        if self.expert_scale:
            yield Tensor(f"{at}.router.expert_scale", (choices,))
        if self.own_norm:
            yield Tensor(f"{at}.router_norm.weight", (d_model,))
        if self.by_token is not None:
            yield Tensor(f"{at}.router.table", (self.by_token, self.top_k))

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
        if self.identities:
            yield from self._identities(experts)
        chooses = self.choice_bias or self.groups is not None or self.capacity is not None or self.identities > 0
        if self.by_token is not None and (chooses or self.score in ("sigmoid_of_chosen", "sparsemixer")):
            yield "a table names the experts of a token, and its router has what is for a choice alone"

    def _identities(self, experts: int) -> Iterator[str]:
        if experts + self.identities > MOST:
            yield f"its router chooses among {experts + self.identities} numbers, it should be at most {MOST}"
        if self.groups is not None or self.capacity is not None or self.score == "sparsemixer":
            yield "its router has numbers that stand for no expert beside groups, a capacity or a sparsemixer"
        if self.weigh == "input":
            yield "its router has numbers that stand for no expert, and weighs what experts get"


@dataclass(frozen=True)
class Beside:
    """A network that every token passes beside the experts, with a norm of its own; its output and the experts' output
    are normed (`after`, `experts_after`), then added."""

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
    """The two matrices around narrow experts, which get narrow · x of `features` features, and whose sum is multiplied
    by `widen`. `bias`: both matrices have one."""

    features: Annotated[int, Within(1, MOST)]
    bias: bool = False

    def tensors(self, at: str, d_model: int) -> Iterator[Tensor]:
        yield from matrix(f"{at}.narrow", (self.features, d_model), "ffn", self.bias)
        yield from matrix(f"{at}.widen", (d_model, self.features), "ffn", self.bias)


@dataclass(frozen=True)
class Experts:
    """`n` networks of one shape, of which a router chooses some for each token. Every token passes the `shared` network
    too; with a `shared_gate`, its output is multiplied with sigmoid(shared_gate · x). `narrow` stands around the `n`
    experts alone, which get as many features as it says. With a `bypass`, tanh(bypass · x) is added to the sum of
    all. With a `shortcut` the experts' output joins the stream when the next layer is done, that of `shared` at once
    (ScMoE, arXiv 2404.05019)."""

    KIND: ClassVar[str] = "experts"
    LEFT_OUT: ClassVar = ("shortcut",)
    n: Annotated[int, Within(1, MOST)]
    ffn: Ffn
    router: Router
    shared: Ffn | None = None
    shared_gate: bool = False
    beside: Beside | None = None
    narrow: Narrow | None = None
    bypass: bool = False
    shortcut: bool = False

    @property
    def chooses(self) -> bool:
        """Returns whether tokens go to different experts: there are more experts than one token takes."""
        return self.router.top_k < self.n

    def width(self, d_model: int) -> int:
        """Returns the number of features of an expert's input and output."""
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
        if self.shortcut and (self.beside is not None or self.bypass):
            yield "experts take a shortcut, and there is a network beside them or a bypass, which joins with them"
