"""Attention to the last tokens and to pools of the tokens before (see moert.pack.mixers.Pooled)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moert.kernels.backend import I64, ROWS, NormWeights
from moert.models.kv import Fixed, Rows
from moert.models.mixers import Rotary, Weights
from moert.pack.codec import F32
from moert.pack.mixers import Indexer, Pooled, Pools


class PooledMixer:
    """A mixer that attends to the last tokens and to pools: mixer(norm(x)) joins x. Each query is computed by itself,
    so that a token has the same bits alone and among others."""

    def __init__(self, part: Pooled, at: str, weights: Weights, norm: NormWeights, rotary: Rotary) -> None:
        self._part, self._backend, self._norm, self._rotary = part, weights.backend, norm, rotary
        self._q_a, self._q, self._kv = (weights.matrix(f"{at}.{name}") for name in ("q_a", "q", "kv"))
        self._q_norm, self._kv_norm = (weights.norm(part.norm, f"{at}.{name}_norm") for name in ("q", "kv"))
        self._each_norm = NormWeights(np.ones(part.dim, np.float32), None, part.norm.eps)
        self._sinks = weights.floats(f"{at}.sinks")
        self._narrow = [weights.matrix(f"{at}.narrow.{group}") for group in range(part.groups)]
        self._out = weights.matrix(f"{at}.out")
        self._makers = [
            _Maker(part, part.pools, dim, f"{at}.{name}", weights, rotary)
            for name, dim in part.kept.items()
            if part.pools is not None
        ]
        indexer = None if part.pools is None else part.pools.indexer
        self._chooser = None if indexer is None else _Chooser(indexer, part.turning, f"{at}.index", weights)

    def read(self, x: F32, kept: Fixed, counted: bool = False) -> None:
        """Changes x [tokens, d_model] in place, the next tokens of a sequence, which `kept` has not `counted`."""
        assert not counted
        for start in range(0, len(x), ROWS):
            piece = x[start : start + ROWS]
            place = kept.extend(len(piece))
            with np.errstate(all="ignore"):  # whoever reads logits looks for numbers that are not finite
                piece += self._mixed(self._backend.norm(piece, self._norm), kept, place)

    def _mixed(self, hidden: F32, kept: Fixed, start: int) -> F32:
        """Returns the output for hidden [tokens, d_model] from position `start` on."""
        part, backend, tokens = self._part, self._backend, len(hidden)
        turns = self._rotary.turns(start, tokens)
        asked, keys = backend.linears(hidden, [self._q_a, self._kv])
        asked, keys = backend.norm(asked, self._q_norm), backend.norm(keys, self._kv_norm)
        queries = backend.norm(backend.linear(asked, self._q).reshape(-1, part.dim), self._each_norm)
        queries = queries.reshape(tokens, part.n, part.dim)
        _turn(queries, turns[:, :, None])
        _turn(keys, turns)
        recent, *before = kept.arrays
        first = start - min(start, len(recent))
        seen = np.concatenate((recent[len(recent) - (start - first) :], keys))
        for maker, last, rows in zip(self._makers, before, kept.pools, strict=True):
            maker.add(hidden, last, rows, start)
        choose = None if self._chooser is None else self._chooser.of(hidden, asked, turns, kept.pools[1])
        for at in range(tokens):
            place = start + at
            window = seen[max(0, place + 1 - part.window - first) : place + 1 - first]
            others: Sequence[F32] = ()
            if part.pools is not None:
                there = (place + 1) // part.pools.every
                chosen = None if choose is None else choose(at, there)
                others = _picked(kept.pools[0], there, chosen)
            queries[at] = self._summed(queries[at], [window, *others])
        if len(recent):
            left = seen[-len(recent) :]
            recent[len(recent) - len(left) :] = left
        _turn(queries, turns[:, :, None], back=True)
        groups = np.split(queries.reshape(tokens, -1), part.groups, axis=1)
        narrow = [
            backend.linear(np.ascontiguousarray(group), matrix)
            for group, matrix in zip(groups, self._narrow, strict=True)
        ]
        return backend.linear(np.concatenate(narrow, axis=1), self._out)

    def _summed(self, query: F32, keys: Sequence[F32]) -> F32:
        """Returns the weighted sum of keys, each [n, dim], for the heads of one token [heads, dim]."""
        scores = np.concatenate([np.einsum("hd,kd->hk", query, some) for some in keys], axis=1)
        scores *= np.float32(self._part.scale)
        most = np.maximum(scores.max(axis=1), self._sinks)
        shares = np.exp(scores - most[:, None])
        shares /= (shares.sum(axis=1) + np.exp(self._sinks - most))[:, None]
        made, start = np.zeros_like(query), 0
        for some in keys:
            made += np.einsum("hk,kd->hd", shares[:, start : start + len(some)], some)
            start += len(some)
        return made


class _Maker:
    """The maker of one kind of pools, of `dim` features each."""

    def __init__(
        self, part: Pooled, pools: Pools, dim: int, at: str, weights: Weights, rotary: Rotary
    ) -> None:  # fmt: skip
        self._pools, self._dim, self._backend, self._rotary = pools, dim, weights.backend, rotary
        self._matrices = [weights.matrix(f"{at}.{name}") for name in ("values", "gates")]
        self._places, self._norm = weights.floats(f"{at}.places"), weights.norm(part.norm, f"{at}.norm")

    def add(self, hidden: F32, last: F32, rows: Rows, start: int) -> None:
        """Adds to `rows` the pools that are full once hidden [tokens, d_model] are read, from position `start` on.
        last [span, 2, width]: values and gates of the tokens before, which is changed in place."""
        every, end = self._pools.every, start + len(hidden)
        made = np.concatenate((last, np.stack(self._backend.linears(hidden, self._matrices), axis=1)))
        for pool in range(start // every, end // every):
            at = pool * every - start + len(last)
            row = self._pooled(made[at : at + every], made[at - every : at] if pool and self._pools.overlap else None)
            row = self._backend.norm(row, self._norm)
            _turn(row, self._rotary.turns(pool * every, 1))
            rows.add(row[0])
        last[:] = made[-len(last) :]

    def _pooled(self, own: F32, before: F32 | None) -> F32:
        """Returns the mean of a pool's tokens [every, 2, width], and of those before, [1, dim]."""
        places = self._places
        values, gates = own[:, 0, -self._dim :], own[:, 1, -self._dim :] + places[:, -self._dim :]
        if before is not None:
            values = np.concatenate((before[:, 0, : self._dim], values))
            gates = np.concatenate((before[:, 1, : self._dim] + places[:, : self._dim], gates))
        shares = np.exp(gates - gates.max(axis=0))
        made: F32 = (values * shares).sum(axis=0, keepdims=True) / shares.sum(axis=0)
        return made


