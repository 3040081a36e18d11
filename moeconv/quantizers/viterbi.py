"""The cheapest path of codes through a trellis, for pairs of inputs one after the other: the numpy counterpart of
moert_code_pairs in moert's library."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moeconv.quantizers.coding import PairCode, Pairs
from moert.pack.codec import F32

_BITS = 12


def code_pairs(code: PairCode, pairs: Pairs, state: int) -> int:
    """Fills in codes and moved of `pairs` as the library's function does, with the same results, and returns the last
    state."""
    of = _Path(code, pairs)
    inputs, columns = pairs.moved.shape
    for j in range(0, inputs, 2):
        cost = np.full(1 << _BITS, 0 if state < 0 else np.inf, np.float32)
        cost[state] = 0
        rows = of.rows(j, j, columns)
        cost, back = of.forward(rows, cost)
        states = of.back(int(cost.argmin()), back)
        if j + 2 < len(pairs.values):
            look = min(pairs.look, columns)
            of.move(j, states[:look], rows)
            cost, more = of.forward(of.rows(j + 2, j + 2, look), cost)
            states = of.back(int(cost.argmin()), [*back, *more])[:columns]
        of.move(j, states, rows)
        pairs.coded[j], pairs.coded[j + 1] = code.first[states], code.second[states]
        pairs.states[j // 2] = states
        state = int(states[-1])
    return state


@dataclass(frozen=True)
class _Rows:
    """The two wanted values of some rows and their weights [rows], and the coefficients of a pair's cost: d1, d2 and
    c."""

    first: F32
    second: F32
    weight: F32
    d1: np.float32
    d2: np.float32
    c: np.float32


class _Path:
    def __init__(self, code: PairCode, pairs: Pairs) -> None:
        self.code, self.pairs = code, pairs
        self.step_of = np.where(pairs.scale > 0, pairs.scale, np.float32(1))

    def rows(self, j: int, before: int, count: int) -> _Rows:
        """Returns the rows of the pair at input j after the changes of the inputs before `before`."""
        first, second, h11, h12, h22 = *(self._value(k, before, count) for k in (j, j + 1)), *self._square(j)
        step, weight, one = self.step_of[:count], self.pairs.weight[:count], np.float32(1)
        if not self.pairs.improves:
            first, second = np.divide(first, step), np.divide(second, step)
            return _Rows(first, second, weight, one / (h11 * h11), one / (h22 * h22), -h12 / h11)
        det = h11 * h22 - h12 * h12
        change, other = (h22 * first - h12 * second) / det, (h11 * second - h12 * first) / det
        first, second = np.divide(change, step), np.divide(other, step)
        first += self.pairs.coded[j, :count]
        second += self.pairs.coded[j + 1, :count]
        return _Rows(first, second, weight, h11 - h12 * h12 / h22, h22, h12 / h22)

    def _square(self, j: int) -> tuple[np.float32, np.float32, np.float32]:
        factor = self.pairs.factor
        return factor[j, j], factor[j, j + 1], factor[j + 1, j + 1]

    def _value(self, j: int, before: int, count: int) -> F32:
        value = self.pairs.values[j, :count]
        for i in range(before):
            value = value - self.pairs.factor[i, j] * self.pairs.moved[i, :count]
        return value

    def forward(self, rows: _Rows, cost: F32) -> tuple[F32, list[npt.NDArray[np.intp]]]:
        """Returns the costs [states] after some rows, and of each row the oldest bits of the state before [groups]."""
        step, found = self.code.step, []
        for first, second, weight in zip(rows.first, rows.second, rows.weight, strict=True):
            ways = cost.reshape(1 << step, -1)
            best = ways.argmin(0)
            found.append(best)
            before = np.repeat(ways[best, np.arange(len(best))], 1 << step)
            e = first - self.code.first
            f = second + rows.c * e - self.code.second
            cost = before + (weight * rows.d1 * (e * e) + weight * rows.d2 * (f * f))
        return cost, found

    def back(self, state: int, found: list[npt.NDArray[np.intp]]) -> npt.NDArray[np.uint16]:
        """Returns the states of the path that ends in `state`. [rows]"""
        step, states = self.code.step, np.empty(len(found), np.uint16)
        for r in range(len(found) - 1, -1, -1):
            states[r], group = state, state >> step
            state = int(found[r][group]) << (_BITS - step) | group
        return states

    def move(self, j: int, states: npt.NDArray[np.uint16], rows: _Rows) -> None:
        """Fills in the moves of the pair at input j in the rows of `states`."""
        count = len(states)
        moved, scale, step = self.pairs.moved[j : j + 2, :count], self.pairs.scale[:count], self.step_of[:count]
        one, other = self.code.first[states], self.code.second[states]
        if self.pairs.improves:
            old = self.pairs.coded[j : j + 2, :count]
            moved[0], moved[1] = (one - old[0]) * scale, (other - old[1]) * scale
            return
        h11, h12, h22 = self._square(j)
        moved[0] = (rows.first[:count] * step - one * scale) / h11
        moved[1] = (rows.second[:count] * step - other * scale - h12 * moved[0]) / h22
