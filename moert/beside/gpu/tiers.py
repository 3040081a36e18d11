"""Two tiers: the experts of a layer on a device and on the processor side by side, each where it is done sooner."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple, cast

import numpy as np

from moert.beside.fill import popularity
from moert.beside.gpu.device import (
    Device,
    DeviceCounters,
    DeviceFull,
    DeviceUse,
    HostCosts,
    Roofline,
    Running,
    host_costs,
)
from moert.beside.gpu.opening import AUTO_DEVICE, open_device
from moert.beside.gpu.placement import (
    CHEAPEST,
    COPIED,
    HELD,
    HOST,
    IN_MEMORY,
    ON_DEVICE,
    ONLY_HELD,
    Busy,
    Kind,
    Placement,
)
from moert.beside.gpu.residents import DEFAULT_KEEP, KEEPS, Keeping, Residents
from moert.beside.gpu.simulated import SimulatedDevice, VirtualClock, bits_of, compute_parts
from moert.beside.wishes import Wishes
from moert.errors import SettingInvalid, said
from moert.experts.ahead import Lookahead
from moert.experts.cache import ExpertCache
from moert.experts.names import succession_of, trace_of
from moert.experts.policy import Demand, Listener
from moert.experts.predictors import Prediction
from moert.experts.probe import remembered
from moert.experts.replay import demands_of
from moert.experts.store import ExpertStore
from moert.experts.streaming import WAVE_BYTES, ByExpert, CachedExperts, Holding, ListenedRunner, by_expert
from moert.kernels.backend import I32, I64, ROWS, Backend, Expert, ExpertView
from moert.pack.codec import F32, U8
from moert.pack.errors import PackError
from moert.pack.manifest import BACKBONE
from moert.pack.model_spec import ExpertKey, LayerKey
from moert.pack.parts import Experts, Ffn
from moert.pack.reader import Pack
from moert.stats import size


class Lent(NamedTuple):
    """An expert in memory, as a view of its bytes and as the backend takes it."""

    view: ExpertView
    expert: Expert


class LendingStore:
    """A Store of the cache whose experts are Lent."""

    def __init__(self, store: ExpertStore) -> None:
        self._store = store

    def nbytes(self, key: ExpertKey) -> int:
        return self._store.nbytes(key)

    def read_all(self, wanted: Sequence[tuple[ExpertKey, U8]]) -> list[U8 | PackError]:
        return self._store.read_all(wanted)

    def expert(self, key: ExpertKey, buffer: U8) -> Expert:
        view = ExpertView(buffer, self._store.projections(key))
        return cast("Expert", Lent(view, self._store.expert(key, buffer)))

    def close(self) -> None:
        self._store.close()


def lent(expert: Expert) -> Lent:
    """Returns the Lent that a LendingStore gave to the cache."""
    return cast("Lent", expert)


class _OfLent:
    """See of_lent."""

    def __init__(self, backend: Backend) -> None:
        self._backend, self.add_parts = backend, backend.add_parts

    def mixture(self, experts: Sequence[Expert], *rest: Any) -> None:
        self._backend.mixture([lent(each).expert for each in experts], *rest)

    def parts(self, experts: Sequence[Expert], *rest: Any) -> None:
        self._backend.parts([lent(each).expert for each in experts], *rest)


def of_lent(backend: Backend) -> Backend:
    """Returns the mixtures of a backend, of experts that are Lent."""
    return cast("Backend", _OfLent(backend))


class Others(NamedTuple):
    """The model without its experts: weights of a layer, and of the head, that every token passes; `by`: the cost of
    computing them, and `call_s` for each layer, for its many small steps."""

    layer_weights: int
    head_weights: int
    by: Roofline
    call_s: float

    def token_s(self, layers: int) -> float:
        """Returns the time of one token [s]."""
        return layers * (self.call_s + self.by.seconds(self.layer_weights, 1)) + self.by.seconds(self.head_weights, 1)


class Telling:
    """A run's times, added to a simulated device's clock. `last`: the layer behind which the head comes."""

    def __init__(self, clock: VirtualClock, host: HostCosts, others: Others, last: LayerKey) -> None:
        self._clock, self._host, self._others, self._last = clock, host, others, last
        self._read_until: dict[ExpertKey, float] = {}

    def layer(self, at: LayerKey, tokens: int) -> None:
        """Adds the time of all work before the experts of this layer, and of the head behind the last one, for `tokens`
        tokens."""
        others = self._others
        seconds = others.call_s + others.by.seconds(others.layer_weights, tokens)
        if at == self._last:
            seconds += others.by.seconds(others.head_weights, 1)
        self._clock.host(seconds)

    def reads(self, nbytes: Mapping[ExpertKey, int]) -> None:
        """Adds reads of experts that are not in memory, one after the other."""
        self._read_until = {
            key: self._clock.read(self._host.read_s + size / self._host.read_bytes_per_s)
            for key, size in nbytes.items()
        }

    def wait_for(self, key: ExpertKey) -> None:
        """Waits for the expert's read, if there is one."""
        self._clock.wait(self._read_until.get(key, 0.0))

    def computes(self, seconds: float) -> None:
        self._clock.host(seconds)


