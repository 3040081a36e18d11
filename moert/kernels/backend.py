"""The interface of the arithmetic for models and the expert executor: coarse operations on C-contiguous float32
arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, NewType, Protocol, TypeVar, cast, runtime_checkable

import numpy as np
import numpy.typing as npt

from moert.kernels.pages import KeptPage, PageLayout
from moert.pack.codec import (
    CODES,
    F32,
    MX_GROUP,
    U8,
    Form16,
    Mxfp4Matrix,
    QuantizedMatrix,
    TrellisCode,
    TrellisMatrix,
    Width,
    from_bfloat16,
    n_groups,
    row_bytes,
    stream_bytes,
    times_two,
)
from moert.pack.layout import NeuronLayout
from moert.pack.parts import Attention, Ffn, Latent, Router

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

ROWS = 256
"""The most rows of a prompt that a caller passes on at once, so that the arrays made of them stay small."""


def pieces(tokens: int) -> list[slice]:
    """Returns the slices of so many rows, of ROWS each and the rest."""
    return [slice(start, min(start + ROWS, tokens)) for start in range(0, tokens, ROWS)]


@dataclass(frozen=True)
class Floats:
    """A tensor of floats as it is stored; `data` has the numbers' bytes: float16, bfloat16 as uint16, or float32. The
    numbers are times 2**power."""

    dtype: Literal["F16", "BF16", "F32"]
    data: npt.NDArray[np.generic]
    power: int = 0

    def widened(self) -> F32:
        """Returns a copy in float32."""
        if self.dtype == "BF16":
            return from_bfloat16(self.data.view(np.uint16))
        return times_two(self.data.astype(np.float32), self.power)


Stored = Floats | QuantizedMatrix | TrellisMatrix
"""A matrix [out, in] of the backbone."""

M = TypeVar("M")
"""The type of a matrix that a backend holds."""
E = TypeVar("E")
"""The type of a feed-forward network's weights that a backend holds."""

Matrix = NewType("Matrix", object)
"""A matrix where any backend may be in use: only the backend that made it looks inside."""

Expert = NewType("Expert", object)
"""A feed-forward network's weights where any backend may be in use, as Matrix."""


class ExpertView(NamedTuple):
    """An expert in a buffer, laid out as its file is."""

    buffer: U8
    projections: Mapping[str, ProjectionView]


class ProjectionView(NamedTuple):
    """One projection of an expert in a buffer. `places`: where its weights begin, or its codes, scales and minima;
    `bias_place`: its bias. `power`: the power of two that its weights are multiplied with. `trellis`: whether widths
    below 8 are trellis codes."""

    shape: tuple[int, int]
    bits: Width
    group_size: int
    form16: Form16
    places: tuple[int, ...]
    bias_place: int | None = None
    power: int = 0
    trellis: bool = False

    @property
    def code(self) -> TrellisCode | None:
        """Returns the trellis code; None where there is none."""
        return CODES[self.bits] if self.trellis and self.bits < 8 else None

    @property
    def form(self) -> Form16 | None:
        """Returns the form of weights that are stored without codes of ours; None for codes."""
        return self.form16 if self.bits == 16 else None

    def stored(self, buffer: U8) -> Stored | Mxfp4Matrix:
        """Returns the stored matrix in the buffer, not copied."""
        out, inputs = self.shape
        if self.code is not None:
            stream = buffer[self.places[0] :][: stream_bytes(self.bits, out, inputs)]
            scales = buffer[self.places[1] :][: 2 * out].view(np.float16)
            return TrellisMatrix(self.bits, inputs, stream, scales[:, None], self.power)
        if self.bits == 16 and self.form16 == "MXFP4":
            sizes = row_bytes(inputs, 4), n_groups(inputs, MX_GROUP)
            codes, exponents = (
                buffer[at:][: out * size].reshape(out, size) for at, size in zip(self.places, sizes, strict=True)
            )
            return Mxfp4Matrix(inputs, codes, exponents)
        if self.bits == 16 and self.form16 != "MXFP4":
            data = buffer[self.places[0] :][: 2 * out * inputs].view(np.uint16).reshape(out, inputs)
            return Floats(self.form16, data.view(np.float16) if self.form16 == "F16" else data, self.power)
        bits = int(self.bits)
        groups, size = n_groups(inputs, self.group_size), row_bytes(inputs, bits)
        codes = buffer[self.places[0] :][: out * size].reshape(out, size)
        scale, minimum = (
            buffer[at:][: 2 * out * groups].view(np.float16).reshape(out, groups) for at in self.places[1:]
        )
        return QuantizedMatrix(bits, inputs, self.group_size, codes, scale, minimum, self.power)

    def bias(self, buffer: U8) -> F32 | None:
        """Returns the bias [out] in the buffer, not copied; None where there is none."""
        at = self.bias_place
        return None if at is None else buffer[at:][: 4 * self.shape[0]].view(np.float32)


