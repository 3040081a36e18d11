"""Experts held in the cache and run from there, and the fitting of reading and eviction to the room that they have."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from moert.experts.ahead import Copying, Lookahead
from moert.experts.cache import HANDED_OVER_BYTES, ExpertCache, Lease, Store
from moert.experts.names import eviction_for
from moert.experts.policy import EVICTION, Demand, EvictionPolicy, Listener, Recorder
from moert.experts.probe import drive_of
from moert.experts.replay import AUTO_EVICTION, DEFAULT, OF_PREFERENCES, belady
from moert.experts.store import ExpertStore, IoSettings
from moert.kernels.backend import I32, I64, ROWS, Backend
from moert.pack.codec import F32
from moert.pack.model_spec import ExpertKey, LayerKey
from moert.pack.reader import Pack
from moert.stats import PAGE_CACHE, ExpertCounters

WAVE_BYTES = 1 << 20
"""Most bytes of experts that run in one call; larger ones run one by one, while the next are read."""


class CachedExperts:
    """The ExpertRunner of moert.models: experts from the expert cache, in ascending order, so that answers don't depend
    on it.

    `ahead` reads the next layer's likely experts while this layer computes; None: nothing is read before it is
    demanded. `listeners` are called with each demand.
    """

    def __init__(
        self, pack: Pack, cache: ExpertCache, backend: Backend, ahead: Lookahead | None,
        listeners: Iterable[Listener] = (),
    ) -> None:  # fmt: skip
        self.listeners = list(listeners)
        self._cache, self._backend, self._ahead = cache, backend, ahead
        manifest = pack.manifest
        self._overlaps = manifest.mean_expert_bytes >= HANDED_OVER_BYTES
        self._experts = manifest.model.experts

    def run(self, at: LayerKey, hidden: F32, experts: I64, weights: F32, out: F32, x: F32) -> None:
        """See moert.models.ffn.ExpertRunner. Raises PackError if an expert can't be read."""
        needed, rows_of, tokens, share = by_expert(experts, weights)
        keys = announce(Demand(at, tuple(needed)), self.listeners, self._cache, self._ahead)
        if len(hidden) == 1:  # the experts of one token are in memory all at once
            with self._cache.lease(keys) as lease:
                if self._ahead is not None:
                    self._ahead.look(at, np.array([needed], np.int64), x)
                if self._overlaps and len(ready := lease.ready()) < len(needed):
                    self._run_as_they_come(at, lease, ready, hidden, share, out)
                elif needed:
                    self._backend.mixture(lease.all(), rows_of, tokens, share, hidden, out, self._experts[at].ffn)
            return
        first = row = 0
        for stop in self._waves(keys, rows_of, len(hidden)):
            with self._cache.lease(keys[first:stop], keys[stop:]) as lease:
                if self._ahead is not None and stop == len(keys):
                    self._ahead.look(at, experts, x)
                for rows in _pieces(rows_of[first:stop]):
                    until = row + sum(rows)
                    self._backend.mixture(
                        lease.all(), rows, tokens[row:until], share[row:until], hidden, out, self._experts[at].ffn
                    )
                    row = until
            first = stop

    def _waves(self, keys: list[ExpertKey], counts: list[int], tokens: int) -> Iterator[int]:
        """Yields the end of each group of experts that run in one call. Small ones run together, as far as the cache
        has room to read ahead beside them; with many tokens each has enough to do alone."""
        nbytes = rows = 0
        most = min(WAVE_BYTES, self._cache.capacity_bytes // 2)
        for place, (key, count) in enumerate(zip(keys, counts, strict=True)):
            nbytes, rows = nbytes + self._cache.nbytes(key), rows + count
            if place and (nbytes > most or rows > tokens or tokens > ROWS):
                yield place
                nbytes, rows = self._cache.nbytes(key), count
        if keys:
            yield len(keys)

    def _run_as_they_come(
        self, at: LayerKey, lease: Lease, ready: list[int], hidden: F32, weights: F32, out: F32
    ) -> None:  # fmt: skip
        """Computes with experts that are in memory while others are read; adds results up in the experts' order all the
        same."""
        missing, ffn = [place for place in range(len(weights)) if place not in ready], self._experts[at].ffn
        parts = np.empty((len(weights), hidden.shape[1]), np.float32)
        self._backend.parts([lease.expert(place) for place in ready], hidden, parts[: len(ready)], ffn)
        for row, place in enumerate(missing, len(ready)):
            self._backend.parts([lease.expert(place)], hidden, parts[row : row + 1], ffn)
        order = np.argsort([*ready, *missing])
        self._backend.add_parts(parts[order], weights, out)


def announce(
    demand: Demand, listeners: Iterable[Listener], cache: ExpertCache | None = None, ahead: Lookahead | None = None
) -> list[ExpertKey]:
    """Passes a router's demand on to the expert cache, to reading ahead, and to all `listeners`; returns the demanded
    experts."""
    if cache is not None:
        arrivals = cache.begin(demand)
        if ahead is not None:
            ahead.demanded(demand, arrivals)
    for hear in listeners:
        hear(demand)
    return demand.expert_keys()


class ByExpert(NamedTuple):
    """Tokens by expert: the experts that they go to, ascending, how many go to each, and these tokens, expert after
    expert, with their weights."""

    needed: list[int]
    counts: list[int]
    tokens: I32
    weights: F32


def by_expert(experts: I64, weights: F32) -> ByExpert:
    """Returns the tokens of each expert; experts and weights [tokens, top_k], ascending, negative where a token was
    dropped."""
    if len(experts) == 1:  # sorting takes as long as running a small expert
        needed, share = experts[0].tolist(), weights[0]
        if min(needed) < 0:
            needed, share = [number for number in needed if number >= 0], share[experts[0] >= 0]
        return ByExpert(needed, [1] * len(needed), np.zeros(len(needed), np.int32), share)
    chosen = experts.reshape(-1)
    order = np.argsort(chosen, kind="stable")[np.count_nonzero(chosen < 0) :]
    needed, counts = np.unique(chosen[order], return_counts=True)
    tokens = (order // experts.shape[1]).astype(np.int32)
    return ByExpert(needed.tolist(), counts.tolist(), tokens, weights.reshape(-1)[order])


def _pieces(counts: list[int]) -> list[list[int]]:
    """Returns the rows of each expert in calls of at most ROWS: one call, except for a single expert with more."""
    if sum(counts) <= ROWS:
        return [counts]
    assert len(counts) == 1
    return [[min(ROWS, counts[0] - start)] for start in range(0, counts[0], ROWS)]


class Needs(NamedTuple):
    """Bytes of experts in memory: those that a token demands in all layers of the decoder, and all that there are;
    `beside`: in words, the demand of a token beside `token_bytes`."""

    token_bytes: int
    all_bytes: int
    beside: str = ""


class ListenedRunner(Protocol):
    """An ExpertRunner of moert.models that calls `listeners` with each demand."""

    listeners: list[Listener]

    def run(self, at: LayerKey, hidden: F32, experts: I64, weights: F32, out: F32, x: F32) -> None: ...


class Holding:
    """Holds experts whole, in the expert cache. A package beside the core that holds or runs them otherwise overrides
    the parts that differ, and accounts for the memory that it takes."""

    def __init__(self, pack: Pack, whole: ExpertStore, backend: Backend) -> None:
        self.whole, self.backend = whole, backend
        self.store: Store = whole
        """The store that the cache reads from."""
        self.nbytes: Mapping[ExpertKey, int] = {entry.key: entry.file_bytes for entry in pack.manifest.experts}
        """Of each expert, the bytes that the cache keeps."""
        self.notes: list[str] = []
        """For the user, of answers that are not the model's own."""
        self.others: Backend | None = None
        """Computes everything but the experts; None: `backend` does."""
        self.apart = False
        """Whether the results of experts are kept until their layer is done."""
        self.reads_ahead = True
        """Whether predicted experts are read from the drive."""
        self.copies: Copying | None = None
        """Copies predicted experts from memory to another place."""
        self.now: Callable[[], float] = time.perf_counter
        """Returns the time [s] that figures of this run are of."""
        self._pack = pack

    def needs(self, token_bytes: int) -> Needs | None:
        """Returns the bytes that experts take, held in this way; None: as their files. `token_bytes`: of the whole
        experts that a token demands."""
        return None

    def open(self, cache: ExpertCache) -> None:
        """Prepares to run the experts of this cache. Raises SettingInvalid where there is no room for any."""

    def runner(self, cache: ExpertCache, ahead: Lookahead | None, listeners: Iterable[Listener]) -> ListenedRunner:
        """Returns the runner of a model's experts. Raises PackError."""
        return CachedExperts(self._pack, cache, self.backend, ahead, listeners)

    def cache_bytes(self, room_bytes: int) -> int:
        """Returns the part of a room for experts that the cache gets."""
        return room_bytes

    def resize(self, room_bytes: int) -> None:
        """Changes the room that is held beside the cache, to its part of a room for experts."""

    @property
    def held_bytes(self) -> int:
        """Memory that experts take beside the cache, read or not."""
        return 0

    @property
    def elsewhere_bytes(self) -> int:
        """Memory of this process that stands for memory in another place, and does not count."""
        return 0

    def expects(self) -> None:
        """A request is about to begin."""

    def begins(self) -> None:
        """Begins a request that has its room."""

    def reads(self, io: IoSettings) -> None:
        """Reads in this way from now on."""
        self.whole.io = io

    @property
    def io(self) -> str:
        """How experts are read."""
        return PAGE_CACHE if self.whole.leaves_page_cache else str(self.whole.io)

    def figures(self) -> dict[str, Any]:
        """Returns further arguments of moert.stats.run_stats."""
        return {}

    def close(self) -> None:
        """Gives back everything that is held beside the cache."""


class Streaming:
    """The cache of a pack's experts, and the rules of reading into it. Nothing to do while all experts fit."""

    def __init__(
        self, pack: Pack, holding: Holding, counters: ExpertCounters, eviction: str | EvictionPolicy,
        measures_drive: bool,
    ) -> None:  # fmt: skip
        """`eviction`: a name, or a policy of the program's own. `measures_drive`: the best way of reading is found out,
        once experts have to go."""
        self._own = None if isinstance(eviction, str) else eviction
        self.eviction = eviction if isinstance(eviction, str) else type(eviction).__name__
        """Name that was asked for, until experts have to leave; then the policy's."""
        self.recorder = Recorder()
        self.capacity_bytes = 0
        """Room for experts [bytes]."""
        self.holding = holding
        self._pack, self._begun, self._measures_drive = pack, False, measures_drive
        self._all_bytes = sum(entry.file_bytes for entry in pack.manifest.experts)
        policy = EVICTION[DEFAULT](pack.manifest.model.moe_layers())
        self.cache = ExpertCache(holding.store, policy, 0, counters, holding.whole.io.threads)

    @property
    def held_bytes(self) -> int:
        """Memory that experts take, read or not."""
        return self.cache.held_bytes + self.holding.held_bytes

    def resize(self, capacity_bytes: int) -> None:
        """Changes the room for experts while none runs."""
        self.capacity_bytes = capacity_bytes
        self.cache.resize(self.holding.cache_bytes(capacity_bytes))
        self.holding.resize(capacity_bytes)

    def prefers(self) -> None:
        """Adapts eviction to cache-aware routing: unless the user names a policy, experts that a sequence has used
        lately are kept."""
        if self.eviction == AUTO_EVICTION:
            self.eviction = OF_PREFERENCES

    def expects(self) -> None:
        """Prepares for a request: experts that are read once may stay in the system's page cache for the next start,
        unless the user says how to read."""
        self.holding.whole.expect()
        self.holding.expects()
        self.holding.whole.leaves_page_cache = self._measures_drive

    def adapt(self, room_bytes: int, notify: Callable[[str], None]) -> None:
        """Adapts to the room for experts: where not all of them fit, finds out, once, how this drive is best read and
        which eviction policy is best. Raises FileTruncated if bytes of experts have gone that were in use."""
        store = self.holding.whole
        store.check()
        if room_bytes >= self._all_bytes:
            return
        store.leaves_page_cache = False
        if self._begun:
            return
        self._begun = True
        if self._measures_drive:
            self.holding.reads(drive_of(store.files()).settings)
            self.cache.loaders.most = store.io.threads
        cached_bytes = self.holding.cache_bytes(room_bytes)
        if not cached_bytes:
            return  # the expert cache keeps nothing of any expert, so nothing is evicted
        if self._own is not None:
            self.cache.use(self._own)
            return
        share = cached_bytes / sum(self.holding.nbytes.values())
        self.eviction, policy = eviction_for(self._pack, self.eviction, share, notify)
        self.cache.use(policy)

    def headroom(self) -> tuple[int, float]:
        """Returns the number of demands that Belady's rule was tried on, and its hit rate in the present room."""
        best, _ = belady(self.recorder, self.holding.nbytes, self.cache.capacity_bytes)
        return best.demands, best.hit_rate
