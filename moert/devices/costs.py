"""What computing, copying and reading take: the numbers that placement reckons with, and the clocks they are of."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Roofline:
    """The time of a matrix product over the number of its rows: whatever takes longer, reading the weights once or
    multiplying each row with them. Both are seconds for each weight; `row_s` for each row as well."""

    weight_s: float
    row_s: float

    def seconds(self, weights: int, rows: int) -> float:
        """Of an expert with so many weights that so many tokens go to."""
        return weights * max(self.weight_s, rows * self.row_s)


Widths = Mapping[int, Roofline]
"""By bits of a weight: 2, 3, 4, 8, 16; MXFP4 counts as 4."""


@dataclass(frozen=True)
class DeviceCosts:
    """Of a device. `pass_s`: for each mixture, to hand x over and fetch what was made, beside their bytes; `launch_s`:
    for each expert in it. Copies take `copy_s` and their bytes by `copy_bytes_per_s`; x and what is made go over at
    the same speed."""

    widths: Widths
    launch_s: float
    pass_s: float
    copy_s: float
    copy_bytes_per_s: float


@dataclass(frozen=True)
class HostCosts:
    """Of the processor and the drive: an expert takes `call_s` and its products, a read `read_s` and its bytes by
    `read_bytes_per_s`."""

    widths: Widths
    call_s: float
    read_s: float
    read_bytes_per_s: float


class Clock(Protocol):
    """Time as a device tells it. On a simulated one it goes on only by what is told to it."""

    def now(self) -> float:
        """Seconds since some moment."""
        ...

    def host(self, seconds: float) -> None:
        """The processor has done something that takes so long on the machine whose time this is."""
        ...


class WallClock:
    """The time of this machine, which goes on by itself."""

    def now(self) -> float:
        return time.perf_counter()

    def host(self, seconds: float) -> None:
        """It has passed already."""
