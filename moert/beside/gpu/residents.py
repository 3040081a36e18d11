"""The experts that stay in a device's memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from moert.beside.fill import Popularity, by_popularity
from moert.beside.gpu.device import STAGING_BUFFERS, Device, DeviceCounters, DeviceFull, Held
from moert.experts.policy import (
    Candidates,
    Demand,
    EvictionPolicy,
    ExpectedWait,
    LayerOrder,
    LeastRecentOfLayer,
    Residency,
    Succession,
    place_of,
)
from moert.kernels.backend import ExpertView
from moert.pack.model_spec import ExpertKey, LayerKey


class Keeping(NamedTuple):
    """An eviction policy, and experts in the order in which they are to be on the device at the start."""

    policy: EvictionPolicy
    first: Sequence[ExpertKey]


class Ranked:
    """An eviction policy by a fixed order: the expert furthest back leaves first, so that the first ones stay for good,
    as many as fit, and others that are copied beside them leave again."""

    def __init__(self, order: Sequence[ExpertKey]) -> None:
        most = 1 + max(key.expert for key in order)
        self._worth = np.zeros((1 + max(place_of(key.at) for key in order), most), np.int64)
        for rank, key in enumerate(order):
            self._worth[place_of(key.at), key.expert] = len(order) - rank

    def worth(self, candidates: Candidates, present: LayerKey) -> npt.NDArray[Any]:
        found: npt.NDArray[Any] = self._worth[candidates.place, candidates.expert]
        return found


def _expected(shares: Popularity, order: LayerOrder, succession: Succession | None) -> Keeping:
    return Keeping(ExpectedWait(order, succession), by_popularity(shares, order))


def _popular(shares: Popularity, order: LayerOrder, succession: Succession | None) -> Keeping:
    ranked = by_popularity(shares, order)
    return Keeping(Ranked(ranked), ranked)


def _lru(shares: Popularity, order: LayerOrder, succession: Succession | None) -> Keeping:
    return Keeping(LeastRecentOfLayer(), ())


def _layers(shares: Popularity, order: LayerOrder, succession: Succession | None) -> Keeping:
    by_layer = [at.expert(number) for at in reversed(order) for number in range(len(shares[at]))]
    return Keeping(Ranked(by_layer), by_layer)


DEFAULT_KEEP = "expected"
KEEPS: Mapping[str, Callable[[Popularity, LayerOrder, Succession | None], Keeping]] = {
    DEFAULT_KEEP: _expected,
    "popular": _popular,
    "lru": _lru,
    "layers": _layers,
}
"""Name → rule. expected: the expert needed again last leaves, as in the expert cache; popular: the most popular of the
trace stay (Fiddler); lru: the latest of each layer stay, which come on demand (Mixtral-offloading); layers: whole
layers stay, the last ones (llama.cpp)."""


class Residents:
    """Experts on a device, never more than `capacity_bytes`. Room for newcomers is kept free: they come into it, are
    used, and then the expert of least worth leaves, which may be the newcomer: so a long prompt that copies all experts
    of a layer does not push out those that its next layers need."""

    def __init__(
        self, device: Device, weights: Mapping[ExpertKey, int], policy: EvictionPolicy, capacity_bytes: int,
        counters: DeviceCounters,
    ) -> None:  # fmt: skip
        """`weights`: bytes of each expert on the device."""
        self._device, self._weights, self._counters = device, weights, counters
        self._residency = Residency(capacity_bytes, policy, native=hasattr(policy, "rule"))
        self._held: dict[ExpertKey, Held] = {}
        self._comes: dict[ExpertKey, float] = {}  # when copies under way will have come
        self._copying_until = 0.0
        self._expected: Sequence[ExpertKey] = ()  # copied for the next layer
        largest = max(weights.values())
        newcomers = min(STAGING_BUFFERS, capacity_bytes // largest // 4)
        self._spare_bytes = max(1, newcomers) * largest

    def learn(self, demands: Iterable[Demand]) -> None:
        """Learns each expert's worth before the first request from the demands of the pack's trace."""
        self._residency.learn(demands)

    @property
    def capacity_bytes(self) -> int:
        return self._residency.capacity_bytes

    @property
    def used_bytes(self) -> int:
        return self._residency.used_bytes

    @property
    def room_bytes(self) -> int:
        """Room for experts that stay [bytes], beside the newcomers'."""
        return self.capacity_bytes - self._spare_bytes - self.used_bytes

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: ExpertKey) -> bool:
        return key in self._held

    def begin(self, demand: Demand) -> None:
        """Begins a layer with its demand."""
        self._residency.begin(demand)
        now = self._device.clock.now()
        self._comes = {key: until for key, until in self._comes.items() if until > now}

    def held(self, key: ExpertKey) -> Held:
        return self._held[key]

    def comes_in(self, key: ExpertKey) -> float:
        """Returns the seconds until an expert's copy arrives, estimated from costs; 0 for one that is there."""
        return max(0.0, self._comes.get(key, 0.0) - self._device.clock.now())

    @property
    def copying_s(self) -> float:
        """Seconds for which the stream of copies is busy."""
        return max(0.0, self._copying_until - self._device.clock.now())

    def bring(self, key: ExpertKey, view: ExpertView, takes_s: float, ahead: bool = False) -> Held | None:
        """Begins to copy an expert to the device, which takes `takes_s`; returns None where it finds no room. `ahead`:
        its demand may not come, so that no other expert leaves for it."""
        nbytes = self._weights[key]
        while True:
            free = self.capacity_bytes - self.used_bytes
            leaving = [] if nbytes <= free else None if ahead else self._residency.victims(nbytes, (), self._expected)
            if leaving is None:
                return None
            self._drop(leaving)
            try:
                held = self._device.copy(view)
                break
            except DeviceFull:
                if not self.give_back(nbytes):
                    return None
        self._residency.add(key, nbytes)
        self._held[key] = held
        self._copying_until = max(self._copying_until, self._device.clock.now()) + takes_s
        self._comes[key] = self._copying_until
        self._counters.copies += 1
        self._counters.copied_bytes += nbytes
        return held

    def limit(self, nbytes: int) -> None:
        """Lowers the capacity to `nbytes`; no expert leaves for that before another one comes."""
        self._residency.capacity_bytes = min(self.capacity_bytes, nbytes)

    def give_back(self, nbytes: int, but: Collection[ExpertKey] = ()) -> bool:
        """Evicts experts of `nbytes`, none of `but`, since the device has less memory than was thought; their room is
        not used again. Returns False where there are none."""
        leaving = self._residency.victims(nbytes + self.capacity_bytes - self.used_bytes, but, (), force=True)
        if not leaving:
            return False
        self._drop(leaving)
        self._counters.given_back += len(leaving)
        self._residency.capacity_bytes = max(self.used_bytes, self.capacity_bytes - nbytes)
        return True

    def used(self, keys: Collection[ExpertKey]) -> None:
        """Counts demands for experts that the present layer computes on the device; it has no more need of them."""
        self._residency.used(keys)

    def computed_elsewhere(self, keys: Collection[ExpertKey]) -> None:
        """Counts demands for experts that the present layer computes on the processor; it has no need of them here."""
        for key in keys:
            if key in self._held:
                self._residency.used((key,))
            else:
                self._residency.pass_by(key)

    def wants(self, key: ExpertKey) -> bool:
        """Returns whether an expert that the processor computes is to come here: it is worth more than one here, or
        there is room."""
        fits = self._weights[key] <= self.room_bytes
        return key not in self._held and not self.copying_s and (fits or self._residency.outlasts(key))

    def expect(self, keys: Sequence[ExpertKey]) -> None:
        """Sets the experts that were copied for the next layer: they stay until then."""
        self._expected = keys

    def settle(self) -> None:
        """Ends a layer: the experts of least worth leave until there is room for newcomers."""
        self._drop(self._residency.victims(self._spare_bytes, (), self._expected) or ())

    def free_all(self) -> None:
        self._drop(list(self._held))

    def _drop(self, keys: Collection[ExpertKey]) -> None:
        for key in keys:
            self._residency.remove(key)
            self._device.free(self._held.pop(key))
            self._comes.pop(key, None)
            self._counters.evictions += 1