_MEMORY = 64  # predictions after which older ones begin to be forgotten
_LEAST = 0.2  # of a copy's time: the part that it must be expected to save
_WINDOW_RATE = 0.1


class CopyAhead:
    """Copies of predicted experts while the stream of copies has nothing else to do. A copy pays where the probability
    of a demand times the time that the device saves is a fair part of the copy's time; how far claimed probabilities
    are right is learned."""

    def __init__(
        self, cache: ExpertCache, residents: Residents, placement: Placement, kind_of: Mapping[ExpertKey, int],
        counters: DeviceCounters, now: Callable[[], float],
    ) -> None:  # fmt: skip
        self._cache, self._residents, self._placement = cache, residents, placement
        self._kind_of, self._counters, self._now = kind_of, counters, now
        self._right, self._claimed = 1.0, 1.0
        self._asked: list[tuple[ExpertKey, float]] = []
        self._window_s = 0.0  # between two layers
        self._last_s: float | None = None

    def wants(self) -> bool:
        """Returns whether any expert is left that could be copied."""
        return len(self._residents) < len(self._kind_of)

    def demanded(self, keys: set[ExpertKey]) -> None:
        """Learns from a layer's demand how good the claims were, and how much time lies between two layers."""
        now = self._now()
        if self._last_s is not None:
            self._window_s += _WINDOW_RATE * (now - self._last_s - self._window_s)
        self._last_s = now
        for key, claim in self._asked:
            self._claimed += claim
            self._right += key in keys
            self._counters.ahead_used += key in keys and key in self._residents
        if self._claimed > _MEMORY:
            self._right, self._claimed = self._right / 2, self._claimed / 2
        self._asked = []

    def expect(self, at: LayerKey, prediction: Prediction, n_tokens: int) -> None:
        """Copies predicted experts of a layer that are not on the device, most probable first, as long as they come in
        time."""
        trust, busy = min(1.0, self._right / self._claimed), self._residents.copying_s
        copied: list[ExpertKey] = []
        for number, claim in prediction:
            key = at.expert(number)
            kind = self._kind_of[key]
            takes, gain = self._placement.copy_s(kind), self._placement.gain_s(kind)
            if claim * trust * gain < _LEAST * takes or busy + takes > self._window_s + gain:
                break
            if key in self._residents:
                copied.append(key)
                continue
            if self._cache.absent([key])[0]:
                continue
            with self._cache.lease([key]) as lease:
                held = self._residents.bring(key, lent(lease.expert(0)).view, takes, ahead=True)
            if held is None:
                break
            busy += takes
            copied.append(key)
            self._asked.append((key, claim))
            self._counters.ahead += 1
        self._residents.expect(copied)


Piece = tuple[int, int, int]
"""Rows of one of several experts: its place among them, its first row, and the row behind its last."""
MOST_ROWS = 1024
"""Rows that a device computes in one call at most, so that its scratch stays small."""


@dataclass(frozen=True)
class Tiers:
    """The parts that a TieredExperts works with. `kind_of`: each expert's kind in `placement`; `nbytes`: its bytes in
    memory; `rows`: most rows that the device computes in one call; `telling`: of a simulated device."""

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
    """One layer on its way: its experts, their shape `ffn`, where the rows of each begin, who computes each, whether
    the processor is `alone`, whether each expert was `absent` from memory, the input, the results of all experts, when
    the layer began [s], and the work that the device has begun."""

    keys: list[ExpertKey]
    ffn: Ffn
    group: ByExpert
    starts: list[int]
    who: bytearray
    alone: bool
    absent: list[bool]
    hidden: F32
    parts: F32
    began_s: float
    running: list[tuple[list[Piece], Running]] = field(default_factory=list)

    def places(self, by: int, absent: bool) -> list[int]:
        """Returns the experts that `by` computes, of those that were absent from memory or of the others."""
        return [place for place in _places(self.who, by) if self.absent[place] == absent]

    def rows(self, place: int) -> slice:
        return slice(self.starts[place], self.starts[place + 1])

    def tokens(self, place: int) -> I32:
        return self.group.tokens[self.rows(place)]