@dataclass(frozen=True, eq=False)
class NormWeights:
    """The weights of a norm, see moert.pack.parts.Norm: weight [n], and the bias [n] of the kind layer. Without a
    weight there is no norm, and its input stays as it is."""

    weight: F32 | None
    bias: F32 | None
    eps: float


NO_NORM = NormWeights(None, None, 0.0)


@dataclass(frozen=True, eq=False)
class AttentionWeights(Generic[M]):
    """The weights of one attention. `norms` and `matrices` have the names that the part gives them, where `before` is
    the layer's own norm and `after` the norm of its Join; sinks [n]. `own`: tokens attend to their own sequence, else
    to keys and values that were kept before; `causal`: to no later tokens. The first `rope_dims` features of a head
    turn. The output is multiplied with `add`."""

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
    """The weights of a router, see moert.pack.parts.Router. `norm` is the norm of the experts' input, `own` of the
    router's, if that is another. `factor` multiplies the factor of the part. choice_bias, expert_scale [experts]"""

    part: Router
    factor: float
    norm: NormWeights
    own: NormWeights | None
    matrix: M
    choice_bias: F32 | None
    expert_scale: F32 | None


class Positions(NamedTuple):
    """The positions of the tokens that are read: `turns` [tokens, 2, dims / 2] cosines and sines, or None; `bias`
    [heads, offsets] by how far a key lies after the query, where the one at `zero` is for the query's own place, or
    None; `query_scale` [tokens] multiplies queries, or None."""

    turns: F32 | None = None
    bias: F32 | None = None
    zero: int = 0
    query_scale: F32 | None = None


class KeptKeys(Protocol):
    """The side of moert.models.kv.Kept that backends use."""

    layout: PageLayout
    length: int
    place: Any

    @property
    def pages(self) -> Sequence[Any]:
        """The pages, as the backend has made them."""
        ...


