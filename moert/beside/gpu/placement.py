"""Where each expert of a layer is computed: by the device that holds it, by it after a copy, or by the processor. Pure.

Fiddler (Kamahori et al. 2024) takes for each expert the cheapest of three ways; here both sides work at the same time,
so that the later of them counts. Copying goes on a stream of its own beside the device's computing, and reads from the
drive beside both.

The native library finds the same in a hundredth of the time, with the same additions in the same order.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import addressof
from typing import Any, NamedTuple

from moert.beside.gpu.device import DeviceCosts, HostCosts
from moert.kernels import library
from moert.kernels.library import PLACING, Placing

IN_MEMORY, ON_DEVICE = 1, 2
"""Where an expert lies, added up: 0 is on the drive alone. An expert on its way to the device counts as there."""
HOST, HELD, COPIED = 0, 1, 2
"""Where an expert is computed: by the processor; by the device that holds it; by the device, once it was copied
there."""
CHEAPEST, ALWAYS_COPIED, ONLY_HELD = "cheapest", "copied", "resident"
RULES = (CHEAPEST, ALWAYS_COPIED, ONLY_HELD)
"""Fiddler's choice; experts that the device lacks are copied there (Mixtral-offloading); the device computes only those
that it holds."""

_TRIED = 7  # experts that could be computed on either side of which all ways are tried
_RELUCTANCE = 0.01  # a copy must save this part of its time at least: it moves others out
_KEPT = 4096  # patterns that are remembered
_PATTERN = 32  # experts of one at most: larger ones hardly come twice
_MOST = 1024  # experts of a layer that the native library places


class Kind(NamedTuple):
    """Experts that cost the same: pairs of bits and weights of their projections, and bytes of their files."""

    projections: tuple[tuple[int, int], ...]
    nbytes: int


class Busy(NamedTuple):
    """Seconds for which streams are busy with earlier work."""

    device_s: float = 0.0
    copy_s: float = 0.0
    read_s: float = 0.0


IDLE = Busy()


class Placed(NamedTuple):
    """The decision for a layer: where each expert is computed (`who`), and the estimated seconds until the layer is
    done."""

    who: bytes
    seconds: float


class _Costs(NamedTuple):
    """Costs of one expert with its tokens, in seconds."""

    host: float
    device: float
    copy: float
    read: float


class Placement:
    """Decisions for the layers of a model, whose experts are of these `kinds` and whose x has `width` features."""

    def __init__(
        self, kinds: Sequence[Kind], width: int, device: DeviceCosts, host: HostCosts, rule: str = CHEAPEST,
        native: bool = True,
    ) -> None:  # fmt: skip
        """`native`: the native library decides, where there is one."""
        self.pass_s = device.pass_s
        self._rule = RULES.index(rule)
        self._host, self._device = host, device
        self._row_s = 8 * width / device.copy_bytes_per_s  # x goes over, and the result comes back
        self._kinds = [_products(kind, device, host) for kind in kinds]
        self._copies = [device.copy_s + kind.nbytes / device.copy_bytes_per_s for kind in kinds]
        self._reads = [host.read_s + kind.nbytes / host.read_bytes_per_s for kind in kinds]
        self._known: dict[tuple[Any, ...], Placed] = {}
        found = library.load() if native else None
        self._native = None if found is None else _Native(found, self)
        self._brings = [rule != CHEAPEST or self.gain_s(kind) > 0 for kind in range(len(kinds))]

    def copy_s(self, kind: int) -> float:
        """Returns the time of copying an expert of this kind [s]."""
        return self._copies[kind]

    def gain_s(self, kind: int) -> float:
        """Returns the time that a token gains where the device computes an expert of this kind and not the processor
        [s]."""
        costs = self.costs(1, kind, IN_MEMORY)
        return costs.host - costs.device

    def brings(self, kind: int) -> bool:
        """Returns whether experts of this kind are to come to the device before they are asked for: they are computed
        sooner there, or the rule does not compare."""
        return self._brings[kind]

    def decide(self, counts: Sequence[int], kinds: Sequence[int], where: Sequence[int], busy: Busy = IDLE) -> Placed:
        """Returns the decision for a layer; for each expert: `counts`, its tokens, `kinds`, its kind, and `where` it
        lies."""
        again = busy == IDLE and len(counts) <= _PATTERN
        pattern = (tuple(counts), tuple(kinds), tuple(where)) if again else None
        if pattern is not None and pattern in self._known:
            return self._known[pattern]
        if self._native is not None and len(counts) <= _MOST:
            placed = self._native.decide(counts, kinds, where, busy)
        else:
            placed = self._decide([self.costs(*each) for each in zip(counts, kinds, where, strict=True)], where, busy)
        if pattern is not None:
            if len(self._known) >= _KEPT:
                self._known.clear()
            self._known[pattern] = placed
        return placed

    def costs(self, count: int, kind: int, where: int) -> _Costs:
        """Returns the costs of an expert of this kind with `count` tokens."""
        host, device = self._host.call_s, self._device.launch_s + count * self._row_s
        for host_weight, host_row, device_weight, device_row in self._kinds[kind]:
            host += max(host_weight, count * host_row)
            device += max(device_weight, count * device_row)
        copy = 0.0 if where & ON_DEVICE else self._copies[kind]
        read = 0.0 if where else self._reads[kind]
        return _Costs(host, device, copy, read)

    def seconds(self, costs: Sequence[_Costs], where: Sequence[int], who: Sequence[int], busy: Busy = IDLE) -> float:
        """Returns the time until the layer is done [s]: the device computes the experts that it holds, then copied
        ones, those in memory first; the processor those in memory, then those that are read. Each of them in the order
        given. Where the processor's thread launches and copies, it does that before it computes."""
        device, copy, read, host, used = busy.device_s, busy.copy_s, busy.read_s, 0.0, False
        begun = 0.0
        for each, by in zip(costs, who, strict=True):
            if by != HOST:
                begun += self._device.launch_s + each.copy
            if by == HELD:
                device, used = device + each.device, True
        for on_drive in (False, True):
            for each, at, by in zip(costs, where, who, strict=True):
                if by == COPIED and (at == 0) is on_drive:
                    read += each.read
                    copy = max(copy, read if on_drive else 0.0) + each.copy
                    device, used = max(device, copy) + each.device, True
        for on_drive in (False, True):
            for each, at, by in zip(costs, where, who, strict=True):
                if by == HOST and (at == 0) is on_drive:
                    read += each.read
                    host = max(host, read if on_drive else 0.0) + each.host
            if not on_drive and self._device.by_caller:
                host += begun
        return max(host, device + self.pass_s) if used else host

    # The rest is in csrc/place.c as well.

    def _decide(self, costs: list[_Costs], where: Sequence[int], busy: Busy) -> Placed:
        who = bytearray(HELD if at & ON_DEVICE else COPIED if self._rule == 1 else HOST for at in where)
        if self._rule == 0:
            movable = [place for place, at in enumerate(where) if at != ON_DEVICE]
            if len(movable) <= _TRIED:
                self._try_all(costs, where, who, movable, busy)
            else:
                self._split(costs, where, who, movable, busy)
        return Placed(bytes(who), self.seconds(costs, where, who, busy))

    def _try_all(
        self, costs: list[_Costs], where: Sequence[int], who: bytearray, movable: list[int], busy: Busy
    ) -> None:  # fmt: skip
        """Leaves the best of all ways in `who`."""
        best, best_s = bytes(who), float("inf")
        for way in range(1 << len(movable)):
            for bit, place in enumerate(movable):
                who[place] = _on_device(where[place]) if way >> bit & 1 else HOST
            taken = self._judged(costs, where, who, busy)
            if taken < best_s:
                best, best_s = bytes(who), taken
        who[:] = best

    def _split(
        self, costs: list[_Costs], where: Sequence[int], who: bytearray, movable: list[int], busy: Busy
    ) -> None:  # fmt: skip
        """Orders experts by the processor's time over the device's or the copy's, and divides the order where both
        sides are done at the same time; then each expert that is better off on the other side goes there."""
        order = sorted(movable, key=lambda place: (-_ratio(costs[place]), place))

        def divided(count: int) -> float:
            for at, place in enumerate(order):
                who[place] = _on_device(where[place]) if at < count else HOST
            return self._judged(costs, where, who, busy)

        least, most = 1, len(order)
        while least < most:
            middle = (least + most) // 2
            if divided(middle) <= divided(middle + 1):
                most = middle
            else:
                least = middle + 1
        best_s = divided(0)
        if (taken := divided(least)) < best_s:
            best_s = taken
        else:
            divided(0)
        if len(order) > 4 * _TRIED:
            return
        for place in order:
            before = who[place]
            who[place] = _on_device(where[place]) if before == HOST else HOST
            taken = self._judged(costs, where, who, busy)
            if taken < best_s:
                best_s = taken
            else:
                who[place] = before

    def _judged(self, costs: list[_Costs], where: Sequence[int], who: Sequence[int], busy: Busy) -> float:
        copied = sum(each.copy for each, by in zip(costs, who, strict=True) if by == COPIED)
        return self.seconds(costs, where, who, busy) + _RELUCTANCE * copied


