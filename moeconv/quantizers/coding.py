"""GPTQ's loop in C: codes for the inputs of a matrix one after the other, or for pairs of them by a trellis, each
making up for the errors before it."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from moert.kernels import library
from moert.kernels.backend import I32
from moert.kernels.library import Feedback, Trellis
from moert.pack.codec import F32


@dataclass(frozen=True)
class Grid:
    """The weights that codes stand for: scale * code + minimum, codes from 0 to `top`. scale and minimum [groups,
    columns], contiguous; group [inputs]: the group of each input."""

    scale: F32
    minimum: F32
    group: I32
    top: int


CodeInputs = Callable[[F32, F32, Grid, F32, F32, bool], None]
"""A function of values, factor [inputs, inputs], the grid, codes, moved and `improves`. values, codes and moved
[inputs, columns] have adjacent columns and one stride from input to input, factor likewise. It fills in codes and moved
as moert_code_inputs does (csrc/moert.h), improving the present codes if `improves`. `values` stay as they are."""


@cache
def code_inputs() -> CodeInputs | None:
    """Returns the function; None where there is no library (moert.kernels.library.missing). Any thread may call it, and
    other threads run meanwhile."""
    found = library.load()
    if found is None:
        return None
    isa, run = found.choose(), found.functions.moert_code_inputs

    def coded(values: F32, factor: F32, grid: Grid, codes: F32, moved: F32, improves: bool) -> None:
        inputs, columns = values.shape
        run(isa, byref(Feedback(
            values.ctypes.data, factor.ctypes.data, grid.scale.ctypes.data, grid.minimum.ctypes.data,
            grid.group.ctypes.data, codes.ctypes.data, moved.ctypes.data, values.strides[0] // values.itemsize,
            factor.strides[0] // factor.itemsize, inputs, columns, improves, grid.top,
        )))  # fmt: skip

    return coded


@dataclass(frozen=True)
class PairCode:
    """A trellis code: the bits of a step, and the two values of each state [4096]. A state is a window of 12 bits in
    reverse order."""

    step: int
    first: F32
    second: F32


@dataclass(frozen=True)
class Pairs:
    """A block of inputs, whose pairs are coded, and a pair behind it where there is one: `values` [inputs + 0 or 2,
    columns], `factor` [as many, as many], `coded`, the values of the codes, as `values`; scale and weight [columns];
    moved [inputs, columns], states [inputs / 2, columns]. values, coded and moved have adjacent columns and one stride,
    states as many numbers, factor a stride of its own. `look`: columns of the next pair that the end of a pair takes
    into account."""

    values: F32
    factor: F32
    scale: F32
    weight: F32
    coded: F32
    moved: F32
    states: npt.NDArray[np.uint16]
    look: int
    improves: bool


CodePairs = Callable[[PairCode, Pairs, int], int]
"""A function of a code, a block and the state before it, or -1 for any. It fills in coded, moved and states as
moert_code_pairs does (csrc/moert.h), and returns the last state."""


@cache
def code_pairs() -> CodePairs | None:
    """Returns the function; None where there is no library (moert.kernels.library.missing)."""
    found = library.load()
    if found is None:
        return None
    isa, run = found.choose(), found.functions.moert_code_pairs

    def coded(code: PairCode, pairs: Pairs, state: int) -> int:
        inputs, columns = pairs.moved.shape
        many = columns + pairs.look
        room = np.empty(8 * many + (8 + many) * (4096 >> code.step), np.uint8)
        addresses = (
            pairs.values, pairs.factor, pairs.scale, pairs.weight, code.first, code.second, pairs.coded, pairs.moved,
            pairs.states, room,
        )  # fmt: skip
        last: int = run(isa, byref(Trellis(
            *(each.ctypes.data for each in addresses), pairs.values.strides[0] // 4, pairs.factor.strides[0] // 4,
            inputs, len(pairs.values) - inputs, columns, pairs.look, code.step, state, pairs.improves,
        )))  # fmt: skip
        return last

    return coded
