"""Experts on the disk: explicit reads, one for each expert."""

from __future__ import annotations

import threading

from moert.pack.codec import U8
from moert.pack.model_spec import ExpertKey
from moert.pack.reader import Pack
from moert.stats import ExpertCounters


class ExpertStore:
    """Reads experts of a pack and counts what it read. Safe to use from several threads."""

    def __init__(self, pack: Pack, counters: ExpertCounters) -> None:
        self._pack = pack
        self._counters = counters
        self._lock = threading.Lock()
        for entry in pack.manifest.experts:
            pack.layout(entry.key)  # so that no thread has to

    def nbytes(self, key: ExpertKey) -> int:
        """Bytes that the expert takes in memory: its whole file, as it was read."""
        return self._pack.entry(key).file_bytes

    def read(self, key: ExpertKey) -> U8:
        """The file of one expert, checked: uint8 [nbytes]. Raises a PackError if it is not what the manifest says."""
        buffer = self._pack.read_expert(key)
        with self._lock:
            self._counters.reads += 1
            self._counters.bytes_read += len(buffer)
        return buffer
