"""What models and the expert executor ask of the arithmetic: coarse operations on C-contiguous float32 arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, NewType, Protocol, TypeVar, cast, runtime_checkable

import numpy as np
import numpy.typing as npt

from moert.kernels.pages import KeptPage, PageLayout
from moert.pack.codec import (
    F32,
    MX_GROUP,
    U8,
    Form16,
    Mxfp4Matrix,
    QuantizedMatrix,
    from_bfloat16,
    n_groups,
    row_bytes,
    times_two,
)
from moert.pack.layout import NeuronLayout
from moert.pack.parts import Attention, Ffn, Latent, Router

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

ROWS = 256
"""Rows of a prompt that a caller passes on at once, so that what is made of them stays small."""


@dataclass(frozen=True)
class Floats:
    """A tensor of floats as it is stored; `data` has the numbers' bytes: float16, bfloat16 as uint16, or float32. They
    are times 2**power."""

    dtype: Literal["F16", "BF16", "F32"]
    data: npt.NDArray[np.generic]
    power: int = 0

    def widened(self) -> F32:
        """A copy in float32."""
        if self.dtype == "BF16":
            return from_bfloat16(self.data.view(np.uint16))
        return times_two(self.data.astype(np.float32), self.power)


Stored = Floats | QuantizedMatrix
"""A matrix [out, in] of the backbone."""

M = TypeVar("M")
"""What a backend holds a matrix as."""
E = TypeVar("E")
"""What a backend holds the weights of one feed-forward as."""

Matrix = NewType("Matrix", object)
"""The same where any backend may be in use: only the backend that made it looks inside."""

Expert = NewType("Expert", object)
"""As Matrix."""


class ExpertView(NamedTuple):
    """An expert as its file lies in a buffer."""

    buffer: U8
    projections: Mapping[str, ProjectionView]


class ProjectionView(NamedTuple):
    """`places`: where in the buffer its weights begin, or its codes, scales and minima; `bias_place`: its bias.
    `power`: of two, which its weights are multiplied with."""

    shape: tuple[int, int]
    bits: int
    group_size: int
    form16: Form16
    places: tuple[int, ...]
    bias_place: int | None = None
    power: int = 0

    @property
    def form(self) -> Form16 | None:
        """How its weights are stored if they have no codes of ours."""
        return self.form16 if self.bits == 16 else None

    def stored(self, buffer: U8) -> Stored | Mxfp4Matrix:
        """What lies in the buffer, not copied."""
        out, inputs = self.shape
        if self.bits == 16 and self.form16 == "MXFP4":
            sizes = row_bytes(inputs, 4), n_groups(inputs, MX_GROUP)
            codes, exponents = (
                buffer[at:][: out * size].reshape(out, size) for at, size in zip(self.places, sizes, strict=True)
            )
            return Mxfp4Matrix(inputs, codes, exponents)
        if self.bits == 16 and self.form16 != "MXFP4":
            data = buffer[self.places[0] :][: 2 * out * inputs].view(np.uint16).reshape(out, inputs)
            return Floats(self.form16, data.view(np.float16) if self.form16 == "F16" else data, self.power)
        groups, size = n_groups(inputs, self.group_size), row_bytes(inputs, self.bits)
        codes = buffer[self.places[0] :][: out * size].reshape(out, size)
        scale, minimum = (
            buffer[at:][: 2 * out * groups].view(np.float16).reshape(out, groups) for at in self.places[1:]
        )
        return QuantizedMatrix(self.bits, inputs, self.group_size, codes, scale, minimum, self.power)

    def bias(self, buffer: U8) -> F32 | None:
        """[out], not copied."""
        at = self.bias_place
        return None if at is None else buffer[at:][: 4 * self.shape[0]].view(np.float32)


@dataclass(frozen=True)
class NormWeights:
    """See moert.pack.parts.Norm: weight [n], and the bias [n] of one of the kind layer. Without a weight there is no
    norm, and what would be normed stays as it is."""

    weight: F32 | None
    bias: F32 | None
    eps: float


NO_NORM = NormWeights(None, None, 0.0)


@dataclass(frozen=True, eq=False)
class AttentionWeights(Generic[M]):
    """One attention. `norms` and `matrices` by the names that its part gives them, where `before` is the layer's own
    norm and `after` that of its Join; sinks [n]. `own`: tokens attend to the sequence that they are of, else to what
    was kept before; `causal`: to no later ones. The first `rope_dims` features of a head turn. What comes out is
    multiplied with `add`."""

    part: Attention | Latent
    own: bool
    causal: bool
    rope_dims: int
    norms: Mapping[str, NormWeights]
    matrices: Mapping[str, M]
    sinks: F32 | None = None
    add: float = 1.0


@dataclass(frozen=True, eq=False)
class RouterWeights(Generic[M]):
    """See moert.pack.parts.Router. `norm` is of what the experts get, `own` of what the router sees, if another.
    `factor` multiplies that of its part. choice_bias, expert_scale [experts]"""

    part: Router
    factor: float
    norm: NormWeights
    own: NormWeights | None
    matrix: M
    choice_bias: F32 | None
    expert_scale: F32 | None


class Positions(NamedTuple):
    """Of the tokens that are read: `turns` [tokens, 2, dims / 2] cosines and sines, or None; `bias` [heads, offsets] by
    how far a key lies after the query, of which the one at `zero` is that of the query itself, or None; `query_scale`
    [tokens] multiplies queries, or None."""

    turns: F32 | None = None
    bias: F32 | None = None
    zero: int = 0
    query_scale: F32 | None = None


class KeptKeys(Protocol):
    """What is asked of moert.models.kv.Kept."""

    layout: PageLayout
    length: int
    place: Any

    @property
    def pages(self) -> Sequence[Any]:
        """As the backend has made them."""
        ...


class BackendOf(Protocol[M, E]):
    """Not for use by several threads at once. One token or many: each gets the same bits. Where there is a `state` it
    is changed in place, and what comes of the tokens may be columns of wider arrays."""

    name: str

    threads: int

    widens: bool
    """True if weights are held and computed with in float32; False if they stay as they are stored."""

    def matrix(self, stored: Stored, bias: F32 | None = None) -> M:
        """bias [out] is added to what the matrix gives."""
        ...

    def biased(self, matrix: M, bias: F32) -> M:
        """The same matrix, not copied, with this bias [out]."""
        ...

    def rows(self, matrix: M, ids: Sequence[int]) -> F32:
        """Rows of a matrix as they are: [len(ids), in]."""
        ...

    def linear(self, x: F32, matrix: M) -> F32:
        """x [tokens, in] → [tokens, out]"""
        ...

    def linears(self, x: F32, matrices: Sequence[M]) -> list[F32]:
        """`linear` for several matrices."""
        ...

    def norm(self, x: F32, norm: NormWeights) -> F32:
        """x [tokens, n], normed."""
        ...

    def pages(self, layout: PageLayout, count: int) -> list[KeptPage]:
        """So many new ones, where this backend keeps keys and values; see moert.models.kv.Kept."""
        ...

    def attend(self, weights: AttentionWeights[M], x: F32, kept: KeptKeys, start: int, positions: Positions) -> None:
        """x [tokens, d_model] joins attention(norm(x)) for the tokens of one sequence from position `start` on, whose
        keys and values are written to `kept` first, if they are not given."""
        ...

    def keep(self, weights: AttentionWeights[M], encoded: F32, kept: KeptKeys, start: int) -> None:
        """Writes keys and values of encoded [tokens, d_model] to `kept` from `start` on."""
        ...

    def scores(self, x: F32, router: RouterWeights[M]) -> tuple[F32, F32]:
        """x [tokens, d_model] → what the experts get, and scores [tokens, experts]; of a sparsemixer, the numbers that
        it has of them."""
        ...

    def choose(self, scores: F32, router: RouterWeights[M]) -> tuple[I64, F32]:
        """scores [tokens, experts] → the chosen experts [tokens, top_k], ascending by number, the first of equal ones;
        and their weights."""
        ...

    def prefer(self, scores: F32, router: RouterWeights[M], bonus: float, sure: int, recent: I32) -> tuple[I64, F32]:
        """The same for one token, which prefers the experts in `recent` [k], the latest first and -1 behind the last:
        `bonus` is added to what they are chosen by, once the `sure` best are taken. Weights are as they would be. Those
        that are chosen come first in `recent` then."""
        ...

    def gate(self, hidden: F32, matrix: M, factor: float) -> F32:
        """hidden [tokens, d_model] → factor · sigmoid(matrix · hidden), [tokens], for a matrix of one row."""
        ...

    def head(self, x: F32, norm: NormWeights, factor: float, softcap: float | None, matrix: M) -> F32:
        """x [tokens, d_model] → matrix · (norm(x) · factor), [tokens, out]; see moert.pack.model_spec.Head"""
        ...

    def expert(self, view: ExpertView) -> E:
        """Keeps the buffer alive."""
        ...

    def dense(self, gate: M | None, up: M, down: M) -> E:
        """The feed-forward of a layer without experts, as if it were one."""
        ...

    def mixture(
        self, experts: Sequence[E], counts: Sequence[int], tokens: npt.NDArray[np.int32], weights: F32, x: F32,
        out: F32, spec: Ffn,
    ) -> None:  # fmt: skip
        """One expert after the other, each with the next `counts` of the tokens [n] and weights [n]:
        out[tokens] += weights[:, None] · expert(x[tokens]). No token comes twice to an expert."""
        ...

    def parts(self, experts: Sequence[E], x: F32, out: F32, spec: Ffn) -> None:
        """The same in two steps for one token x [1, d_model]: out [n, d_model] = expert(x) for each."""
        ...

    def add_parts(self, parts: F32, weights: F32, out: F32, tokens: I32 | None = None) -> None:
        """out [1, d_model] += the sum of weights [n] times parts [n, d_model], in the order given: bit for bit what
        `mixture` gives. With `tokens` [n], each part is added to the row of out that these name."""
        ...

    def fire(self, layout: NeuronLayout, base: U8, offsets: I64, x: F32, spec: Ffn) -> F32:
        """What the neurons of an expert have for x [tokens, d_model]: act(gate(x)) · (up(x) + plus), or act(up(x)),
        [tokens, d_ff]. The rows of block k lie offsets[k] bytes behind the beginning of `base`; with -1 they are not
        there, and its neurons get 0. A neuron gets the same bits whatever else is there."""
        ...

    def project(self, layout: NeuronLayout, base: U8, offsets: I64, hidden: F32, bias: F32 | None) -> F32:
        """hidden [tokens, d_ff] → [tokens, d_model]: the sum of hidden[i] times the column of neuron i, neuron after
        neuron in float32, then bias [d_model]. Nothing is rounded to fewer bits. The columns of blocks lie as in
        `fire`; those of neurons with 0 are not looked at. Raises ValueError if another one's is not there."""
        ...

    def conv(self, x: F32, taps: F32, bias: F32 | None, state: F32, silu: bool) -> F32:
        """x [tokens, channels] → [tokens, channels]: of each channel the last k inputs times taps [k, channels], the
        oldest first, and bias [channels]; with `silu`, silu of that. state [k - 1, channels]: the inputs before the
        first token in the same order, which become those before the next one."""
        ...

    def delta(self, q: F32, k: F32, v: F32, decay: F32, beta: F32, state: F32) -> F32:
        """The gated delta rule (Yang et al. 2024). q and k [tokens, key heads, dk] are scaled to length 1, q then by
        1 / √dk. For each token and head of v [tokens, heads, dv], with state S [heads, dk, dv] and decay and beta
        [tokens, heads]: S ← e^decay · S; S ← S + k (beta · (v - Sᵀk))ᵀ; → [tokens, heads, dv]: Sᵀq. As many heads
        follow one another with the same q and k as there are heads for each key head."""
        ...

    def scan(self, x: F32, dt: F32, a: F32, b: F32, c: F32, d: F32, state: F32) -> F32:
        """The scan of Mamba: for each token and each head of x [tokens, heads, p], with state S [heads, p, n],
        dt [tokens, heads], a [heads, 1] (Mamba-2) or [heads, n] (Mamba-1, where channels are heads with p = 1),
        d [heads]: S ← e^(dt · a) · S + dt · x bᵀ; → [tokens, heads, p]: S c + d · x. As many heads follow one another
        with the same b and c [tokens, groups, n] as there are heads for each group."""
        ...

    def lstm(self, inputs: F32, recurrent: F32, state: F32, counts: Sequence[int], backward: bool = False) -> F32:
        """An LSTM over sequences of counts[s] rows each, which follow one another, each read from its last row to its
        first if `backward`. inputs [rows, 4 * width]: what the gates input, forget, cell and output get from the rows,
        biases among it. With h and c = state [sequences, 2, width]: gates = inputs + h recurrent [width, 4 * width];
        c ← sigmoid(forget) c + sigmoid(input) tanh(cell); h ← sigmoid(output) tanh(c); → [rows, width]: h of each."""
        ...

    def attend_sparsely(self, queries: F32, keys: F32, values: F32, spans: I32) -> F32:
        """queries [rows, width], keys and values [n, width] → [rows, width]: of each row the sum of the values from
        spans[row, 0] to spans[row, 1] - 1 times the sparsemax (Martins & Astudillo 2016) of query · key / √width; 0
        where it sees none."""
        ...

    def softplus(self, x: F32, bias: F32) -> F32:
        """x [tokens, n] → log(1 + e^(x + bias [n]))"""
        ...

    def sigmoid(self, x: F32) -> F32:
        """Of each number: any shape."""
        ...

    def gated(self, x: F32, gate: F32, norm: NormWeights | None = None, groups: int = 1, last: bool = False) -> F32:
        """x [rows, n] · silu(gate [rows, n]). A norm [n] without a bias is of each of `groups` parts of a row alone, of
        x or, if it comes `last`, of the product."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class Keeps(Protocol):
    """A backend that keeps matrices where they were read to, if that is where it says: others copy them."""

    def stay(self, nbytes: int) -> U8:
        """uint8 [nbytes], undefined, for what is given to `matrix` next."""
        ...


Backend = BackendOf[Matrix, Expert]
"""Any backend, as models and the expert executor use it."""


def opaque(backend: BackendOf[M, E]) -> Backend:
    """The same backend, for those who hand its matrices and experts back to it and never look inside."""
    return cast("Backend", backend)
