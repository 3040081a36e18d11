"""How weights become codes. One file per quantiser behind one protocol; QUANTIZERS is the registry. Each is imported
when one is made: they compute with torch, which nobody needs who only asks what a pack would take."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from moeconv.quantizers.quantizer import Inputs, Quantizer

__all__ = ["GROUP_SIZES", "QUANTIZERS", "Inputs", "Quantizer", "group_size_of"]

GROUP_SIZES = (32, 64, 128)
_USUAL: Mapping[str, int] = {"channel": 0, "group": 64, "gptq": 0}


def group_size_of(name: str, wanted: int | None) -> int:
    """Returns the inputs per scale of a quantizer, where so many or None were asked for; 0 for a whole channel."""
    return _USUAL[name] if wanted is None or name == "channel" else wanted


def _channel(group_size: int | None) -> Quantizer:
    from moeconv.quantizers.quantizer import ChannelQuantizer

    return ChannelQuantizer()


def _group(group_size: int | None) -> Quantizer:
    from moeconv.quantizers.group import GroupQuantizer

    return GroupQuantizer(group_size_of("group", group_size))


def _gptq(group_size: int | None) -> Quantizer:
    from moeconv.quantizers.gptq import GptqQuantizer

    return GptqQuantizer(group_size_of("gptq", group_size))


QUANTIZERS: Mapping[str, Callable[[int | None], Quantizer]] = {"channel": _channel, "group": _group, "gptq": _gptq}
