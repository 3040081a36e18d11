"""Puts a device beside the cache of a pack's experts: what lies there, what that costs, who runs where."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from moert.devices.calibration import host_costs
from moert.devices.costs import HostCosts
from moert.devices.device import Device
from moert.devices.simulated import SimulatedDevice, bits_of
from moert.errors import SettingInvalid
from moert.experts.cache.cache import ExpertCache
from moert.experts.demand import Demand, Listener
from moert.experts.drive.probe import remembered
from moert.experts.drive.store import ExpertStore
from moert.experts.policy.names import succession_of, trace_of
from moert.experts.policy.selection import demands_of
from moert.experts.tiers.ahead import CopyAhead
from moert.experts.tiers.executor import MOST_ROWS, TieredExperts, Tiers
from moert.experts.tiers.keeping import KEEPS, Keeping, popularity
from moert.experts.tiers.residents import Residents
from moert.experts.tiers.telling import Others, Telling
from moert.kernels.backend import Backend
from moert.pack.manifest import BACKBONE
from moert.pack.model_spec import ExpertKey
from moert.pack.reader import Pack
from moert.placement import ONLY_HELD, Kind, Placement
from moert.stats import DeviceCounters, DeviceUse, size
from moert.wording import said

if TYPE_CHECKING:
    from moert.experts.ahead import Lookahead

_USUAL_DRIVE = 1e9  # bytes a second, of a drive that was never measured
_STEPS_S = 50e-6  # what the small steps of a layer take on a device, some ten kernels
_PAST = 4000  # layers of the trace that the worth of experts is learned from
_OF_SCRATCH = 0.125  # of a device's memory, what it computes with
_OF_OTHERS = 0.5  # the part of a device's memory that what is not experts may take there


@dataclass(frozen=True)
class Asked:
    """Of the user: a name of moert.experts.tiers.keeping, and a rule of moert.placement."""

    keep: str
    rule: str


class DeviceTier:
    """A device and the experts of a pack there."""

    def __init__(self, pack: Pack, device: Device, store: ExpertStore, backend: Backend, asked: Asked) -> None:
        """`backend`: of the processor. Raises PackError."""
        self.device, self.counters = device, DeviceCounters()
        self._pack, self._backend, self._asked, self._store = pack, backend, asked, store
        self.others_there = _others_there(pack, device)
        """Whether all but the experts lies there as well."""
        self.keeping = self._keeping()
        self.runner: TieredExperts | None = None
        self._filled = False
        self._width = pack.manifest.model.projection_shape("down")[0]

    def open(self, cache: ExpertCache, ahead: Lookahead | None, listeners: Iterable[Listener]) -> TieredExperts:
        """What runs the experts. Raises SettingInvalid where the device has no room for any."""
        pack, device, model = self._pack, self.device, self._pack.manifest.model
        kinds, kind_of = _kinds(pack, self._store)
        weighs = {
            entry.key: device.weigh(entry.file_bytes, self._store.projections(entry.key))
            for entry in pack.manifest.experts
        }
        rows, room = self._rows, self._room_bytes()
        if room < max(weighs.values()):
            raise SettingInvalid(
                "gpu_memory",
                f"of {size(device.capacity_bytes)} leaves {size(room)} for experts, one of which takes "
                f"{size(max(weighs.values()))} there: give more, or no {said('device')}",
            )
        host = self._host_costs()
        placement = Placement(kinds, self._width, device.costs(), host, self._asked.rule)
        residents = Residents(device, weighs, self.keeping.policy, room, self.counters)
        device.full(lambda: residents.give_back(max(weighs.values())))
        residents.learn(self._past())
        copies = None
        if self._asked.rule != ONLY_HELD:
            copies = CopyAhead(cache, residents, placement, kind_of, self.counters, device.clock.now)
        nbytes = {entry.key: entry.file_bytes for entry in pack.manifest.experts}
        tiers = Tiers(
            device, residents, placement, kind_of, nbytes, self.counters, rows, copies, self._telling(host)
        )  # fmt: skip
        if ahead is not None and device.simulated:
            ahead.reads = False  # what other threads have read by now would depend on this machine
        self.runner = TieredExperts(tiers, cache, self._backend, model.moe.ffn, ahead, listeners)
        return self.runner

    def begins(self) -> None:
        """The first request is about to run: what is to lie there from the start is brought there."""
        if self.runner is not None and not self._filled:
            self._filled = True
            self.runner.tiers.residents.limit(self._room_bytes())  # what is not experts lies there by now
            self.runner.fill(self.keeping.first)

    def close(self) -> None:
        """Gives back what experts take there, before the device closes."""
        if self.runner is not None:
            self.runner.tiers.residents.free_all()

    def use(self) -> DeviceUse:
        device = self.device
        return DeviceUse(device.title, device.used_bytes, device.capacity_bytes, self.counters)

    def _keeping(self) -> Keeping:
        spec, quiet = self._pack.manifest.model, lambda note: None
        shares = popularity(trace_of(self._pack, quiet), spec)
        return KEEPS[self._asked.keep](shares, spec.moe_layers(), succession_of(self._pack, quiet))

    def _past(self) -> list[Demand]:
        """The end of what the pack's trace asks for."""
        spec, trace = self._pack.manifest.model, trace_of(self._pack, lambda note: None)
        if trace is None:
            return []
        found: deque[Demand] = deque(maxlen=_PAST)
        found.extend(demands_of(trace, spec, _PAST))
        return list(found)

    def _room_bytes(self) -> int:
        """For experts, beside what is on the device now."""
        scratch = self.device.scratch_bytes(self._rows, self._width, self._pack.manifest.model.moe.ffn.d_ff)
        return max(0, self.device.capacity_bytes - self.device.used_bytes - scratch)

    @property
    def _rows(self) -> int:
        """That the device computes in one call: a small one has no room for the scratch of many."""
        d_ff = self._pack.manifest.model.moe.ffn.d_ff
        each = max(1, self.device.scratch_bytes(MOST_ROWS, self._width, d_ff) // MOST_ROWS)
        return max(1, min(MOST_ROWS, int(_OF_SCRATCH * self.device.capacity_bytes) // each))

    def _host_costs(self) -> HostCosts:
        if isinstance(self.device, SimulatedDevice):
            return self.device.host_costs()
        known = remembered(self._pack.root)
        speed = _USUAL_DRIVE if known is None else known.speeds[known.settings]
        return host_costs(self._backend, speed)

    def _telling(self, host: HostCosts) -> Telling | None:
        device, spec = self.device, self._pack.manifest.model
        if not isinstance(device, SimulatedDevice):
            return None
        by = device.costs().widths[16] if self.others_there else host.widths[16]
        sizes = [(tensor.role, prod(tensor.shape)) for tensor in spec.tensors.values()]
        head = sum(size for role, size in sizes if role == "head")
        layers = spec.moe_layers()
        rest = sum(size for role, size in sizes if role not in ("head", "embed"))
        others = Others(rest // len(layers), head, by, _STEPS_S if self.others_there else 0.0)
        return Telling(device.clock, host, others, layers[-1])


def _others_there(pack: Pack, device: Device) -> bool:
    """Whether all but the experts has room on a simulated device, where it is taken then. A real one decides itself."""
    if not isinstance(device, SimulatedDevice) or BACKBONE not in pack.manifest.files:
        return False
    nbytes = pack.manifest.files[BACKBONE].nbytes
    if nbytes > _OF_OTHERS * device.capacity_bytes:
        return False
    device.take(nbytes)
    return True


def _kinds(pack: Pack, store: ExpertStore) -> tuple[Sequence[Kind], dict[ExpertKey, int]]:
    """Kinds of experts that cost the same, and which each is of."""
    kinds: dict[Kind, int] = {}
    found: dict[ExpertKey, int] = {}
    for entry in pack.manifest.experts:
        views = store.projections(entry.key)
        kind = Kind(tuple((bits_of(each), prod(each.shape)) for each in views.values()), entry.file_bytes)
        found[entry.key] = kinds.setdefault(kind, len(kinds))
    return tuple(kinds), found
