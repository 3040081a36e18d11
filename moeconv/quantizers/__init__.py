"""How weights become codes. One file per quantiser behind one protocol; QUANTIZERS is the registry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from moeconv.quantizers.linear import LinearQuantizer
from moert.pack.codec import F32, QuantizedMatrix


class Quantizer(Protocol):
    """`group_size` is what the pack's manifest records: inputs per scale, 0 for one scale per output channel."""

    @property
    def name(self) -> str: ...

    @property
    def group_size(self) -> int: ...

    def quantize(self, weight: F32, bits: int) -> QuantizedMatrix:
        """weight [out_features, in_features] float32 → codes of `bits` (2, 3, 4 or 8) with scales and minima."""
        ...


GROUP_SIZES = (32, 64, 128)

DEFAULT_GROUP_SIZE = 64

QUANTIZERS: dict[str, Callable[[int | None], Quantizer]] = {
    "channel": lambda group_size: LinearQuantizer("channel", 0),
    "group": lambda group_size: LinearQuantizer("group", group_size or DEFAULT_GROUP_SIZE),
}
