"""Codes for the inputs of a matrix one after the other, each making up for the errors before it: GPTQ's loop, in C."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref
from dataclasses import dataclass
from functools import cache

from moert.kernels import library
from moert.kernels.backend import I32
from moert.kernels.structs import Feedback
from moert.pack.codec import F32


@dataclass(frozen=True)
class Grid:
    """What codes stand for: scale * code + minimum, codes from 0 to `top`. scale and minimum [groups, columns],
    contiguous; group [inputs]: whose scales an input has."""

    scale: F32
    minimum: F32
    group: I32
    top: int


CodeInputs = Callable[[F32, F32, Grid, F32, F32, bool], None]
"""values, codes and moved [inputs, columns] with columns side by side and as long a way from input to input, factor
[inputs, inputs] likewise, the grid: fills in codes and moved as moert_code_inputs says (csrc/moert.h), improving the
codes that there are where the last argument says so. `values` stay as they are."""


@cache
def code_inputs() -> CodeInputs | None:
    """None where there is no library (moert.kernels.library.missing). Any thread may call it, and others go on."""
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
