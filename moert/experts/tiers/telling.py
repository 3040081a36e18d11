"""Tells a simulated device's clock what the processor and the drive of that machine would take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from moert.devices.costs import HostCosts, Roofline
from moert.devices.simulated import VirtualClock
from moert.pack.model_spec import ExpertKey, LayerKey


class Others(NamedTuple):
    """What is not experts: weights of a layer, and of the head, that every token passes; `by`: what computes them, and
    `call_s` for each layer, for its many small steps."""

    layer_weights: int
    head_weights: int
    by: Roofline
    call_s: float


class Telling:
    """Of one run. `last`: the layer behind which the head comes."""

    def __init__(self, clock: VirtualClock, host: HostCosts, others: Others, last: LayerKey) -> None:
        self._clock, self._host, self._others, self._last = clock, host, others, last
        self._read_until: dict[ExpertKey, float] = {}

    def layer(self, at: LayerKey, tokens: int) -> None:
        """All before the experts of this layer, and behind the last one the head, for so many tokens."""
        others = self._others
        seconds = others.call_s + others.by.seconds(others.layer_weights, tokens)
        if at == self._last:
            seconds += others.by.seconds(others.head_weights, 1)
        self._clock.host(seconds)

    def reads(self, nbytes: Mapping[ExpertKey, int]) -> None:
        """Experts that are not in memory are read one after the other."""
        self._read_until = {
            key: self._clock.read(self._host.read_s + size / self._host.read_bytes_per_s)
            for key, size in nbytes.items()
        }

    def wait_for(self, key: ExpertKey) -> None:
        """For its read, if there is one."""
        self._clock.wait(self._read_until.get(key, 0.0))

    def computes(self, seconds: float) -> None:
        self._clock.host(seconds)