class BackendOf(Protocol[M, E]):
    """A backend, for one thread at a time. A token gets the same bits whether it comes alone or with others. A `state`
    is changed in place, and arrays made of the tokens may then be columns of wider arrays."""

    name: str

    threads: int

    widens: bool
    """Whether weights are held and computed with in float32; else they stay as they are stored."""

    def matrix(self, stored: Stored, bias: F32 | None = None) -> M:
        """Returns the matrix in the backend's form; bias [out] is added to its products."""
        ...

    def biased(self, matrix: M, bias: F32) -> M:
        """Returns the same matrix, not copied, with this bias [out]."""
        ...

    def rows(self, matrix: M, ids: Sequence[int]) -> F32:
        """Returns rows of a matrix as they are: [len(ids), in]."""
        ...

    def linear(self, x: F32, matrix: M) -> F32:
        """Returns the product [tokens, out] for x [tokens, in]."""
        ...

    def linears(self, x: F32, matrices: Sequence[M]) -> list[F32]:
        """Returns the products of `linear` for several matrices."""
        ...

    def norm(self, x: F32, norm: NormWeights) -> F32:
        """Returns x [tokens, n], normed."""
        ...

    def pages(self, layout: PageLayout, count: int) -> list[KeptPage]:
        """Returns `count` new pages, where this backend keeps keys and values; see moert.models.kv.Kept."""
        ...

    def attend(self, weights: AttentionWeights[M], x: F32, kept: KeptKeys, start: int, positions: Positions) -> None:
        """Adds attention(norm(x)) to x [tokens, d_model] in place, for the tokens of one sequence from position `start`
        on; their keys and values are written to `kept` first, if `weights.own`."""
        ...

    def keep(self, weights: AttentionWeights[M], encoded: F32, kept: KeptKeys, start: int) -> None:
        """Writes keys and values of encoded [tokens, d_model] to `kept` from `start` on."""
        ...

    def scores(self, x: F32, router: RouterWeights[M]) -> tuple[F32, F32]:
        """Returns the experts' input and the scores [tokens, experts] for x [tokens, d_model]; a sparsemixer's scores
        are its products as they are."""
        ...

    def choose(self, scores: F32, router: RouterWeights[M]) -> tuple[I64, F32]:
        """Returns the chosen experts [tokens, top_k], ascending by number, the first of equal ones, and their weights,
        for scores [tokens, experts]."""
        ...

    def prefer(self, scores: F32, router: RouterWeights[M], bonus: float, sure: int, recent: I32) -> tuple[I64, F32]:
        """Chooses for one token, which prefers the experts in `recent` [k], the latest first and -1 behind the last:
        `bonus` is added to the scores that they are chosen by, once the `sure` best are taken. Weights are as without a
        bonus. The chosen experts come first in `recent` then. Returns as `choose` does."""
        ...

    def gate(self, hidden: F32, matrix: M, factor: float) -> F32:
        """Returns factor · sigmoid(matrix · hidden) [tokens] for hidden [tokens, d_model] and a matrix of one row."""
        ...

    def head(self, x: F32, norm: NormWeights, factor: float, softcap: float | None, matrix: M) -> F32:
        """Returns matrix · (norm(x) · factor) [tokens, out] for x [tokens, d_model]; see moert.pack.model_spec.Head."""
        ...

    def expert(self, view: ExpertView) -> E:
        """Returns the expert of a view, which keeps the buffer alive."""
        ...

    def dense(self, gate: M | None, up: M, down: M) -> E:
        """Returns the feed-forward network of a layer without experts, in the form of an expert."""
        ...

    def mixture(
        self, experts: Sequence[E], counts: Sequence[int], tokens: npt.NDArray[np.int32], weights: F32, x: F32,
        out: F32, spec: Ffn,
    ) -> None:  # fmt: skip
        """Runs one expert after the other, each with the next `counts` of the tokens [n] and weights [n]: out[tokens]
        += weights[:, None] · expert(x[tokens]). No token comes twice to an expert."""
        ...

    def parts(self, experts: Sequence[E], x: F32, out: F32, spec: Ffn) -> None:
        """Writes expert(x) of each expert for one token x [1, d_model] to out [n, d_model]: with `add_parts`, `mixture`
        in two steps."""
        ...

    def add_parts(self, parts: F32, weights: F32, out: F32, tokens: I32 | None = None) -> None:
        """Adds the sum of weights [n] times parts [n, d_model], in the order given, to out [1, d_model]: bit for bit
        the result of `mixture`. With `tokens` [n], each part is added to the row of out that these name."""
        ...

    def fire(self, layout: NeuronLayout, base: U8, offsets: I64, x: F32, spec: Ffn) -> F32:
        """Returns the activations of an expert's neurons for x [tokens, d_model]: act(gate(x)) · (up(x) + plus), or
        act(up(x)), [tokens, d_ff]. The rows of block k lie offsets[k] bytes behind the beginning of `base`; with -1
        they are not there, and its neurons get 0. A neuron gets the same bits whatever other blocks are there."""
        ...

    def project(self, layout: NeuronLayout, base: U8, offsets: I64, hidden: F32, bias: F32 | None) -> F32:
        """Returns [tokens, d_model] for hidden [tokens, d_ff]: the sum of hidden[i] times the column of neuron i,
        neuron after neuron in float32, then bias [d_model]. Nothing is rounded to fewer bits. The columns of blocks lie
        as in `fire`; columns of neurons with 0 are not read. Raises ValueError if the column of any other neuron is not
        there."""
        ...

    def conv(self, x: F32, taps: F32, bias: F32 | None, state: F32, silu: bool) -> F32:
        """Returns [tokens, channels] for x [tokens, channels]: for each channel the last k inputs times taps [k,
        channels], the oldest first, and bias [channels]; with `silu`, silu of the sum. state [k - 1, channels]: the
        inputs before the first token in the same order, which become the inputs before the next one."""
        ...

    def delta(self, q: F32, k: F32, v: F32, decay: F32, beta: F32, state: F32) -> F32:
        """Runs the gated delta rule (Yang et al. 2024). q and k [tokens, key heads, dk] are scaled to length 1, q then
        by 1 / √dk. For each token and head of v [tokens, heads, dv], with state S [heads, dk, dv], beta [tokens, heads]
        and decay [tokens, heads], or by row of S [tokens, heads, dk] (arXiv 2510.26692): S ← e^decay · S; S ← S + k
        (beta · (v - Sᵀk))ᵀ; → [tokens, heads, dv]: Sᵀq. As many heads follow one another with the same q and k as
        there are heads for each key head."""
        ...

    def scan(self, x: F32, dt: F32, a: F32, b: F32, c: F32, d: F32, state: F32) -> F32:
        """Runs the scan of Mamba: for each token and each head of x [tokens, heads, p], with state S [heads, p, n], dt
        [tokens, heads], a [heads, 1] (Mamba-2) or [heads, n] (Mamba-1, where channels are heads with p = 1), d [heads]:
        S ← e^(dt · a) · S + dt · x bᵀ; → [tokens, heads, p]: S c + d · x. As many heads follow one another with the
        same b and c [tokens, groups, n] as there are heads for each group."""
        ...

    def lstm(self, inputs: F32, recurrent: F32, state: F32, counts: Sequence[int], backward: bool = False) -> F32:
        """Runs an LSTM over sequences of counts[s] rows each, which follow one another, each read from its last row to
        its first if `backward`. inputs [rows, 4 * width]: the rows' share in the gates input, forget, cell and output,
        biases included. With h and c = state [sequences, 2, width]: gates = inputs + h recurrent [width, 4 * width]; c
        ← sigmoid(forget) c + sigmoid(input) tanh(cell); h ← sigmoid(output) tanh(c); → [rows, width]: h of each row."""
        ...

    def attend_sparsely(self, queries: F32, keys: F32, values: F32, spans: I32) -> F32:
        """Returns [rows, width] for queries [rows, width], keys and values [n, width]: for each row the sum of the
        values from spans[row, 0] to spans[row, 1] - 1 times the sparsemax (Martins & Astudillo 2016) of query · key /
        √width; 0 for an empty span."""
        ...

    def softplus(self, x: F32, bias: F32) -> F32:
        """Returns log(1 + e^(x + bias [n])) for x [tokens, n]."""
        ...

    def sigmoid(self, x: F32) -> F32:
        """Returns the sigmoid of each number, in any shape."""
        ...

    def balance(self, matrices: F32, rounds: int, floor: float) -> None:
        """Divides in place the columns of matrices [tokens, n, n] by floor + their sum, then `rounds` - 1 times their
        rows by floor + theirs, and their columns again (Sinkhorn and Knopp)."""
        ...

    def gated(self, x: F32, gate: F32, norm: NormWeights | None = None, groups: int = 1, last: bool = False) -> F32:
        """Returns x [rows, n] · silu(gate [rows, n]). A norm [n] without a bias is of each of `groups` parts of a row
        alone, of x or, if it comes `last`, of the product."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class Keeps(Protocol):
    """A backend that keeps matrices where they were read to, if that is memory from `stay`: other backends copy
    them."""

    def stay(self, nbytes: int) -> U8:
        """Returns uint8 [nbytes], undefined, for the bytes that are passed to `matrix` next."""
        ...


Backend = BackendOf[Matrix, Expert]
"""Any backend, as models and the expert executor use it."""


def opaque(backend: BackendOf[M, E]) -> Backend:
    """Returns the same backend, for callers who pass its matrices and experts back to it and never look inside."""
    return cast("Backend", backend)
