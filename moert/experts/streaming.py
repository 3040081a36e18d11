"""How a pack's experts are held and who runs them, and fits reading and eviction to the room that they have."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

from moert.experts.ahead import Copying, Lookahead
from moert.experts.cache import ExpertCache, Store
from moert.experts.io import IoSettings
from moert.experts.names import eviction_for
from moert.experts.policy import EVICTION, EvictionPolicy, Listener
from moert.experts.probe import settings_for
from moert.experts.replay import AUTO_EVICTION, DEFAULT, OF_PREFERENCES, Recorder, headroom
from moert.experts.runner import CachedExperts
from moert.experts.store import ExpertStore
from moert.kernels.backend import I64, Backend
from moert.pack.codec import F32
from moert.pack.model_spec import ExpertKey, LayerKey
from moert.pack.reader import Pack
from moert.stats import PAGE_CACHE, ExpertCounters


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
        return CachedExperts(self._pack, cache, self.backend, ahead, [*listeners, self.whole.check])

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

    def runner(self, ahead: Lookahead | None, listeners: Iterable[Listener]) -> ListenedRunner:
        """Returns the ExpertRunner of the pack. Raises PackError."""
        return self.holding.runner(self.cache, ahead, listeners)

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
            self.holding.reads(settings_for(store.files()))
            self.cache.loaders.most = store.io.threads
        cached_bytes = self.holding.cache_bytes(room_bytes)
        if not cached_bytes:
            return  # the expert cache keeps nothing of any expert, so nothing is evicted
        if self._own is not None:
            self.cache.use(self._own)
            return
        choice = eviction_for(self._pack, self.eviction, cached_bytes / sum(self.holding.nbytes.values()), notify)
        self.eviction = choice.name
        self.cache.use(choice.policy)

    def headroom(self) -> tuple[int, float]:
        """Returns the number of demands that Belady's rule was tried on, and its hit rate in the present room."""
        best = headroom(self.recorder, self.holding.nbytes, self.cache.capacity_bytes)
        return best.demands, best.hit_rate
