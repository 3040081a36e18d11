"""Runs the experts of a layer on the device and on the processor side by side, each where it is done sooner."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from moert.devices.device import Device, DeviceFull, Running
from moert.devices.simulated import compute_parts
from moert.experts.ahead import Lookahead
from moert.experts.cache.cache import ExpertCache
from moert.experts.demand import Demand, Listener
from moert.experts.executor import WAVE_BYTES, ByExpert, by_expert
from moert.experts.tiers.ahead import CopyAhead
from moert.experts.tiers.lent import lent
from moert.experts.tiers.residents import Residents
from moert.experts.tiers.telling import Telling
from moert.kernels.backend import I32, I64, Backend
from moert.pack.codec import F32
from moert.pack.model_spec import ExpertKey, LayerKey
from moert.pack.parts import Ffn
from moert.placement import COPIED, HELD, HOST, IN_MEMORY, ON_DEVICE, Busy, Placement
from moert.stats import DeviceCounters

Piece = tuple[int, int, int]
"""Of some experts the place of one, and which of its rows: from, and up to which."""
MOST_ROWS = 1024
"""Rows that a device computes in one call at most, so that its scratch stays small."""


@dataclass(frozen=True)
class Tiers:
    """What a TieredExperts works with. `telling`: of a simulated device; `kind_of`: of each expert its kind in
    `placement`, of which it has so many bytes in memory (`nbytes`); `rows`: that the device computes in one call."""

    device: Device
    residents: Residents
    placement: Placement
    kind_of: Mapping[ExpertKey, int]
    nbytes: Mapping[ExpertKey, int]
    counters: DeviceCounters
    rows: int = MOST_ROWS
    copy_ahead: CopyAhead | None = None
    telling: Telling | None = None


@dataclass
class _Layer:
    """One layer on its way: its experts, where the rows of each begin, who computes each, what the device was asked to
    compute, and what all of them make."""

    keys: list[ExpertKey]
    group: ByExpert
    starts: list[int]
    who: bytearray
    hidden: F32
    parts: F32
    running: list[tuple[list[Piece], Running]]

    def rows(self, place: int) -> slice:
        return slice(self.starts[place], self.starts[place + 1])

    def tokens(self, place: int) -> I32:
        return self.group.tokens[self.rows(place)]


class TieredExperts:
    """The ExpertRunner of moert.models for two devices. What all experts make is added up in the order of their
    numbers, wherever each was computed."""

    def __init__(
        self, tiers: Tiers, cache: ExpertCache, backend: Backend, spec: Ffn, ahead: Lookahead | None,
        listeners: Iterable[Listener] = (),
    ) -> None:  # fmt: skip
        self.listeners = list(listeners)
        self.tiers = tiers
        self._cache, self._backend, self._spec, self._ahead = cache, backend, spec, ahead
        if ahead is not None:
            ahead.copies = tiers.copy_ahead

    def run(self, at: LayerKey, hidden: F32, experts: I64, weights: F32, out: F32, x: F32) -> None:
        """See moert.models.ffn.ExpertRunner. Raises PackError if an expert can't be read."""
        group = by_expert(experts, weights)
        keys = [at.expert(number) for number in group.needed]
        tiers, demand = self.tiers, Demand(at, tuple(group.needed))
        if tiers.telling is not None:
            tiers.telling.layer(at, len(hidden))
        tiers.residents.begin(demand)
        if tiers.copy_ahead is not None:
            tiers.copy_ahead.demanded(set(keys))
        absent = self._cache.absent(keys)
        began, who, seconds = tiers.device.clock.now(), *self._placed(keys, group.counts, absent)
        self._announce(demand, keys, who)
        starts = list(accumulate(group.counts, initial=0))
        parts = np.empty((starts[-1], hidden.shape[1]), np.float32)
        layer = _Layer(keys, group, starts, who, hidden, parts, [])
        self._begin_held(layer)
        if tiers.telling is not None:
            lacking = [place for by in (COPIED, HOST) for place in _places(who, by) if absent[place]]
            tiers.telling.reads({keys[place]: tiers.nbytes[keys[place]] for place in lacking})
        self._copy(layer, [place for place in _places(who, COPIED) if not absent[place]])
        if self._ahead is not None:
            self._ahead.look(at, experts, x)
        self._compute(layer, [place for place in _places(who, HOST) if not absent[place]])
        self._copy(layer, [place for place in _places(who, COPIED) if absent[place]])
        self._compute(layer, [place for place in _places(who, HOST) if absent[place]])
        self._finish(layer)
        self._backend.add_parts(layer.parts, group.weights, out, group.tokens)
        self._exchange(layer)
        tiers.residents.settle()
        tiers.counters.predicted_s += seconds
        tiers.counters.taken_s += tiers.device.clock.now() - began

    def fill(self, first: Sequence[ExpertKey]) -> None:
        """Brings experts to the device before the first request, in this order, as many as stay there."""
        tiers, residents = self.tiers, self.tiers.residents
        if not first:
            return
        nothing = Demand(first[0].at, ())
        residents.begin(nothing)
        self._cache.begin(nothing)
        for key in first:
            if tiers.nbytes[key] > residents.room_bytes:
                break
            if key not in residents:
                with self._cache.lease([key]) as lease:
                    held = residents.bring(key, lent(lease.expert(0)).view, 0.0)
                    if held is None:
                        break
                    tiers.device.wait_left(held)
        for key in first:
            if key in residents:
                tiers.device.wait(residents.held(key))

    def _placed(self, keys: list[ExpertKey], counts: list[int], absent: list[bool]) -> tuple[bytearray, float]:
        """Who computes each, and how long that is to take."""
        tiers, residents = self.tiers, self.tiers.residents
        where = [
            (ON_DEVICE if key in residents else 0) | (0 if is_absent else IN_MEMORY)
            for key, is_absent in zip(keys, absent, strict=True)
        ]
        kinds = [tiers.kind_of[key] for key in keys]
        coming = max((residents.comes_in(key) for key in keys if key in residents), default=0.0)
        busy = Busy(copy_s=residents.copying_s)
        if coming:
            there = sum(
                tiers.placement.costs(count, kind, ON_DEVICE).device
                for key, count, kind in zip(keys, counts, kinds, strict=True)
                if key in residents and not residents.comes_in(key)
            )
            busy = busy._replace(device_s=max(0.0, coming - there))
        placed = tiers.placement.decide(counts, kinds, where, busy)
        return bytearray(placed.who), placed.seconds

    def _announce(self, demand: Demand, keys: list[ExpertKey], who: bytearray) -> None:
        """The cache in memory hears of what is needed there alone, everyone else of all."""
        needed = [key.expert for key, by in zip(keys, who, strict=True) if by != HELD]
        arrivals = self._cache.begin(Demand(demand.at, tuple(needed)))
        if self._ahead is not None:
            self._ahead.demanded(demand, arrivals)
        for hear in self.listeners:
            hear(demand)
        counters = self.tiers.counters
        counters.asked += len(keys)
        counters.held += len(keys) - len(needed)

    def _begin_held(self, layer: _Layer) -> None:
        """First what is there, then what is on its way, in the order in which it comes."""
        residents = self.tiers.residents
        held = sorted(_places(layer.who, HELD), key=lambda place: residents.comes_in(layer.keys[place]))
        late = sum(residents.comes_in(layer.keys[place]) > 0 for place in held)
        self.tiers.counters.coming += late
        if held and not self._begin(layer, held):
            for place in held:
                layer.who[place] = HOST
            self._cache.begin(Demand(layer.keys[0].at, tuple(
                key.expert for key, by in zip(layer.keys, layer.who, strict=True) if by != HELD
            )))  # fmt: skip
        residents.computed_elsewhere([layer.keys[place] for place in _places(layer.who, HOST)])

    def _begin(self, layer: _Layer, places: list[int]) -> bool:
        """The device computes these; False where it has no memory for that, even once experts have left."""
        tiers, residents = self.tiers, self.tiers.residents
        counts, rows = layer.group.counts, [layer.tokens(place) for place in places]
        wanted = [layer.keys[place] for place in places]
        for piece in _pieces([counts[place] for place in places], tiers.rows):
            held = [residents.held(layer.keys[places[at]]) for at, _, _ in piece]
            tokens = np.concatenate([rows[at][start:stop] for at, start, stop in piece])
            sizes = [stop - start for _, start, stop in piece]
            while True:
                try:
                    running = tiers.device.begin(held, sizes, tokens, layer.hidden, self._spec)
                    break
                except DeviceFull:
                    if not residents.give_back(max(tiers.nbytes.values()), wanted):
                        return False
            layer.running.append(([(places[at], start, stop) for at, start, stop in piece], running))
        residents.used(wanted)
        return True

    def _copy(self, layer: _Layer, places: list[int]) -> None:
        """Copies experts to the device, which computes them as they come."""
        tiers = self.tiers
        for place in places:
            key = layer.keys[place]
            with self._cache.lease([key]) as lease:
                given = lent(lease.expert(0))
                if tiers.telling is not None:
                    tiers.telling.wait_for(key)
                takes = tiers.placement.copy_s(tiers.kind_of[key])
                held = tiers.residents.bring(key, given.view, takes)
                if held is not None:
                    tiers.device.wait_left(held)
            if held is None or not self._begin(layer, [place]):
                layer.who[place] = HOST  # as it comes to those
            else:
                tiers.counters.copied += 1

    def _exchange(self, layer: _Layer) -> None:
        """While copies have nothing else to do, what the processor had to compute comes to the device, if it is worth
        more there than somebody who is there."""
        tiers, residents = self.tiers, self.tiers.residents
        for place in _places(layer.who, HOST):
            key = layer.keys[place]
            if residents.wants(key) and not self._cache.absent([key])[0]:
                with self._cache.lease([key]) as lease:
                    takes = tiers.placement.copy_s(tiers.kind_of[key])
                    held = residents.bring(key, lent(lease.expert(0)).view, takes, ahead=True)
                    if held is not None:
                        tiers.device.wait_left(held)

    def _compute(self, layer: _Layer, places: list[int]) -> None:
        """The processor computes these."""
        tiers = self.tiers
        for wave in self._waves(layer, places):
            with self._cache.lease([layer.keys[place] for place in wave]) as lease:
                for at, place in enumerate(wave):
                    expert = lent(lease.expert(at)).expert
                    rows = layer.rows(place)
                    if tiers.telling is not None:
                        kind = tiers.kind_of[layer.keys[place]]
                        tiers.telling.wait_for(layer.keys[place])
                        tiers.telling.computes(tiers.placement.costs(layer.group.counts[place], kind, IN_MEMORY).host)
                    compute_parts(
                        self._backend, expert, layer.hidden, layer.tokens(place), layer.parts[rows], self._spec
                    )
            tiers.counters.on_host += len(wave)

    def _waves(self, layer: _Layer, places: list[int]) -> Iterator[list[int]]:
        """Small experts are leased together, as far as the cache has room for them."""
        most, nbytes = min(WAVE_BYTES, self._cache.capacity_bytes // 2), 0
        wave: list[int] = []
        for place in places:
            size = self.tiers.nbytes[layer.keys[place]]
            if wave and nbytes + size > most:
                yield wave
                wave, nbytes = [], 0
            wave.append(place)
            nbytes += size
        if wave:
            yield wave

    def _finish(self, layer: _Layer) -> None:
        """What the device has made goes where it belongs."""
        for pieces, running in layer.running:
            made = np.empty((sum(stop - start for _, start, stop in pieces), layer.parts.shape[1]), np.float32)
            self.tiers.device.finish(running, made)
            row = 0
            for place, start, stop in pieces:
                first = layer.starts[place]
                layer.parts[first + start : first + stop] = made[row : row + stop - start]
                row += stop - start


def _places(who: Sequence[int], by: int) -> list[int]:
    return [place for place, each in enumerate(who) if each == by]


def _pieces(counts: Sequence[int], most: int) -> Iterator[list[Piece]]:
    """Rows of experts in groups of at most so many."""
    piece: list[Piece] = []
    room = most
    for at, count in enumerate(counts):
        start = 0
        while start < count:
            stop = min(count, start + room)
            piece.append((at, start, stop))
            room -= stop - start
            start = stop
            if not room:
                yield piece
                piece, room = [], most
    if piece:
        yield piece
