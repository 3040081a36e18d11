"""GPTQ's loop in C: codes for the inputs of a matrix one after the other, each making up for the errors before it."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref
from dataclasses import dataclass
from functools import cache

from moert.kernels import library
from moert.kernels.backend import I32
from moert.kernels.library import Feedback
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