class _Chooser:
    """The choice of pools, see moert.pack.mixers.Indexer."""

    def __init__(self, part: Indexer, turning: int, at: str, weights: Weights) -> None:
        self._part, self._backend = part, weights.backend
        self._q, self._weights = weights.matrix(f"{at}.q"), weights.matrix(f"{at}.weights")

    def of(self, hidden: F32, asked: F32, turns: F32, rows: Rows) -> _Choice:
        """Returns the choice for the queries of some tokens; asked [tokens, q_rank]: their queries are made of it."""
        part = self._part
        queries = self._backend.linear(asked, self._q).reshape(len(hidden), part.n, part.dim)
        _turn(queries, turns[:, :, None])
        return _Choice(part, queries, self._backend.linear(hidden, self._weights), rows)


class _Choice:
    """The choice of pools for tokens with these queries [tokens, n, dim] and weights [tokens, n]."""

    def __init__(self, part: Indexer, queries: F32, weights: F32, rows: Rows) -> None:
        self._part, self._queries, self._weights, self._rows = part, queries, weights, rows

    def __call__(self, at: int, there: int) -> I64 | None:
        """Returns the pools that the token `at` attends to of the first `there`, ascending; None for all of them."""
        if there <= self._part.top:
            return None
        query, weights = self._queries[at], self._weights[at]
        scores = [
            np.einsum("h,hk->k", weights, np.maximum(np.einsum("hd,kd->hk", query, some), 0))
            for some in self._rows.pieces(there)
        ]
        best = np.argsort(-np.concatenate(scores), kind="stable")[: self._part.top]
        return np.sort(best)


def _picked(rows: Rows, there: int, chosen: I64 | None) -> Sequence[F32]:
    """Returns the chosen of the first `there` rows, page by page; None: all of them."""
    pieces, start, found = rows.pieces(there), 0, []
    if chosen is None:
        return pieces
    for some in pieces:
        mine = chosen[np.searchsorted(chosen, start) : np.searchsorted(chosen, start + len(some))]
        found.append(some[mine - start])
        start += len(some)
    return found


def _turn(x: F32, turns: F32, back: bool = False) -> None:
    """Turns in place the last features of x [tokens, ..., dim] in pairs (2i, 2i + 1); turns [tokens, 2, ..., pairs]."""
    cos, sin = turns[:, 0], turns[:, 1]
    some = x[..., x.shape[-1] - 2 * turns.shape[-1] :]
    even, odd = some[..., ::2].copy(), some[..., 1::2].copy()
    sin = -sin if back else sin
    some[..., ::2] = even * cos - odd * sin
    some[..., 1::2] = odd * cos + even * sin
