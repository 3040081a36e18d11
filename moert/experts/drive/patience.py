"""Reads that failed are tried again: a cable, a network or a drive may have had a bad moment."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from moert.pack.errors import FileTruncated, HashMismatch, HeaderInvalid
from moert.pack.files import unreadable
from moert.pack.reader import Pack
from moert.stats import ExpertCounters

FAILURES = (OSError, FileTruncated, HashMismatch, HeaderInvalid)
"""What a read raises that did not bring what the manifest promises."""
_PAUSES_S = (0.02, 0.1, 0.5)
_FINAL = {errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ELOOP}

_T = TypeVar("_T")


class Patience:
    """Tries again what failed to be read of a pack, and counts that; `lock` guards the counters."""

    def __init__(self, pack: Pack, counters: ExpertCounters, lock: threading.Lock) -> None:
        self._pack, self._counters, self._lock = pack, counters, lock

    def again(self, read: Callable[[], _T], path: str, error: Exception) -> _T:
        """What `read` gives of a file of the pack, which had one of FAILURES before. Raises PackError for what is wrong
        four times in a row, or is as it is."""
        for pause_s in _PAUSES_S:
            if isinstance(error, OSError) and error.errno in _FINAL:
                break
            with self._lock:
                self._counters.retries += 1
            time.sleep(pause_s)
            try:
                return read()
            except FAILURES as caught:
                error = caught
        if isinstance(error, OSError):
            raise unreadable(self._pack.root, path, error) from None
        raise error from None
