"""Attention to the last tokens and to pools of the tokens before, a part that models are made of."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

from moert.pack.documents import MAX_COUNT, Within
from moert.pack.parts import HELD, MOST, Factor, FixedState, Norm, Shapes, Tensor, has_no_bias, matrix, too_many

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
