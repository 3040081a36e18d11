"""The experts that lie on a device, or are on their way there: who comes, who leaves, when copies will have come."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from moert.devices.device import STAGING_BUFFERS, Device, DeviceFull, Held
from moert.experts.cache.residency import Residency
from moert.experts.demand import Demand
from moert.experts.policy.eviction import EvictionPolicy
from moert.kernels.backend import ExpertView
from moert.pack.model_spec import ExpertKey
from moert.stats import DeviceCounters


class Residents:
    """Never more than `capacity_bytes` of experts. Room for newcomers is kept free: they come into it, are used, and
    then whoever is worth least leaves, which may be the newcomer: so a long prompt that copies all experts of a layer
    does not push out what its next layers need."""

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
        self._expected: Sequence[ExpertKey] = ()  # copied for what comes next
        largest = max(weights.values())
        newcomers = min(STAGING_BUFFERS, capacity_bytes // largest // 4)
        self._spare_bytes = max(1, newcomers) * largest

    def learn(self, demands: Iterable[Demand]) -> None:
        """What the pack's trace asked for: who is worth how much before the first request."""
        self._residency.learn(demands)

    @property
    def capacity_bytes(self) -> int:
        return self._residency.capacity_bytes

    @property
    def used_bytes(self) -> int:
        return self._residency.used_bytes

    @property
    def room_bytes(self) -> int:
        """For experts that stay, beside the newcomers'."""
        return self.capacity_bytes - self._spare_bytes - self.used_bytes

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: ExpertKey) -> bool:
        return key in self._held

    def begin(self, demand: Demand) -> None:
        """A layer begins."""
        self._residency.begin(demand)
        now = self._device.clock.now()
        self._comes = {key: until for key, until in self._comes.items() if until > now}

    def held(self, key: ExpertKey) -> Held:
        return self._held[key]

    def comes_in(self, key: ExpertKey) -> float:
        """Seconds until its copy will have come, as far as costs tell; 0 for what is there."""
        return max(0.0, self._comes.get(key, 0.0) - self._device.clock.now())

    @property
    def copying_s(self) -> float:
        """For how long the stream of copies is busy."""
        return max(0.0, self._copying_until - self._device.clock.now())

    def bring(self, key: ExpertKey, view: ExpertView, takes_s: float, ahead: bool = False) -> Held | None:
        """Begins to copy an expert there, which takes so long; None where it finds no room. What it is copied `ahead`
        for may not come: nobody who stays leaves for it."""
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
        """From now on experts take no more than this; nobody leaves for it before somebody comes."""
        self._residency.capacity_bytes = min(self.capacity_bytes, nbytes)

    def give_back(self, nbytes: int, but: Collection[ExpertKey] = ()) -> bool:
        """The device has less memory than was thought: experts of so many bytes leave, `but` none of these, and their
        room is not used again. False where there are none."""
        leaving = self._residency.victims(nbytes + self.capacity_bytes - self.used_bytes, but, (), force=True)
        if not leaving:
            return False
        self._drop(leaving)
        self._counters.given_back += len(leaving)
        self._residency.capacity_bytes = max(self.used_bytes, self.capacity_bytes - nbytes)
        return True

    def used(self, keys: Collection[ExpertKey]) -> None:
        """The present layer computes with these on the device; it has no more need of them."""
        for key in keys:
            self._residency.demand(key)
            self._residency.done(key)

    def computed_elsewhere(self, keys: Collection[ExpertKey]) -> None:
        """The present layer has no need of these here."""
        for key in keys:
            if key in self._held:
                self._residency.demand(key)
            else:
                self._residency.pass_by(key)
            self._residency.done(key)

    def wants(self, key: ExpertKey) -> bool:
        """Whether one that the processor computes is worth more here than somebody who is here."""
        fits = self._weights[key] <= self.room_bytes
        return key not in self._held and not self.copying_s and (fits or self._residency.outlasts(key))

    def expect(self, keys: Sequence[ExpertKey]) -> None:
        """What was copied for the next layer: it stays until then."""
        self._expected = keys

    def settle(self) -> None:
        """The layer is done: whoever is worth least leaves until there is room for newcomers."""
        self._drop(self._residency.victims(self._spare_bytes, (), self._expected) or ())

    def free_all(self) -> None:
        self._drop(list(self._held))

    def _drop(self, keys: Collection[ExpertKey]) -> None:
        for key in keys:
            self._residency.remove(key)
            self._device.free(self._held.pop(key))
            self._comes.pop(key, None)
            self._counters.evictions += 1
