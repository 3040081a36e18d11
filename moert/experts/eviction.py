"""Which expert leaves when room is needed: pure policies over plain values."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from moert.pack.model_spec import ExpertKey, Stack

LayerOrder = Sequence[tuple[Stack, int]]
"""Every layer with experts, in the order of execution (ModelSpec.moe_layers)."""


@dataclass(slots=True)
class Resident:
    """One expert in memory, as a policy sees it; policies do not change it.

    `frequency` counts the demands for it so far, also those before it was last evicted. `last_used` and `loaded_at`
    are readings of a clock that moves on by one with every demand; `last_used` is -1 for an expert that was preloaded
    and not demanded yet.
    """

    key: ExpertKey
    nbytes: int
    frequency: int
    last_used: int
    loaded_at: int


@dataclass(frozen=True)
class Moment:
    """When room is needed: the layer being executed and the clock (demands so far)."""

    stack: Stack
    layer: int
    clock: int


class EvictionPolicy(Protocol):
    """Chooses who leaves. Must not depend on the order of the candidates."""

    def victim(self, candidates: Sequence[Resident], now: Moment) -> ExpertKey:
        """The first of `candidates` (never empty) to evict."""
        ...


class PaperEviction:
    """EdgeMoE §3.3.3: evict first the expert with the smallest frequency × nearness of its layer.

    With S layers in the decoder, i the expert's layer and I the present one, nearness is (S - i + I) mod S: S - 1 for
    the layer that runs next, 1 for the one that has just run, 0 for the present one (whose experts still needed are
    not candidates). Of two equally frequent experts the one needed sooner stays. The published formula has the sign
    of the rule wrong: read literally it evicts the largest product, which is the expert that the text wants to keep.
    While the decoder runs, experts of the encoder go before all others. While the encoder runs, its
    layers and the decoder's form one cycle: layers just passed are the furthest from their next use. Ties go to the
    least recently used.
    """

    def __init__(self, order: LayerOrder) -> None:
        self._positions: dict[tuple[Stack, int], int] = {}
        sizes: dict[Stack, int] = {"encoder": 0, "decoder": 0}
        for stack, layer in order:
            self._positions[stack, layer] = sizes[stack]
            sizes[stack] += 1
        self._sizes = sizes

    def victim(self, candidates: Sequence[Resident], now: Moment) -> ExpertKey:
        return min(candidates, key=lambda one: (self.value(one, now), one.last_used, one.key)).key

    def value(self, resident: Resident, now: Moment) -> int:
        """frequency × nearness, or -1 for what the decoder never asks for; the smallest goes first."""
        stack, layer, _ = resident.key
        position, present = self._positions[stack, layer], self._positions[now.stack, now.layer]
        size = self._sizes["decoder"]
        if now.stack == "decoder":
            if stack == "encoder":
                return -1
        else:
            size += self._sizes["encoder"]
            position += self._sizes["encoder"] if stack == "decoder" else 0
        return resident.frequency * ((size - position + present) % size)


class LeastRecentlyUsed:
    """Evicts what was demanded longest ago; what was never demanded counts from when it was loaded."""

    def victim(self, candidates: Sequence[Resident], now: Moment) -> ExpertKey:
        return min(candidates, key=lambda one: (max(one.last_used, one.loaded_at), one.key)).key


class LeastFrequentlyUsed:
    """Evicts what was demanded least often since the start; ties by least recently used."""

    def victim(self, candidates: Sequence[Resident], now: Moment) -> ExpertKey:
        return min(candidates, key=lambda one: (one.frequency, one.last_used, one.key)).key


class FirstInFirstOut:
    """Evicts what was loaded first."""

    def victim(self, candidates: Sequence[Resident], now: Moment) -> ExpertKey:
        return min(candidates, key=lambda one: (one.loaded_at, one.key)).key


class Belady:
    """Evicts what is needed again last (MIN): the best there is at equal sizes, but it must know the future.

    `demands` are all demands of the run in order; the moment's clock says how many of them have been served. Among
    experts equally far away the largest goes.
    """

    def __init__(self, demands: Sequence[ExpertKey]) -> None:
        self._never = len(demands)
        self._uses: dict[ExpertKey, list[int]] = {}
        for at, key in enumerate(demands):
            self._uses.setdefault(key, []).append(at)

    def victim(self, candidates: Sequence[Resident], now: Moment) -> ExpertKey:
        return max(candidates, key=lambda one: (self._next_use(one.key, now.clock), one.nbytes, one.key)).key

    def _next_use(self, key: ExpertKey, clock: int) -> int:
        uses = self._uses.get(key, [])
        at = bisect_right(uses, clock - 1)
        return uses[at] if at < len(uses) else self._never


EVICTION: Mapping[str, Callable[[LayerOrder], EvictionPolicy]] = {
    "paper": PaperEviction,
    "lru": lambda order: LeastRecentlyUsed(),
    "lfu": lambda order: LeastFrequentlyUsed(),
    "fifo": lambda order: FirstInFirstOut(),
}
"""Name → policy, given the order of the layers. Belady is not here: it needs the future."""
