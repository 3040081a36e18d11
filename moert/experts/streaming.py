"""Streaming: reading and eviction, fitted to the room that experts have; nothing to do while all fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from moert.beside.flash.keeping import DEFAULT_KEEPING
from moert.beside.flash.runner import Firing, FiringExperts, Naming, PredictedExperts
from moert.beside.gpu.device import Device
from moert.beside.gpu.tiers import Asked, DeviceTier, LendingStore, TieredExperts
from moert.experts.ahead import Lookahead
from moert.experts.cache import ExpertCache, Store
from moert.experts.io import DEFAULT_THREADS, IoSettings
from moert.experts.names import eviction_for
from moert.experts.policy import EVICTION, EvictionPolicy, Listener
from moert.experts.probe import settings_for
from moert.experts.replay import AUTO_EVICTION, DEFAULT, OF_PREFERENCES, Recorder, headroom
from moert.experts.runner import CachedExperts
from moert.experts.store import ExpertStore
from moert.kernels.backend import Backend
from moert.pack.neurons import NeuronPredictor
from moert.pack.reader import Pack
from moert.stats import PAGE_CACHE, ExpertCounters


class Streaming:
    """The expert cache of a pack, and the store that reads into it."""

    def __init__(
        self, pack: Pack, backend: Backend, counters: ExpertCounters, eviction: str | EvictionPolicy,
        io: IoSettings | None, keep_neurons: str = DEFAULT_KEEPING, predictor: NeuronPredictor | None = None,
        device: Device | None = None, asked: Asked | None = None,
    ) -> None:  # fmt: skip
        """`eviction`: a name, or a policy of the program's own. `io`: None to measure the best; `keep_neurons`: a name
        of moert.beside.flash.keeping; `predictor`: only neurons that it names count; `device`: a second place for
        experts, used as `asked` says. Raises PackError."""
        self._own = None if isinstance(eviction, str) else eviction
        self.eviction = eviction if isinstance(eviction, str) else type(eviction).__name__
        """Name that was asked for, until experts have to leave; then the policy's."""
        self.recorder = Recorder()
        self.capacity_bytes = 0
        """Room for experts [bytes]."""
        self._pack, self._backend, self._begun = pack, backend, False
        self._measures_drive, settings = io is None, io or IoSettings(True, DEFAULT_THREADS)
        self._store = ExpertStore(pack, backend, counters, settings)
        nbytes = {entry.key: entry.file_bytes for entry in pack.manifest.experts}
        self._all_bytes = sum(nbytes.values())
        self.firing: Firing | Naming | None = None
        """Set where experts run neuron by neuron: then only an expert's rows are cached and counted, or nothing of
        it."""
        if predictor is not None:
            self.firing = Naming(pack, counters, settings, keep_neurons, predictor, backend)
        elif pack.has_neurons:
            self.firing = Firing(pack, counters, settings, keep_neurons)
        self.nbytes = nbytes if self.firing is None else self.firing.nbytes
        """Bytes of each expert in the expert cache."""
        self.tier: DeviceTier | None = None
        """Experts on a device beside those in memory."""
        store: Store = self._store if self.firing is None else self.firing.store
        if device is not None and asked is not None:
            self.tier = DeviceTier(pack, device, self._store, backend, asked)
            store = LendingStore(self._store)
        policy = EVICTION[DEFAULT](pack.manifest.model.moe_layers())
        self.cache = ExpertCache(store, policy, 0, counters, settings.threads)

    def runner(
        self, ahead: Lookahead | None, listeners: Iterable[Listener]
    ) -> CachedExperts | FiringExperts | PredictedExperts | TieredExperts:
        """Returns the ExpertRunner of the pack. Raises PackError."""
        if self.tier is not None:
            return self.tier.open(self.cache, ahead, listeners)
        if self.firing is not None:
            return self.firing.runner(self.cache, self._backend, ahead, listeners)
        return CachedExperts(self._pack, self.cache, self._backend, ahead, [*listeners, lambda _: self._store.check()])

    @property
    def held_bytes(self) -> int:
        """Memory that experts take, read or not."""
        return self.cache.held_bytes + (0 if self.firing is None else self.firing.blocks.held_bytes)

    def resize(self, capacity_bytes: int) -> None:
        """Changes the room for experts while none runs."""
        self.capacity_bytes = capacity_bytes
        if self.firing is None:
            self.cache.resize(capacity_bytes)
            return
        shares = self.firing.shares(capacity_bytes)
        self.cache.resize(shares.rows_bytes)
        self.firing.blocks.resize(shares.blocks_bytes)

    def prefers(self) -> None:
        """Adapts eviction to cache-aware routing: unless the user names a policy, experts that a sequence has used
        lately are kept."""
        if self.eviction == AUTO_EVICTION:
            self.eviction = OF_PREFERENCES

    def expects(self) -> None:
        """Prepares for a request: experts that are read once may stay in the system's page cache for the next start,
        unless the user says how to read."""
        self._store.expect()
        if self.firing is not None:
            self.firing.pieces.expect()
        self._store.leaves_page_cache = self._measures_drive

    def begins(self) -> None:
        """Begins a request that has its room: brings experts to the device, if there is one."""
        if self.tier is not None:
            self.tier.begins()

    def adapt(self, room_bytes: int, notify: Callable[[str], None]) -> None:
        """Adapts to the room for experts: where not all of them fit, finds out, once, how this drive is best read and
        which eviction policy is best. Raises FileTruncated if bytes of experts have gone that were in use."""
        self._store.check()
        if room_bytes >= self._all_bytes:
            return
        self._store.leaves_page_cache = False
        if self._begun:
            return
        self._begun = True
        if self._measures_drive:
            self._store.io = settings_for(self._store.files())
            self.cache.loaders.most = self._store.io.threads
            if self.firing is not None:
                self.firing.pieces.io = self._store.io
        cached_bytes = room_bytes if self.firing is None else self.firing.shares(room_bytes).rows_bytes
        if not cached_bytes:
            return  # the expert cache keeps nothing of any expert, so nothing is evicted
        if self._own is not None:
            self.cache.use(self._own)
            return
        choice = eviction_for(self._pack, self.eviction, cached_bytes / sum(self.nbytes.values()), notify)
        self.eviction = choice.name
        self.cache.use(choice.policy)

    @property
    def io(self) -> str:
        """How experts are read."""
        if self.firing is not None:
            return str(self.firing.pieces.io)
        return PAGE_CACHE if self._store.leaves_page_cache else str(self._store.io)

    def headroom(self) -> tuple[int, float]:
        """Returns the number of demands that Belady's rule was tried on, and its hit rate in the present room."""
        best = headroom(self.recorder, self.nbytes, self.cache.capacity_bytes)
        return best.demands, best.hit_rate
