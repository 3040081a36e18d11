"""How weights become codes. One file per quantiser behind one protocol; QUANTIZERS is the registry."""

from __future__ import annotations

from collections.abc import Callable

from moeconv.quantizers.channel import ChannelQuantizer
from moeconv.quantizers.gptq import GptqQuantizer
from moeconv.quantizers.group import GroupQuantizer
from moeconv.quantizers.quantizer import Inputs, Quantizer

__all__ = ["DEFAULT_GROUP_SIZE", "GROUP_SIZES", "QUANTIZERS", "Inputs", "Quantizer"]

GROUP_SIZES = (32, 64, 128)
DEFAULT_GROUP_SIZE = 64

QUANTIZERS: dict[str, Callable[[int | None], Quantizer]] = {
    "channel": lambda group_size: ChannelQuantizer(),
    "group": lambda group_size: GroupQuantizer(DEFAULT_GROUP_SIZE if group_size is None else group_size),
    "gptq": lambda group_size: GptqQuantizer(group_size or 0),
}
