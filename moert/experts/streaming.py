"""Fits reading and eviction to the room that experts have: nothing to do while all fit."""

from __future__ import annotations

from collections.abc import Callable

from moert.experts.cache.cache import ExpertCache
from moert.experts.drive.io import DEFAULT_THREADS, IoSettings
from moert.experts.drive.probe import settings_for
from moert.experts.drive.store import ExpertStore
from moert.experts.policy.belady import Recorder, headroom
from moert.experts.policy.eviction import EVICTION
from moert.experts.policy.names import eviction_for
from moert.experts.policy.selection import AUTO_EVICTION, DEFAULT, OF_PREFERENCES
from moert.kernels.backend import Backend
from moert.pack.reader import Pack
from moert.predict.foresight import Foresight
from moert.stats import PAGE_CACHE, ExpertCounters


class Streaming:
    """The cache of a pack's experts, and what reads into it."""

    def __init__(
        self, pack: Pack, backend: Backend, counters: ExpertCounters, eviction: str, io: IoSettings | None
    ) -> None:
        """`io`: None to find out what is best."""
        self.eviction = eviction
        """Of the name that was asked for, until experts have to go."""
        self.recorder = Recorder()
        self.nbytes = {entry.key: entry.file_bytes for entry in pack.manifest.experts}
        self.foresight: Foresight | None = None
        """What a policy may ask of the pass that runs."""
        self._pack, self._begun, self._all_bytes = pack, False, sum(self.nbytes.values())
        self._measures_drive = io is None
        self._store = ExpertStore(pack, backend, counters, io or IoSettings(True, DEFAULT_THREADS))
        policy = EVICTION[DEFAULT](pack.manifest.model.moe_layers())
        self.cache = ExpertCache(self._store, policy, 0, counters, self._store.io.threads)

    def prefers(self) -> None:
        """Routers prefer what a sequence has used lately: that is kept, where the user does not say what is."""
        if self.eviction == AUTO_EVICTION:
            self.eviction = OF_PREFERENCES

    def expects(self) -> None:
        """A request is about to begin: what is read once may stay in the system's page cache for the next start, unless
        the user says how to read."""
        self._store.expect()
        self._store.leaves_page_cache = self._measures_drive

    def adapt(self, room_bytes: int, notify: Callable[[str], None]) -> None:
        """To so much room for experts: where that is not enough for all, finds out, once, how this drive is best read
        and which eviction policy is best."""
        if room_bytes >= self._all_bytes:
            return
        self._store.leaves_page_cache = False
        if self._begun:
            return
        self._begun = True
        if self._measures_drive:
            self._store.io = settings_for(self._store.files())
            self.cache.loaders.most = self._store.io.threads
        choice = eviction_for(self._pack, self.eviction, self.nbytes, room_bytes, notify, self.foresight)
        self.eviction = choice.name
        self.cache.use(choice.policy)

    @property
    def io(self) -> str:
        """How experts are read."""
        return PAGE_CACHE if self._store.leaves_page_cache else str(self._store.io)

    def headroom(self) -> tuple[int, float]:
        """Demands that Belady's rule was tried on, and its hit rate in the present room."""
        best = headroom(self.recorder, self.nbytes, self.cache.capacity_bytes)
        return best.demands, best.hit_rate