class _Native:
    """The same decisions, in C."""

    def __init__(self, native: library.Library, placement: Placement) -> None:
        self._call: Any = native.functions.moert_assign
        table = array("d")
        for products, copy, read in zip(placement._kinds, placement._copies, placement._reads, strict=True):
            for each in [*products, *[(0.0, 0.0, 0.0, 0.0)] * (3 - len(products))]:
                table.extend(each)
            table.extend((copy, read))
        self._table = table
        self._placing = Placing(
            kinds=table.buffer_info()[0], host_call_s=placement._host.call_s, launch_s=placement._device.launch_s,
            row_s=placement._row_s, pass_s=placement.pass_s, reluctance=_RELUCTANCE, tried=_TRIED, rule=placement._rule,
            by_caller=placement._device.by_caller,
        )  # fmt: skip
        self._address = addressof(self._placing)
        self._scratch = array("d", bytes(PLACING * 8 * _MOST))

    def decide(self, counts: Sequence[int], kinds: Sequence[int], where: Sequence[int], busy: Busy) -> Placed:
        given, who, placing = array("i", (*counts, *kinds, *where)), bytearray(len(counts)), self._placing
        placing.device_s, placing.copy_s, placing.read_s = busy
        seconds = self._call(self._address, len(who), given, who, self._scratch)
        return Placed(bytes(who), seconds)


def _products(kind: Kind, device: DeviceCosts, host: HostCosts) -> list[tuple[float, float, float, float]]:
    """Returns for each projection the seconds of its weights and of a row, on the processor and on the device."""
    return [
        (
            weights * host.widths[bits].weight_s, weights * host.widths[bits].row_s,
            weights * device.widths[bits].weight_s, weights * device.widths[bits].row_s,
        )
        for bits, weights in kind.projections
    ]  # fmt: skip


def _on_device(at: int) -> int:
    return HELD if at & ON_DEVICE else COPIED


def _ratio(costs: _Costs) -> float:
    """Returns the time that the processor saves over the time that the busier of the device's two streams gets."""
    return costs.host / max(costs.device, costs.copy)
