"""Who leaves, found by the native library: the same as the policies say in numpy, in a tenth of the time."""

from __future__ import annotations

from array import array
from ctypes import addressof, c_char
from typing import Any

import numpy as np
import numpy.typing as npt

from moert.experts.policy.eviction import Rule
from moert.experts.policy.usage import FORGETTING, FORGOTTEN, Usage
from moert.kernels.library import Library
from moert.kernels.structs import RULES, Residents


class Leaving:
    """Of the experts that `usage` knows; `nbytes` by row grows with it."""

    def __init__(self, native: Library, usage: Usage, nbytes: array[int]) -> None:
        self._call: Any = native.functions.moert_leave
        self._usage, self._nbytes = usage, nbytes
        self._size = (-1, -1)
        self._rule: Rule | None = None
        self._all = Residents(
            forgotten=_at(FORGOTTEN), forgotten_n=len(FORGOTTEN), remembered=1.0 - FORGETTING
        )  # fmt: skip
        self._address = addressof(self._all)
        self._scratch = np.zeros(0)
        self._leaving = np.zeros(0, np.int64)

    def rows(self, rule: Rule, free: bytearray, missing: int) -> list[int]:
        """Of the rows that are `free`, [rows] of 0 or 1, those that leave, in order: until `missing` bytes are free, or
        none is left."""
        if not free:
            return []
        if self._size != self._usage.size:
            self._look_again()
        everything = self._all
        everything.steps = self._usage.steps
        if rule is not self._rule:
            self._follow(rule)
        count = self._call(
            self._address, addressof(c_char.from_buffer(free)), missing, self._scratch_at, self._leaving_at
        )
        found: list[int] = self._leaving[:count].tolist()
        return found

    def _look_again(self) -> None:
        """The columns have grown and lie elsewhere."""
        self._size = self._usage.size
        rows = self._size[0]
        if rows > len(self._leaving):
            self._scratch, self._leaving = np.empty(2 * rows), np.empty(2 * rows, np.int64)
            self._scratch_at, self._leaving_at = _at(self._scratch), _at(self._leaving)
        self._all.rows = rows
        for name, column in self._usage.columns().items():
            setattr(self._all, name, column.buffer_info()[0])
        self._all.nbytes = self._nbytes.buffer_info()[0]

    def _follow(self, rule: Rule) -> None:
        self._rule = rule  # which keeps its arrays alive
        self._all.rule = RULES[rule.name]
        self._all.nearness = None if rule.nearness is None else _at(rule.nearness)
        self._all.following = None if rule.following is None else _at(rule.following)
        self._all.experts = 0 if rule.following is None else rule.following.shape[1]


def _at(numbers: npt.NDArray[Any]) -> int:
    """The address of its first number."""
    assert numbers.flags.c_contiguous
    return int(numbers.ctypes.data)