class TieredExperts:
    """The ExpertRunner of moert.models for the processor and a device. The results of all experts are added up in the
    order of their numbers, wherever each was computed. Layers of which the device computes nothing are the processor's
    alone, run as without a device."""

    def __init__(
        self, tiers: Tiers, cache: ExpertCache, backend: Backend, experts: Mapping[LayerKey, Experts],
        ahead: Lookahead | None, alone: ListenedRunner,
    ) -> None:  # fmt: skip
        """`alone`: runs layers of the processor alone, and has the listeners of all."""
        self.listeners = alone.listeners
        self.tiers = tiers
        self._cache, self._backend, self._ahead, self._alone = cache, of_lent(backend), ahead, alone
        self._experts = experts

    def run(self, at: LayerKey, hidden: F32, experts: I64, weights: F32, out: F32, x: F32) -> None:
        """See moert.models.ffn.ExpertRunner. Raises PackError if an expert can't be read."""
        tiers, group = self.tiers, by_expert(experts, weights)
        layer = self._planned(at, hidden, group)
        if layer.alone:
            tiers.counters.asked += len(layer.keys)
            tiers.counters.on_host += len(layer.keys)
            tiers.residents.computed_elsewhere(layer.keys)
            self._alone.run(at, hidden, experts, weights, out, x)
        else:
            self._on_both(layer, at, experts, out, x)
        self._exchange(layer)
        tiers.residents.settle()
        tiers.counters.taken_s += tiers.device.clock.now() - layer.began_s

    def _on_both(self, layer: _Layer, at: LayerKey, experts: I64, out: F32, x: F32) -> None:
        """Runs a layer on the device and the processor."""
        self._announce(Demand(at, tuple(layer.group.needed)), layer.keys, layer.who)
        self._begin_held(layer)
        self._tell_reads(layer)
        self._copy(layer, layer.places(COPIED, absent=False))
        if self._ahead is not None:
            self._ahead.look(at, experts, x)
        self._compute(layer, layer.places(HOST, absent=False))
        self._copy(layer, layer.places(COPIED, absent=True))
        self._compute(layer, layer.places(HOST, absent=True))
        self._finish(layer)
        self._backend.add_parts(layer.parts, layer.group.weights, out, layer.group.tokens)

    def _planned(self, at: LayerKey, hidden: F32, group: ByExpert) -> _Layer:
        """Returns the layer with a place for each of its experts."""
        tiers, demand = self.tiers, Demand(at, tuple(group.needed))
        keys = demand.expert_keys()
        if tiers.telling is not None:
            tiers.telling.layer(at, len(hidden))
        tiers.residents.begin(demand)
        if tiers.copy_ahead is not None:
            tiers.copy_ahead.demanded(set(keys))
        absent = self._cache.absent(keys)
        began_s, (who, seconds) = tiers.device.clock.now(), self._placed(keys, group.counts, absent)
        tiers.counters.predicted_s += seconds
        starts = list(accumulate(group.counts, initial=0))
        alone = tiers.telling is None and not any(who)
        parts = np.empty((0 if alone else starts[-1], hidden.shape[1]), np.float32)
        return _Layer(keys, self._experts[at].ffn, group, starts, who, alone, absent, hidden, parts, began_s)

    def _tell_reads(self, layer: _Layer) -> None:
        """Tells a simulated device which experts are read now."""
        telling, nbytes = self.tiers.telling, self.tiers.nbytes
        if telling is not None:
            lacking = [place for by in (COPIED, HOST) for place in layer.places(by, absent=True)]
            telling.reads({layer.keys[place]: nbytes[layer.keys[place]] for place in lacking})

    def fill(self, first: Sequence[ExpertKey]) -> None:
        """Brings experts that pay there to the device before the first request, in this order, as many as stay."""
        tiers, residents = self.tiers, self.tiers.residents
        first = [key for key in first if tiers.placement.brings(tiers.kind_of[key])]
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
        """Returns where each expert is computed, and the estimated time of all [s]."""
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
        """Passes a demand on: the expert cache gets only experts that are needed in memory, reading ahead and listeners
        all."""
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
        """Begins to compute experts that the device holds: first those that are there, then others in the order of
        their arrival."""
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
        """Begins to compute experts on the device; returns False where it has no memory for that, even once others have
        left."""
        tiers, residents = self.tiers, self.tiers.residents
        counts, rows = layer.group.counts, [layer.tokens(place) for place in places]
        wanted = [layer.keys[place] for place in places]
        for piece in _pieces([counts[place] for place in places], tiers.rows):
            held = [residents.held(layer.keys[places[at]]) for at, _, _ in piece]
            tokens = np.concatenate([rows[at][start:stop] for at, start, stop in piece])
            sizes = [stop - start for _, start, stop in piece]
            while True:
                try:
                    running = tiers.device.begin(held, sizes, tokens, layer.hidden, layer.ffn)
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
                layer.who[place] = HOST  # it is computed with the others of the processor
            else:
                tiers.counters.copied += 1

    def _exchange(self, layer: _Layer) -> None:
        """Copies experts that the processor had to compute to the device, while copies have nothing else to do, if they
        are worth more there than experts that are there, and are computed sooner there."""
        tiers, residents = self.tiers, self.tiers.residents
        for place in _places(layer.who, HOST):
            key = layer.keys[place]
            comes = tiers.placement.brings(tiers.kind_of[key]) and residents.wants(key)
            if comes and not self._cache.absent([key])[0]:
                with self._cache.lease([key]) as lease:
                    takes = tiers.placement.copy_s(tiers.kind_of[key])
                    held = residents.bring(key, lent(lease.expert(0)).view, takes, ahead=True)
                    if held is not None:
                        tiers.device.wait_left(held)

    def _compute(self, layer: _Layer, places: list[int]) -> None:
        """Computes experts on the processor."""
        tiers = self.tiers
        for wave in self._waves(layer, places):
            with self._cache.lease([layer.keys[place] for place in wave]) as lease:
                if tiers.telling is not None:
                    self._tell_wave(tiers.telling, layer, wave)
                self._compute_wave(layer, wave, lease.all())
            tiers.counters.on_host += len(wave)

    def _tell_wave(self, telling: Telling, layer: _Layer, wave: list[int]) -> None:
        """Tells a simulated device which experts the processor computes now."""
        for place in wave:
            key = layer.keys[place]
            telling.wait_for(key)
            telling.computes(
                self.tiers.placement.costs(layer.group.counts[place], self.tiers.kind_of[key], IN_MEMORY).host
            )

    def _compute_wave(self, layer: _Layer, wave: list[int], experts: Sequence[Expert]) -> None:
        """Computes experts that are leased."""
        spans, counts = [layer.rows(place) for place in wave], [layer.group.counts[place] for place in wave]
        together = slice(spans[0].start, spans[-1].stop)
        apart = together.stop - together.start != sum(counts)  # others lie between them
        made = np.empty((sum(counts), layer.parts.shape[1]), np.float32) if apart else layer.parts[together]
        tokens = np.concatenate([layer.tokens(place) for place in wave])
        compute_parts(self._backend, experts, counts, layer.hidden, tokens, made, layer.ffn)
        if apart:
            layer.parts[np.concatenate([np.arange(span.start, span.stop) for span in spans])] = made

    def _waves(self, layer: _Layer, places: list[int]) -> Iterator[list[int]]:
        """Yields small experts together, to be leased and run at once as far as the cache has room for them; others,
        and those of many tokens, alone."""
        most, nbytes, rows = min(WAVE_BYTES, self._cache.capacity_bytes // 2), 0, 0
        wave: list[int] = []
        for place in places:
            size, count = self.tiers.nbytes[layer.keys[place]], layer.group.counts[place]
            if wave and (nbytes + size > most or rows + count > ROWS):
                yield wave
                wave, nbytes, rows = [], 0, 0
            wave.append(place)
            nbytes, rows = nbytes + size, rows + count
        if wave:
            yield wave

    def _finish(self, layer: _Layer) -> None:
        """Waits for the device's results, and puts each in its place."""
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
    """Yields rows of experts in groups of at most `most` rows."""
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


_USUAL_DRIVE = 1e9  # bytes a second, of a drive that was never measured
_PAST = 4000  # layers of the trace that the worth of experts is learned from
_OF_SCRATCH = 0.125  # the part of a device's memory that it computes with
_OF_OTHERS = 0.5  # the part of a device's memory that all but the experts may take


@dataclass(frozen=True)
class Asked:
    """The user's settings: a name of moert.beside.gpu.residents, and a rule of moert.beside.gpu.placement."""

    keep: str
    rule: str


class DeviceTier(Holding):
    """A device and the experts of a pack there."""

    def __init__(self, pack: Pack, device: Device, whole: ExpertStore, backend: Backend, asked: Asked) -> None:
        """`backend`: the processor's. Raises PackError."""
        super().__init__(pack, whole, backend)
        self.device, self.counters = device, DeviceCounters()
        self.store, self.apart, self.now = LendingStore(whole), True, device.clock.now
        self.reads_ahead = not device.simulated  # the experts read by now would depend on this machine
        self._asked = asked
        self.others_there = self._others_there()
        """Whether all weights but the experts' lie on the device as well."""
        self.others = device.backend(backend) if self.others_there else None
        self.keeping = self._keeping()
        self._width = pack.manifest.model.projection_shape("down")[0]
        kinds, self._kind_of = _kinds(pack, whole)
        self._placement = Placement(kinds, self._width, device.costs(), self._host_costs, asked.rule)
        self.tiers: Tiers | None = None
        self._running: TieredExperts | None = None
        self._filled = False

    def pays(self) -> bool:
        """Returns whether the device computes anything of one token sooner than the processor."""
        placement = self._placement
        return self.others_there or any(placement.gain_s(kind) > 0 for kind in set(self._kind_of.values()))

    def open(self, cache: ExpertCache) -> None:
        pack, device = self._pack, self.device
        weighs = {
            entry.key: device.weigh(entry.file_bytes, self.whole.projections(entry.key))
            for entry in pack.manifest.experts
        }
        rows, room = self._rows, self._room_bytes()
        if room < max(weighs.values()):
            raise SettingInvalid(
                "gpu_memory",
                f"of {size(device.capacity_bytes)} leaves {size(room)} for experts, one of which takes "
                f"{size(max(weighs.values()))} there: give more, or no {said('device')}",
            )
        residents = Residents(device, weighs, self.keeping.policy, room, self.counters)
        device.full(lambda: residents.give_back(max(weighs.values())))
        residents.learn(self._past())
        copies = None
        if self._asked.rule != ONLY_HELD and any(map(self._placement.brings, set(self._kind_of.values()))):
            copies = CopyAhead(cache, residents, self._placement, self._kind_of, self.counters, device.clock.now)
        self.copies = copies
        self.tiers = Tiers(
            device, residents, self._placement, self._kind_of, self.nbytes, self.counters, rows, copies, self._telling()
        )  # fmt: skip

    def runner(self, cache: ExpertCache, ahead: Lookahead | None, listeners: Iterable[Listener]) -> TieredExperts:
        assert self.tiers is not None
        alone = CachedExperts(self._pack, cache, of_lent(self.backend), ahead, listeners)
        self._running = TieredExperts(self.tiers, cache, self.backend, self._pack.manifest.model.experts, ahead, alone)
        return self._running

    def begins(self) -> None:
        """Fills the device with the first experts when the first request is about to run."""
        if self._running is not None and not self._filled:
            self._filled = True
            self._running.tiers.residents.limit(self._room_bytes())  # all weights but the experts' lie there by now
            self._running.fill(self.keeping.first)

    def close(self) -> None:
        """Frees the experts' memory on the device, and closes it."""
        if self.tiers is not None:
            self.tiers.residents.free_all()
        self.others = None
        self.device.close()

    @property
    def elsewhere_bytes(self) -> int:
        """Returns the bytes on a simulated device, which stand for memory of a real one."""
        return self.device.used_bytes if self.device.simulated else 0

    def figures(self) -> dict[str, Any]:
        device = self.device
        return {"device": DeviceUse(device.title, device.used_bytes, device.capacity_bytes, self.counters)}

    def _keeping(self) -> Keeping:
        spec, quiet = self._pack.manifest.model, lambda note: None
        shares = popularity(trace_of(self._pack, quiet), spec)
        return KEEPS[self._asked.keep](shares, spec.moe_layers(), succession_of(self._pack, quiet))

    def _past(self) -> list[Demand]:
        """Returns the last _PAST demands of the first _PAST decoder tokens in the pack's trace."""
        spec, trace = self._pack.manifest.model, trace_of(self._pack, lambda note: None)
        if trace is None:
            return []
        found: deque[Demand] = deque(maxlen=_PAST)
        found.extend(demands_of(trace, spec, _PAST))
        return list(found)

    def _room_bytes(self) -> int:
        """Returns the bytes for experts, beside all that is on the device now."""
        scratch = self.device.scratch_bytes(self._rows, self._width, self._pack.manifest.model.moe.ffn.d_ff)
        return max(0, self.device.capacity_bytes - self.device.used_bytes - scratch)

    @property
    def _rows(self) -> int:
        """Most rows that the device computes in one call: a small one has no room for the scratch of many."""
        d_ff = self._pack.manifest.model.moe.ffn.d_ff
        each = max(1, self.device.scratch_bytes(MOST_ROWS, self._width, d_ff) // MOST_ROWS)
        return max(1, min(MOST_ROWS, int(_OF_SCRATCH * self.device.capacity_bytes) // each))

    @cached_property
    def _host_costs(self) -> HostCosts:
        if isinstance(self.device, SimulatedDevice):
            return self.device.host_costs()
        known = remembered(self._pack.root)
        speed = _USUAL_DRIVE if known is None else known.speeds[known.settings]
        return host_costs(self.backend, speed)

    def _others_there(self) -> bool:
        """Returns whether all weights but the experts' are to lie on the device. On a simulated one they do where they
        have room, which is taken; on a real one where a token is done sooner, and what has no room stays in memory."""
        device, pack = self.device, self._pack
        if device.simulated:
            if BACKBONE not in pack.manifest.files:
                return False
            nbytes = pack.manifest.files[BACKBONE].nbytes
            if nbytes > _OF_OTHERS * device.capacity_bytes:
                return False
            cast("SimulatedDevice", device).take(nbytes)
            return True
        there, here = self._others(True), self._others(False)
        return there.token_s(self._layers) < here.token_s(self._layers)

    @property
    def _layers(self) -> int:
        return len(self._pack.manifest.model.moe_layers())

    def _others(self, on_device: bool) -> Others:
        """Returns the model without its experts as the device or the processor computes it."""
        costs = self.device.costs()
        sizes = [(tensor.role, prod(tensor.shape)) for tensor in self._pack.manifest.model.tensors.values()]
        head = sum(size for role, size in sizes if role == "head")
        rest = sum(size for role, size in sizes if role not in ("head", "embed"))
        by = (costs if on_device else self._host_costs).widths[16]
        return Others(rest // self._layers, head, by, costs.step_s if on_device else 0.0)

    def _telling(self) -> Telling | None:
        device = self.device
        if not isinstance(device, SimulatedDevice):
            return None
        last = self._pack.manifest.model.moe_layers()[-1]
        return Telling(device.clock, self._host_costs, self._others(self.others_there), last)


def held_on_device(
    pack: Pack, whole: ExpertStore, backend: Backend, wishes: Wishes, note: Callable[[str], None]
) -> DeviceTier | None:
    """Returns the device that the settings name, open, with the experts there; None, with a note, if `auto` is none.
    Raises DeviceMissing, or SettingInvalid where it is of no use for this pack."""
    auto = wishes.device == AUTO_DEVICE
    device = open_device(wishes.device, wishes.gpu_bytes, backend)
    if device is None:
        if auto:
            note(f"{said('device', AUTO_DEVICE)} found no GPU that torch can use: the processor runs all")
        return None
    try:
        if (lies := _unfit(pack)) is None:
            asked = Asked(wishes.device_keep or DEFAULT_KEEP, wishes.device_experts or CHEAPEST)
            tier = DeviceTier(pack, device, whole, backend, asked)
            if not auto or tier.pays():
                return tier
        if not auto:
            raise SettingInvalid("device", f"{wishes.device!r} {lies}: leave it out")
    except BaseException:
        device.close()
        raise
    device.close()
    why = lies or f"found {device.title}, where a token of this pack would take longer"
    note(f"{said('device', AUTO_DEVICE)} {why}: the processor runs all")
    return None


def _unfit(pack: Pack) -> str | None:
    """Returns the reason why devices can't run the experts of a pack; None where they can."""
    if pack.has_neurons:
        return "runs whole experts, and this pack's lie in blocks of neurons"
    return None


def _kinds(pack: Pack, store: ExpertStore) -> tuple[Sequence[Kind], dict[ExpertKey, int]]:
    """Returns the kinds of experts that cost the same, and the kind of each expert."""
    kinds: dict[Kind, int] = {}
    found: dict[ExpertKey, int] = {}
    for entry in pack.manifest.experts:
        views = store.projections(entry.key)
        kind = Kind(tuple((bits_of(each), prod(each.shape)) for each in views.values()), entry.file_bytes)
        found[entry.key] = kinds.setdefault(kind, len(kinds))
    return tuple(kinds), found
