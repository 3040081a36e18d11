"""What models and the expert executor ask of the arithmetic; reference.py and native.py give it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NewType, Protocol, TypeVar, cast

from torch import Tensor

from moert.pack.codec import U8, QuantizedMatrix
from moert.pack.model_spec import ExpertKey, MoeSpec
from moert.pack.reader import Pack

ROWS = 256
"""Tokens of a prompt that are handed over at once, which bounds what the arithmetic needs beside them; a fixed number,
so that no budget changes answers."""

StoredWeights = Tensor | QuantizedMatrix
"""One weight of the backbone: a tensor of the type that is stored, or a matrix of fewer bits."""

M = TypeVar("M")
"""What a backend holds a dense matrix [out, in] as."""

E = TypeVar("E")
"""What a backend holds the weights of one feed-forward part as."""

Matrix = NewType("Matrix", object)
"""The same where any backend may be in use: only the backend that made it looks inside."""

Expert = NewType("Expert", object)
"""As Matrix."""


class AttentionBlock(Protocol[M]):
    """The weights and settings of one attention block; k and v are None where keys and values are given to it."""

    norm: Tensor  # [d_model]
    q_norm: Tensor | None
    k_norm: Tensor | None
    q: M
    o: M
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    scale: float
    clip: float | None

    @property
    def k(self) -> M | None: ...

    @property
    def v(self) -> M | None: ...


class AttentionStep(Protocol):
    """One token through one attention block."""

    def __call__(
        self, x: Tensor, keys: Tensor, values: Tensor, length: int, turn: Tensor | None, bias: Tensor | None
    ) -> None:
        """x [1, d_model] += attention(norm(x)). keys, values [kv_heads, ≥ length, head_dim], float32; unless they are
        given, those of this token are written to row length - 1. turn [2, head_dim]: cosines and signed sines. bias
        [heads, length]."""
        ...


class StepsOf(Protocol[M]):
    """Whole steps of one token as one call each, where many small ones would cost more than the arithmetic."""

    def attention(self, block: AttentionBlock[M]) -> AttentionStep: ...

    def route(self, x: Tensor, norm: Tensor, eps: float, router: M, moe: MoeSpec) -> tuple[Tensor, list[int], Tensor]:
        """x [1, d_model] → norm(x), top_k experts ascending, their weights [top_k]; the tensors are written anew by the
        next call."""
        ...

    def head(self, x: Tensor, norm: Tensor, eps: float, factor: float, matrix: M) -> Tensor:
        """x [1, d_model] → matrix · (norm(x) * factor), [1, out]."""
        ...


class BackendOf(Protocol[M, E]):
    """Activations are float32. Not for use by several threads at once."""

    name: str

    widens: bool
    """True if weights are held and computed with in float32; False if they stay as they are stored."""

    @property
    def steps(self) -> StepsOf[M] | None: ...

    def matrix(self, stored: StoredWeights) -> M:
        """A copy: `stored` may lie in a mapped file."""
        ...

    def rows(self, matrix: M, ids: Sequence[int]) -> Tensor:
        """Rows of a matrix as they are: [len(ids), in]."""
        ...

    def linear(self, x: Tensor, matrices: Sequence[M]) -> Tensor:
        """x [tokens, in] → [tokens, all rows of the matrices, one matrix after the other]."""
        ...

    def expert(self, pack: Pack, key: ExpertKey, buffer: U8) -> E:
        """An expert whose file was read into `buffer`, which it keeps alive."""
        ...

    def dense(self, gate: M | None, up: M, down: M) -> E:
        """The feed-forward part of a layer without experts, as if it were one."""
        ...

    def mix(self, experts: Sequence[E], weights: Tensor, x: Tensor, out: Tensor, moe: MoeSpec) -> None:
        """One token: out [1, d_model] += the sum of weights [n] times expert(x [1, d_model]), in the order given."""
        ...

    def parts(self, experts: Sequence[E], x: Tensor, moe: MoeSpec, out: Tensor) -> None:
        """The same in two steps, where experts come one after the other: out [n, d_model] = expert(x) for each."""
        ...

    def add_parts(self, parts: Tensor, weights: Tensor, out: Tensor) -> None:
        """out [1, d_model] += the sum of weights [n] times parts [n, d_model], in the order given: bit for bit what
        `mix` gives."""
        ...

    def run_all(
        self, experts: Sequence[E], counts: Sequence[int], tokens: Tensor, weights: Tensor, x: Tensor,
        out: Tensor, moe: MoeSpec,
    ) -> None:  # fmt: skip
        """Many tokens, one expert after the other, each with the next `counts` of the tokens (int64 [n]) and weights
        [n]: out[tokens] += weights[:, None] * expert(x[tokens]). No token comes twice to an expert."""
        ...

    def close(self) -> None: ...


Backend = BackendOf[Matrix, Expert]
"""Any backend, as models and the expert executor use it."""


def opaque(backend: BackendOf[M, E]) -> Backend:
    """The same backend, for those who hand its matrices and experts back to it and never look inside."""
    return cast("Backend", backend)
