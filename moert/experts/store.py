"""Experts on the disk: explicit reads, one for each expert."""

from __future__ import annotations

import threading

from moert.kernels.arena import Arena
from moert.kernels.backend import Backend, Expert
from moert.pack.model_spec import ExpertKey
from moert.pack.reader import Pack
from moert.stats import ExpertCounters


class ExpertStore:
    """Reads experts of a pack and counts what it read. Safe to use from several threads."""

    def __init__(self, pack: Pack, backend: Backend, counters: ExpertCounters) -> None:
        self._pack, self._backend = pack, backend
        self._counters = counters
        self.arena: Arena | None = None
        """Where experts that will stay are put."""
        self._lock = threading.Lock()
        for entry in pack.manifest.experts:
            pack.layout(entry.key)  # so that no thread has to

    def nbytes(self, key: ExpertKey) -> int:
        """Bytes that the expert takes in memory: its whole file, as it was read."""
        return self._pack.entry(key).file_bytes

    def read(self, key: ExpertKey) -> Expert:
        """One expert, checked, as the backend takes it. Raises a PackError if it is not what the manifest says."""
        with self._lock:
            room = None if self.arena is None else self.arena.allocate(self.nbytes(key))
        buffer = self._pack.read_expert(key, room)
        with self._lock:
            self._counters.reads += 1
            self._counters.bytes_read += len(buffer)
        return self._backend.expert(self._pack, key, buffer)
