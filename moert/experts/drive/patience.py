"""Reads that are tried again: a cable, a network or a drive may have had a bad moment."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from moert.pack.errors import FileTruncated, HashMismatch, HeaderInvalid, PackError
from moert.pack.reader import Pack, unreadable
from moert.stats import ExpertCounters

PAUSES_S = (0.02, 0.1, 0.5)
"""Before a failed read is tried again."""
_FINAL = {errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ELOOP}

_T = TypeVar("_T")


def patiently(
    attempt: Callable[[], _T], nbytes: int, counters: ExpertCounters, lock: threading.Lock, pack: Pack, path: str
) -> _T:
    """What `attempt` gives, which reads so many bytes of a file of the pack; tried again where it raises OSError, or an
    error that says that other bytes were found. What is wrong four times in a row is a PackError. `lock` guards the
    counters."""
    for pause_s in (*PAUSES_S, None):
        started = time.perf_counter()
        try:
            found = attempt()
        except (OSError, FileTruncated, HashMismatch, HeaderInvalid) as error:
            if pause_s is None or (isinstance(error, OSError) and error.errno in _FINAL):
                raise _named(pack, path, error) from None
            with lock:
                counters.retries += 1
            time.sleep(pause_s)
        else:
            with lock:
                counters.reads += 1
                counters.bytes_read += nbytes
                counters.read_s += time.perf_counter() - started
            return found
    raise AssertionError("the last try returns or raises")


def _named(pack: Pack, path: str, error: Exception) -> PackError:
    if isinstance(error, OSError):
        return unreadable(pack.root, path, error)
    assert isinstance(error, PackError)
    return error
