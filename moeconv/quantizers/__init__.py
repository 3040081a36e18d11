"""Quantizers: methods that turn weights into codes. One file per quantizer behind one protocol; QUANTIZERS is the
registry. A quantizer's module is imported when one is made: it computes with torch, and an estimate of a pack's size
needs none."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from moeconv.quantizers.quantizer import Inputs, Quantizer
from moert.pack.codec import Codes

__all__ = ["GROUP_SIZES", "QUANTIZERS", "WHOLE_CHANNELS", "Inputs", "Quantizer", "codes_of", "group_size_of"]

GROUP_SIZES = (32, 64, 128)
_USUAL: Mapping[str, int] = {"channel": 0, "group": 64, "gptq": 0, "trellis": 0, "source": 32}
WHOLE_CHANNELS = ("channel", "trellis")
"""The quantizers without groups."""


def codes_of(name: str) -> Codes:
    """Returns the codes of the quantizer `name`, as the quantizer itself does."""
    return "trellis" if name == "trellis" else "plain"


def group_size_of(name: str, wanted: int | None) -> int:
    """Returns the inputs per scale of the quantizer `name`: `wanted`, or its usual number; 0 for a whole channel."""
    return _USUAL[name] if wanted is None or name in WHOLE_CHANNELS else wanted


def _channel(group_size: int | None) -> Quantizer:
    from moeconv.quantizers.quantizer import ChannelQuantizer

    return ChannelQuantizer()


def _group(group_size: int | None) -> Quantizer:
    from moeconv.quantizers.group import GroupQuantizer

    return GroupQuantizer(group_size_of("group", group_size))


def _gptq(group_size: int | None) -> Quantizer:
    from moeconv.quantizers.gptq import GptqQuantizer

    return GptqQuantizer(group_size_of("gptq", group_size))


def _trellis(group_size: int | None) -> Quantizer:
    from moeconv.quantizers.trellis import TrellisQuantizer

    return TrellisQuantizer()


def _source(group_size: int | None) -> Quantizer:
    from moeconv.quantizers.source import SourceQuantizer

    return SourceQuantizer(group_size_of("source", group_size))


QUANTIZERS: Mapping[str, Callable[[int | None], Quantizer]] = {
    "channel": _channel, "group": _group, "gptq": _gptq, "trellis": _trellis, "source": _source,
}  # fmt: skip
